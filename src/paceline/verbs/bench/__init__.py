"""``paceline bench``: measurements, each a command and a function of its own; without a command's name, the ladder.

Only typer is imported here; a command imports what it needs when it runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from paceline.verbs.commands.bench import ladder as measure_ladder
from paceline.verbs.commands.bench import loader as measure_loader
from paceline.verbs.commands.options import SingleOptions, unfolded
from paceline.verbs.commands.ranks import gpus_typed

LADDER = "ladder"
"""The command that is meant where none is named."""


class Measurements(TyperGroup):
    """``paceline bench RECIPE`` stands for ``paceline bench ladder RECIPE``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put the ladder's name before what names no command."""
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = [LADDER, *args]
        found: list[str] = super().parse_args(ctx, args)
        return found


app = typer.Typer(cls=Measurements, no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def bench() -> None:
    """Measure this machine: paceline bench RECIPE climbs the ladder.

    \b
    paceline bench recipes/bench_small.yaml --budget 10m
    paceline bench loader recipes/bench_small.yaml
    paceline bench comm
    """


app.command(LADDER, cls=SingleOptions)(unfolded(measure_ladder))
app.command("loader", cls=SingleOptions)(unfolded(measure_loader))


@app.command("comm")
def measure_comm(
    gpus: Annotated[
        Any, typer.Option(parser=gpus_typed, metavar="N|all", help="Between this many GPUs [default: all].")
    ] = None,
    devices: Annotated[str | None, typer.Option(metavar="N,N,...", help="Between these GPUs, such as 1,3.")] = None,
    processes: Annotated[
        int | None, typer.Option(min=2, metavar="N", help="Between this many processes on the CPU.")
    ] = None,
    largest: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Largest message, as 64M [default: 256M].")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the figures as JSON lines.")] = None,
) -> None:
    """Measure how fast ranks exchange data: all-reduce, all-gather, reduce-scatter.

    \b
    paceline bench comm --gpus 4
    torchrun --nproc-per-node 4 -m paceline bench comm
    """
    from paceline.distributed.failures import failures_told
    from paceline.verbs.bench.start import parse_size, start_ranks

    with failures_told():
        largest_bytes = None if largest is None else parse_size(largest)
        code = start_ranks(gpus=gpus, devices=devices, processes=processes)
        if code is not None:
            raise SystemExit(code)
        from paceline.verbs.bench.comm import bench_comm

        bench_comm(largest_bytes=largest_bytes, out=out)

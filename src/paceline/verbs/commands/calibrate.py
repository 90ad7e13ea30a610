"""``paceline calibrate`` as it is typed."""

from __future__ import annotations

import typer


def calibrate() -> None:
    """Measure what this machine's GPU takes for itself, for plans.

    \b
    paceline calibrate
    """
    from rich.console import Console

    from paceline.machine.facts import this_machine
    from paceline.memory.calibrate import calibrate as measure

    with Console(stderr=True, markup=False).status("measuring") as status:
        found = measure(this_machine(), progress=status.update)
    constants, mib = found.constants, 2**20
    each = " + ".join(f"{size / mib:,.0f}" for size in constants.workspaces)
    rows = {
        "context": f"{constants.context / mib:,.0f} MiB, the driver's and the code of a run's kernels",
        "workspaces": f"{each} MiB, cuBLAS's, of the forward and of the backward pass",
        "communicator": "not measured: it takes two GPUs"
        if constants.communicator is None
        else f"{constants.communicator / mib:,.0f} MiB, NCCL's on two GPUs",
        "products": f"{found.flops_per_second / 1e12:,.0f} TFLOP/s, bf16, 8192 x 8192",
    }
    typer.echo(found.gpu)
    for name, value in rows.items():
        typer.echo(f"  {name:<12}  {value}")
    typer.echo(f"plans for this GPU use them from now on: {found.file}")

"""The command line: one command a verb, each a thin shell around the Python function of the same name.

Only typer and the errors are imported here; a command imports what it needs when it runs, so that ``--help`` and
usage errors answer at once.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from typer.core import TyperGroup

from paceline.contract.errors import INTERRUPTED, PacelineError, UserError
from paceline.contract.python_fixes import command_line
from paceline.contract.redaction import without_credentials
from paceline.memory.expandable import ask_for_it
from paceline.verbs.commands.bench import bench
from paceline.verbs.commands.check import check
from paceline.verbs.commands.evaluate import evaluate
from paceline.verbs.commands.launch import app as launch_app
from paceline.verbs.commands.lr import lr
from paceline.verbs.commands.memory import memory
from paceline.verbs.commands.options import SingleOptions, unfolded
from paceline.verbs.commands.plan import plan
from paceline.verbs.commands.predict import predict
from paceline.verbs.commands.trace import trace
from paceline.verbs.commands.train import train
from paceline.verbs.short import explain_option

_USAGE_ERROR = cast("type[Exception]", typer.BadParameter.__mro__[1])
"""What an option, argument or command raises that is not there; typer has no name for it."""


class Commands(TyperGroup):
    """The one place where errors become messages and exit codes; bugs keep their traceback."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command.

        Raises:
            UserError: it was removed, or is called otherwise here.
        """
        try:
            return super().resolve_command(ctx, args)
        except _USAGE_ERROR:
            from paceline.recipe.suggestions import suggest_option

            suggestion = suggest_option(args[0])
            if suggestion is None:
                raise
            is_command = suggestion.command.startswith("paceline ")
            fix = suggestion.command if is_command else "paceline --help"
            raise UserError(f"{args[0]}: no such command", suggestion.in_full, fix) from None

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a person's error ends with its message and exit code, without a traceback."""
        arguments = [*ctx._protected_args, *ctx.args]
        try:
            with command_line():
                return super().invoke(ctx)
        except PacelineError as error:
            typer.echo(f"paceline: {without_credentials(str(error))}", err=True)
            raise SystemExit(error.exit_code) from None
        except KeyboardInterrupt:
            typer.echo("paceline: interrupted", err=True)
            raise SystemExit(INTERRUPTED) from None
        except _USAGE_ERROR as error:
            context = getattr(error, "ctx", None)
            verb, command = getattr(context, "info_name", None) or "", getattr(context, "command", None)
            known = {name for parameter in getattr(command, "params", ()) for name in parameter.opts}
            explained = explain_option(getattr(error, "option_name", None) or "", verb, arguments, known)
            if explained is None:
                raise
            typer.echo(f"paceline: {explained}", err=True)
            raise SystemExit(explained.exit_code) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(launch_app, name="launch")

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.", show_default=False)]

for verb in (train, lr, trace, plan, memory, check, evaluate, predict, bench):
    app.command(cls=SingleOptions)(unfolded(verb))


def main() -> None:
    """Entry point of the ``paceline`` command."""
    # torch.distributed.launch puts it first; it also sets LOCAL_RANK, which is read
    if sys.argv[1:] and re.fullmatch(r"--local[-_]rank=\d+", sys.argv[1]):
        del sys.argv[1]
    ask_for_it(os.environ)  # of torch, which is not loaded yet
    app(prog_name="paceline")


def _version(asked: bool) -> None:
    if asked:
        from paceline._version import __version__

        typer.echo(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def paceline(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Fine-tune PyTorch models at the speed of the hardware."""


@app.command()
def demo() -> None:
    """Train a small classifier on embedded data, offline.

    \b
    paceline demo
    """
    from paceline.verbs.demo import demo as run_demo

    run_demo()


@app.command()
def doctor() -> None:
    """Describe this machine and what it lacks.

    \b
    paceline doctor
    """
    from paceline.verbs.doctor import doctor as examine_machine

    examine_machine()


@app.command()
def techniques(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One of them.", show_default=False)] = None,
) -> None:
    """List the techniques in a line each, or tell all about one.

    \b
    paceline techniques
    paceline techniques packing
    """
    from paceline.verbs.techniques import techniques as list_techniques

    list_techniques(name)


@app.command()
def schema() -> None:
    """Print the recipe's JSON schema, for editors.

    \b
    paceline schema > recipe.schema.json
    """
    from paceline.verbs.schema import schema as print_schema

    print_schema()


@app.command()
def report(
    run: RunFolder,
    figures: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also loss and metrics as figures: SVG, with matplotlib PDF and PNG."),
    ] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Also a table of all steps, as metrics.csv.")] = None,
) -> None:
    """Write a run's report.html again.

    \b
    paceline report runs/reviews
    paceline report runs/reviews --figures figures --csv metrics.csv
    """
    from paceline.verbs.report import report as write_report

    typer.echo(f"wrote {write_report(run)}")
    if figures is None and csv is None:
        return
    from paceline.verbs.report import export

    for path in export(run, figures, csv, typer.echo):
        typer.echo(f"wrote {path}")


@app.command()
def restore(
    url: Annotated[str, typer.Argument(metavar="URL", help="Of the run there: MIRROR/NAME.", show_default=False)],
    out: Annotated[Path | None, typer.Option(help="Run folder [default: runs/<name>].")] = None,
) -> None:
    """Make a run folder again from its mirror.

    \b
    paceline restore s3://bucket/runs/reviews --out runs/reviews
    """
    from paceline.verbs.restore import restore as fetch

    folder, step = fetch(url, out)
    typer.echo(f"restored {folder}, step {step}; paceline train {folder} --resume goes on")


@app.command("data")
def data_set(
    name: Annotated[str, typer.Argument(help="Data set to fetch: imdb or cifar10.", show_default=False)],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where its files go.", show_default=False)],
) -> None:
    """Download a data set and write its files.

    \b
    paceline data imdb data/imdb
    paceline data cifar10 data/cifar10
    """
    from paceline.verbs.data import data as fetch

    for path in fetch(name, folder):
        typer.echo(f"wrote {path}")


@app.command()
def convert(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Model with .bin, .pt or .pth weights.")],
) -> None:
    """Write safetensors beside pickled weights, running no code.

    \b
    paceline convert models/old
    """
    from paceline.models.convert import convert as convert_weights

    for path in convert_weights(folder):
        typer.echo(f"wrote {path}")


if __name__ == "__main__":
    main()

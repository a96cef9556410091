"""The commands of ``nfold`` and their options: typer alone, nothing heavy."""

from __future__ import annotations

from typing import Annotated

import typer

import nfold
from nfold.cli import bench, env, explain, report, run, train

app = typer.Typer(
    name="nfold",
    help="Make N devices N-fold faster: benchmark, see what is missing, and why.",
    epilog="Exit codes: 0 ok, 1 a run failed, 2 usage, 3 threshold not met, 4 machine unfit.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("env")(env.env_command)
app.command("bench")(bench.bench_command)
app.command("train")(train.train_command)
app.command("run", context_settings=run.RUN_CONTEXT_SETTINGS)(run.run_command)
app.command("explain", context_settings=explain.EXPLAIN_CONTEXT_SETTINGS)(explain.explain_command)
app.command("report")(report.report_command)


def _show_version(requested: bool) -> None:
    if requested:
        typer.echo(f"nfold {nfold.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
) -> None:
    """Options of every command; both are dealt with before a command runs."""

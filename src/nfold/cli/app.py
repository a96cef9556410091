"""The commands of nfold. Only Typer is imported here, so that ``nfold --help`` answers at once."""

from __future__ import annotations

import sys
import traceback
from typing import Annotated, Any

import typer

import nfold
from nfold.cli import options as declared
from nfold.cli.options import GroupedHelp, with_options

app = typer.Typer(
    name="nfold",
    help="Make N devices N-fold faster: measure training, and explain the missing speedup.",
    epilog="Exit codes: 0 ok, 1 a run failed, 2 usage, 4 machine or environment unfit.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.command("env", cls=GroupedHelp)
@with_options(declared.ENV_OPTIONS)
def env(**options: Any) -> None:
    """Show the hardware, and what slows training on it."""
    from nfold.cli.env_command import run_env

    run_env(**options)


@app.command("bench", cls=GroupedHelp)
@with_options(declared.BENCH_OPTIONS)
def bench(**options: Any) -> None:
    """Measure a grid of plans, print a table, write a report.

    Options of a plan take comma-separated lists; every combination is one cell. A combination that
    is not supported is a row with the reason. Stored cells are not measured again.

    With --report, --devices and a length replace those of the field report, and other options keep
    some of its values.

    Exits with 1 if a run crashed, hung, was killed or diverged. Out of memory and unsupported are
    results.
    """
    declared.refuse_script("bench", options["workload"])
    from nfold.cli.bench_command import BenchOptions, run_bench

    raise typer.Exit(run_bench(BenchOptions(**options)))


@app.command("train", cls=GroupedHelp)
@with_options(declared.TRAIN_OPTIONS)
def train(**options: Any) -> None:
    """Train a workload to the end, with checkpoints.

    The plan is read from nfold.toml in the working directory, if it exists; options override it.
    After an interruption the same command resumes from the last checkpoint, with the same result
    as without the interruption.
    """
    declared.refuse_script("train", options["workload"])
    from nfold.cli.train_command import TrainOptions, run_train

    raise typer.Exit(run_train(TrainOptions(**options)))


@app.command(
    "run",
    cls=GroupedHelp,
    context_settings={
        "allow_interspersed_args": False,  # everything after SCRIPT belongs to the script
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
)
@with_options(declared.RUN_OPTIONS)
def run(**options: Any) -> None:
    """Launch and supervise a script on all devices; torchrun's options.

    Options may be written with - or _. Environment variables PET_* have the same effect as with
    torchrun. Inside a running job (RANK and WORLD_SIZE are set) the script runs as that rank.
    """
    debug = options.pop("debug")
    options.pop("unsupported_torchrun_option")
    options |= {name: tuple(options[name] or ()) for name in ("arguments", "plan")}
    from nfold.cli.run_command import launch_and_report
    from nfold.launch.torchrun_args import TorchrunArgs

    try:
        raise typer.Exit(launch_and_report(TorchrunArgs(**options)))
    except Exception as error:
        if debug and not isinstance(error, typer.Exit):
            sys.stderr.write(traceback.format_exc())
        raise


@app.command("explain", cls=GroupedHelp, context_settings={"ignore_unknown_options": True})
@with_options(declared.EXPLAIN_OPTIONS)
def explain(**options: Any) -> None:
    """Explain by experiment where the missing speedup went.

    Runs the plan repeatedly with one thing changed, in fresh processes and random order, until the
    time limit. Stored runs are reused: the same command with a larger --budget continues.

    A script runs unchanged in a sandbox and is stopped after enough steps. Files that it writes are
    counted and discarded.
    """
    if options["target"] and not options["module"]:
        declared.refuse_missing_suffix("explain", options["target"])
    options["arguments"] = tuple(options["arguments"] or ())
    from nfold.cli.explain_command import ExplainOptions, run_explain

    raise typer.Exit(run_explain(ExplainOptions(**options)))


@app.command("tune", cls=GroupedHelp, context_settings={"ignore_unknown_options": True})
@with_options(declared.TUNE_OPTIONS)
def tune(**options: Any) -> None:
    """Make training faster: try remedies, keep what wins, verify it in fresh runs.

    Explains first, then tries one remedy after the other in runs that alternate with the best so
    far. The script is not changed: what is kept is written to nfold.toml, which nfold run --with
    applies, and as a patch. Remedies that change the training need --allow.

    Exits with 3 if fresh runs do not confirm the gain.
    """
    if options["target"] and not options["module"]:
        declared.refuse_missing_suffix("tune", options["target"])
    options["arguments"] = tuple(options["arguments"] or ())
    from nfold.cli.tune_command import TuneOptions, run_tune

    raise typer.Exit(run_tune(TuneOptions(**options, show=False, details=False)))


@app.command("report", cls=GroupedHelp)
@with_options(declared.REPORT_OPTIONS)
def report(**options: Any) -> None:
    """Show stored results: a table, and a page, Markdown or CSV.

    Without --html, --csv or --md: prints the table and writes the page into the results folder.
    """
    from nfold.cli.report_command import run_report

    run_report(**options)


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
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    pass  # main() handles --debug, _show_version handles --version

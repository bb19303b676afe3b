"""The command line: what each command is called, and what an error looks like."""

import faulthandler
import os
import sys
from inspect import cleandoc, currentframe
from io import TextIOWrapper
from typing import NoReturn

import typer

from astraflow import __version__
from astraflow.cli import (
    assets,
    conformance,
    evaluate,
    gateway,
    machine,
    processes,
    run,
    runs,
    simulate,
    tinker,
    ui,
    weights,
)
from astraflow.config.extras import cure_of
from astraflow.config.run_dir import keep_files_private
from astraflow.core.errors import AstraflowError

app = typer.Typer(
    name="astraflow",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Train LLM agents with reinforcement learning, organised around data.\n\n"
    "Begin with [bold]astraflow run recipes/sort.yaml[/]: it trains a small policy on this machine "
    "in about a minute. [bold]astraflow doctor[/] tells what works here.",
)
app.command("init")(runs.init)
app.command("run")(run.run)
app.command("check")(run.check)
app.command("ls")(runs.ls)
app.command("show")(runs.show)
app.command("compare")(runs.compare)
app.command("logs")(runs.logs)
app.command("ui")(ui.ui)
app.command("stop")(runs.stop)
app.command("status")(run.status)
app.command("explain")(run.explain)
app.command("ledger")(run.ledger)
app.command("eval")(evaluate.evaluate)
app.command("save")(run.save)
app.command("rollouts")(run.rollouts)
app.command("track")(run.track)
app.command("token")(run.token)
app.command("autoscale")(run.autoscale)
app.command("simulate")(simulate.simulate)
app.command("tinker")(tinker.tinker)
app.command("doctor")(machine.doctor)
app.add_typer(processes.dataflow_app, name="dataflow")
app.add_typer(processes.raas_app, name="raas")
app.add_typer(processes.trainer_app, name="trainer")
app.add_typer(gateway.gateway_app, name="gateway")
app.add_typer(assets.config_app, name="config")
app.add_typer(assets.models_app, name="models")
app.add_typer(weights.app, name="weights")
app.add_typer(machine.bench_app, name="bench")
app.add_typer(conformance.app, name="conformance")
app.add_typer(assets.data_app, name="data")


@app.callback(invoke_without_command=True)
def _root(
    *, version: bool = typer.Option(False, "--version", help="Print the version and exit.")
) -> None:
    if version:
        typer.echo(__version__)
        raise typer.Exit


def _unwrap_help(group: typer.Typer) -> None:
    """Let help wrap where the terminal ends, not where a line of the source does."""
    for command in group.registered_commands:
        paragraphs = cleandoc((command.callback and command.callback.__doc__) or "").split("\n\n")
        command.help = "\n\n".join(" ".join(each.split()) for each in paragraphs)
    for part in group.registered_groups:
        if part.typer_instance is not None:
            _unwrap_help(part.typer_instance)


_unwrap_help(app)


def _open_standard_streams() -> None:
    """Open those of standard input, output and error that this was started without.

    Else the next file or pipe would get the number of one, and with it what is meant for that.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It gets the least number that is free, which is that one's.
            descriptor = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode))


def _report_sudden_ends() -> None:
    """Have a crash, and `os._exit` in code of a user, say where: nothing else tells what ran."""
    if sys.stderr is sys.__stderr__ is not None:
        faulthandler.enable(all_threads=False)
    leave, process = os._exit, os.getpid()

    def report_and_leave(status: int) -> NoReturn:
        frame = currentframe()
        # A child that was forked ends so.
        if os.getpid() == process and frame is not None:
            from astraflow.telemetry.tracebacks import place_of_stack  # noqa: PLC0415 - for this alone

            said = f"os._exit({status}) ends the process here"
            place = place_of_stack(frame, name="os._exit", said=said)
            if place.is_users:
                print(place.traceback, file=sys.stderr, flush=True)  # noqa: T201 - as a traceback
        leave(status)

    os._exit = report_and_leave


def _log_to_stderr() -> None:
    """Keep what is logged apart from what a command prints, which may be JSON for a program.

    Roles log in their own way.
    """
    # Help loads nothing that is heavy; nor do completions, whose command line has no argument.
    if sys.argv[1:] and "--help" not in sys.argv:
        from astraflow.telemetry.logging import configure_logging  # noqa: PLC0415

        configure_logging("astraflow")


def main() -> None:
    """Run the command line; an error that has a name is one line and exit code 1.

    So is a file that is not there or may not be used. A package that is not installed is named with
    the command that installs it.
    """
    _open_standard_streams()
    keep_files_private()
    _report_sudden_ends()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A sign that a terminal cannot show is a question mark, not the end of a run.
            stream.reconfigure(errors="replace")
    try:
        _log_to_stderr()
        app()
    except AstraflowError as error:
        typer.secho(f"error: {error.message}  [{error.reason}]", err=True, fg=typer.colors.RED)
        sys.exit(1)
    except OSError as error:
        from astraflow.telemetry.tracebacks import place_of  # noqa: PLC0415 - for errors alone

        # What code of the user's own stumbles over is told with its traceback.
        if error.filename is None or place_of(error).is_users:
            raise
        cure = "see that it is there, and that you may use it"
        said = f"error: {error.filename}: {error.strerror}; {cure}"
        typer.secho(said, err=True, fg=typer.colors.RED)
        sys.exit(1)
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        cure = cure_of(module)
        if cure is None:
            raise
        typer.secho(f"error: this needs {module}: {cure}", err=True, fg=typer.colors.RED)
        sys.exit(1)

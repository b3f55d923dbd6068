"""The Typer application, and how its errors become one line and an exit code.

Exit codes: 0 done; 1 a comparison diverged, or an inspected checkpoint is not as it should be; 2 bad input; 3 a rank
failed; 75 (as a launcher's rank) another rank failed; 130 interrupted; 143 terminated; 141 the reader of the output
went away.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from importlib import metadata
from typing import Annotated

import typer
from typer.main import get_command

from lockstep.cli import comm_bench, compare, exit_codes, generate, inspect, launcher, make_checkpoint, report
from lockstep.comm.errors import PeerLost, UsageError

LOCAL_RANKS = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK")  # of torchrun and deepspeed; of MPIs
app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode="rich")
app.command("generate")(generate.command)
app.command("compare")(compare.command)
app.command("report")(report.command)
# What follows the command to launch is that command's, with or without a -- before it.
app.command("launch", context_settings={"allow_interspersed_args": False})(launcher.command)
app.command("comm-bench")(comm_bench.command)
app.command("inspect")(inspect.command)
app.command("make-checkpoint")(make_checkpoint.command)


def _version(value: bool) -> None:
    if value:
        numbers = {name: _installed(name) for name in ("lockstep-decode", "torch")}
        ours, torch = numbers.values()
        typer.echo(f"lockstep {ours} (torch {torch}, Python {platform.python_version()})")
        raise typer.Exit


def _installed(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


@app.callback()
def lockstep(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
    # DeepSpeed's launcher puts it before the sub-command (Megatron-DeepSpeed#178); RANK says what we need to know.
    local_rank: Annotated[int | None, typer.Option("--local_rank", "--local-rank", hidden=True)] = None,
) -> None:
    """Distributed speculative decoding of mixture-of-experts models with MTP heads."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    code = _main(arguments)
    exit_codes.tell(code)
    return code


def _main(arguments: list[str] | None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 is no reason to fail
    try:
        with _terminable():
            return _run(arguments)
    except Terminated:
        return 143
    except KeyboardInterrupt:
        return 130
    except (BrokenPipeError, SystemExit):  # rich makes the one into the other
        # What is still buffered would fail again when the interpreter exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except UsageError as error:
        return _refuse(str(error))
    except typer.TyperException as error:
        return _refuse(error.format_message())
    except Exception as error:
        return _report_failure(error, show="--traceback" in arguments)


class Terminated(KeyboardInterrupt):
    """SIGTERM: ends the ranks as Ctrl-C does, where dying of it would leave what they started."""


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """As a rank of a launcher SIGTERM is the launcher's word about the other ranks (comm/peers.py)."""

    def end(number: int, frame: object) -> None:
        raise Terminated

    if "RANK" in os.environ or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(arguments: list[str]) -> int:
    """Without Typer's own error pages: an error here is one line."""
    command = get_command(app)
    try:
        with command.make_context("lockstep", list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    finally:
        sys.stdout.flush()
    return 0


def _refuse(message: str) -> int:
    # Every rank of a launcher finds the same bad input; the first one on each host says so.
    if message and all(os.environ.get(name, "0") == "0" for name in LOCAL_RANKS):
        _say(_one_line(message))
    return 2


def _report_failure(error: Exception, *, show: bool) -> int:
    from lockstep.comm.world import PEER_LOST, RankFailed

    if isinstance(error, RankFailed):
        message, text = str(error), error.traceback_text
    else:
        message, text = f"{type(error).__name__}: {error}", traceback.format_exc()
    if show:
        sys.stderr.write(text.rstrip() + "\n")
    _say(_one_line(message) + ("" if show else " (run again with --traceback to see where)"))
    return PEER_LOST if isinstance(error, PeerLost) else 3


def _say(line: str) -> None:
    sys.stderr.write(f"lockstep: {line}\n")


def _one_line(text: str) -> str:
    return " ".join(text.split())

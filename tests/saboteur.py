"""What kills or stops one rank at one place: in the ranks of this process, or as `-m saboteur` in those of a launcher.

A place is a stage, and where that has collectives one of them: `verify` is the first collective of the second verify.
`-m saboteur` reads SABOTAGE, which is CULPRIT:PLACE:HOW, and writes into the folder SABOTAGE_NOTES: each rank's process
number as `rank-N`, and `struck` when it strikes. With SABOTAGE_AFTER it strikes in the second batch, once that file has
the first one's finished request; and in `write` once it has the second's too.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lockstep.comm.pulse import Pulse
from lockstep.comm.world import rank_of_launcher

PLACES = ("load", "prefill", "verify", "draft", "exit", "write")
HOW: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": lambda: _raise(),
    "sleep": lambda: time.sleep(1000),
    "memory": lambda: _raise(MemoryError("cannot allocate 99 GiB")),
}


def _raise(error: Exception | None = None) -> None:
    raise error or ValueError("sabotage")


def sabotage(rank_of: Callable[[], int], culprit: int, place: str, how: str) -> tuple[object, object]:
    """Make Pulse strike when `culprit` is at `place`. Returns what it was."""
    mark, enter = Pulse.mark, Pulse.enter
    done: list[bool] = []
    batches: list[int] = []
    after = os.environ.get("SABOTAGE_AFTER")

    def strike(pulse: Pulse, here: bool) -> None:
        if here and not done and rank_of() == culprit and len(batches) >= (2 if after else 0):
            # Rank 0 writes it, or our own launcher's parent, when they come to that.
            while after and _num_lines(Path(after)) < (2 if place == "write" else 1):
                time.sleep(0.01)
            done.append(True)
            _note("struck")
            HOW[how]()

    def marked(pulse: Pulse, stage: str, round: int | None = None) -> None:
        mark(pulse, stage, round)
        if stage == "start":
            _note(f"rank-{rank_of()}", str(os.getpid()))
        if stage == "prefill" and round == 0:
            batches.append(len(batches))
        writer = culprit == 0 and rank_of_launcher() is not None  # where ranks are our own, their parent writes
        strike(pulse, {"load": "load", "write": "write" if writer else "end"}.get(place) == stage)

    def entered(pulse: Pulse, collective: str, boundary: str) -> None:
        enter(pulse, collective, boundary)
        beat = pulse.read()
        at_exit = place == "exit" and boundary.startswith("mtp.") and boundary.endswith(".exit")
        strike(pulse, (beat.round >= 2 or place == "prefill") and (beat.stage == place or at_exit))

    Pulse.mark, Pulse.enter = marked, entered  # type: ignore[method-assign]
    return mark, enter


def restore(was: tuple[object, object]) -> None:
    Pulse.mark, Pulse.enter = was  # type: ignore[method-assign, assignment]


def _num_lines(file: Path) -> int:
    return file.read_text().count("\n") if file.exists() else 0


def _note(name: str, text: str = "") -> None:
    if "SABOTAGE_NOTES" in os.environ:
        Path(os.environ["SABOTAGE_NOTES"], name).write_text(text)


def _rank() -> int:
    """Of a launcher, or of our own: those have a name. -1 in their parent."""
    launched = rank_of_launcher()
    name = multiprocessing.current_process().name.rpartition("lockstep-rank-")[2]
    return launched[0] if launched else int(name) if name.isdecimal() else -1


if __name__ == "__main__":
    from lockstep.cli.app import main

    culprit, place, how = os.environ["SABOTAGE"].split(":")
    sabotage(_rank, int(culprit), place, how)
    sys.exit(main())

"""What kills or stops one rank at one place: in the ranks of this process, or as `-m saboteur` in those of a launcher.

A place is a stage, and where that has collectives one of them: `verify` is the first collective of the second verify.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from lockstep.comm.pulse import Pulse

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

    def strike(pulse: Pulse, here: bool) -> None:
        if here and not done and rank_of() == culprit:
            done.append(True)
            if "SABOTAGE_STRUCK" in os.environ:
                Path(os.environ["SABOTAGE_STRUCK"]).touch()  # for a test to see when
            HOW[how]()

    def marked(pulse: Pulse, stage: str, round: int | None = None) -> None:
        mark(pulse, stage, round)
        strike(pulse, {"load": "load", "write": "end"}.get(place) == stage)

    def entered(pulse: Pulse, collective: str, boundary: str) -> None:
        enter(pulse, collective, boundary)
        beat = pulse.read()
        at_exit = place == "exit" and boundary.startswith("mtp.") and boundary.endswith(".exit")
        strike(pulse, (beat.round >= 2 or place == "prefill") and (beat.stage == place or at_exit))

    Pulse.mark, Pulse.enter = marked, entered  # type: ignore[method-assign]
    return mark, enter


def restore(was: tuple[object, object]) -> None:
    Pulse.mark, Pulse.enter = was  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    from lockstep.cli.app import main
    from lockstep.comm.world import rank_of_launcher

    culprit, place, how = os.environ["SABOTAGE"].split(":")
    launched = rank_of_launcher()
    assert launched
    Path(os.environ["SABOTAGE_PIDS"], str(os.getpid())).touch()  # for a test to see that none is left
    sabotage(lambda: launched[0], int(culprit), place, how)
    sys.exit(main())

"""How the ranks of a run talk to each other: what a user chooses. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

COMMS = ("torch", "deepspeed", "deepspeed-shm", "mpi")
COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast", "gather", "barrier")
ALGORITHMS = ("auto", "native", "exchange")


@dataclass(frozen=True)
class Wiring:
    """`comm` is the library that moves bytes, `algorithm` what it does behind a conversion (comm/algorithms.py).

    `check_ranks` compares what all ranks are about to do before each collective; `comm_log` is DeepSpeed's own log.
    """

    comm: str = "torch"
    algorithm: str = "auto"
    check_ranks: bool = False
    comm_log: bool = False

"""What moves bytes between ranks: one small interface, and who implements it.

A wire knows nothing of layouts, boundaries or deadlines. Tensors are contiguous; results go where the caller says.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lockstep.comm.errors import UsageError
from lockstep.comm.overdue import killed_after
from lockstep.comm.wiring import COMMS, Wiring


class Wire(Protocol):
    """Collectives of P ranks. Each returns when this rank may use the result."""

    name: str
    ends_itself: bool  # whether a collective that waits too long raises; else someone must watch it

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over ranks, in place."""

    def all_gather(self, out: Tensor, tensor: Tensor) -> None:
        """`out` [P * rows, ...] becomes every rank's `tensor` [rows, ...] in rank order."""

    def reduce_scatter(self, out: Tensor, tensor: Tensor) -> None:
        """`out` [rows, ...] becomes this rank's block of the sum of every rank's `tensor` [P * rows, ...]."""

    def all_to_all(self, out: Tensor, tensor: Tensor, received: list[int], sent: list[int]) -> None:
        """Rows to and from each rank: `sent[r]` rows of `tensor` go to rank r, `received[r]` come from it."""

    def gather(self, tensor: Tensor) -> list[Tensor] | None:
        """Every rank's `tensor`, on rank 0; None elsewhere."""

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's `tensor`, everywhere, in place."""

    def barrier(self) -> None: ...

    def wait_for_root(self, tensor: Tensor) -> None:
        """A `broadcast` for which ranks may wait long: they leave the processor to others."""

    def part(self, ranks: Sequence[int]) -> Wire | None:
        """The wire of these ranks alone, rank 0 among them; None on the others. All ranks call this."""

    def close(self) -> None:
        """Leave the group. Waits for nobody."""

    def is_loss(self, error: RuntimeError) -> bool:
        """Whether `error` says that another rank is gone or late."""


def open_wire(
    wiring: Wiring, rank: int, size: int, device: torch.device, timeout_s: float, init_method: str | None
) -> Wire:
    """Join the group: blocks until all have, `timeout_s` at most. Raises UsageError where a library is missing."""
    timeout = datetime.timedelta(seconds=timeout_s)
    if wiring.comm == "torch":
        from lockstep.comm.torch_wire import open_torch

        return open_torch(rank, size, device, timeout, init_method, wiring.algorithm)
    if wiring.comm in ("deepspeed", "deepspeed-shm"):
        from lockstep.comm.deepspeed_wire import open_deepspeed

        return open_deepspeed(rank, size, device, timeout, init_method, wiring)
    if wiring.comm == "mpi":
        from lockstep.comm.mpi_wire import MpiWire

        late = f"rank {rank} of {size} could not join the group: no end of MPI's start after {timeout_s:g} s"
        with killed_after(timeout_s, late):
            return MpiWire(rank, size, device)
    raise UsageError(f"--comm {wiring.comm!r} is not known; use {', '.join(COMMS)}")

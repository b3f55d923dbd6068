"""The wire of mpi4py, for ranks that an mpiexec has started (lockstep launch --launcher mpi).

MPI has no time-outs, so a Transport watches it. Sums of 16-bit floats travel as bytes and are made here: MPI knows no
bfloat16, and Open MPI adds it as if it were something else.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.algorithms import sum_in_order
from lockstep.comm.errors import UsageError

IDLE_S = 0.001
SUMMED_BY_MPI = (torch.float32, torch.float64, torch.int32, torch.int64)


class MpiWire:
    name = "mpi"
    ends_itself = False

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        if device.type != "cpu":
            raise UsageError(f"--comm mpi is for CPU ranks, and --device is {device.type}; use --comm torch")
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:  # the package, or the MPI library that it looks for
            reason = " ".join(str(error).split())
            raise UsageError(f"--comm mpi: {reason}; pip install 'lockstep-decode[mpi]'") from error
        self._mpi, self._rank, self._size = MPI, rank, size
        self._world: Any = MPI.COMM_WORLD
        if (self._world.rank, self._world.size) != (rank, size):
            raise UsageError(
                f"--comm mpi: rank {rank} of {size} is rank {self._world.rank} of {self._world.size} to MPI; start it "
                "with lockstep launch --launcher mpi"
            )

    def all_reduce(self, tensor: Tensor) -> None:
        if tensor.dtype in SUMMED_BY_MPI:
            self._world.Allreduce(self._mpi.IN_PLACE, tensor.numpy())
        else:
            parts = torch.empty((self._size, *tensor.shape), dtype=tensor.dtype)
            self._world.Allgather(_bytes(tensor), _bytes(parts))
            tensor.copy_(sum_in_order(parts))

    def all_gather(self, out: Tensor, tensor: Tensor) -> None:
        self._world.Allgather(_bytes(tensor), _bytes(out))

    def reduce_scatter(self, out: Tensor, tensor: Tensor) -> None:
        if tensor.dtype in SUMMED_BY_MPI:
            self._world.Reduce_scatter_block(tensor.numpy(), out.numpy())
        else:
            parts = torch.empty((self._size, *out.shape), dtype=tensor.dtype)
            self._world.Alltoall(_bytes(tensor), _bytes(parts))
            out.copy_(sum_in_order(parts))

    def all_to_all(self, out: Tensor, tensor: Tensor, received: list[int], sent: list[int]) -> None:
        width = tensor[:1].nbytes if len(tensor) else out[:1].nbytes
        self._world.Alltoallv([_bytes(tensor), [n * width for n in sent]], [_bytes(out), [n * width for n in received]])

    def gather(self, tensor: Tensor) -> list[Tensor] | None:
        if self._rank != 0:
            self._world.Gather(_bytes(tensor), None)
            return None
        out = torch.empty((self._size, *tensor.shape), dtype=tensor.dtype)
        self._world.Gather(_bytes(tensor), _bytes(out))
        return list(out)

    def broadcast(self, tensor: Tensor) -> None:
        self._world.Bcast(_bytes(tensor))

    def barrier(self) -> None:
        self._world.Barrier()

    def wait_for_root(self, tensor: Tensor) -> None:
        request = self._world.Ibcast(_bytes(tensor))
        while not request.Test():
            time.sleep(IDLE_S)  # MPI itself would spin

    def part(self, ranks: Sequence[int]) -> MpiWire | None:
        inside = self._rank in ranks
        world = self._world.Split(0 if inside else self._mpi.UNDEFINED, self._rank)
        if not inside:
            return None
        part = copy.copy(self)
        part._world, part._rank, part._size = world, ranks.index(self._rank), len(ranks)
        return part

    def close(self) -> None:
        """MPI ends with the process."""

    def is_loss(self, error: RuntimeError) -> bool:
        return isinstance(error, self._mpi.Exception)


def _bytes(tensor: Tensor) -> Any:
    """The tensor's memory as bytes, for what moves it without looking at it."""
    return tensor.view(-1).view(torch.uint8).numpy()

"""The bytes behind a conversion: torch.distributed, with gloo on CPU and nccl on CUDA.

A transport moves tensors and knows nothing of layouts. Tensors are contiguous; results go where the caller says.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.errors import PeerLost
from lockstep.comm.timeline import COLLECTIVE, Timeline

Result = TypeVar("Result")


class TorchTransport:
    """Collectives of the default process group of torch.distributed."""

    def __init__(self, rank: int, size: int, device: torch.device, timeout_s: float, init_method: str | None) -> None:
        self.rank, self.size = rank, size
        self.timeline: Timeline | None = None
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend,
            init_method=init_method or "env://",
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )

    def all_reduce(self, tensor: Tensor, at: str) -> None:
        """Sum over ranks, in place."""
        self._call("all-reduce", at, dist.all_reduce, tensor)

    def all_gather(self, out: Tensor, tensor: Tensor, at: str) -> None:
        """`out` [P * rows, ...] becomes every rank's `tensor` [rows, ...] in rank order."""
        self._call("all-gather", at, dist.all_gather_single, out, tensor)

    def reduce_scatter(self, out: Tensor, tensor: Tensor, at: str) -> None:
        """`out` [rows, ...] becomes this rank's block of the sum of every rank's `tensor` [P * rows, ...]."""
        self._call("reduce-scatter", at, dist.reduce_scatter_single, out, tensor)

    def all_to_all(self, out: Tensor, tensor: Tensor, received: list[int], sent: list[int], at: str) -> None:
        """Rows to and from each rank: `sent[r]` rows of `tensor` go to rank r, `received[r]` come from it."""
        self._call("all-to-all", at, dist.all_to_all_single, out, tensor, received, sent)

    def gather(self, tensor: Tensor, at: str) -> list[Tensor] | None:
        """Every rank's `tensor`, on rank 0; None elsewhere."""
        out = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else None
        self._call("gather", at, dist.gather, tensor, out)
        return out

    def broadcast(self, tensor: Tensor, at: str) -> None:
        """Rank 0's `tensor`, everywhere, in place."""
        self._call("broadcast", at, dist.broadcast, tensor, 0)

    def barrier(self, at: str) -> None:
        self._call("barrier", at, dist.barrier)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _call(self, name: str, at: str, function: Callable[..., Result], *args: Any) -> Result:
        try:
            if self.timeline is None:
                return function(*args)
            begin = self.timeline.now()
            result = function(*args)
            self.timeline.add(COLLECTIVE, f"{at} {name}", begin)
            return result
        except RuntimeError as error:
            # gloo has no error type of its own: a lost or late peer is a RuntimeError that names its source file.
            if isinstance(error, dist.DistError) or "gloo/" in str(error) or "Timed out" in str(error):
                raise PeerLost(f"{name} at {at} on rank {self.rank} failed: {error}") from error
            raise

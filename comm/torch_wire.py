"""The wire of torch.distributed, with gloo on CPU and nccl on CUDA, and of what offers the same calls."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.comm.algorithms import EXCHANGE_UP_TO, copies, exchange_up_to, sum_in_order


@dataclass(frozen=True)
class Calls:
    """The functions of a process group, the default one unless they are given a `group`.

    `all_gather` and `reduce_scatter` take (out, tensor).
    """

    all_reduce: Callable[[Tensor], Any]
    all_gather: Callable[[Tensor, Tensor], Any]
    reduce_scatter: Callable[[Tensor, Tensor], Any]
    all_to_all: Callable[[Tensor, Tensor, list[int], list[int]], Any]
    gather: Callable[[Tensor, list[Tensor] | None], Any]
    broadcast: Callable[[Tensor, int], Any]
    barrier: Callable[[], Any]

    def within(self, group: Any) -> Calls:
        return Calls(**{name: partial(call, group=group) for name, call in vars(self).items()})


TORCH = Calls(
    dist.all_reduce,
    dist.all_gather_single,
    dist.reduce_scatter_single,
    dist.all_to_all_single,
    dist.gather,
    dist.broadcast,
    dist.barrier,
)


def backend_of(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


class CallsWire:
    """Collectives of a process group that exists, through `calls`; small ones on gloo by exchange if that is faster."""

    def __init__(
        self,
        calls: Calls,
        name: str,
        rank: int,
        size: int,
        algorithm: str,
        *,
        timeout: datetime.timedelta | None = None,
        ends_itself: bool = True,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.name, self.ends_itself, self._timeout, self._algorithm = name, ends_itself, timeout, algorithm
        self._calls, self._rank, self._size, self._on_close = calls, rank, size, on_close
        self._up_to = {
            collective: {"native": -1, "exchange": 1 << 62}.get(algorithm, exchange_up_to(collective, size))
            for collective in (EXCHANGE_UP_TO if name.endswith("gloo") else ())
        }

    def has_choice(self, collective: str) -> bool:
        """Whether there is more than one algorithm behind `collective`."""
        return collective in self._up_to

    def with_algorithm(self, algorithm: str) -> CallsWire:
        """The same group by another algorithm. Close only one of them."""
        return CallsWire(self._calls, self.name, self._rank, self._size, algorithm, ends_itself=self.ends_itself)

    def all_reduce(self, tensor: Tensor) -> None:
        if self._by_exchange("all-reduce", tensor):
            tensor.copy_(sum_in_order(self._exchange(copies(tensor, self._size))))
        else:
            self._calls.all_reduce(tensor)

    def all_gather(self, out: Tensor, tensor: Tensor) -> None:
        if self._by_exchange("all-gather", tensor):
            sent = copies(tensor, self._size)
            self._to_each(out.view(sent.shape), sent)
        else:
            self._calls.all_gather(out, tensor)

    def reduce_scatter(self, out: Tensor, tensor: Tensor) -> None:
        if self._by_exchange("reduce-scatter", tensor):
            out.copy_(sum_in_order(self._exchange(tensor.view(self._size, *out.shape))))
        else:
            self._calls.reduce_scatter(out, tensor)

    def all_to_all(self, out: Tensor, tensor: Tensor, received: list[int], sent: list[int]) -> None:
        self._calls.all_to_all(out, tensor, received, sent)

    def gather(self, tensor: Tensor) -> list[Tensor] | None:
        out = [torch.empty_like(tensor) for _ in range(self._size)] if self._rank == 0 else None
        self._calls.gather(tensor, out)
        return out

    def broadcast(self, tensor: Tensor) -> None:
        self._calls.broadcast(tensor, 0)

    def barrier(self) -> None:
        self._calls.barrier()

    def wait_for_root(self, tensor: Tensor) -> None:
        self.broadcast(tensor)  # gloo sleeps

    def part(self, ranks: Sequence[int]) -> CallsWire | None:
        group = dist.new_group(list(ranks), timeout=self._timeout)
        if self._rank not in ranks:
            return None
        calls = self._calls.within(group)
        return CallsWire(calls, self.name, ranks.index(self._rank), len(ranks), self._algorithm)

    def close(self) -> None:
        if self._on_close:
            self._on_close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def is_loss(self, error: RuntimeError) -> bool:
        # gloo has no error type of its own: a lost or late peer is a RuntimeError that names its source file.
        return isinstance(error, dist.DistError) or "gloo/" in str(error) or "Timed out" in str(error)

    def _by_exchange(self, collective: str, tensor: Tensor) -> bool:
        return tensor.nbytes <= self._up_to.get(collective, -1)

    def _exchange(self, sent: Tensor) -> Tensor:
        """What each rank has for this one, [P, ...], in rank order. `sent` [P, ...] is one part for each."""
        received = torch.empty_like(sent)
        self._to_each(received, sent)
        return received

    def _to_each(self, received: Tensor, sent: Tensor) -> None:
        ones = [1] * self._size
        self._calls.all_to_all(received, sent, ones, ones)


def open_torch(
    rank: int, size: int, device: torch.device, timeout: datetime.timedelta, init_method: str | None, algorithm: str
) -> CallsWire:
    """Join torch.distributed's default group; `init_method` None reads MASTER_ADDR and MASTER_PORT."""
    dist.init_process_group(
        backend_of(device),
        init_method=init_method or "env://",
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    return CallsWire(TORCH, backend_of(device), rank, size, algorithm, timeout=timeout)

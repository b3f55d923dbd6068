"""How far the clocks of other hosts are ahead, where ranks' times are laid side by side. P ranks."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from lockstep.comm.group import Group

TRIES = 20


def offsets(group: Group) -> Tensor | None:
    """[P] nanoseconds by which each rank's monotonic clock is ahead of rank 0's, on rank 0. Exact on one host.

    A rank reads its clock between a broadcast and a gather, and so between two readings of rank 0. Of many tries the
    quickest knows best; it is wrong by half of its round trip at most (Cristian, 1989).
    """
    found = torch.zeros(group.size, dtype=torch.long)
    quickest = None
    for _ in range(TRIES if len(set(group.hosts)) > 1 else 0):
        before = time.perf_counter_ns()
        group.broadcast(torch.zeros(1, device=group.device), "clock")
        read = group.to_root(torch.tensor([[time.perf_counter_ns()]], device=group.device), "clock")
        took = time.perf_counter_ns() - before
        if read is not None and (quickest is None or took < quickest):
            quickest = took
            found = torch.stack([r.cpu()[0, 0] for r in read]) - before - took // 2
    found[0] = 0
    return found if group.rank == 0 else None

"""Where a run's time went on each rank: computing, moving, and waiting for the slowest rank.

C collectives, in the same order on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lockstep.comm.timeline import COLLECTIVE, Timeline


def parts(times: list[Tensor], wholes: list[Tensor]) -> list[dict[str, float]]:
    """Per rank: seconds of computing, moving, and waiting for the slowest rank; and the run they are parts of.

    `times` [C, 2] per rank. A collective begins for good when the last rank has entered it: before that is waiting.
    Computing is what prefill and the rounds leave beside their collectives; `whole_s` is clocked around everything.
    """
    last = torch.stack([t[:, 0] for t in times]).amax(0)
    shares = []
    for own, whole in zip(times, wholes, strict=True):
        begin, end = own.unbind(1)
        waiting = (torch.minimum(last, end) - begin).sum().item() * 1e-9
        inside = (end - begin).sum().item() * 1e-9
        total, prefill, rounds = whole[0].tolist()
        shares.append(
            {
                "compute_s": prefill + rounds - inside,
                "transfer_s": inside - waiting,
                "wait_s": waiting,
                "prefill_s": prefill,
                "rounds_s": rounds,
                "whole_s": total,
            }
        )
    return shares


def by_collective(timeline: Timeline, times: list[Tensor]) -> list[dict[str, Any]]:
    """Calls, transfer and waiting (means over ranks) of each boundary and collective."""
    begins = torch.stack([t[:, 0] for t in times])
    ends = torch.stack([t[:, 1] for t in times])
    waiting = torch.minimum(begins.amax(0)[None], ends) - begins
    moving = ends - begins - waiting
    totals: dict[str, list[float]] = {}
    for i, span in enumerate(timeline.spans):
        if span.kind == COLLECTIVE:
            row = totals.setdefault(span.name, [0, 0.0, 0.0])
            row[0] += 1
            row[1] += moving[:, i].double().mean().item() * 1e-9
            row[2] += waiting[:, i].double().mean().item() * 1e-9
    return [
        dict(zip(("boundary", "collective"), name.split(" ", 1), strict=True))
        | {"calls": int(calls), "transfer_s": moved, "wait_s": waited}
        for name, (calls, moved, waited) in totals.items()
    ]

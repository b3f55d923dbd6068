"""One run of a comparison on one rank: the job after a warm-up, clocked, and once also counted and timed in parts.

R ranks, C collectives.
"""

from __future__ import annotations

import contextlib
import itertools
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.decisions import Decisions
from lockstep.comm.group import Group
from lockstep.comm.timeline import COLLECTIVE, Timeline
from lockstep.engine import trace
from lockstep.engine.requests import Committed, Job, Progress
from lockstep.engine.run import acceptance, decode, dtype_of, effective, load_for, sequences_of, settings_of, timings
from lockstep.engine.sequence import Sequence
from lockstep.models.checkpoint import open_checkpoint
from lockstep.models.config import check

WARM_UP_TOKENS = 8
Emit = Callable[[Any], None]


@dataclass(frozen=True)
class Task:
    """`counted`: with the ledger, the parts of the time, memory and the decisions; else clocked only."""

    job: Job
    counted: bool
    trace: bool = False


def measure(group: Group, emit: Emit, task: Task) -> dict[str, Any]:
    """Run the task as one rank of its group. Rank 0 returns the result (docs/report.md, "runs")."""
    job, checkpoint = task.job, open_checkpoint(task.job.model)
    check(checkpoint.config, job.tp, job.strategy.placement, job.draft_tokens)
    tell = emit if group.rank == 0 else _silent
    memory = Memory(group.device)
    model = load_for(job, checkpoint, group, tell)
    settings = settings_of(job, group)
    _warm_up(job, checkpoint, model.model, settings)
    group.ledger.clear()
    group.ledger.enabled = task.counted
    group.decisions = Decisions() if task.counted else None
    timeline = Timeline(group.device) if task.counted else None
    unhook = trace.hook_layers(model.model, timeline) if timeline and task.trace else None
    group.barrier("start")
    group.time(timeline)

    sequences = sequences_of(job, checkpoint)
    log = Log(group, tell)
    began = time.perf_counter()
    clocks = decode(job, model.model, settings, sequences, log)
    whole = time.perf_counter() - began

    group.time(None)
    if unhook:
        unhook()
    group.ledger.enabled = False
    result = {
        "tokens": [s.generated for s in sequences],
        "timings": timings(clocks, sequences) | {"whole_s": whole},
        "first_token_s": [t for c in clocks for t in c.first_token],
        "token_gaps_s": log.gaps(),
    }
    peaks = _on_root(group, torch.tensor([[memory.start, memory.peak()]], dtype=torch.long))
    if not task.counted:
        return result
    assert timeline is not None and group.decisions is not None
    spans = _on_root(group, timeline.times())
    own = torch.tensor([[whole, sum(c.prefill for c in clocks), sum(s for c in clocks for s, _ in c.rounds)]])
    wholes = _on_root(group, own.double())
    if group.rank:
        return {}
    assert peaks is not None and spans is not None and wholes is not None
    collective = [s.kind == COLLECTIVE for s in timeline.spans]
    return result | {
        "effective": effective(job, checkpoint, settings),
        "requests": [_request(s) for s in sequences],
        "acceptance": acceptance(sequences, job.draft_tokens),
        "ledger": group.ledger.rows(),
        "parts": parts([t[torch.tensor(collective, dtype=torch.bool)] for t in spans], wholes),
        "collectives": by_collective(timeline, spans),
        "memory": [{"start_bytes": int(p[0, 0]), "peak_bytes": int(p[0, 1])} for p in peaks],
        "weights_bytes": model.num_bytes,
        "decisions": log.decisions_by_batch(group.decisions),
        "trace": trace.events(timeline, spans) if task.trace else None,
        "notes": [*job.strategy.notes, *model.notes],
    }


class Log:
    """Rank 0's ears: when each token was committed, and where batches end in its decisions. Passes progress on."""

    def __init__(self, group: Group, tell: Emit) -> None:
        self._group, self._tell = group, tell
        self._commits: dict[int, list[tuple[float, int]]] = {}
        self._ends: list[int] = []

    def __call__(self, event: Committed | Progress) -> None:
        if isinstance(event, Committed):
            self._commits.setdefault(event.request, []).append((time.perf_counter(), len(event.tokens)))
            return
        if event.stage == "decode" and self._group.decisions is not None:
            self._ends.append(len(self._group.decisions.own))
        self._tell(event)

    def gaps(self) -> list[float]:
        """Seconds to each token after a request's first: the tokens of one round share the time since the last."""
        gaps = []
        for commits in self._commits.values():
            for (before, _), (now, count) in itertools.pairwise(commits):
                gaps += [(now - before) / count] * count
        return gaps

    def decisions_by_batch(self, decisions: Decisions) -> list[list[list[int]]]:
        return [decisions.own[a:b] for a, b in zip([0, *self._ends], self._ends, strict=False)]


class Memory:
    """Peak memory of this rank: the process's on a CPU, the allocator's on a GPU. `start` is what it had before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            _reset_peak()
        self.start = self.peak()

    def peak(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        try:
            status = Path("/proc/self/status").read_text(encoding="ascii")
            return int(status.split("VmHWM:")[1].split()[0]) * 1024
        except (OSError, IndexError):
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _reset_peak() -> None:
    with contextlib.suppress(OSError):  # not Linux: the peak is then that of the whole process's life
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


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


def _warm_up(job: Job, checkpoint: Any, model: Any, settings: Any) -> None:
    """First use costs once: memory, thread pools, connections between ranks."""
    few = replace(job, prompts=job.prompts[: job.batch], max_new_tokens=min(WARM_UP_TOKENS, job.max_new_tokens))
    decode(few, model, settings, sequences_of(few, checkpoint), _silent)


def _on_root(group: Group, values: Tensor) -> list[Tensor] | None:
    """Every rank's values, on rank 0, after the counting has ended."""
    gathered = group.to_root(values.to(group.device), "results")
    return None if gathered is None else [v.cpu() for v in gathered]


def _request(sequence: Sequence) -> dict[str, Any]:
    return {
        "finish_reason": sequence.finish_reason,
        "rounds": [{"drafts": r.drafts, "accepted": r.accepted} for r in sequence.rounds],
    }


def _silent(event: object) -> None:
    pass


__all__ = ["Task", "dtype_of", "measure"]

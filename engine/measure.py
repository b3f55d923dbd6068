"""One run of a comparison on one rank: the job after a warm-up, clocked, and once also counted and timed in parts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lockstep.comm import clock
from lockstep.comm.decisions import Decisions
from lockstep.comm.group import Group
from lockstep.comm.timeline import COLLECTIVE, Timeline
from lockstep.engine import trace
from lockstep.engine.choices import checkpoint_of
from lockstep.engine.memory import Memory
from lockstep.engine.parts import by_collective, parts
from lockstep.engine.requests import Committed, Job, Progress
from lockstep.engine.run import (
    about_weights,
    acceptance,
    decode,
    effective,
    load_for,
    sequences_of,
    settings_of,
    timings,
)
from lockstep.engine.sequence import Sequence
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
    job, checkpoint = task.job, checkpoint_of(task.job)
    check(checkpoint.config, job.tp, job.strategy.placement, job.draft_tokens)
    tell = emit if group.rank == 0 else _silent
    memory = Memory(group.device)
    model = load_for(job, checkpoint, group, tell)
    settings = settings_of(job, checkpoint, group)
    _warm_up(job, checkpoint, model.model, settings, tell)
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
    ahead = clock.offsets(group)
    own = torch.tensor([[whole, sum(c.prefill for c in clocks), sum(s for c in clocks for s, _ in c.rounds)]])
    wholes = _on_root(group, own.double())
    if group.rank:
        return {}
    assert peaks is not None and spans is not None and wholes is not None and ahead is not None
    spans = [own - by for own, by in zip(spans, ahead, strict=True)]
    collective = [s.kind == COLLECTIVE for s in timeline.spans]
    return result | {
        "effective": effective(job, checkpoint, settings) | {"weights": model.weights},
        "hosts": list(group.hosts),
        "wire": group.wire,
        "requests": [_request(s) for s in sequences],
        "acceptance": acceptance(sequences, job.draft_tokens),
        "ledger": group.ledger.rows(),
        "parts": parts([t[torch.tensor(collective, dtype=torch.bool)] for t in spans], wholes),
        "collectives": by_collective(timeline, spans),
        "memory": [{"start_bytes": int(p[0, 0]), "peak_bytes": int(p[0, 1])} for p in peaks],
        "weights_bytes": model.num_bytes,
        "decisions": log.decisions_by_batch(group.decisions),
        "trace": trace.events(timeline, spans) if task.trace else None,
        "notes": [*job.strategy.notes, *model.notes, *about_weights(job, model, group)],
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


def _warm_up(job: Job, checkpoint: Any, model: Any, settings: Any, tell: Emit) -> None:
    """First use costs once: memory, thread pools, connections between ranks."""
    few = replace(job, prompts=job.prompts[: job.batch], max_new_tokens=min(WARM_UP_TOKENS, job.max_new_tokens))
    decode(few, model, settings, sequences_of(few, checkpoint), tell)


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

"""A run's batches once more, on its own tokens: every decision is given, and what was computed on the way is kept.

Two paths that are given the same decisions make the same forwards over the same rows, so what they compute can be laid
side by side, row by row, also past the first token on which they would have disagreed.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.comm.decisions import Decisions
from lockstep.comm.group import Group
from lockstep.comm.layout import PARTIAL, REPLICATED, SHARDED, Activation
from lockstep.engine.accept import gather_logits
from lockstep.engine.choices import checkpoint_of
from lockstep.engine.floor import split_sums
from lockstep.engine.record import BASE, FLOAT64, SPLIT, TARGET, Array, Forward, Logits, Plain, Record, Script
from lockstep.engine.requests import Job, Progress
from lockstep.engine.run import load_for, sequences_of, settings_of
from lockstep.engine.speculate import Batch
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.model import MTP, Model
from lockstep.models.rows import Rows
from lockstep.models.step import Step
from lockstep.models.weights import Vocabulary

MAX_FEATURES = 512
Emit = Callable[[Any], None]


@dataclass(frozen=True)
class Task:
    """`orders`: ways to add up, of BASE, SPLIT (as `parts` ranks would) and FLOAT64. `plain`: the plain forward too."""

    job: Job
    scripts: tuple[Script, ...]
    columns: tuple[int, ...]
    orders: tuple[str, ...] = (BASE,)
    parts: int = 1
    plain: bool = False


def replay(group: Group, emit: Emit, task: Task) -> dict[str, list[tuple[Record, Plain | None]]]:
    """As one rank: per order, what each script's batch computes. Rank 0 returns it, the others records without rows."""
    checkpoint = checkpoint_of(task.job)
    out: dict[str, list[tuple[Record, Plain | None]]] = {}
    model: Model | None = None
    for order in task.orders:
        job = _in_float64(task.job) if order == FLOAT64 else task.job
        if model is None or order == FLOAT64:
            model = load_for(job, checkpoint, group, emit if group.rank == 0 else _silent).model
        if order == SPLIT:
            split_sums(model, task.parts)
        out[order] = []
        for script in task.scripts:
            record = _replay_batch(group, model, job, checkpoint, script, task.columns)
            plain = _plain(group, model, job, checkpoint, script, task.columns) if task.plain else None
            out[order].append((record, plain))
            if group.rank == 0:
                emit(Progress("replay", len(out[order]), len(task.scripts)))
    return out


def _in_float64(job: Job) -> Job:
    return replace(job, dtype=FLOAT64, weights="dequantise", expert_kernel="auto")


def _replay_batch(
    group: Group, model: Model, job: Job, checkpoint: Checkpoint, script: Script, columns: List[int]
) -> Record:
    start = script.batch * job.batch
    sequences = sequences_of(job, checkpoint)[start : start + job.batch]
    recorder = Recorder(group, model, torch.tensor(columns), script)
    batch = Batch(model, replace(settings_of(job, checkpoint, group), watch=recorder.watch), sequences)
    recorder.batch = batch
    group.decisions = Decisions(script.decisions)
    hooks = recorder.hook()
    counting, group.ledger.enabled = group.ledger.enabled, True
    try:
        batch.decode(_silent)
    finally:
        group.decisions, group.ledger.enabled = None, counting
        for hook in hooks:
            hook.remove()
    return recorder.record


class Recorder:
    """Keeps the forwards of one batch. Every rank calls it alike, for it gathers; only rank 0 keeps anything."""

    def __init__(self, group: Group, model: Model, columns: Tensor, script: Script) -> None:
        self.group, self.model, self.columns, self.script = group, model, columns, script
        self.batch: Batch | None = None
        self.record = Record()
        self._values: dict[str, Array] = {}
        self._calls: dict[tuple[str, str], int] = {}
        width = model.config.hidden
        self._features = (
            torch.arange(width) if width <= MAX_FEATURES else torch.linspace(0, width - 1, MAX_FEATURES).long()
        )

    def watch(self, at: str, y: Activation) -> None:
        """Each boundary as it is crossed (Step.watch)."""
        self._note_cause(at)
        self._keep(at, y)

    def _keep(self, at: str, y: Activation) -> None:
        if not self.script.values or y.layout is PARTIAL:
            return
        rows = y.data[..., self._features.to(y.data.device)]
        gathered = self._gathered(rows if y.layout is REPLICATED else _pad(rows, -(-y.tokens // self.group.size)))
        if gathered is not None:
            whole = torch.cat(gathered)[: y.tokens][None] if y.layout is SHARDED else torch.stack(gathered)
            self._values[at] = _array(whole)

    def hook(self) -> list[Any]:
        """See every forward's rows as they leave the target and the MTP blocks."""

        def target(module: Model, args: Any, out: Any) -> None:
            _, step, _ = args
            self._forward(TARGET, args[0], step, out.normed, module.lm_head)

        def draft(module: MTP, args: Any, out: Any) -> None:
            head = module.head if module.head is not None else self.model.lm_head
            self._forward(module.name, args[0], args[3], out.normed, head)

        blocks: list[MTP] = list(self.model.mtp)  # type: ignore[arg-type]
        return [self.model.register_forward_hook(target), *(b.register_forward_hook(draft) for b in blocks)]

    def _forward(self, model: str, tokens: Tensor, step: Step, normed: Activation, head: Vocabulary) -> None:
        self._keep("norm" if model == TARGET else f"{model}.norm", normed)
        with _uncounted(self.group):
            full = gather_logits(head, head.logits(normed.expect(REPLICATED, "replay")), self.group, "replay")
        assert self.batch is not None
        rows: Rows = step.rows
        request = np.array([s.request for s in self.batch.sequences])[rows.sequence.cpu().numpy()]
        assert self.group.decisions is not None
        decided = len(self.group.decisions.own)
        forward = Forward(
            model, decided, request, rows.positions.cpu().numpy(), tokens.cpu().numpy(), values=self._values
        )
        self._values = {}
        if full is not None:
            forward.logits = _logits(full, self.columns)
        self.record.forwards.append(forward)

    def _note_cause(self, at: str) -> None:
        fresh = []
        for key, entry in self.group.ledger.entries.items():
            if self._calls.get(key, 0) != entry.calls:
                self._calls[key] = entry.calls
                if key[1] not in ("gather", "broadcast"):  # of logits and decisions: after the boundary before
                    fresh.append(f"{key[1]} at {key[0]}")
        seen = self.record.causes.setdefault(at, [])
        seen += [cause for cause in fresh if cause not in seen]

    def _gathered(self, rows: Tensor) -> list[Tensor] | None:
        with _uncounted(self.group):
            return self.group.to_root(rows.contiguous(), "replay")


@torch.inference_mode()
def _plain(group: Group, model: Model, job: Job, checkpoint: Checkpoint, script: Script, columns: List[int]) -> Plain:
    """All the batch's sequences at once, as a prompt: nothing is remembered, drafted or decided on the way."""
    settings = replace(settings_of(job, checkpoint, group), draft_tokens=0)
    counts = [len(tokens) - 1 for tokens in script.tokens]
    prompts = [len(prompt) for prompt in job.prompts[script.batch * job.batch :][: len(counts)]]
    cache = model.new_cache(len(counts), max(counts))
    ids = torch.tensor([t for tokens in script.tokens for t in tokens[:-1]], device=group.device)
    out = model(ids, settings.step(cache.rows(counts, group.device)), cache)
    hidden = list(out.normed.expect(REPLICATED, "replay").split(counts))
    index = torch.tensor(columns)

    def of_generated(rows: list[Tensor], head: Vocabulary) -> list[Logits]:
        return [_logits(head.logits(r[n - 1 :]), index) for r, n in zip(rows, prompts, strict=True)]

    target = of_generated(hidden, model.lm_head)
    if not len(model.mtp):
        return Plain(target, None)
    cache = model.mtp[0].new_cache(len(counts), max(counts))  # type: ignore[operator]
    following = torch.tensor([t for tokens in script.tokens for t in tokens[1:]], device=group.device)
    rows = cache.rows(counts, group.device, 1)
    drafts = model.draft(
        0, following, Activation(torch.cat(hidden), REPLICATED, sum(counts)), settings.step(rows), cache
    )
    normed = list(drafts.normed.expect(REPLICATED, "replay").split(counts))
    return Plain(target, of_generated(normed, model.draft_head(0)))


class _uncounted:
    """What a replay gathers to look at is no part of the run."""

    def __init__(self, group: Group) -> None:
        self._ledger = group.ledger

    def __enter__(self) -> None:
        self._before, self._ledger.enabled = self._ledger.enabled, False

    def __exit__(self, *error: object) -> None:
        self._ledger.enabled = self._before


def _logits(full: Tensor, columns: Tensor) -> Logits:
    wide = full.double() if full.dtype == torch.float64 else full.float()
    top = wide.topk(2, -1)
    best = torch.where(wide == top.values[:, :1], torch.arange(wide.shape[1], device=wide.device), wide.shape[1])
    return Logits(
        _array(wide[:, columns.to(wide.device)]),
        best.amin(-1).cpu().numpy(),
        _array(top.values[:, 0]),
        _array(top.values[:, 1]),
    )


def _pad(rows: Tensor, count: int) -> Tensor:
    out = rows.new_zeros(count, *rows.shape[1:])
    out[: len(rows)] = rows
    return out


def _array(values: Tensor) -> Array:
    kept: Array = (values if values.dtype == torch.float64 else values.float()).cpu().numpy()
    return kept


def _silent(event: object) -> None:
    pass

"""A whole generation job on one rank: load, decode in batches, and say what happened."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from lockstep.comm.group import Group
from lockstep.engine.choices import checkpoint_of, dtype_of, keeps_fp8, kernel_of, num_mtp
from lockstep.engine.requests import Job, Progress
from lockstep.engine.sequence import Sequence
from lockstep.engine.settings import Settings
from lockstep.engine.speculate import Batch, Clock
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.config import check
from lockstep.models.load import Loaded, load
from lockstep.models.model import Model
from lockstep.models.weights import Shard

Emit = Callable[[Any], None]


def generate(group: Group, emit: Emit, job: Job) -> dict[str, Any]:
    """Run `job` as one rank of its group. Every rank returns the same result; rank 0 emits Progress and Committed."""
    checkpoint = checkpoint_of(job)
    check(checkpoint.config, job.tp, job.strategy.placement, job.draft_tokens)
    settings = settings_of(job, checkpoint, group)
    tell = emit if group.rank == 0 else _silent
    group.mark("load")
    began = time.perf_counter()
    loaded = load_for(job, checkpoint, group, tell)
    load_s = time.perf_counter() - began
    sequences = sequences_of(job, checkpoint)
    clocks = decode(job, loaded.model, settings, sequences, tell)
    result = {
        "effective": effective(job, checkpoint, settings) | {"weights": loaded.weights},
        "requests": [_request(s) for s in sequences],
        "acceptance": acceptance(sequences, job.draft_tokens),
        "timings": {"load_s": load_s} | timings(clocks, sequences),
        "ledger": group.ledger.rows(),
        "notes": [*job.strategy.notes, *loaded.notes, *about_weights(job, loaded, group)],
    }
    group.mark("end")
    group.barrier("end")  # there is no result where a rank is lost before it is done
    return result


def decode(job: Job, model: Model, settings: Settings, sequences: list[Sequence], emit: Emit) -> list[Clock]:
    """Finish the sequences, batch after batch. `emit` is told of commits, and of requests as their batch ends."""
    clocks = []
    for start in range(0, len(sequences), job.batch):
        batch = Batch(model, settings, sequences[start : start + job.batch])
        batch.decode(emit)
        clocks.append(batch.clock)
        emit(Progress("decode", min(start + job.batch, len(sequences)), len(sequences)))
    return clocks


def settings_of(job: Job, checkpoint: Checkpoint, group: Group) -> Settings:
    """Raises UsageError where the expert kernel that is asked for cannot run this model so."""
    kernel = kernel_of(job, checkpoint.config)
    return Settings(group, job.strategy, job.draft_tokens, job.recycle, job.prefill_chunk, kernel)


def load_for(job: Job, checkpoint: Checkpoint, group: Group, emit: Emit) -> Loaded:
    """This rank's part of the job's model."""
    return load(
        checkpoint,
        job.strategy.placement,
        Shard(group.rank, group.size),
        draft_tokens=job.draft_tokens,
        dtype=getattr(torch, dtype_of(job, checkpoint.config)),
        device=group.device,
        keep_fp8=keeps_fp8(job),
        progress=lambda done, total: emit(Progress("load", done, total)),
    )


def about_weights(job: Job, loaded: Loaded, group: Group) -> list[str]:
    """Notes on what was asked for and is not so, or costs something."""
    if loaded.weights == "keep" and group.device.type == "cpu":
        return ["weights kept in FP8 are made dense for each product, which is slow on a CPU"]
    if job.weights == "keep" and loaded.weights != "keep":
        return ["weights keep has no effect: no weight on this rank is kept in FP8"]
    return []


def sequences_of(job: Job, checkpoint: Checkpoint) -> list[Sequence]:
    eos = frozenset() if job.ignore_eos else checkpoint.eos_ids
    most = checkpoint.config.max_position
    return [
        Sequence(i, prompt, min(len(prompt) + job.max_new_tokens, most), eos) for i, prompt in enumerate(job.prompts)
    ]


def effective(job: Job, checkpoint: Checkpoint, settings: Settings) -> dict[str, Any]:
    """What really ran: every strategy field, and what the defaults became."""
    return job.strategy.as_dict() | {
        "tp": settings.group.size,
        "dtype": dtype_of(job, checkpoint.config),
        "device": settings.group.device.type,
        "draft_tokens": job.draft_tokens,
        "mtp_layers": num_mtp(job, checkpoint.config),
        "recycle": job.recycle,
        "prefill_chunk": job.prefill_chunk,
        "batch": job.batch,
        "expert_kernel": settings.kernel,
        "load_format": job.load_format,
        "layers": len(checkpoint.config.layers),
    }


def _request(sequence: Sequence) -> dict[str, Any]:
    return {
        "prompt_ids": list(sequence.prompt),
        "tokens": sequence.generated,
        "finish_reason": sequence.finish_reason,
        "rounds": [{"drafts": r.drafts, "accepted": r.accepted} for r in sequence.rounds],
    }


def acceptance(sequences: list[Sequence], draft_tokens: int) -> dict[str, Any]:
    """Raw counts per draft position, and their means over the rounds that drafted anything."""
    rounds = [r for s in sequences for r in s.rounds if r.drafts]
    positions = [
        {"drafted": sum(len(r.drafts) > i for r in rounds), "accepted": sum(r.accepted > i for r in rounds)}
        for i in range(draft_tokens)
    ]
    accepted = sum(r.accepted for r in rounds)
    return {
        "per_position": positions,
        "rounds": sum(len(s.rounds) for s in sequences),
        "drafted": sum(len(r.drafts) for r in rounds),
        "accepted": accepted,
        "mean_accepted": accepted / len(rounds) if rounds else None,
    }


def timings(clocks: list[Clock], sequences: list[Sequence]) -> dict[str, Any]:
    """Seconds, and tokens per second of the rounds (`decode`) and of everything but loading (`total`)."""
    prefill = sum(c.prefill for c in clocks)
    decode = sum(seconds for c in clocks for seconds, _ in c.rounds)
    in_rounds = sum(count for c in clocks for _, count in c.rounds)
    generated = sum(len(s.generated) for s in sequences)
    return {
        "prefill_s": prefill,
        "decode_s": decode,
        "first_token_s": [round(t, 6) for c in clocks for t in c.first_token],
        "rounds": sum(len(c.rounds) for c in clocks),
        "tokens": generated,
        "decode_tokens_per_s": in_rounds / decode if decode else None,
        "tokens_per_s": generated / (prefill + decode) if prefill + decode else None,
    }


def _silent(event: object) -> None:
    pass

"""What a judgement is made from: the run and the reference's path, replayed on the same tokens in the same batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from lockstep.engine.choices import checkpoint_of
from lockstep.engine.record import BASE, FLOAT64, SPLIT, Script
from lockstep.engine.replay import Task, replay
from lockstep.engine.requests import Job
from lockstep.engine.verdict import DIVERGED, Batch, Judgement, first_differences
from lockstep.engine.verdict import judge as judged
from lockstep.models.checkpoint import Checkpoint

FLOAT64_BYTES = 2 << 30  # a model that takes no more than this in float64 is small enough
MAX_COLUMNS = 2048
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
Launch = Callable[[Callable[..., Any], Task], Any]


def judge(job: Job, run: dict[str, Any], reference: Sequence[list[int]], launch: Launch) -> Judgement:
    """`run` is the counted result of `job`, `reference` the reference's generated tokens."""
    checkpoint = checkpoint_of(job)
    differing = sorted({request // job.batch for request in first_differences(run["tokens"], reference)})
    batches = sorted({0, *differing})
    first = _judge(job, run, reference, launch, checkpoint, batches, valued={0, *differing[:1]})
    if first.verdict != DIVERGED or first.where is not None:
        return first
    # The values of the batches that were looked at are right: look at the one that has the broken token.
    broken = next((d.request // job.batch for d in first.differences if not d.tie), None)
    return first if broken is None else _judge(job, run, reference, launch, checkpoint, [broken], valued={broken})


def _judge(
    job: Job,
    run: dict[str, Any],
    reference: Sequence[list[int]],
    launch: Launch,
    checkpoint: Checkpoint,
    numbers: Sequence[int],
    valued: set[int],
) -> Judgement:
    scripts = tuple(_script(job, run, number, number in valued) for number in numbers)
    columns = _columns(scripts, reference, job.batch, checkpoint.config.vocab)
    mine = launch(replay, Task(job, scripts, columns))[BASE]
    orders = (BASE, SPLIT, FLOAT64) if _is_small(checkpoint) and _dtype(job, checkpoint) != FLOAT64 else (BASE, SPLIT)
    alone = replace(job, tp=1)
    theirs = launch(replay, Task(alone, scripts, columns, orders, max(job.tp, 2), plain=True))
    batches = []
    for i, script in enumerate(scripts):
        requests = range(script.batch * job.batch, script.batch * job.batch + len(script.tokens))
        batches.append(
            Batch(
                script=script,
                prompts=[len(job.prompts[r]) for r in requests],
                first_request=requests.start,
                rounds=[run["requests"][r]["rounds"] for r in requests],
                run=mine[i][0],
                base=theirs[BASE][i][0],
                plain=theirs[BASE][i][1],
                others=[theirs[order][i] for order in orders[1:]],
            )
        )
    return judged(run["tokens"], list(reference), batches, columns, EPS[_dtype(job, checkpoint)])


def _script(job: Job, run: dict[str, Any], number: int, values: bool) -> Script:
    requests = range(number * job.batch, min((number + 1) * job.batch, len(job.prompts)))
    tokens = [[*job.prompts[r], *run["tokens"][r]] for r in requests]
    return Script(number, run["decisions"][number], tokens, values)


def _columns(scripts: Sequence[Script], reference: Sequence[list[int]], batch: int, vocab: int) -> tuple[int, ...]:
    """The vocabulary ids to keep logits of: every token in play, and others evenly between."""
    ids = {t for s in scripts for tokens in s.tokens for t in tokens}
    ids |= {t for s in scripts for tokens in reference[s.batch * batch : (s.batch + 1) * batch] for t in tokens}
    ids |= {t for s in scripts for told in s.decisions for t in told if 0 <= t < vocab}  # drafts among them
    ids |= set(range(0, vocab, math.ceil(vocab / MAX_COLUMNS)))
    return tuple(sorted(ids))


def _is_small(checkpoint: Checkpoint) -> bool:
    return 8 * sum(math.prod(stored.shape) for stored in checkpoint.tensors().values()) <= FLOAT64_BYTES


def _dtype(job: Job, checkpoint: Checkpoint) -> str:
    return checkpoint.config.dtype if job.dtype == "auto" else job.dtype

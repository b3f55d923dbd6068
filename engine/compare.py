"""A comparison: every cell of a grid in ranks of its own, interleaved, then judged against the reference.

Repetition 0 is counted, timed in parts and written down; the others are only clocked. All are kept as they finish.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lockstep.comm import world
from lockstep.comm.errors import UsageError
from lockstep.engine.grid import Cell, refusal
from lockstep.engine.requests import Job
from lockstep.engine.store import Store, describe
from lockstep.models.config import Config

Result = dict[str, Any]


Launch = Callable[..., Any]  # world.run, or what stands for it in a test


@dataclass(frozen=True)
class Plan:
    """`job` has what all cells share. `num_devices`: how many ranks the host's devices allow; None is any number."""

    job: Job
    cells: Sequence[Cell]
    reference: Cell
    config: Config
    repeat: int = 5
    trace: bool = False
    timeout_s: float = 60.0
    num_devices: int | None = None


@dataclass(frozen=True)
class Step:
    """Progress: step `number` of `total` begins. `of_cell` is a cell's label."""

    number: int
    total: int
    what: str
    of_cell: str


@dataclass
class Outcome:
    """What became of one cell. `runs` are its repetitions, the counted one first."""

    cell: Cell
    status: str = "ok"  # or "refused", "failed"
    why: str = ""
    runs: list[Result] | None = None
    judgement: Result | None = None

    def fail(self, status: str, why: str) -> None:
        self.status, self.why = status, " ".join(why.split())


def compare(
    plan: Plan,
    store: Store,
    *,
    launch: Launch = world.run,
    on_step: Callable[[Step], None] = lambda step: None,
    on_event: Callable[[int, Any], None] | None = None,
) -> list[Outcome]:
    """Run and judge every cell; `on_event` hears the ranks. Raises UsageError where the reference itself cannot run."""
    outcomes = [Outcome(cell, runs=[]) for cell in plan.cells]
    for outcome in outcomes:
        why = refusal(outcome.cell, plan.config, plan.job, plan.num_devices)
        if why and outcome.cell == plan.reference:
            raise UsageError(f"the reference {outcome.cell.label} cannot run: {why}")
        if why:
            outcome.fail("refused", why)
    work = _Work(plan, store, partial(launch, on_event=on_event), on_step, sum(o.status == "ok" for o in outcomes))
    for repetition in range(plan.repeat + 1):
        for outcome in outcomes:
            if outcome.status == "ok":
                work.attempt(outcome, partial(work.run, outcome, repetition))
    reference = next(o for o in outcomes if o.cell == plan.reference)
    for outcome in outcomes:
        if outcome.status == "ok" and reference.status == "ok":
            work.attempt(outcome, partial(work.judge, outcome, reference))
    return outcomes


class _Work:
    """The steps of a comparison, each launched or taken from the store."""

    def __init__(
        self, plan: Plan, store: Store, launch: Launch, on_step: Callable[[Step], None], num_cells: int
    ) -> None:
        self._plan, self._store, self._launch, self._on_step = plan, store, launch, on_step
        self._done, self._total = 0, num_cells * (plan.repeat + 2)

    def attempt(self, outcome: Outcome, step: Callable[[], None]) -> None:
        """A step that fails ends its cell and nothing else."""
        try:
            step()
        except world.RankFailed as error:
            outcome.fail("failed", str(error))
        except UsageError as error:
            outcome.fail("refused", str(error))
        self._done += 1

    def run(self, outcome: Outcome, repetition: int) -> None:
        from lockstep.engine.measure import Task, measure

        cell, counted = outcome.cell, repetition == 0
        job = cell.job(self._plan.job)
        trace = self._plan.trace and counted
        description = describe(job, counted=counted, trace=trace)
        name = f"{cell.label}.{repetition}"
        self._tell(f"run {repetition} of {self._plan.repeat}" if repetition else "counted run", cell)
        result = self._store.get(name, description)
        if result is None:
            result = self._launch_ranks(measure, Task(job, counted, trace))
            result["when"] = time.time()
            self._store.put(name, description, result)
        assert outcome.runs is not None
        outcome.runs.append(result)

    def judge(self, outcome: Outcome, reference: Outcome) -> None:
        from lockstep.engine import evidence

        assert outcome.runs and reference.runs
        mine, theirs = outcome.runs[0], reference.runs[0]
        job = outcome.cell.job(self._plan.job)
        description = describe(job, tokens=mine["tokens"], reference=theirs["tokens"], requests=mine["requests"])
        self._tell("verdict", outcome.cell)
        judgement = self._store.get(f"{outcome.cell.label}.verdict", description)
        if judgement is None:
            judgement = evidence.judge(job, mine, theirs["tokens"], self._launch_ranks).as_dict()
            self._store.put(f"{outcome.cell.label}.verdict", description, judgement)
        outcome.judgement = judgement

    def _launch_ranks(self, target: Callable[..., Any], task: Any) -> Any:
        job: Job = task.job
        return self._launch(target, job.tp, args=(task,), timeout_s=self._plan.timeout_s, device=job.device)

    def _tell(self, what: str, cell: Cell) -> None:
        self._on_step(Step(self._done, self._total, what, cell.label))

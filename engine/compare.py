"""A comparison: every cell of a grid in ranks of its own, interleaved, then judged against the reference.

Repetition 0 is counted, timed in parts and written down; the others are only clocked. All are kept as they finish.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from lockstep.comm import world
from lockstep.comm.errors import UsageError
from lockstep.comm.wiring import Wiring
from lockstep.engine.grid import Cell, refusal
from lockstep.engine.requests import Job
from lockstep.engine.store import Store, describe
from lockstep.models.config import Config

if TYPE_CHECKING:
    from lockstep.comm.group import Group

Result = dict[str, Any]


Launch = Callable[..., Any]  # world.run, or what stands for it in a test


@dataclass(frozen=True)
class Plan:
    """`job` has what all cells share. `num_devices`: how many ranks the host's devices allow; None is any number.

    `hosts`: where the ranks of a launcher are; () where each step has ranks of its own, on this host.
    """

    job: Job
    cells: Sequence[Cell]
    reference: Cell
    config: Config
    repeat: int = 5
    trace: bool = False
    timeout_s: float = 60.0
    num_devices: int | None = None
    wiring: Wiring = field(default_factory=Wiring)
    hosts: tuple[str, ...] = ()


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
    isolated: bool = True,
) -> list[Outcome]:
    """Run and judge every cell; `on_event` hears the ranks. Raises UsageError where the reference itself cannot run.

    `isolated`: whether a step that fails leaves the next one's ranks alone. Else its error ends the comparison.
    """
    outcomes = [Outcome(cell, runs=[]) for cell in plan.cells]
    for outcome in outcomes:
        why = refusal(outcome.cell, plan.config, plan.job, plan.num_devices)
        if why and outcome.cell == plan.reference:
            raise UsageError(f"the reference {outcome.cell.label} cannot run: {why}")
        if why:
            outcome.fail("refused", why)
    launch = partial(launch, on_event=on_event)
    work = _Work(plan, store, launch, on_step, sum(o.status == "ok" for o in outcomes), isolated)
    for repetition in range(plan.repeat + 1):
        for outcome in outcomes:
            if outcome.status == "ok":
                work.attempt(outcome, partial(work.run, outcome, repetition))
    reference = next(o for o in outcomes if o.cell == plan.reference)
    for outcome in outcomes:
        if outcome.status == "ok" and reference.status == "ok":
            work.attempt(outcome, partial(work.judge, outcome, reference))
    return outcomes


def compare_here(
    group: Group, emit: Callable[[Any], None], plan: Plan, open_store: Callable[[], Store]
) -> list[Outcome] | None:
    """The same on the ranks of a launcher, which all call this. Rank 0 opens the store, and has the outcomes.

    It emits each Step, and what the steps emit.
    """
    from lockstep.comm.crew import Crew

    crew = Crew(group)
    if group.rank:
        crew.serve()
        return None
    plan = replace(plan, hosts=group.hosts)
    with crew:
        return compare(
            plan, open_store(), launch=crew.call, on_step=emit, on_event=lambda rank, event: emit(event), isolated=False
        )


class _Work:
    """The steps of a comparison, each launched or taken from the store."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        launch: Launch,
        on_step: Callable[[Step], None],
        num_cells: int,
        isolated: bool,
    ) -> None:
        self._plan, self._store, self._launch, self._on_step = plan, store, launch, on_step
        self._isolated = isolated
        self._done, self._total = 0, num_cells * (plan.repeat + 2)

    def attempt(self, outcome: Outcome, step: Callable[[], None]) -> None:
        """A step that fails ends its cell and nothing else."""
        try:
            step()
        except (world.RankFailed, UsageError) as error:
            if not self._isolated:
                raise
            outcome.fail("refused" if isinstance(error, UsageError) else "failed", str(error))
        self._done += 1

    def run(self, outcome: Outcome, repetition: int) -> None:
        from lockstep.engine.measure import Task, measure

        cell, counted = outcome.cell, repetition == 0
        job = cell.job(self._plan.job)
        trace = self._plan.trace and counted
        description = self._describe(job, counted=counted, trace=trace)
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
        runs = {"tokens": mine["tokens"], "reference": theirs["tokens"], "requests": mine["requests"]}
        description = self._describe(job, **runs)
        self._tell("verdict", outcome.cell)
        judgement = self._store.get(f"{outcome.cell.label}.verdict", description)
        if judgement is None:
            judgement = evidence.judge(job, mine, theirs["tokens"], self._launch_ranks).as_dict()
            self._store.put(f"{outcome.cell.label}.verdict", description, judgement)
        outcome.judgement = judgement

    def _describe(self, job: Job, **more: Any) -> dict[str, Any]:
        """With where its ranks are and how they talk, if there are several."""
        where = {"wiring": asdict(self._plan.wiring), "hosts": self._plan.hosts} if job.tp > 1 else {}
        return describe(job, **more, **where)

    def _launch_ranks(self, target: Callable[..., Any], task: Any) -> Any:
        job: Job = task.job
        where = {"timeout_s": self._plan.timeout_s, "device": job.device, "wiring": self._plan.wiring}
        return self._launch(target, job.tp, args=(task,), **where)

    def _tell(self, what: str, cell: Cell) -> None:
        self._on_step(Step(self._done, self._total, what, cell.label))

"""What a comparison runs: strategies x ranks x drafts, once where they are the same. No torch here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.comm import strategy as strategies
from lockstep.comm.errors import UsageError
from lockstep.comm.strategy import Strategy
from lockstep.engine.choices import kernel_of
from lockstep.engine.requests import MAX_DRAFT_TOKENS, Job
from lockstep.models.config import Config, check

ANY = "any"  # how the run of one rank is called: without other ranks every strategy is the same


@dataclass(frozen=True)
class Cell:
    """One run of the grid, called `name@tp+k`."""

    name: str
    strategy: Strategy
    tp: int
    draft_tokens: int

    @property
    def label(self) -> str:
        return f"{self.name}@{self.tp}+{self.draft_tokens}"

    def job(self, common: Job) -> Job:
        return replace(common, strategy=self.strategy, tp=self.tp, draft_tokens=self.draft_tokens)


def grid(specs: Sequence[str], tps: Sequence[int], drafts: Sequence[int], reference: str) -> tuple[list[Cell], Cell]:
    """Every cell in the order in which it is run, the reference first, and the reference."""
    first = parse(reference, specs[0])
    cells = {first.label: first}
    named: dict[str, str] = {}
    for spec in specs:
        name = name_of(spec)
        if named.setdefault(name, spec) != spec:
            raise UsageError(f"strategies {named[name]} and {spec} are both called {name}; rename one of the files")
    for k in drafts:
        for tp in tps:
            for spec in specs:
                cell = cell_of(spec, tp, k)
                cells.setdefault(cell.label, cell)
    return list(cells.values()), first


def cell_of(spec: str, tp: int, draft_tokens: int) -> Cell:
    return Cell(ANY if tp == 1 else name_of(spec), strategies.resolve(spec), tp, draft_tokens)


def name_of(spec: str) -> str:
    return Path(spec).stem if spec.endswith(".toml") else spec


def parse(text: str, default: str) -> Cell:
    """`STRATEGY@P+K`; `any` for the strategy where P is 1."""
    found = re.fullmatch(r"(?P<spec>.+)@(?P<tp>\d+)\+(?P<k>\d+)", text)
    if not found or int(found["tp"]) < 1:
        raise UsageError(f"--reference {text!r} is not STRATEGY@P+K, such as tp@2+0 or any@1+0")
    tp, k = int(found["tp"]), int(found["k"])
    if k > MAX_DRAFT_TOKENS:
        raise UsageError(f"--reference {text!r} has {k} drafts; at most {MAX_DRAFT_TOKENS} are possible")
    if found["spec"] == ANY and tp > 1:
        raise UsageError(f"--reference {text!r}: name the strategy of {tp} ranks")
    return cell_of(default if found["spec"] == ANY else found["spec"], tp, k)


def refusal(cell: Cell, config: Config, common: Job, num_devices: int | None) -> str | None:
    """Why a cell cannot run here, or None. `num_devices` limits ranks where each needs a device."""
    try:
        check(config, cell.tp, cell.strategy.placement, cell.draft_tokens)
        strategies.check_recycle(cell.strategy, common.recycle)
        kernel_of(cell.job(common), config)
    except UsageError as error:
        return str(error)
    if num_devices is not None and cell.tp > num_devices:
        return f"{cell.tp} ranks need {cell.tp} CUDA devices and {num_devices} are here"
    return None

"""One comparison for many tests: strategies that are right, one that is broken, one that fails, one that cannot run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import cached
from ranks import RankError
from runs import job
from test_verdict_faults import faulty

from lockstep.comm.world import RankFailed
from lockstep.engine import report
from lockstep.engine.compare import Outcome, Plan, compare
from lockstep.engine.grid import grid
from lockstep.engine.prompts import Tokenizer
from lockstep.engine.store import Store
from lockstep.models.checkpoint import open_checkpoint

Compared = tuple[Plan, list[Outcome], Path, list[str]]
FAULTS = {"sp-early@2+0": "a10_shared_expert_per_rank", "sp-dense@2+0": "a14_full_rows_for_a_shard"}


def launcher(ranks: Any, launched: list[str]) -> Callable[..., Any]:
    """world.run on ranks that stay, with a fault in some cells; notes what was launched."""

    def launch(target: Callable[..., Any], size: int, *, args: Any, **options: Any) -> Any:
        work = args[0].job
        label = f"{work.strategy.name}@{size}+{work.draft_tokens}"
        launched.append(f"{target.__name__} {label}")
        try:
            return ranks(size).run(faulty, target, args[0], FAULTS.get(label))[0]
        except RankError as error:
            raise RankFailed(error.rank, error.traceback.strip().splitlines()[-1], error.traceback) from error

    return launch


def plan_of(folder: Path, **fields: Any) -> Plan:
    cells, reference = grid(["tp", "sp-late:gather-sum", "sp-early", "sp-dense"], [1, 2, 3], [0], "any@1+0")
    more, _ = grid(["tp", "sp-late:gather-sum"], [1, 2], [3], "any@1+0")
    cells += [cell for cell in more if cell not in cells]
    cells = [cell for cell in cells if cell.tp != 3 or cell.name == "tp"]
    work = replace(job(folder, max_new_tokens=8), dtype="float32", batch=2)
    return Plan(work, cells, reference, open_checkpoint(folder).config, **({"repeat": 2, "trace": True} | fields))


@pytest.fixture(scope="session")
def compared(ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> Compared:
    plan, out, launched = plan_of(cached("deepseek_v3")), tmp_path_factory.mktemp("compared"), list[str]()
    return plan, compare(plan, Store(out, resume=False), launch=launcher(ranks, launched)), out, launched


@pytest.fixture(scope="session")
def document(compared: Any) -> dict[str, Any]:
    plan, outcomes, _, _ = compared
    tokenizer = Tokenizer.load(Path(plan.job.model))
    assert tokenizer
    answers = [tokenizer.decode(outcomes[0].runs[0]["tokens"][0]), "no such answer", None]
    return report.build(plan, outcomes, report.Texts("tiny", answers, tokenizer.decode))


def row_of(document: dict[str, Any], label: str) -> dict[str, Any]:
    return next(row for row in document["rows"] if row["label"] == label)

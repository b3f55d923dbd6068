"""The ledger shows the collectives of DESIGN section 3 per layer and exit, and nothing more.

T tokens, H hidden, V vocabulary; float64, so an element is 8 bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import cached
from runs import every_strategy, job, label, run

from lockstep.comm.group import Group
from lockstep.comm.strategy import Strategy, resolve
from lockstep.engine.settings import Settings
from lockstep.models.checkpoint import open_checkpoint
from lockstep.models.load import load
from lockstep.models.weights import Shard

T, H, SIZE = 5, 64, 8
MOE_LAYER, DENSE_LAYER = "layers.1", "layers.0"
# (boundary within the layer, collective, width): dispatch of routed rows aside, which `dispatch` lists.
PER_LAYER = {
    "tp": [("attention.out", "all-reduce", H), ("ffn.out", "all-reduce", H)],
    "sp-chunk": [("attention.out", "all-reduce", H), ("ffn.out", "all-gather", H)],
    "sp-early": [("attention.out", "reduce-scatter", H), ("ffn.out", "all-gather", 2 * H)],
    "sp-late": [("attention.in", "all-gather", H), ("attention.out", "reduce-scatter", H)],
    "sp-dense": [
        ("attention.in", "all-gather", H),
        ("attention.out", "reduce-scatter", H),
        ("ffn.in", "all-gather", H),
        ("ffn.out", "reduce-scatter", H),
    ],
}
DISPATCH = [("ffn.dispatch", "all-gather", H), ("ffn.combine", "reduce-scatter", H)]
EXIT_WIDTH = {"gather-pair": 2 * H, "gather-sum": H, "gather-norm": H}


def one_forward(group: Group, folder: Path, strategy: Strategy) -> list[dict[str, Any]]:
    """The ledger of one target forward over T tokens and one MTP pass over the same rows."""
    loaded = load(
        open_checkpoint(folder), strategy.placement, Shard(group.rank, group.size),
        draft_tokens=1, dtype=torch.float64, device=group.device,
    )  # fmt: skip
    model, settings = loaded.model, Settings(group, strategy)
    tokens = torch.arange(T)
    with torch.inference_mode():
        cache = model.new_cache(1, T)
        out = model(tokens, settings.step(cache.rows([T], group.device)), cache)
        drafts = model.mtp[0].new_cache(1, T)
        model.draft(0, tokens, out.normed, settings.step(drafts.rows([T], group.device, 1)), drafts)
    return group.ledger.rows()


def of(ledger: list[dict[str, Any]], module: str) -> list[tuple[str, str, int]]:
    """(boundary, collective, width) of the one call at each boundary of `module`."""
    rows = [r for r in ledger if r["boundary"].startswith(module + ".") or r["boundary"] == module]
    assert all(r["calls"] == 1 and r["rows"] == T for r in rows), rows
    return [(r["boundary"].removeprefix(module + "."), r["collective"], r["bytes"] // (T * SIZE)) for r in rows]


@pytest.mark.parametrize("case", every_strategy(), ids=label)
@pytest.mark.parametrize("family", ("deepseek_v3", "glm4_moe"))
def test_collectives_of_a_layer_and_an_exit(ranks: Any, family: str, case: tuple[str, dict[str, str]]) -> None:
    name, fields = case
    strategy = resolve(name, **fields)
    for ledger in ranks(2).run(one_forward, cached(family), strategy):
        want = sorted(PER_LAYER[name])
        all_to_all = fields.get("dispatch") == "all-to-all"
        dispatch = DISPATCH if strategy.dispatches and not all_to_all else []
        routed = [r for r in ledger if r["collective"] == "all-to-all" or r["boundary"].endswith("ffn.dispatch")]
        fixed = [r for r in ledger if r not in routed] if all_to_all else ledger
        assert sorted(of(fixed, MOE_LAYER)) == sorted(want + dispatch)
        # A dense layer's whole weights take the rows that are here: nothing travels to them.
        assert sorted(of(fixed, DENSE_LAYER)) == want
        gathers = strategy.stream == "sharded"
        exits = [("exit", "all-gather", EXIT_WIDTH[strategy.exit])] if gathers else []
        assert of(fixed, "exit") == exits
        mtp = of(fixed, "mtp.0")
        embed = ("embed", "reduce-scatter" if gathers else "all-reduce", H)
        assert sorted(mtp) == sorted([embed, *want, *dispatch, *exits])
        assert of(fixed, "embed") == [embed]
        assert {r["boundary"].split(".")[0] for r in ledger} <= {"embed", "layers", "exit", "mtp"}


@pytest.mark.parametrize("dispatch", ("gather", "all-to-all"))
def test_gather_norm_moves_the_exit_rows_once(ranks: Any, dispatch: str) -> None:
    """T x H, where the fix of vllm-project/vllm#48429 moved T x 2H and reduced besides (#48763)."""
    strategy = resolve("sp-late:gather-norm", dispatch=dispatch)
    ledger = ranks(2).run(one_forward, cached("deepseek_v3"), strategy)[0]
    exits = [r for r in ledger if r["boundary"] in ("exit", "mtp.0.exit")]
    assert [(r["collective"], r["calls"], r["bytes"]) for r in exits] == [("all-gather", 1, T * H * SIZE)] * 2


def test_all_to_all_moves_each_row_once_per_owner(ranks: Any) -> None:
    """At most top-k rows per token travel, and they come home at the same boundary count."""
    ledger = ranks(2).run(one_forward, cached("deepseek_v3"), resolve("sp-late", dispatch="all-to-all"))[0]
    there = [r for r in ledger if r["boundary"] == f"{MOE_LAYER}.ffn.dispatch" and r["collective"] == "all-to-all"]
    back = [r for r in ledger if r["boundary"] == f"{MOE_LAYER}.ffn.combine"]
    assert there[0]["calls"] == 2 and back[0]["calls"] == 1  # rows and their routing; sums
    assert T <= back[0]["rows"] <= 2 * T and there[0]["rows"] == 2 * back[0]["rows"]


def test_ranks_agree_and_one_rank_moves_nothing(ranks: Any) -> None:
    work = job(cached("deepseek_v3"), "sp-late", tp=2, draft_tokens=2)
    first, second = ranks(2).run(run, work)
    assert [(r["boundary"], r["calls"], r["bytes"]) for r in first["ledger"]] == [
        (r["boundary"], r["calls"], r["bytes"]) for r in second["ledger"]
    ]
    assert ranks(1).run(run, job(cached("deepseek_v3"), "sp-late", draft_tokens=2))[0]["ledger"] == []

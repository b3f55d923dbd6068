"""Every wire, algorithm and type gives the same sums and the same ledger, and ranks that disagree are told so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.comm import algorithms
from lockstep.comm.errors import Disagreement
from lockstep.comm.group import Group
from lockstep.comm.layout import PARTIAL, REPLICATED, SHARDED, Activation
from lockstep.comm.shard import shard_range
from lockstep.comm.supervise import RankFailed
from lockstep.comm.torch_wire import TORCH, CallsWire
from lockstep.comm.wiring import Wiring
from lockstep.comm.world import run

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def whole_numbers(tokens: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Small enough that every type adds them exactly, in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, (tokens, 6), generator=generator).to(dtype)


def conversions(group: Group) -> list[str]:
    """Every conversion and exchange, with all types and awkward row counts; what differs from the sum made here."""
    wrong = []
    for dtype in DTYPES:
        for tokens in (1, 2, 5, 64):
            parts = [whole_numbers(tokens, 10 * tokens + rank, dtype) for rank in range(group.size)]
            total, mine = torch.stack(parts).sum(0), parts[group.rank].t().contiguous().t()  # strided
            first, last = shard_range(tokens, group.rank, group.size)
            x = Activation(mine, PARTIAL, tokens)
            shard = group.convert(x, SHARDED, "scatter")
            found = {
                "all-reduce": (group.convert(x, REPLICATED, "reduce").data, total),
                "reduce-scatter": (shard.data, total[first:last]),
                "all-gather": (group.convert(shard, REPLICATED, "gather").data, total),
                "unchanged": (mine, parts[group.rank]),
            }
            wrong += [f"{name} {dtype} {tokens}" for name, (a, b) in found.items() if not torch.equal(a, b)]
        counts = torch.tensor([[(i + 2 * j) % 3 for j in range(group.size)] for i in range(group.size)])
        rows = torch.full((int(counts[group.rank].sum()), 3), float(group.rank)).to(dtype)
        came = group.all_to_all(rows, counts, "route")
        want = torch.cat([torch.full((int(counts[i, group.rank]), 3), float(i)) for i in range(group.size)]).to(dtype)
        home = group.all_to_all(came, counts, "home", back=True)
        wrong += [] if torch.equal(came, want) and torch.equal(home, rows) else [f"all-to-all {dtype}"]
        told = group.broadcast(torch.full((3,), float(group.rank)).to(dtype), "tell")
        wrong += [] if not told.any() else [f"broadcast {dtype}"]
        at_root = group.to_root(rows.new_full((2, 2), group.rank), "root")
        wrong += [] if at_root is None or [int(p[0, 0]) for p in at_root] == [*range(group.size)] else [f"root {dtype}"]
    group.barrier("end")
    return wrong


def with_algorithm(group: Group, algorithm: str) -> tuple[list[str], list[dict[str, Any]], list[str]]:
    """Run the conversions over this pool's gloo group by another algorithm; what gloo was asked for comes third."""
    assert group.transport
    before, asked = group.transport.wire, []

    def all_reduce(tensor: torch.Tensor) -> None:
        asked.append("all-reduce")
        TORCH.all_reduce(tensor)

    calls = type(TORCH)(**{**vars(TORCH), "all_reduce": all_reduce})
    group.transport.wire = CallsWire(calls, "gloo", group.rank, group.size, algorithm)
    try:
        return conversions(group), group.ledger.rows(), asked
    finally:
        group.transport.wire = before


@pytest.mark.parametrize("size", [2, 3])
def test_every_algorithm_gives_the_same_sums_and_ledger(ranks: Any, size: int) -> None:
    by = {name: ranks(size).run(with_algorithm, name) for name in ("native", "exchange", "auto")}
    for name, results in by.items():
        assert [wrong for wrong, _, _ in results] == [[]] * size, name
        assert [rows for _, rows, _ in results] == [rows for _, rows, _ in by["native"]]
    assert len(by["native"][0][2]) == len(DTYPES) * 4  # one per conversion
    assert by["exchange"][0][2] == []


def test_the_threshold_decides() -> None:
    table = algorithms.EXCHANGE_UP_TO
    for collective, by_size in table.items():
        for size, up_to in by_size.items():
            assert algorithms.exchange_up_to(collective, size) == up_to
    assert algorithms.exchange_up_to("all-reduce", 64) == 0
    asked: list[str] = []
    calls = type(TORCH)(
        lambda tensor: asked.append("all-reduce"),
        lambda out, tensor: asked.append("all-gather"),
        lambda out, tensor: asked.append("reduce-scatter"),
        lambda out, tensor, received, sent: asked.append("all-to-all"),
        TORCH.gather,
        TORCH.broadcast,
        TORCH.barrier,
    )
    for name, large, small in (("gloo", "all-reduce", "all-to-all"), ("nccl", "all-reduce", "all-reduce")):
        wire = CallsWire(calls, name, 0, 4, "auto")
        asked.clear()
        up_to = table["all-reduce"][4]
        wire.all_reduce(torch.zeros(up_to // 4))
        wire.all_reduce(torch.zeros(up_to // 4 + 1))
        assert asked == [small, large]


def test_the_sum_is_taken_in_rank_order() -> None:
    parts = torch.tensor([[1e8], [1.0], [-1e8], [1.0]])  # float32: 1e8 + 1 is 1e8
    assert algorithms.sum_in_order(parts).tolist() == [1.0]
    assert algorithms.sum_in_order(parts[[0, 2, 1, 3]]).tolist() == [2.0]


def _checked(group: Group, emit: Any, what: str) -> None:
    """What each rank does; the last one does something else."""
    group.mark("verify", 3, [1, 2, 3])
    group.convert(_partial(4), REPLICATED, "same")
    odd = group.rank == group.size - 1
    if what == "rows":
        group.convert(_partial(6 if odd else 4), REPLICATED, "layers.1.out")
    elif what == "order":
        at, to = ("b", SHARDED) if odd else ("a", REPLICATED)
        group.convert(_partial(4), to, at)
    elif what == "dtype":
        group.convert(_partial(4, torch.float64 if odd else torch.float32), REPLICATED, "layers.1.out")
    elif what == "tokens":
        group.mark("verify", 4, [1, 2, 4 if odd else 3])
        group.convert(_partial(4), REPLICATED, "layers.1.out")
    elif what == "counts":
        counts = torch.full((group.size, group.size), 1)
        counts[0, 1] += odd
        rows = torch.zeros(int(counts[group.rank].sum()), 3)
        group.all_to_all(rows, counts, "layers.1.dispatch")


def _partial(tokens: int, dtype: torch.dtype = torch.float32) -> Activation:
    return Activation(torch.ones(tokens, 3, dtype=dtype), PARTIAL, tokens)


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("rows", r"before all-reduce at layers\.1\.out \(verify, round 3\) rank 1 differs from rank 0: rows 6, not 4"),
        ("order", r"before all-reduce at a .* rank 1 .*: collective reduce-scatter, not all-reduce; boundary b, not a"),
        ("dtype", r"rank 1 differs from rank 0: dtype float64, not float32"),
        ("tokens", r"\(verify, round 4\) rank 1 differs from rank 0: token ids \w{8}, not \w{8}"),
        ("counts", r"layers\.1\.dispatch \(verify, round 3\) rank 0 is to send 1 rows to rank 1, which expects 2"),
    ],
)
def test_ranks_that_disagree_are_told_so(what: str, says: str) -> None:
    with pytest.raises(RankFailed, match=says) as failed:
        run(_checked, 2, args=(what,), wiring=Wiring(check_ranks=True), timeout_s=30)
    assert Disagreement.__name__ in failed.value.message


def test_ranks_that_agree_are_not_held_up(ranks: Any) -> None:
    assert run(_all_conversions, 2, wiring=Wiring(check_ranks=True), timeout_s=30) == []


def _all_conversions(group: Group, emit: Any) -> list[str]:
    return conversions(group)


def test_torch_s_own_debug_mode_changes_nothing() -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the group; once the wrapper lacked some collectives (CASES D16)."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        assert run(_all_conversions, 2, timeout_s=30) == []
    finally:
        dist.set_debug_level(before)

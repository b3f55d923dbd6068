"""Layouts and conversions: every pair, every row count around the number of ranks, every dtype, on 1, 2 and 4 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.comm.errors import LayoutError
from lockstep.comm.group import Group
from lockstep.comm.layout import PARTIAL, REPLICATED, SHARDED, Activation, Layout
from lockstep.comm.shard import shard_range

WIDTH = 3
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def value(tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers: their sums are exact in every dtype, so every conversion must be too."""
    return torch.arange(tokens * WIDTH, dtype=torch.float64).view(tokens, WIDTH).remainder(17).to(dtype)


def held(group: Group, layout: Layout, tokens: int, dtype: torch.dtype) -> Activation:
    full = value(tokens, dtype)
    if layout is REPLICATED:
        return Activation(full, layout, tokens)
    if layout is SHARDED:
        first, last = shard_range(tokens, group.rank, group.size)
        return Activation(full[first:last], layout, tokens)
    weight = group.rank + 1 if group.size > 1 else 1  # parts 1x, 2x, ... of a value that is 1 + 2 + ... times `full`
    return Activation(full * weight, layout, tokens)


def convert_all(group: Group, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    out = []
    factor = {PARTIAL: group.size * (group.size + 1) // 2}
    for tokens in range(10):
        for start in Layout:
            for to in (REPLICATED, SHARDED):
                x = held(group, start, tokens, dtype)
                before = x.data.clone()
                y = group.convert(x, to, "here")
                first, last = (0, tokens) if to is REPLICATED else shard_range(tokens, group.rank, group.size)
                right = (value(tokens, dtype) * factor.get(start, 1))[first:last]
                same = y.layout is to and y.tokens == tokens and torch.equal(y.data, right)
                out.append((tokens, start.value, to.value, same and torch.equal(x.data, before)))
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", (1, 2, 4))
def test_every_conversion(ranks: Any, size: int, dtype: torch.dtype) -> None:
    """T = 0, 1, below, at, above and no multiple of P; the input is left as it was."""
    for answers in ranks(size).run(convert_all, dtype):
        assert [a for a in answers if not a[-1]] == []


def strided(group: Group) -> list[bool]:
    full = value(6, torch.float32)
    column = torch.stack((full, full + 1), -1)[..., 0]
    assert not column.is_contiguous()
    summed = group.convert(Activation(column, PARTIAL, 6), REPLICATED, "here").data
    transposed = group.convert(Activation(full.T.contiguous().T, PARTIAL, 6), REPLICATED, "here").data
    return [torch.equal(summed, full * group.size), torch.equal(transposed, full * group.size)]


def test_strided_inputs_are_made_contiguous(ranks: Any) -> None:
    """gloo reduces a strided tensor wrongly and says nothing (CASES D10, D11)."""
    assert ranks(2).run(strided) == [[True, True]] * 2


def packed(group: Group) -> tuple[Any, ...]:
    a, b = held(group, SHARDED, 5, torch.float64), held(group, SHARDED, 5, torch.float64)
    b = b.rowwise(lambda x: x + 100, "here")
    left, right = group.convert_pair(a, b, REPLICATED, "here")
    full = value(5, torch.float64)
    mixed = group.convert_pair(held(group, PARTIAL, 5, torch.float64), a, SHARDED, "there")
    return torch.equal(left.data, full), torch.equal(right.data, full + 100), mixed[1] is a, group.ledger.rows()


def test_packed_pair_is_one_collective(ranks: Any) -> None:
    for left, right, untouched, ledger in ranks(2).run(packed):
        assert left and right and untouched
        assert [(r["boundary"], r["collective"], r["calls"], r["rows"], r["bytes"]) for r in ledger] == [
            ("here", "all-gather", 1, 5, 5 * 2 * WIDTH * 8),
            ("there", "reduce-scatter", 1, 5, 5 * WIDTH * 8),
        ]
        assert [r["wire_bytes"] for r in ledger] == [6 * 2 * WIDTH * 8 // 2, 6 * WIDTH * 8 // 2]


@pytest.mark.parametrize("layout", (REPLICATED, SHARDED))
def test_nothing_becomes_partial(layout: Layout) -> None:
    x = Activation(torch.ones(2, WIDTH), layout, 2)
    with pytest.raises(LayoutError, match=f"layers.1.exit would turn a {layout} activation into PARTIAL"):
        Group.local().convert(x, PARTIAL, "layers.1.exit")


def test_operations_name_layouts_and_boundary() -> None:
    full, shard, part = (Activation(torch.ones(2, WIDTH), layout, 2) for layout in (REPLICATED, SHARDED, PARTIAL))
    with pytest.raises(LayoutError, match="norm1 adds a REPLICATED activation of 2 tokens and a SHARDED one of 2"):
        full.add(shard, "norm1")
    with pytest.raises(LayoutError, match=r"proj puts side by side a PARTIAL .* and a REPLICATED one"):
        part.beside(full, "proj")
    with pytest.raises(LayoutError, match="norm1 applies a row-wise function to a PARTIAL activation"):
        part.rowwise(torch.tanh, "norm1")
    with pytest.raises(LayoutError, match="head takes a REPLICATED activation and was given a SHARDED one"):
        shard.expect(REPLICATED, "head")
    with pytest.raises(LayoutError, match="1 rows cannot be a REPLICATED activation of 2 tokens"):
        Activation(torch.ones(1, WIDTH), REPLICATED, 2)
    with pytest.raises(LayoutError, match="and a REPLICATED one of 3"):
        full.add(Activation(torch.ones(3, WIDTH), REPLICATED, 3), "norm1")


def test_shards_cover_every_row_once() -> None:
    for size in range(1, 9):
        for tokens in range(40):
            ranges = [shard_range(tokens, rank, size) for rank in range(size)]
            assert [row for a, b in ranges for row in range(a, b)] == list(range(tokens))
            assert all(b - a <= -(-tokens // size) for a, b in ranges)


def wrong_shard(group: Group) -> str:
    try:
        group.convert(Activation(torch.ones(1, WIDTH), SHARDED, 4), REPLICATED, "exit")
    except LayoutError as error:
        return str(error)
    return ""


def test_a_shard_has_its_rows(ranks: Any) -> None:
    for rank, message in enumerate(ranks(2).run(wrong_shard)):
        assert message == f"exit gathers 1 rows from rank {rank}, whose shard has 2"


def routed(group: Group) -> tuple[bool, bool]:
    """Rank i sends i + j rows to rank j, each tagged; they come back in the order in which they left."""
    counts = torch.tensor([group.rank + j for j in range(group.size)])
    rows = torch.tensor([[100.0 * group.rank + j] for j in range(group.size) for _ in range(group.rank + j)])
    table = group.all_counts(counts, "moe")
    there = group.all_to_all(rows.view(-1, 1), table, "moe")
    right = [[100.0 * i + group.rank] for i in range(group.size) for _ in range(i + group.rank)]
    back = group.all_to_all(there, table, "moe", back=True)
    return torch.equal(there, torch.tensor(right).view(-1, 1)), torch.equal(back, rows.view(-1, 1))


@pytest.mark.parametrize("size", (1, 2, 4))
def test_routed_rows_come_home(ranks: Any, size: int) -> None:
    assert ranks(size).run(routed) == [(True, True)] * size

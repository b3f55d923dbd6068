"""The gated delta rule against its recurrence, a rank's share of the heads, and going back to any row (CASES B7)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from checkpoints import cached
from oracle import TrueFloat64, oracle
from runs import PROMPTS
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as theirs

from lockstep.comm.errors import UsageError
from lockstep.comm.group import Group
from lockstep.comm.strategy import resolve
from lockstep.engine.draft import Drafter
from lockstep.engine.sequence import Sequence
from lockstep.engine.settings import Settings
from lockstep.engine.speculate import Batch
from lockstep.models.checkpoint import open_checkpoint
from lockstep.models.config import check
from lockstep.models.delta_net import DeltaNetCache
from lockstep.models.delta_rule import CHUNK, delta_rule, write
from lockstep.models.load import load
from lockstep.models.rows import Rows
from lockstep.models.weights import Shard

CPU, WHOLE = torch.device("cpu"), Shard(0, 1)
FAMILIES = ("qwen3_next", "qwen3_5_moe_text")
close = torch.testing.assert_close


def rows_of(count: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """State [2, 3, 8, 5], then queries, keys, values, log decays and betas of `count` rows."""
    query, key = (torch.nn.functional.normalize(torch.randn(2, 3, count, 8), dim=-1) for _ in range(2))
    value, log_decay, beta = torch.randn(2, 3, count, 5), -torch.rand(2, 3, count), torch.rand(2, 3, count)
    return [x.to(dtype) for x in (torch.randn(2, 3, 8, 5), query, key, value, log_decay, beta)]


def recurrence(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Row by row, as the paper has it: outputs, and the states before, between and after the rows."""
    outputs, states = [], [state]
    for t in range(query.shape[2]):
        k, q, b = key[:, :, t, :, None], query[:, :, t, :, None], beta[:, :, t, None, None]
        state = state * log_decay[:, :, t, None, None].exp()
        state = state - b * k @ (k.transpose(-1, -2) @ state) + b * k @ value[:, :, t, None]
        outputs.append((q.transpose(-1, -2) @ state)[:, :, 0])
        states.append(state)
    return torch.stack(outputs, 2), states


@pytest.mark.parametrize("count", (1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 2))
def test_chunks_equal_single_rows(count: int) -> None:
    state, *rows = rows_of(count)
    want, states = recurrence(state, *rows)

    chunked = state.clone()
    out, written = delta_rule(chunked, *rows)
    write(chunked, written, torch.tensor([CHUNK, CHUNK]))
    close(out, want, atol=1e-12, rtol=0)
    close(chunked, states[-1], atol=1e-12, rtol=0)

    stepped, outputs = state.clone(), []
    for t in range(count):
        out, written = delta_rule(stepped, *(x[:, :, t : t + 1] for x in rows))
        write(stepped, written, torch.tensor([1, 1]))
        outputs.append(out)
    close(torch.cat(outputs, 2), want, atol=1e-12, rtol=0)
    close(stepped, states[-1], atol=1e-12, rtol=0)


@pytest.mark.parametrize("form", (theirs.torch_chunk_gated_delta_rule, theirs.torch_recurrent_gated_delta_rule))
def test_equals_transformers(form: Any) -> None:
    state, query, key, value, log_decay, beta = rows_of(CHUNK + 6)
    with TrueFloat64():
        turned = (x.transpose(1, 2) for x in (query, key, value, log_decay, beta))
        want, last = form(*turned, initial_state=state, output_final_state=True)
    out, written = delta_rule(state, query * query.shape[-1] ** -0.5, key, value, log_decay, beta)
    write(state, written, torch.tensor([CHUNK, CHUNK]))
    close(out.transpose(1, 2), want, atol=1e-12, rtol=0)
    close(state, last, atol=1e-12, rtol=0)


@pytest.mark.parametrize("count", (1, 5, CHUNK))
def test_a_state_can_be_taken_to_any_row(count: int) -> None:
    state, *rows = rows_of(count)
    states = recurrence(state, *rows)[1]
    _, written = delta_rule(state, *rows)
    for n in range(count + 1):
        here = state.clone()
        write(here, written, torch.tensor([n, count - n]))
        close(here[0], states[n][0], atol=1e-12, rtol=0)
        close(here[1], states[count - n][1], atol=1e-12, rtol=0)


def test_strong_decays_keep_their_precision() -> None:
    """Rows that forget everything make large sums of logs, in whose float32 the other rows' decays would drown."""
    state, *rows = rows_of(CHUNK)
    rows[3][:, :, ::8] = -300.0
    want, states = recurrence(state, *rows)
    narrow = state.float()
    out, written = delta_rule(narrow, *(x.float() for x in rows))
    write(narrow, written, torch.tensor([CHUNK, CHUNK]))
    close(out.double(), want, atol=2e-6, rtol=0)
    close(narrow.double(), states[-1], atol=2e-6, rtol=0)


def test_rows_fold_into_sequences() -> None:
    x = torch.arange(12.0).view(6, 2) + 1
    for counts, folded in (((3, 3), [(0, 1, 2), (3, 4, 5)]), ((0, 6, 0), [range(6)])):
        rows = Rows(counts, [4] * len(counts), CPU)
        close(rows.fold(x), torch.stack([x[list(part)] for part in folded]))
        close(rows.unfold(rows.fold(x)), x)
    rows = Rows([2, 0, 4], [0, 7, 1], CPU)
    close(rows.fold(x)[1], x[2:])
    close(rows.fold(x)[0], torch.cat((x[:2], torch.zeros(2, 2))))
    close(rows.unfold(rows.fold(x)), x)


# ------------------------------------------------------------------------------------------------- a rank's share
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("size,heads", ((2, (2, 4)), (4, (2, 4)), (2, (4, 4)), (8, (2, 8))), ids=str)
def test_ranks_add_up(family: str, size: int, heads: tuple[int, int]) -> None:
    """Delta nets and gated attentions of all ranks sum to the whole, with fewer key heads than ranks too (CASES D8)."""
    keys, values = heads
    widths = {"num_attention_heads": 8, "attention_bias": True}
    folder = cached(family, overrides={"linear_num_key_heads": keys, "linear_num_value_heads": values} | widths)
    whole, *parts = (model_of(folder, Shard(r, p)) for r, p in [(0, 1), *((r, size) for r in range(size))])
    x = torch.randn(7, 64, dtype=torch.float64)
    for layer in (0, 3):
        sums = torch.zeros_like(x)
        for model in parts:
            sums += mixed(model, layer, x)
        close(sums, mixed(whole, layer, x), atol=1e-12, rtol=0)


def mixed(model: Any, layer: int, x: Tensor) -> Tensor:
    rows = Rows([4, 0, 3], [0, 0, 0], CPU)
    model.turn(Settings(Group.local(), resolve("tp")).step(rows), x.dtype)
    block = model.layers[layer]
    out: Tensor = block.mixer(x, rows, block.new_cache(3, 8))
    return out


def model_of(folder: Any, shard: Shard = WHOLE, draft_tokens: int = 0) -> Any:
    placement = resolve("tp", experts="owned").placement
    checkpoint = open_checkpoint(folder)
    check(checkpoint.config, shard.size, placement, draft_tokens)
    return load(
        checkpoint, placement, shard, draft_tokens=draft_tokens, dtype=torch.float64, device=CPU
    ).model  # fmt: skip


@pytest.mark.parametrize(
    "size,says",
    (
        (3, "--tp 3 does not divide the 4 value heads of a delta net: use one of 1, 2, 4"),
        (8, "--tp 8 does not divide the 4 value heads of a delta net: use one of 1, 2, 4"),
    ),
)
def test_heads_that_cannot_be_split_are_refused(size: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check(open_checkpoint(cached("qwen3_next")).config, size, resolve("tp").placement, 0)


def test_key_heads_that_cannot_be_shared_are_refused() -> None:
    overrides = {"linear_num_key_heads": 6, "linear_num_value_heads": 12}
    with pytest.raises(
        UsageError, match="nor is a multiple of the 6 key heads of a delta net: use one of 1, 2, 3, 6, 12"
    ):
        check(open_checkpoint(cached("qwen3_next", overrides=overrides)).config, 4, resolve("tp").placement, 0)


# ---------------------------------------------------------------------------------------------------- going back
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("accepts", ((0, 1, 2, 3, 4), (4, 0, 0, 3)))
def test_states_after_forced_rounds_equal_a_fresh_prefill(family: str, accepts: tuple[int, ...]) -> None:
    """Another accept count for each sequence in each round, and one sequence that leaves in between (CASES B7)."""
    k, folder = 4, cached(family)
    reference, model = oracle(folder), model_of(folder, draft_tokens=4)
    settings = Settings(Group.local(), resolve("tp", experts="owned"), draft_tokens=k, prefill_chunk=4)
    limits = (64, len(PROMPTS[1]) + 5, 64)
    batch = Batch(model, settings, [Sequence(b, p, limits[b], frozenset()) for b, p in enumerate(PROMPTS)])
    sizes = []
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        list(batch.prefill())
        for turn in range(len(accepts)):
            forced = {}
            for s in batch.sequences:
                n, truth = accepts[(turn + s.request) % len(accepts)], list(reference.greedy(s.tokens, k))
                drafts = truth[:n] + [(t + 1) % 97 for t in truth[n:]]
                forced[s.request] = drafts[: s.num_drafts(k)]

            def stub(self: Drafter, sequences: Any, forced: Any = forced, propose: Any = Drafter.propose) -> Any:
                assert propose(self, sequences) == [
                    list(reference.draft(s.tokens, s.num_drafts(k)).tokens) if s.num_drafts(k) else []
                    for s in sequences
                ]
                return [forced[s.request] for s in sequences]

            with patch.context() as one_round:
                one_round.setattr(Drafter, "propose", stub)
                batch.round()
            sizes.append(len(batch.sequences))
            for b, s in enumerate(batch.sequences):
                again = Batch(model, settings, [Sequence(0, tuple(s.tokens[:-1]), 64, frozenset())])
                list(again.prefill())
                assert batch.cache.lengths[b] == again.cache.lengths[0] == len(s.tokens) - 1
                for ours, fresh in zip(batch.cache.layers, again.cache.layers, strict=True):
                    if isinstance(ours, DeltaNetCache):
                        close(kept(ours, b), kept(fresh, 0), atol=1e-10, rtol=0)
    assert sizes[0] == 3 and sizes[-1] == 2


def kept(cache: Any, b: int) -> tuple[Tensor, Tensor]:
    """State and last inputs of sequence b, of a copy that has taken in what was kept."""
    settled = copy.deepcopy(cache)
    settled.settle()
    return settled.state[b], settled.inputs[b]


def some_cache(*counts: list[int]) -> tuple[Any, DeltaNetCache]:
    """A delta net, and its cache after forwards of so many rows."""
    mixer = model_of(cached("qwen3_next")).layers[0].mixer
    cache: DeltaNetCache = mixer.new_cache(len(counts[0]), 0)
    for count in counts:
        mixer(torch.randn(sum(count), 64, dtype=torch.float64), Rows(count, cache.lengths, CPU), cache)
    return mixer, cache


def test_sequences_without_rows_stay_as_they_are() -> None:
    mixer, cache = some_cache([3, 5, 2])
    cache.keep([1, 5, 0])
    cache.settle()
    before = [x[[0, 2]].clone() for x in (cache.state, cache.inputs)]
    for count in ([0, 4, 0], [0, CHUNK + 3, 0]):
        mixer(torch.randn(sum(count), 64, dtype=torch.float64), Rows(count, cache.lengths, CPU), cache)
    cache.settle()
    for now, then in zip((cache.state, cache.inputs), before, strict=True):
        assert torch.equal(now[[0, 2]], then)
    assert cache.lengths == [1, 5 + 4 + CHUNK + 3, 0]
    assert not before[0][1].any() and before[0][0].any()


def test_only_rows_of_the_last_forward_can_be_forgotten() -> None:
    _, cache = some_cache([3, 5], [2, 0])
    cache.keep([4, 5])
    cache.keep([3, 5])
    for lengths in ([2, 5], [3, 4], [4, 5]):
        with pytest.raises(ValueError, match="cannot go back"):
            cache.keep(lengths)
    _, cache = some_cache([CHUNK, 2])
    cache.keep([1, 1])
    _, cache = some_cache([CHUNK + 1, 2])
    cache.keep([CHUNK + 1, 2])
    with pytest.raises(ValueError, match="sequence 1 has 2 rows in a delta net's state and cannot go back to 1"):
        cache.keep([CHUNK + 1, 1])


def test_a_cache_does_not_grow_with_the_context() -> None:
    mixer = model_of(cached("qwen3_next")).layers[0].mixer
    small, large = mixer.new_cache(2, 10), mixer.new_cache(2, 10000)
    assert small.num_bytes() == large.num_bytes() == 2 * 8 * (4 * 16 * 16 + 3 * 128)

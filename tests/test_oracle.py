"""The oracle itself: against transformers' own MTP, against a cached run, and on checkpoints whose answer is known."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import checkpoints
import pytest
import torch
import torch.nn.functional as F
from oracle import Oracle, TrueFloat64, load_mtp, load_target, mtp_config, num_mtp_layers, oracle, raw_config, to_dtype
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache, modeling_layers

PROMPTS = ([5, 7, 30, 2, 11], [1, 40, 77], [9])
LONG = [3, 90, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46]  # more than index_topk
close = torch.testing.assert_close


FAMILIES = [family for family in checkpoints.FAMILIES if family != "qwen3_5_moe"]  # it is the nested form of _text


def accepted_per_round(reference: Oracle, k: int, max_new: int, prompts: Sequence[list[int]] = PROMPTS) -> list[int]:
    runs = [reference.speculative(prompt, max_new, k) for prompt in prompts]
    return [accepted for run in runs for drafts, accepted in run.rounds if len(drafts) == k]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mtp_layers", [1, 2])
def test_rigged_checkpoints_accept_all_or_nothing(family: str, mtp_layers: int) -> None:
    always = oracle(checkpoints.cached(family, mtp_layers=mtp_layers, draft="always"))
    never = oracle(checkpoints.cached(family, mtp_layers=mtp_layers, draft="never"))
    assert set(accepted_per_round(always, 3, 9, PROMPTS[:1])) == {3}
    assert set(accepted_per_round(never, 3, 6, PROMPTS[:1])) == {0}


@pytest.mark.parametrize("family", FAMILIES)
def test_aligned_heads_accept_a_mixture_and_tell_the_recycled_hidden(family: str) -> None:
    reference = oracle(checkpoints.cached(family))
    assert len(set(accepted_per_round(reference, 3, 16))) >= 3
    post, pre = (reference.draft_logits(LONG, 3, recycle) for recycle in ("post-norm", "pre-norm"))
    close(post[0], pre[0], rtol=0, atol=0)
    assert (post[1] - pre[1]).abs().max() > 1e-3


def test_random_heads_are_right_by_chance() -> None:
    accepted = accepted_per_round(oracle(checkpoints.cached("deepseek_v3", draft="random")), 1, 24)
    assert sum(accepted) <= 0.1 * len(accepted)


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
@pytest.mark.parametrize("k", [0, 4])
def test_speculative_tokens_are_the_greedy_ones(family: str, k: int) -> None:
    reference = oracle(checkpoints.cached(family, mtp_layers=2))
    plain = reference.greedy(LONG, 10)
    run = reference.speculative(LONG, 10, k)
    assert (run.tokens, run.finish_reason) == (plain, "length")
    assert 1 + sum(accepted + 1 for _, accepted in run.rounds) == 10
    assert all(len(drafts) <= k for drafts, _ in run.rounds)


def test_stops_at_eos_inside_an_accepted_run_and_at_limits() -> None:
    reference = oracle(checkpoints.cached("deepseek_v3", draft="always"))
    plain = reference.greedy(LONG, 8)
    for at, token in enumerate(plain):
        length = plain.index(token) + 1
        run = reference.speculative(LONG, 8, 3, eos=[token])
        assert (run.tokens, run.finish_reason) == (plain[:length], "stop"), at
        assert run.tokens == reference.greedy(LONG, 8, eos=[token])
        kept = sum(accepted + 1 for _, accepted in run.rounds)
        assert kept - 1 <= length - 1 <= kept  # an EOS that was a draft is not followed by the target's own token
    assert [len(drafts) for drafts, _ in reference.speculative(LONG, 8, 3).rounds] == [3, 2]
    assert [len(d) for d, _ in reference.speculative(LONG, 8, 3, max_position=len(LONG) + 6).rounds] == [3, 0]


# ---------------------------------------------------------------------------------------- against transformers itself
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize("mtp_layers", [1, 2, 3])
def test_agrees_with_transformers_use_mtp(family: str, mtp_layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoints.cached(family, mtp_layers=mtp_layers)
    for prompt in PROMPTS[: 2 if mtp_layers == 3 else 3]:  # its cache crop fails on one token and three layers
        tokens, theirs = transformers_mtp(folder, prompt, 14, monkeypatch)
        run = oracle(folder).speculative(prompt, 14, mtp_layers)
        assert run.tokens == tokens
        assert len(run.rounds) == len(theirs)
        committed = len(prompt) + 1
        for (_, accepted), logits in zip(run.rounds, theirs, strict=True):
            ours = oracle(folder).draft_logits([*prompt, *tokens][:committed], mtp_layers)
            close(ours, logits, rtol=0, atol=1e-12)
            committed += accepted + 1


def transformers_mtp(
    folder: Path, prompt: Sequence[int], max_new: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[tuple[int, ...], list[torch.Tensor]]:
    """Tokens of `generate(use_mtp=True)`, and the draft logits [k, V] of each of its rounds."""
    model, raw, rounds = load_target(folder, torch.float64), raw_config(folder), []
    numbers = [raw["num_hidden_layers"] + j for j in range(num_mtp_layers(raw))]
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{i}\..*" for i in numbers]
    forward = modeling_layers.MtpModel.forward

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = forward(to_dtype(self, torch.float64), *args, **kwargs)
        rounds.append(out[1][0])
        return out

    monkeypatch.setattr(modeling_layers.MtpModel, "forward", recorded)
    ids = torch.tensor([list(prompt)])
    with TrueFloat64():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), use_mtp=True, max_new_tokens=max_new, do_sample=False
        )
    monkeypatch.undo()
    return tuple(out[0, len(prompt) :].tolist()), rounds


@pytest.mark.parametrize("family", [f for f in checkpoints.FAMILIES if f != "glm_moe_dsa"])
@pytest.mark.parametrize("mtp_layers", [1, 2])
def test_recomputing_equals_a_cached_run(family: str, mtp_layers: int) -> None:
    reference = oracle(checkpoints.cached(family, mtp_layers=mtp_layers))
    close(cached_draft_logits(reference, LONG, 5), reference.draft_logits(LONG, 5), rtol=0, atol=1e-12)


def test_sharing_the_selection_changes_later_steps_only() -> None:
    shared = oracle(checkpoints.cached("glm_moe_dsa"))
    alone = oracle(checkpoints.cached("glm_moe_dsa", overrides={"index_share_for_mtp_iteration": False}))
    close(cached_draft_logits(alone, LONG, 3), alone.draft_logits(LONG, 3), rtol=0, atol=1e-12)
    close(shared.draft_logits(LONG, 1), alone.draft_logits(LONG, 1), rtol=0, atol=0)
    assert (shared.draft_logits(LONG, 2)[1] - alone.draft_logits(LONG, 2)[1]).abs().max() > 1e-6


@torch.no_grad()
def cached_draft_logits(reference: Oracle, tokens: list[int], k: int) -> torch.Tensor:
    """Draft steps with a KV cache per MTP layer, one new row at a time after the first n steps."""
    c, num, known, logits = len(tokens) - 1, min(len(reference.mtp), k), list(tokens), []
    caches = [DynamicCache(config=mtp_config(reference.config, len(reference.mtp))) for _ in reference.mtp]
    hidden = reference.hidden(tokens[:c])
    with TrueFloat64():
        for step in range(k):
            layer, start = reference.mtp[step % num], 1 + step if step < num else c + step
            ids, positions = known[start : c + step + 1], torch.arange(start, c + step + 1)[None]
            x = reference.project(layer, ids, hidden[-len(ids) :])[None]
            total = caches[step % num].get_seq_length(step % num) + len(ids)
            mask = torch.full((len(ids), total), -1e300, dtype=x.dtype).triu(1 + total - len(ids))[None, None]
            out = layer.block(
                x,
                attention_mask=mask,
                position_ids=positions,
                position_embeddings=reference.model.model.rotary_emb(x, positions),
                cache=caches[step % num],
            )
            hidden = layer.norm((out[0] if isinstance(out, tuple) else out)[0])
            logits.append(F.linear(hidden[-1], layer.head))
            known.append(int(logits[-1].argmax()))
    return torch.stack(logits)


class NoFloat32(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        low = isinstance(out, torch.Tensor) and out.dtype in (torch.float32, torch.bfloat16)
        assert not low, f"{func} computes in {out.dtype}"
        return out


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_nothing_but_rope_angles_is_computed_in_float32(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = Oracle(checkpoints.cached(family))  # its own, nothing memoised
    shape = torch.zeros(1, 1, dtype=torch.float64)
    angles = reference.model.model.rotary_emb(shape, torch.arange(len(LONG) + 1)[None])
    monkeypatch.setattr(
        reference.model.model.rotary_emb, "forward", lambda x, position_ids: [a[:, : x.shape[1]] for a in angles]
    )
    with NoFloat32():
        reference.logits(LONG)
        reference.draft_logits(LONG, 1)


def test_layers_end_at_the_final_norm() -> None:
    reference = oracle(checkpoints.cached("glm_moe_dsa"))
    last = reference.layers(LONG)[-1]
    with TrueFloat64():
        close(reference.model.model.norm(last), reference.hidden(LONG), rtol=0, atol=0)
    assert len(reference.layers(LONG)) == 3
    close(reference.logits(LONG)[:5], reference.logits(LONG[:5]), rtol=0, atol=1e-12)


def test_float32_oracle_is_near() -> None:
    folder = checkpoints.cached("qwen3_next")
    close(oracle(folder, torch.float32).logits(LONG).double(), oracle(folder).logits(LONG), rtol=0, atol=1e-4)


# ------------------------------------------------------------------------------------------------ editing checkpoints
def test_edited_copies(tmp_path: Path) -> None:
    source = checkpoints.cached("deepseek_v3")
    logits = oracle(source).draft_logits(LONG, 2)

    def again(folder: Path) -> torch.Tensor:
        return oracle(folder).draft_logits(LONG, 2)

    sharded = checkpoints.shard(checkpoints.copy(source, tmp_path / "sharded"), 3)
    assert len(list(sharded.glob("model-*.safetensors"))) == 3
    close(again(sharded), logits, rtol=0, atol=0)

    duplicates = checkpoints.copy(source, tmp_path / "duplicates")
    checkpoints.drop(duplicates, r"layers\.3\.(embed_tokens|shared_head\.head)")
    close(again(duplicates), logits, rtol=0, atol=0)
    checkpoints.change(duplicates, "model.layers.3.embed_tokens.weight", torch.zeros(97, 64))
    assert not torch.equal(again(duplicates), logits)

    bare = checkpoints.copy(source, tmp_path / "bare")
    checkpoints.rename(bare, r"^model\.layers\.3\.", "model.mtp.")
    assert any(key.startswith("model.mtp.eh_proj") for key in checkpoints.read(bare))
    checkpoints.drop(bare, r"^model\.mtp\.")
    assert load_mtp(bare, oracle(source).model, raw_config(bare), torch.float64) == []

    cut = checkpoints.truncate(checkpoints.copy(source, tmp_path / "cut"))
    assert cut.stat().st_size < (source / "model.safetensors").stat().st_size
    checkpoints.set_config(cut.parent, n_group=..., topk_group=1)
    config = json.loads((cut.parent / "config.json").read_text())
    assert "n_group" not in config
    assert config["topk_group"] == 1

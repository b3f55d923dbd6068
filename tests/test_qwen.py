"""Qwen3-Next and Qwen3.5 beyond the matrix: every form of config and checkpoint, and prompts of more than one chunk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import apart, cached, change, copy, drop, read, rename, set_config, write
from oracle import oracle
from runs import PROMPTS, expected, job, outcome, run
from torch import Tensor

from lockstep.comm.errors import UsageError
from lockstep.comm.group import Group
from lockstep.comm.strategy import resolve
from lockstep.engine.settings import Settings
from lockstep.models import families
from lockstep.models.checkpoint import open_checkpoint
from lockstep.models.config import GQA, DeltaNet, Dense, MoE
from lockstep.models.load import Loaded, load
from lockstep.models.weights import Shard

FAMILIES = ("qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe")
TOKENS = tuple((i * 37 + 11) % 97 for i in range(150))
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
close = torch.testing.assert_close


def loaded(folder: Path, draft_tokens: int = 0, dtype: torch.dtype = torch.float64) -> Loaded:
    placement = resolve("tp").placement
    return load(
        open_checkpoint(folder), placement, Shard(0, 1),
        draft_tokens=draft_tokens, dtype=dtype, device=torch.device("cpu"),
    )  # fmt: skip


def logits(folder: Path, lengths: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Tensor:
    """Teacher-forced, in forwards of so many rows."""
    model, settings = loaded(folder, dtype=dtype).model, Settings(Group.local(), resolve("tp"))
    cache, parts, done = model.new_cache(1, sum(lengths)), [], 0
    with torch.inference_mode():
        for count in lengths:
            step = settings.step(cache.rows([count], torch.device("cpu")))
            out = model(torch.tensor(TOKENS[done : done + count]), step, cache)
            parts.append(model.lm_head.logits(out.rows("test")))
            done += count
    return torch.cat(parts)


def here(folder: Path, **fields: Any) -> list[tuple[Any, ...]]:
    return outcome(run(Group.local(), job(folder, **fields)))


@pytest.mark.parametrize("dtype,atol", ((torch.float64, 1e-10), (torch.float32, 1e-4)), ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_over_several_chunks(family: str, dtype: torch.dtype, atol: float) -> None:
    want = oracle(cached(family), dtype).logits(TOKENS)
    for lengths in ((150,), (3, 1, 70, 1, 75)):
        close(logits(cached(family), lengths, dtype), want, atol=atol, rtol=0)


@pytest.mark.parametrize(
    "family,overrides",
    (
        ("qwen3_next", {"attention_bias": True}),
        ("qwen3_next", {"rope_scaling": YARN}),
        ("qwen3_next", {"norm_topk_prob": False, "num_experts_per_tok": 3}),
        ("qwen3_next", {"partial_rotary_factor": 0.5, "linear_conv_kernel_dim": 2, "linear_value_head_dim": 8}),
        ("qwen3_next", {"tie_word_embeddings": True}),
        ("qwen3_5_moe_text", {"linear_num_value_heads": 8, "attention_bias": True}),
        ("qwen3_5_moe", {"tie_word_embeddings": True}),
    ),
    ids=str,
)
def test_variants(family: str, overrides: dict[str, Any]) -> None:
    folder = cached(family, draft="random", overrides=overrides)
    close(logits(folder, (40,)), oracle(folder).logits(TOKENS[:40]), atol=1e-10, rtol=0)


@pytest.mark.parametrize("size", (1, 2))
def test_prompts_of_more_than_one_chunk(ranks: Any, size: int) -> None:
    """Unchunked prefill of 70 and of 3 rows in one forward, then drafts."""
    folder, prompts = cached("qwen3_next"), (TOKENS[:70], TOKENS[:3], TOKENS[5:72])
    work = job(folder, "sp-late:gather-sum" if size > 1 else "tp", prompts=prompts, tp=size, draft_tokens=3)
    assert outcome(ranks(size).run(run, work)[0]) == expected(folder, 3, prompts=prompts)


@pytest.mark.parametrize("family", ("qwen3_next", "qwen3_5_moe"))
def test_two_mtp_layers_share_what_is_before_and_after_them(family: str) -> None:
    folder = cached(family, mtp_layers=2)
    first, second = loaded(folder, 2).model.mtp
    assert first.eh_proj is second.eh_proj and first.norm is second.norm and first.block is not second.block
    assert here(folder, draft_tokens=3, prefill_chunk=4) == expected(folder, 3)


# ------------------------------------------------------------------------------------------------ forms of a checkpoint
@pytest.mark.parametrize("size,strategy", ((1, "tp"), (2, "tp"), (2, "sp-late")))
def test_experts_may_be_stacked_or_apart(ranks: Any, tmp_path: Path, size: int, strategy: str) -> None:
    """Also one form in the model and the other in its MTP layer, as quantised releases have it."""
    stacked = cached("qwen3_5_moe_text")
    single = write(copy(stacked, tmp_path / "apart"), apart(stacked))
    both = copy(stacked, tmp_path / "both")
    tensors = {k: v for k, v in read(stacked).items() if not k.startswith("mtp.")}
    write(both, tensors | {k: v for k, v in read(single).items() if k.startswith("mtp.")})
    for folder in (single, both):
        work = job(folder, strategy, tp=size, draft_tokens=2, max_new_tokens=6)
        assert outcome(ranks(size).run(run, work)[0]) == expected(stacked, 2, max_new=6)


def test_an_expert_that_is_stored_twice_is_refused(tmp_path: Path) -> None:
    folder = copy(cached("qwen3_5_moe_text"), tmp_path / "m")
    change(folder, "model.layers.0.mlp.experts.0.down_proj.weight", torch.zeros(64, 32))
    with pytest.raises(UsageError, match=r"stands for layers\.0\.mlp\.experts\.0\.down_proj\.weight"):
        open_checkpoint(folder).tensors()


def test_a_stack_of_the_wrong_shape_is_refused(tmp_path: Path) -> None:
    folder = copy(cached("qwen3_5_moe_text"), tmp_path / "m")
    change(folder, "model.layers.1.mlp.experts.gate_up_proj", lambda x: x[:, :62])
    with pytest.raises(UsageError, match=r"layers\.1\.mlp\.experts\.gate_up_proj has shape \[31, 64\]"):
        loaded(folder)


@pytest.mark.parametrize("pattern,replacement", ((r"^mtp\.", "model.mtp."), (r"^model\.(?!visual)", "")))
@pytest.mark.parametrize("family", FAMILIES)
def test_prefixes(tmp_path: Path, family: str, pattern: str, replacement: str) -> None:
    """With and without what engines and training codes put before a key (CASES E7)."""
    source = cached(family)
    folder = rename(copy(source, tmp_path / "m"), pattern, replacement)
    assert here(folder, draft_tokens=2, max_new_tokens=5) == expected(source, 2, max_new=5)


def test_embedding_and_head_are_the_targets_unless_the_mtp_layer_has_its_own(tmp_path: Path) -> None:
    """CASES E8, E13."""
    source = cached("qwen3_next")
    assert loaded(source, 2).notes == ()
    folder = copy(source, tmp_path / "m")
    for key in ("mtp.embed_tokens.weight", "mtp.lm_head.weight"):
        change(folder, key, torch.randn(97, 64))
    notes = loaded(folder, 2).notes
    assert [note.split(" (")[0] for note in notes] == ["mtp.0 uses its own embed_tokens", "mtp.0 uses its own head"]
    assert here(folder, draft_tokens=2) == expected(folder, 2) != expected(source, 2)


def test_a_vision_model_is_passed_over_and_said() -> None:
    (note,) = loaded(cached("qwen3_5_moe")).notes
    assert note == "text only: tensors under visual. are not read"
    assert loaded(cached("qwen3_5_moe_text")).notes == ()


@pytest.mark.parametrize("family", ("qwen3_next", "deepseek_v3"))
@pytest.mark.parametrize("part", ("eh_proj|fc", "."))
def test_missing_mtp_weights_are_named(tmp_path: Path, family: str, part: str) -> None:
    """Each family asks for its own keys, and runs without drafts where they are missing (CASES E6, E12, E14)."""
    folder = copy(cached(family), tmp_path / "m")
    gone = drop(folder, rf"(mtp|layers\.3)\.{part}" if family == "deepseek_v3" else rf"^mtp\.{part}")
    missing = sorted(gone)[0].removeprefix("model.")
    assert len(here(folder, prompts=PROMPTS[:1])[0][0]) == 12 if part == "." else True
    with pytest.raises(UsageError, match="runs with --draft-tokens 0") as error:
        loaded(folder, 1)
    assert part == "." or missing in str(error.value)


def test_an_unknown_tensor_is_refused(tmp_path: Path) -> None:
    folder = change(
        copy(cached("qwen3_next"), tmp_path / "m"), "model.layers.0.self_attn.q_proj.weight", torch.zeros(1)
    )
    with pytest.raises(UsageError, match=r"holds layers\.0\.self_attn\.q_proj\.weight"):
        loaded(folder)


# ---------------------------------------------------------------------------------------------------- forms of a config
def raw(family: str, **fields: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((cached(family) / "config.json").read_text())
    return {k: v for k, v in (config | fields).items() if v is not ...}


def test_layers_by_interval_and_by_name() -> None:
    by_name = families.read(raw("qwen3_next"), "c")
    assert [type(layer.mixer) for layer in by_name.layers] == [DeltaNet] * 3 + [GQA]
    assert families.read(raw("qwen3_next", layer_types=...), "c") == by_name
    every_two = families.read(raw("qwen3_next", layer_types=..., full_attention_interval=2), "c")
    assert [type(layer.mixer) for layer in every_two.layers] == [DeltaNet, GQA] * 2
    with pytest.raises(UsageError, match="layer_types must be 4 times"):
        families.read(raw("qwen3_next", layer_types=["linear_attention"] * 3 + ["sliding_attention"]), "c")


def test_dense_layers() -> None:
    config = families.read(raw("qwen3_next", mlp_only_layers=[0], decoder_sparse_step=2), "c")
    assert [type(layer.ffn) for layer in config.layers] == [Dense, MoE, Dense, MoE]
    assert [type(layer.ffn) for layer in config.mtp] == [MoE]


def test_released_configs_do_not_all_count_their_mtp_layers(tmp_path: Path) -> None:
    """Qwen3-Next's does not; there is one."""
    source = cached("qwen3_next")
    folder = set_config(copy(source, tmp_path / "m"), num_nextn_predict_layers=...)
    assert here(folder, draft_tokens=2, max_new_tokens=6) == expected(source, 2, max_new=6)
    assert families.read(raw("qwen3_next", num_nextn_predict_layers=0), "c").mtp == ()


def test_a_nested_config_falls_back_on_the_outer_one() -> None:
    nested = raw("qwen3_5_moe")
    text = nested["text_config"]
    outer = {key: text.pop(key) for key in ("tie_word_embeddings", "dtype")}
    assert families.read(nested | outer, "c") == families.read(raw("qwen3_5_moe"), "c")
    assert families.read(nested | outer | {"tie_word_embeddings": True}, "c").tied
    with pytest.raises(UsageError, match="attn_output_gate"):
        families.read(nested | outer | {"text_config": text | {"attn_output_gate": False}}, "c")
    with pytest.raises(UsageError, match="'head_dim' is missing"):
        families.read(raw("qwen3_next", head_dim=...), "c")

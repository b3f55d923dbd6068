"""Tiny random checkpoints in the key layout that the models are released in, and helpers that edit or damage them.

Rules that decide whether a bug shows (all norm weights random, routing bias non-zero, prime vocabulary, ...) are built
in. Every tensor has its own random stream (seed, key), so a change of one option leaves the other tensors as they were.

    H hidden size, I intermediate size, E experts, D head size, V vocabulary
"""

import atexit
import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
Shapes = Iterator[tuple[str, tuple[int, ...]]]

QWEN = ("qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe")
SPARSE = ("deepseek_v32", "glm_moe_dsa")
FAMILIES = ("deepseek_v3", "glm4_moe", *SPARSE, *QWEN)
DRAFTS = ("random", "aligned", "always", "never")

YARN = {  # for overrides={"rope_scaling": YARN}
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
KEPT_FLOAT32 = ("e_score_correction_bias", "A_log", "dt_bias")


# ---------------------------------------------------------------------------------------------------- configuration
def config_fields(family: str, layers: int, mtp_layers: int, vocab: int) -> dict[str, Any]:
    """config.json as such a model is released, with tiny sizes."""
    fields: dict[str, Any] = {
        "model_type": family,
        "hidden_act": "silu",
        "vocab_size": vocab,
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": 1,
    }
    if family in QWEN:
        return fields | qwen_fields(family, layers, mtp_layers)
    fields |= {
        "num_nextn_predict_layers": mtp_layers,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.3,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": 1,
        "topk_group": 1,
    }
    if family == "glm4_moe":
        return fields | {"head_dim": 16, "partial_rotary_factor": 0.5, "use_qk_norm": True, "attention_bias": True}
    fields |= {
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    }
    if family in SPARSE:
        # Eight heads: an index score is a sum of ReLUs, and with few heads many keys would tie at exactly zero.
        fields |= {"index_topk": 8, "index_n_heads": 8, "index_head_dim": 16}
    if family == "glm_moe_dsa":
        return fields | {
            "indexer_types": ["full" if i != 2 else "shared" for i in range(layers)],
            "indexer_rope_interleave": True,
            "index_share_for_mtp_iteration": True,
        }
    return fields | {"n_group": 4, "topk_group": 2}


def qwen_fields(family: str, layers: int, mtp_layers: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "head_dim": 32,
        "partial_rotary_factor": 0.25,
        "num_experts": 8,
        "shared_expert_intermediate_size": 32,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)],
        "full_attention_interval": 4,
    }
    if family == "qwen3_next":
        return fields | {"num_nextn_predict_layers": mtp_layers, "decoder_sparse_step": 1, "mlp_only_layers": []}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    return fields | {
        "mtp_num_hidden_layers": mtp_layers,
        "mtp_use_dedicated_embeddings": False,
        "attn_output_gate": True,
        "rope_parameters": rope | {"mrope_interleaved": True, "mrope_section": [2, 1, 1]},
    }


# ----------------------------------------------------------------------------------------------- tensors of a model
def model_shapes(c: dict[str, Any]) -> Shapes:
    """Every key of the released checkpoint with its shape, main model first."""
    hidden, layers = c["hidden_size"], c["num_hidden_layers"]
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    for i in range(layers):
        yield from block_shapes(c, f"model.layers.{i}.", i)
    yield "model.norm.weight", (hidden,)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (c["vocab_size"], hidden)
    if c["model_type"] in QWEN:
        num = c.get("mtp_num_hidden_layers", c.get("num_nextn_predict_layers", 0))
        for j in range(num):
            yield from block_shapes(c, f"mtp.layers.{j}.", None)
        if num:
            yield "mtp.fc.weight", (hidden, 2 * hidden)
            for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
                yield f"mtp.{name}.weight", (hidden,)
        return
    for j in range(c["num_nextn_predict_layers"]):
        pre = f"model.layers.{layers + j}."
        yield from block_shapes(c, pre, None)
        yield pre + "eh_proj.weight", (hidden, 2 * hidden)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            yield f"{pre}{name}.weight", (hidden,)
        yield pre + "embed_tokens.weight", (c["vocab_size"], hidden)
        yield pre + "shared_head.head.weight", (c["vocab_size"], hidden)


def block_shapes(c: dict[str, Any], pre: str, layer: int | None) -> Shapes:
    """One decoder layer; `layer` None is an MTP layer: full attention, its own indexer, experts."""
    family, hidden = c["model_type"], c["hidden_size"]
    yield pre + "input_layernorm.weight", (hidden,)
    yield pre + "post_attention_layernorm.weight", (hidden,)
    if family in QWEN:
        linear = layer is not None and c["layer_types"][layer] == "linear_attention"
        if linear:
            yield from delta_net_shapes(c, pre + "linear_attn.")
        else:
            yield from gqa_shapes(c, pre + "self_attn.", gated=True)
        yield from qwen_moe_shapes(c, pre + "mlp.")
        return
    if family == "glm4_moe":
        yield from gqa_shapes(c, pre + "self_attn.", gated=False)
    else:
        yield from mla_shapes(c, pre + "self_attn.")
        shared = layer is not None and "indexer_types" in c and c["indexer_types"][layer] == "shared"
        if family in SPARSE and not shared:
            yield from indexer_shapes(c, pre + "self_attn.indexer.")
    if layer is not None and layer < c["first_k_dense_replace"]:
        yield from mlp_shapes(pre + "mlp.", hidden, c["intermediate_size"])
    else:
        num, inter = c["n_routed_experts"], c["moe_intermediate_size"]
        yield pre + "mlp.gate.weight", (num, hidden)
        yield pre + "mlp.gate.e_score_correction_bias", (num,)
        for e in range(num):
            yield from mlp_shapes(f"{pre}mlp.experts.{e}.", hidden, inter)
        yield from mlp_shapes(pre + "mlp.shared_experts.", hidden, inter * c["n_shared_experts"])


def mlp_shapes(pre: str, hidden: int, inter: int) -> Shapes:
    yield pre + "gate_proj.weight", (inter, hidden)
    yield pre + "up_proj.weight", (inter, hidden)
    yield pre + "down_proj.weight", (hidden, inter)


def qwen_moe_shapes(c: dict[str, Any], pre: str) -> Shapes:
    num, hidden, inter = c["num_experts"], c["hidden_size"], c["moe_intermediate_size"]
    yield pre + "gate.weight", (num, hidden)
    yield from mlp_shapes(pre + "shared_expert.", hidden, c["shared_expert_intermediate_size"])
    yield pre + "shared_expert_gate.weight", (1, hidden)
    if c["model_type"] == "qwen3_next":
        for e in range(num):
            yield from mlp_shapes(f"{pre}experts.{e}.", hidden, inter)
    else:
        yield pre + "experts.gate_up_proj", (num, 2 * inter, hidden)
        yield pre + "experts.down_proj", (num, hidden, inter)


def mla_shapes(c: dict[str, Any], pre: str) -> Shapes:
    hidden, heads, rope = c["hidden_size"], c["num_attention_heads"], c["qk_rope_head_dim"]
    q_out = heads * (c["qk_nope_head_dim"] + rope)
    if c["q_lora_rank"] is None:
        yield pre + "q_proj.weight", (q_out, hidden)
    else:
        yield from linear_shapes(pre + "q_a_proj.", c["q_lora_rank"], hidden, c["attention_bias"])
        yield pre + "q_a_layernorm.weight", (c["q_lora_rank"],)
        yield pre + "q_b_proj.weight", (q_out, c["q_lora_rank"])
    yield from linear_shapes(pre + "kv_a_proj_with_mqa.", c["kv_lora_rank"] + rope, hidden, c["attention_bias"])
    yield pre + "kv_a_layernorm.weight", (c["kv_lora_rank"],)
    yield pre + "kv_b_proj.weight", (heads * (c["qk_nope_head_dim"] + c["v_head_dim"]), c["kv_lora_rank"])
    yield from linear_shapes(pre + "o_proj.", hidden, heads * c["v_head_dim"], c["attention_bias"])


def indexer_shapes(c: dict[str, Any], pre: str) -> Shapes:
    heads, size = c["index_n_heads"], c["index_head_dim"]
    yield pre + "wq_b.weight", (heads * size, c["q_lora_rank"])
    yield pre + "wk.weight", (size, c["hidden_size"])
    yield pre + "k_norm.weight", (size,)
    yield pre + "k_norm.bias", (size,)
    yield pre + "weights_proj.weight", (heads, c["hidden_size"])


def gqa_shapes(c: dict[str, Any], pre: str, gated: bool) -> Shapes:
    hidden, size, bias = c["hidden_size"], c["head_dim"], c["attention_bias"]
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    yield from linear_shapes(pre + "q_proj.", heads * size * (2 if gated else 1), hidden, bias)
    yield from linear_shapes(pre + "k_proj.", kv_heads * size, hidden, bias)
    yield from linear_shapes(pre + "v_proj.", kv_heads * size, hidden, bias)
    yield from linear_shapes(pre + "o_proj.", hidden, heads * size, bias and gated)
    if gated or c["use_qk_norm"]:
        yield pre + "q_norm.weight", (size,)
        yield pre + "k_norm.weight", (size,)


def delta_net_shapes(c: dict[str, Any], pre: str) -> Shapes:
    hidden, k_heads, v_heads = c["hidden_size"], c["linear_num_key_heads"], c["linear_num_value_heads"]
    keys, values = k_heads * c["linear_key_head_dim"], v_heads * c["linear_value_head_dim"]
    yield pre + "conv1d.weight", (2 * keys + values, 1, c["linear_conv_kernel_dim"])
    if c["model_type"] == "qwen3_next":
        yield pre + "in_proj_qkvz.weight", (2 * keys + 2 * values, hidden)
        yield pre + "in_proj_ba.weight", (2 * v_heads, hidden)
    else:
        yield pre + "in_proj_qkv.weight", (2 * keys + values, hidden)
        yield pre + "in_proj_z.weight", (values, hidden)
        yield pre + "in_proj_b.weight", (v_heads, hidden)
        yield pre + "in_proj_a.weight", (v_heads, hidden)
    yield pre + "dt_bias", (v_heads,)
    yield pre + "A_log", (v_heads,)
    yield pre + "norm.weight", (c["linear_value_head_dim"],)
    yield pre + "out_proj.weight", (hidden, values)


def linear_shapes(pre: str, out: int, into: int, bias: bool) -> Shapes:
    yield pre + "weight", (out, into)
    if bias:
        yield pre + "bias", (out,)


# ------------------------------------------------------------------------------------------------------- the values
def fill(key: str, shape: tuple[int, ...], seed: int, centred: bool, gain: float) -> Tensor:
    """`centred`: norms are stored as w of (1 + w). `gain` scales what a block adds to the residual stream."""
    gen = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{key}".encode()))

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(shape, generator=gen) * (high - low) + low

    def normal(std: float) -> Tensor:
        return torch.randn(shape, generator=gen) * std

    if key.endswith("e_score_correction_bias"):
        return normal(0.2)
    if key.endswith("A_log"):
        return uniform(0.5, 8.0).log()
    if key.endswith("dt_bias"):
        return uniform(-3.0, 0.0)
    if key.endswith("k_norm.bias"):
        return uniform(-0.3, 0.3)
    if "norm" in key:
        return uniform(0.3, 1.7) - (1.0 if centred and not key.endswith("linear_attn.norm.weight") else 0.0)
    if key.endswith("bias"):
        return normal(0.2)
    if key.endswith("embed_tokens.weight"):
        return normal(1.0)
    if key.endswith("conv1d.weight"):
        return normal(0.5)
    scale = gain if re.search(r"(o_proj|out_proj|down_proj)(\.weight)?$", key) else 1.0
    return normal(scale * shape[-1] ** -0.5)


def align(tensors: Tensors, c: dict[str, Any], seed: int, draft: str, noise: float) -> None:
    """Make the MTP layers predict what the target predicts: often (`aligned`), `always` or `never`.

    An MTP row sees the embedding of the token that the target sees one step later, so with eh_proj = [1/enorm, 0],
    the target's final norm and blocks that add nothing, both compute the same logits. For `always` and `never` that
    holds bit by bit in every dtype: embeddings are +-1 (their norm is an identity) and enorm is a power of two.
    """
    exact, centred = draft != "aligned", c["model_type"] in QWEN
    head = "lm_head.weight" if "lm_head.weight" in tensors else "model.embed_tokens.weight"
    if exact:
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].sign()
    for pre, norm, proj, final in mtp_keys(c):
        hidden = c["hidden_size"]
        enorm = fill(pre + "powers", (hidden,), seed, False, 1.0).sign().exp2() if exact else actual(tensors, norm, c)
        tensors[norm] = enorm - (1.0 if centred else 0.0)
        mixing = 0.0 if exact else noise
        tensors[proj] = tensors[proj] * mixing + torch.cat([(1 / enorm).diag(), torch.zeros(hidden, hidden)], 1)
        wobble = 1 + mixing * (2 * fill(pre + "norm.wobble", (hidden,), seed, False, 1.0) - 2)
        target = actual(tensors, "model.norm.weight", c) * wobble
        if centred and draft == "never":
            target = -target
        tensors[final] = target - (1.0 if centred else 0.0)
        if not centred:
            tensors[pre + "embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            sign = -1.0 if draft == "never" else 1.0
            tensors[pre + "shared_head.head.weight"] = sign * tensors[head]


def actual(tensors: Tensors, key: str, c: dict[str, Any]) -> Tensor:
    """A norm's weight without the (1 + w) form."""
    return tensors[key] + (1.0 if c["model_type"] in QWEN else 0.0)


def mtp_keys(c: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """(prefix, embedding norm, projection, final norm) of each MTP layer; Qwen's layers share the last three."""
    if c["model_type"] in QWEN:
        num = c.get("mtp_num_hidden_layers", c.get("num_nextn_predict_layers", 0))
        return [("mtp.", "mtp.pre_fc_norm_embedding.weight", "mtp.fc.weight", "mtp.norm.weight")] if num else []
    pres = [f"model.layers.{c['num_hidden_layers'] + j}." for j in range(c["num_nextn_predict_layers"])]
    return [(p, p + "enorm.weight", p + "eh_proj.weight", p + "shared_head.norm.weight") for p in pres]


# ---------------------------------------------------------------------------------------------------------- writing
def make(
    folder: Path,
    family: str,
    *,
    layers: int | None = None,
    mtp_layers: int = 1,
    vocab: int = 97,
    seed: int = 0,
    dtype: str = "float32",
    draft: str = "aligned",
    noise: float = 0.15,
    overrides: dict[str, Any] | None = None,
) -> Path:
    """Write a checkpoint. `overrides` are fields of config.json (the value `...` removes one).

    draft: `random` heads are right by chance (1/V), `aligned` ones often (less with more `noise`), `always` and
    `never` exactly 100 % and 0 % of the time, in every dtype and for every k. With tied embeddings only `random` has
    blocks that outweigh the embedding: the others repeat one token.
    """
    if family not in FAMILIES or draft not in DRAFTS:
        raise ValueError(f"family {family!r} must be one of {FAMILIES} and draft {draft!r} one of {DRAFTS}")
    layers = layers or (4 if family in QWEN else 3)
    config = config_fields(family, layers, mtp_layers, vocab) | {"dtype": dtype} | (overrides or {})
    config = {key: value for key, value in config.items() if value is not ...}
    gain = {"random": 1.0, "aligned": noise}.get(draft, 0.0)
    tensors = {k: fill(k, shape, seed, family in QWEN, gain) for k, shape in model_shapes(config)}
    if draft != "random":
        align(tensors, config, seed, draft, noise)
    keep = {k: v if k.endswith(KEPT_FLOAT32) else v.to(getattr(torch, dtype)) for k, v in tensors.items()}
    if family == "qwen3_5_moe":
        config, keep = nested(config), {released_qwen_key(k): v for k, v in keep.items()}
        keep["model.visual.patch_embed.proj.weight"] = torch.ones(8, 3, dtype=getattr(torch, dtype))
    folder.mkdir(parents=True, exist_ok=True)
    write(folder, keep)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"do_sample": False}))
    (folder / "tokenizer.json").write_text(tokenizer_json(vocab))
    return folder


def nested(config: dict[str, Any]) -> dict[str, Any]:
    """The multimodal form in which Qwen3.5 is released."""
    text = config | {"model_type": "qwen3_5_moe_text"}
    outer = {"model_type": "qwen3_5_moe", "tie_word_embeddings": config["tie_word_embeddings"]}
    return outer | {"dtype": config["dtype"], "text_config": text, "vision_config": {"depth": 1, "hidden_size": 8}}


def released_qwen_key(key: str) -> str:
    return re.sub(r"^model\.", "model.language_model.", key)


def tokenizer_json(vocab: int) -> str:
    """One token per printable ASCII character (97 with the two special ones), then placeholder words."""
    from tokenizers import Tokenizer, decoders, models

    words = (["<s>", "<pad>"] + [chr(c) for c in range(32, 127)] + [f"<w{i}>" for i in range(97, vocab)])[:vocab]
    tokenizer = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<s>", "<pad>"])
    return tokenizer.to_str()


@functools.cache
def session_folder() -> Path:
    """Removed when the process that asked first ends (not when a forked rank does)."""
    folder, owner = Path(tempfile.mkdtemp(prefix="lockstep-checkpoints-")), os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def cached(family: str, **options: Any) -> Path:
    """`make` with the same arguments, once per session. Shared: edit a `copy`, never this folder."""
    key = hashlib.sha1(repr(sorted(options.items())).encode()).hexdigest()[:12]
    folder = session_folder() / f"{family}-{key}"
    return folder if folder.exists() else make(folder, family, **options)


# ---------------------------------------------------------------------------------------- editing and damaging copies
def copy(folder: Path, to: Path) -> Path:
    """The helpers below edit in place; give them a copy of a cached checkpoint."""
    shutil.copytree(folder, to)
    return to


def read(folder: Path) -> Tensors:
    """All tensors, from one file or several."""
    return {k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()}


def apart(folder: Path) -> Tensors:
    """All tensors, of stacked experts each expert's."""
    tensors = {}
    for key, tensor in read(folder).items():
        prefix, _, kind = key.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind)
        for e, matrix in enumerate(tensor if parts else ()):
            for part, rows in zip(parts or (), matrix.chunk(len(parts or ())), strict=True):
                tensors[f"{prefix}.{e}.{part}.weight"] = rows.clone()
        if not parts:
            tensors[key] = tensor
    return tensors


def write(folder: Path, tensors: Tensors, files: int = 1) -> Path:
    """Replace the weights; more than one file means shards with an index."""
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    tensors = {k: v.contiguous() for k, v in tensors.items()}
    if files == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = [f"model-{i + 1:05d}-of-{files:05d}.safetensors" for i in range(files)]
    weight_map = {key: names[i * files // len(tensors)] for i, key in enumerate(tensors)}
    for name in names:
        part = {k: v for k, v in tensors.items() if weight_map[k] == name}
        save_file(part, folder / name, metadata={"format": "pt"})
    size = sum(v.numel() * v.element_size() for v in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def shard(folder: Path, files: int = 3) -> Path:
    return write(folder, read(folder), files)


def rename(folder: Path, pattern: str, replacement: str) -> Path:
    """`re.sub` on every key; an error when no key changes."""
    tensors = read(folder)
    renamed = {re.sub(pattern, replacement, k): v for k, v in tensors.items()}
    if renamed.keys() == tensors.keys():
        raise ValueError(f"no key matches {pattern!r}")
    return write(folder, renamed)


def drop(folder: Path, pattern: str) -> list[str]:
    """Remove the keys that `re.search` finds; returns them."""
    tensors = read(folder)
    dropped = [k for k in tensors if re.search(pattern, k)]
    if not dropped:
        raise ValueError(f"no key matches {pattern!r}")
    write(folder, {k: v for k, v in tensors.items() if k not in dropped})
    return dropped


def change(folder: Path, key: str, value: Tensor | Callable[[Tensor], Tensor]) -> Path:
    """Set or add one tensor, or map the one that is there."""
    tensors = read(folder)
    tensors[key] = value(tensors[key]) if callable(value) else value
    return write(folder, tensors)


def truncate(folder: Path, file: str = "model.safetensors", keep: float = 0.5) -> Path:
    """Cut a file, as an interrupted download leaves it; returns the file."""
    path = folder / file
    os.truncate(path, int(path.stat().st_size * keep))
    return path


def set_config(folder: Path, **fields: Any) -> Path:
    """Change fields of config.json; the value `...` removes one."""
    config = json.loads((folder / "config.json").read_text()) | fields
    config = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder

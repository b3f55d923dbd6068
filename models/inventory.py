"""Every tensor that a checkpoint of a model has, and how much of it a rank holds. Nothing here imports torch.

What the layers of models/ say of themselves with their pieces is said here from the configuration alone, so that names
can be checked, and memory told, before anything heavy is loaded. tests/test_inventory.py holds the two together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lockstep.comm.shard import Range, Shard, shard_range
from lockstep.comm.strategy import Placement
from lockstep.models.config import GQA, MLA, Config, DeltaNet, Dense, Indexer, Layer, MoE

WIDE_BYTES = 4
SCALE_BYTES = 4


class Entry(NamedTuple):
    """A tensor, and this rank's part: `rows` of the first dimension (how many), `cols` of the last (which).

    A `wide` one is kept in float32 or wider, a `scalable` one may stay FP8. `mtp` is the first MTP block that needs it.
    """

    name: str
    shape: tuple[int, ...]
    rows: int
    cols: Range | None = None
    wide: bool = False
    scalable: bool = False
    mtp: int | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def size_here(self) -> int:
        width = self.shape[-1] if self.cols is None else self.cols[1] - self.cols[0]
        return self.rows * math.prod(self.shape[1:-1]) * (width if len(self.shape) > 1 else 1)

    def bytes_here(self, item_bytes: int) -> int:
        return self.size_here * (max(item_bytes, WIDE_BYTES) if self.wide else item_bytes)

    def scaled_bytes_here(self, block: int) -> int:
        """Of a scalable one that stays FP8 (models/fp8.py)."""
        first, last = self.cols or (0, self.shape[-1])
        return self.size_here + self.rows * -(-(first % block + last - first) // block) * SCALE_BYTES


def tensors(config: Config, placement: Placement, shard: Shard, num_mtp: int) -> Iterator[Entry]:
    """What the model needs with `num_mtp` of its MTP blocks, by key without prefix."""
    place = _Place(config.hidden, placement, shard)
    for entry in _decoder(config, place):
        name = config.checkpoint_name(entry.name)
        yield entry if name == entry.name else entry._replace(name=name)
    seen = set()
    for i, layer in enumerate(config.mtp[:num_mtp]):
        for entry in _mtp_block(f"mtp.{i}", layer, place):
            name = config.checkpoint_name(entry.name)
            if name not in seen:  # blocks may share what lies outside their decoder layer
                seen.add(name)
                yield entry._replace(name=name, mtp=i)


def whole(config: Config, num_mtp: int) -> Iterator[Entry]:
    """The same for a single rank: names and shapes do not depend on where a tensor lies."""
    return tensors(config, Placement("owned", "sliced", "sliced"), Shard(0, 1), num_mtp)


def optional(config: Config, num_mtp: int) -> dict[str, tuple[int, ...]]:
    """Tensors that a checkpoint may have, and the model shares where it has not: an MTP block's, a tied head."""
    names = [
        config.checkpoint_name(f"mtp.{i}.{part}.weight") for i in range(num_mtp) for part in ("embed_tokens", "head")
    ]
    return dict.fromkeys(names + ["lm_head.weight"] * config.tied, (config.vocab, config.hidden))


@dataclass(frozen=True)
class _Place:
    hidden: int
    placement: Placement
    shard: Shard

    def part(self, count: int, sliced: bool) -> Range:
        return self.shard.of(count) if sliced else (0, count)


def _decoder(config: Config, place: _Place) -> Iterator[Entry]:
    first, last = shard_range(config.vocab, place.shard.rank, place.shard.size)
    vocabulary = Entry("embed_tokens.weight", (config.vocab, config.hidden), last - first)
    yield vocabulary
    for i, layer in enumerate(config.layers):
        yield from _block(f"layers.{i}", layer, place)
    yield from _norm("norm", config.hidden)
    if not config.tied:
        yield vocabulary._replace(name="lm_head.weight")


def _mtp_block(at: str, layer: Layer, place: _Place) -> Iterator[Entry]:
    for name in ("enorm", "hnorm", "norm"):
        yield from _norm(f"{at}.{name}", place.hidden)
    yield from _linear(f"{at}.eh_proj", 2 * place.hidden, place.hidden)
    yield from _block(f"{at}.block", layer, place)


def _linear(
    at: str, inputs: int, outputs: int, *, bias: bool = False, rows: int | None = None, cols: Range | None = None
) -> Iterator[Entry]:
    here = outputs if rows is None else rows
    yield Entry(f"{at}.weight", (outputs, inputs), here, cols, scalable=True)
    if bias:
        yield Entry(f"{at}.bias", (outputs,), here)


def _norm(at: str, width: int) -> Iterator[Entry]:
    yield Entry(f"{at}.weight", (width,), width)


def _block(at: str, layer: Layer, place: _Place) -> Iterator[Entry]:
    yield from _norm(f"{at}.input_layernorm", place.hidden)
    yield from _norm(f"{at}.post_attention_layernorm", place.hidden)
    if isinstance(layer.mixer, MLA):
        yield from _mla(f"{at}.self_attn", layer.mixer, place)
    elif isinstance(layer.mixer, GQA):
        yield from _gqa(f"{at}.self_attn", layer.mixer, place)
    else:
        yield from _delta_net(f"{at}.linear_attn", layer.mixer, place)
    if isinstance(layer.ffn, Dense):
        part = place.part(layer.ffn.inter, place.placement.dense == "sliced")
        yield from _mlp(f"{at}.mlp", place.hidden, layer.ffn.inter, part)
    else:
        yield from _moe(f"{at}.mlp", layer.ffn, place)


def _mla(at: str, c: MLA, place: _Place) -> Iterator[Entry]:
    first, last = place.shard.of(c.heads)
    heads, key, up = last - first, c.nope + c.rope, c.nope + c.value
    if c.q_lora is None:
        yield from _linear(f"{at}.q_proj", place.hidden, c.heads * key, rows=heads * key)
    else:
        yield from _linear(f"{at}.q_a_proj", place.hidden, c.q_lora, bias=c.bias)
        yield from _norm(f"{at}.q_a_layernorm", c.q_lora)
        yield from _linear(f"{at}.q_b_proj", c.q_lora, c.heads * key, rows=heads * key)
        if c.indexer is not None:
            yield from _indexer(f"{at}.indexer", c.indexer, place.hidden, c.q_lora)
    yield from _linear(f"{at}.kv_a_proj_with_mqa", place.hidden, c.kv_lora + c.rope, bias=c.bias)
    yield from _norm(f"{at}.kv_a_layernorm", c.kv_lora)
    yield from _linear(f"{at}.kv_b_proj", c.kv_lora, c.heads * up, rows=heads * up)
    cols = first * c.value, last * c.value
    yield from _linear(f"{at}.o_proj", c.heads * c.value, place.hidden, bias=c.bias, cols=cols)


def _indexer(at: str, c: Indexer, hidden: int, q_lora: int) -> Iterator[Entry]:
    yield from _linear(f"{at}.wq_b", q_lora, c.heads * c.dim)
    yield from _linear(f"{at}.wk", hidden, c.dim)
    for name in ("weight", "bias"):
        yield Entry(f"{at}.k_norm.{name}", (c.dim,), c.dim)
    for entry in _linear(f"{at}.weights_proj", hidden, c.heads):
        yield entry._replace(wide=True)


def _gqa(at: str, c: GQA, place: _Place) -> Iterator[Entry]:
    heads, kv, d = place.shard.of(c.heads), place.shard.copy_of(c.kv_heads), c.head_dim
    query = 2 * d if c.gated else d
    for name, count, part, width in (
        ("q_proj", c.heads, heads, query),
        ("k_proj", c.kv_heads, kv, d),
        ("v_proj", c.kv_heads, kv, d),
    ):
        rows = (part[1] - part[0]) * width
        yield from _linear(f"{at}.{name}", place.hidden, count * width, bias=c.bias, rows=rows)
    cols = heads[0] * d, heads[1] * d
    yield from _linear(f"{at}.o_proj", c.heads * d, place.hidden, bias=c.bias and c.gated, cols=cols)
    if c.qk_norm:
        yield from _norm(f"{at}.q_norm", d)
        yield from _norm(f"{at}.k_norm", d)


def _delta_net(at: str, c: DeltaNet, place: _Place) -> Iterator[Entry]:
    first, last = place.shard.of(c.value_heads)
    keys, values = delta_heads(c, place.shard)
    key, value = keys * c.key_dim, values * c.value_dim
    all_key, all_value = c.key_heads * c.key_dim, c.value_heads * c.value_dim
    if c.packed:
        projections = [
            ("in_proj_qkvz", 2 * (all_key + all_value), 2 * (key + value)),
            ("in_proj_ba", 2 * c.value_heads, 2 * values),
        ]
    else:
        projections = [("in_proj_qkv", 2 * all_key + all_value, 2 * key + value), ("in_proj_z", all_value, value)]
        projections += [(name, c.value_heads, values) for name in ("in_proj_b", "in_proj_a")]
    for name, outputs, rows in projections:
        yield from _linear(f"{at}.{name}", place.hidden, outputs, rows=rows)
    yield Entry(f"{at}.conv1d.weight", (2 * all_key + all_value, 1, c.taps), 2 * key + value)
    for name in ("A_log", "dt_bias"):
        yield Entry(f"{at}.{name}", (c.value_heads,), values, wide=True)
    yield from _norm(f"{at}.norm", c.value_dim)
    yield from _linear(f"{at}.out_proj", all_value, place.hidden, cols=(first * c.value_dim, last * c.value_dim))


def _mlp(at: str, hidden: int, inter: int, part: Range) -> Iterator[Entry]:
    for name in ("gate_proj", "up_proj"):
        yield from _linear(f"{at}.{name}", hidden, inter, rows=part[1] - part[0])
    yield from _linear(f"{at}.down_proj", inter, hidden, cols=part)


def _moe(at: str, c: MoE, place: _Place) -> Iterator[Entry]:
    experts, owned = c.router.experts, place.placement.experts == "owned"
    yield Entry(f"{at}.gate.weight", (experts, place.hidden), experts, wide=True)
    if c.router.scoring == "sigmoid":
        yield Entry(f"{at}.gate.e_score_correction_bias", (experts,), experts, wide=True)
    here, part = place.part(experts, owned), place.part(c.inter, not owned)
    for expert in range(experts):
        columns = part if here[0] <= expert < here[1] else (0, 0)
        yield from _mlp(f"{at}.experts.{expert}", place.hidden, c.inter, columns)
    if c.shared_inter:
        part = place.part(c.shared_inter, place.placement.shared == "sliced")
        yield from _mlp(f"{at}.shared_experts", place.hidden, c.shared_inter, part)
    if c.shared_gate:
        yield from _linear(f"{at}.shared_expert_gate", place.hidden, 1)


def cache_bytes(config: Config, shard: Shard, num_mtp: int, item_bytes: int) -> tuple[int, int]:
    """What a rank remembers of a sequence: bytes per token, and bytes that do not grow."""
    per_token, fixed = 0, 0
    for layer in (*config.layers, *config.mtp[:num_mtp]):
        c = layer.mixer
        if isinstance(c, MLA):
            per_token += (c.kv_lora + c.rope + (c.indexer.dim if c.indexer else 0)) * item_bytes
        elif isinstance(c, GQA):
            first, last = shard.copy_of(c.kv_heads)
            per_token += 2 * (last - first) * c.head_dim * item_bytes
        else:
            keys, values = delta_heads(c, shard)
            state = values * c.key_dim * c.value_dim * max(item_bytes, WIDE_BYTES)
            fixed += state + (c.taps - 1) * (2 * keys * c.key_dim + values * c.value_dim) * item_bytes
    return per_token, fixed


def delta_heads(c: DeltaNet, shard: Shard) -> tuple[int, int]:
    """Key heads and value heads of a delta net on this rank; ranks with few value heads share a key head."""
    first, last = shard.of(c.value_heads)
    per = c.value_heads // c.key_heads
    return -(-last // per) - first // per, last - first

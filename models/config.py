"""What a model is, as frozen values: a family translates a Hugging Face config.json into these, once.

Nothing here imports torch, so bad input is refused before anything heavy is loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lockstep.comm.errors import UsageError
from lockstep.comm.strategy import Placement


@dataclass(frozen=True)
class Yarn:
    """YaRN context extension (Peng et al., 2023) as DeepSeek parametrises it."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    mscale: float
    mscale_all_dim: float
    attention_factor: float | None
    truncate: bool = True

    def table_scale(self) -> float:
        """What cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    def softmax_scale(self) -> float:
        """What MLA multiplies its softmax scale by."""
        return _mscale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first `dim` features of a head; `interleaved` pairs (0, 1), else (0, dim / 2)."""

    dim: int
    theta: float
    interleaved: bool
    yarn: Yarn | None = None


@dataclass(frozen=True)
class Indexer:
    """Which `top_k` keys a query attends to: the best by `heads` small heads of width `dim` (DeepSeek-V3.2, 2025).

    `interleaved` is how the rotary embedding pairs the features of its keys, which may differ from the attention's.
    """

    heads: int
    dim: int
    top_k: int
    interleaved: bool


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention (DeepSeek-V2, 2024): keys and values live in one compressed row per token.

    Without an indexer a layer attends to what the last layer before it that has one selected; to all keys if none has.
    """

    heads: int
    q_lora: int | None
    kv_lora: int
    nope: int
    rope: int
    value: int
    bias: bool
    norm_eps: float
    softmax_scale: float
    indexer: Indexer | None = None


@dataclass(frozen=True)
class GQA:
    """Grouped-query attention (Ainslie et al., 2023) with optional per-head query and key norms.

    A `gated` one multiplies its output by the sigmoid of a gate, which q_proj gives beside each head's query.
    """

    heads: int
    kv_heads: int
    head_dim: int
    bias: bool
    qk_norm: bool
    gated: bool = False


@dataclass(frozen=True)
class DeltaNet:
    """Gated delta net (Yang et al., 2024): a causal convolution of `taps` rows, and a state per value head.

    Each key head serves value_heads / key_heads consecutive value heads. A `packed` one is stored with all projections
    of a key head side by side (in_proj_qkvz, in_proj_ba), another as in_proj_qkv, in_proj_z, in_proj_b, in_proj_a.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    packed: bool


@dataclass(frozen=True)
class Router:
    """Which experts a row goes to: scores, a selection bias, groups of experts, and the weights' scaling.

    `scoring` is sigmoid, or softmax, which has no selection bias.
    """

    experts: int
    top_k: int
    groups: int
    top_groups: int
    normalise: bool
    scale: float
    scoring: str = "sigmoid"


@dataclass(frozen=True)
class MoE:
    """Routed experts of width `inter`, and one shared expert of width `shared_inter` (0: none).

    With `shared_gate` each row has its own weight for the shared expert, a sigmoid.
    """

    router: Router
    inter: int
    shared_inter: int
    shared_gate: bool = False


@dataclass(frozen=True)
class Dense:
    """One gated MLP of width `inter`."""

    inter: int


@dataclass(frozen=True)
class Layer:
    mixer: MLA | GQA | DeltaNet
    ffn: MoE | Dense


@dataclass(frozen=True)
class Config:
    """A model, whatever its family. `mtp` are the decoder layers of its MTP blocks.

    `mtp_names` maps the names of an MTP block's parts here to checkpoint keys, `{i}` being the block's number and
    `{n}` that number counted on from the model's own layers. `ignored` are key prefixes that hold nothing we use, and
    `renamed` parts of our names that the checkpoint spells otherwise. Norms are `zero_centred` where a stored weight w
    stands for 1 + w.
    With `shares_draft_selection` the rows that recycle a draft step attend to the keys that draft step 0 selected.
    `fp8_block` is how many rows and columns of an FP8 tensor share a scale. A family is released with `stacked` experts
    where the file has one tensor for all of a layer (both forms are read).
    """

    family: str
    hidden: int
    vocab: int
    max_position: int
    eps: float
    rope: Rope
    tied: bool
    dtype: str
    layers: tuple[Layer, ...]
    mtp: tuple[Layer, ...]
    mtp_names: tuple[tuple[str, str], ...]
    ignored: tuple[str, ...] = ()
    shares_draft_selection: bool = False
    fp8_block: tuple[int, int] | None = None
    stacked: bool = False
    renamed: tuple[tuple[str, str], ...] = ()
    zero_centred: bool = False

    def checkpoint_name(self, name: str) -> str:
        """The key, without its `model.` prefix, under which a checkpoint of this family keeps our parameter `name`."""
        for ours, theirs in self.renamed:
            name = name.replace(ours, theirs)
        if not name.startswith("mtp."):
            return name
        number, _, rest = name.removeprefix("mtp.").partition(".")
        for ours, theirs in self.mtp_names:
            if rest.startswith(ours):
                place = theirs.format(i=number, n=len(self.layers) + int(number))
                return place + rest.removeprefix(ours)
        raise KeyError(name)


def check(config: Config, tp: int, placement: Placement, draft_tokens: int) -> None:
    """Refuse what cannot be split over `tp` ranks, or drafted without an MTP block. Raises UsageError."""
    if draft_tokens and not config.mtp:
        raise UsageError(f"this {config.family} checkpoint has no MTP layers to draft with: use --draft-tokens 0")
    for layer in (*config.layers, *config.mtp):
        mixer, ffn = layer.mixer, layer.ffn
        if isinstance(mixer, DeltaNet):
            _divides(tp, mixer.value_heads, "value heads of a delta net")
            _groups(tp, mixer.value_heads, mixer.key_heads, "key heads of a delta net")
        else:
            _divides(tp, mixer.heads, "attention heads")
        if isinstance(mixer, GQA):
            _groups(tp, mixer.heads, mixer.kv_heads, "key-value heads")
        if isinstance(ffn, Dense):
            _divides(tp if placement.dense == "sliced" else 1, ffn.inter, "columns of the dense MLP")
            continue
        if placement.experts == "owned":
            _divides(tp, ffn.router.experts, "experts")
        else:
            _divides(tp, ffn.inter, "columns of an expert")
        _divides(tp if placement.shared == "sliced" else 1, ffn.shared_inter, "columns of the shared expert")


def _divides(tp: int, count: int, what: str) -> None:
    if count % tp:
        raise UsageError(f"--tp {tp} does not divide the {count} {what}: use one of {_list(_divisors(count))}")


def _groups(tp: int, heads: int, groups: int, what: str) -> None:
    """Heads that share one of `groups` stay together, or each of their ranks holds a copy of what they share."""
    if tp % groups and groups % tp:
        usable = [p for p in _divisors(heads) if not (p % groups and groups % p)]
        raise UsageError(
            f"--tp {tp} neither divides nor is a multiple of the {groups} {what}: use one of {_list(usable)}"
        )


def _divisors(count: int) -> list[int]:
    return [p for p in range(1, min(count, 64) + 1) if count % p == 0]


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))

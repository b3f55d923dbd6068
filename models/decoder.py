"""The decoder block, which is also the body of an MTP block, and the exit from a stack of blocks.

A block's input is a pair: the last block's output, and the residual it has not been added to yet. The residual's
layout is the strategy's choice at each boundary; nothing here asks which strategy it is.
T tokens, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from lockstep.comm.errors import LayoutError
from lockstep.comm.layout import PARTIAL, REPLICATED, SHARDED, Activation
from lockstep.comm.strategy import Placement
from lockstep.models import config as cfg
from lockstep.models.cache import MixerCache
from lockstep.models.config import Config, Layer, MoE
from lockstep.models.delta_net import GatedDeltaNet
from lockstep.models.gqa import GroupedQueryAttention
from lockstep.models.mla import LatentAttention
from lockstep.models.moe import MLP, MoEFFN
from lockstep.models.step import Step
from lockstep.models.weights import RMSNorm, Shard

Mixer = LatentAttention | GroupedQueryAttention | GatedDeltaNet


@dataclass(frozen=True)
class Stream:
    """The residual stream between blocks: `residual` + `output` is its value; the first block has no output yet."""

    residual: Activation
    output: Activation | None = None

    def total(self, at: str) -> Activation:
        return self.residual if self.output is None else self.output.add(self.residual, at)


class Block(nn.Module):
    """Mixer and feed-forward network, each behind its norm."""

    def __init__(self, name: str, layer: Layer, config: Config, placement: Placement, shard: Shard) -> None:
        super().__init__()
        self.name = name
        self.input_layernorm = RMSNorm(config.hidden, config.eps, config.zero_centred)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.eps, config.zero_centred)
        self.mixer_name = "linear_attn" if isinstance(layer.mixer, cfg.DeltaNet) else "self_attn"
        self.add_module(self.mixer_name, make_mixer(layer.mixer, config, shard))
        if isinstance(layer.ffn, MoE):
            self.mlp: MoEFFN | MLP = MoEFFN(layer.ffn, config.hidden, placement, shard)
        else:
            inter = layer.ffn.inter
            self.mlp = MLP(config.hidden, inter, shard.of(inter) if placement.dense == "sliced" else None)

    @property
    def mixer(self) -> Mixer:
        """Under the name that it has in a checkpoint."""
        found: Mixer = getattr(self, self.mixer_name)
        return found

    def new_cache(self, batch: int, slots: int) -> MixerCache:
        return self.mixer.new_cache(batch, slots)

    def forward(self, x: Stream, step: Step, cache: MixerCache) -> Stream:
        at = self.name
        residual = x.total(f"{at}.input_layernorm")
        h = residual.rowwise(self.input_layernorm, f"{at}.input_layernorm")
        h = step.convert(h, REPLICATED, f"{at}.attention.in")
        h = Activation(self.mixer(h.data, step.rows, cache), PARTIAL, h.tokens)
        h, residual = step.convert_pair(h, residual, step.mid, f"{at}.attention.out")

        residual = h.add(residual, f"{at}.post_attention_layernorm")
        h = residual.rowwise(self.post_attention_layernorm, f"{at}.post_attention_layernorm")
        h = self.mlp.ffn(step.convert(h, step.ffn_in, f"{at}.ffn.in"), step, f"{at}.ffn")
        h, residual = step.convert_pair(h, residual, step.stream, f"{at}.ffn.out")
        return Stream(residual, h)


def make_mixer(mixer: cfg.MLA | cfg.GQA | cfg.DeltaNet, config: Config, shard: Shard) -> Mixer:
    if isinstance(mixer, cfg.MLA):
        return LatentAttention(mixer, config.hidden, config.rope.interleaved, shard)
    if isinstance(mixer, cfg.GQA):
        return GroupedQueryAttention(mixer, config.hidden, config.eps, config.zero_centred, shard)
    return GatedDeltaNet(mixer, config.hidden, config.eps, shard)


@dataclass(frozen=True)
class Exit:
    """Full rows [T, H] after the final norm, for the head and for recycling; `raw` is before it, where it exists."""

    normed: Activation
    raw: Activation | None

    def rows(self, at: str) -> Tensor:
        """The normed rows [T, H], all of them: what a head takes, and what is recycled after the norm."""
        return self.normed.expect(REPLICATED, at)

    def raw_rows(self, at: str) -> Tensor:
        """The rows [T, H] from before the norm, which an exit that moves only normed rows does not have."""
        if self.raw is None:
            raise LayoutError(f"{at} recycles rows from before the norm, which this strategy's exit does not move")
        return self.raw.expect(REPLICATED, at)


def leave(x: Stream, norm: RMSNorm, step: Step, at: str) -> Exit:
    """From the stream to full normed rows, by the strategy's exit (DESIGN section 3).

    On a SHARDED stream gather-pair moves T x 2H, the others T x H; on a REPLICATED one nothing is left to move.
    """
    exit_name = step.strategy.exit
    if step.stream is SHARDED and exit_name == "gather-norm":
        normed = x.total(at).rowwise(norm, at)
        return Exit(step.convert(normed, REPLICATED, at), None)
    if step.stream is SHARDED and exit_name == "gather-pair" and x.output is not None:
        output, residual = step.convert_pair(x.output, x.residual, REPLICATED, at)
        raw = output.add(residual, at)
    else:
        raw = step.convert(x.total(at), REPLICATED, at)
    return Exit(raw.rowwise(norm, at), raw)

"""The target model and its MTP blocks, over shared layers.

T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from lockstep.comm.layout import PARTIAL, REPLICATED, Activation
from lockstep.comm.strategy import Placement
from lockstep.models.cache import Cache
from lockstep.models.config import Config, Layer
from lockstep.models.decoder import Block, Exit, Stream, leave
from lockstep.models.rope import RotaryTable
from lockstep.models.step import Step
from lockstep.models.weights import Linear, Piece, RMSNorm, Shard, Vocabulary


class Model(nn.Module):
    """A decoder and the first `num_mtp` of its MTP blocks, holding this rank's part of the weights."""

    def __init__(self, config: Config, placement: Placement, shard: Shard, num_mtp: int) -> None:
        super().__init__()
        self.config, self.placement = config, placement
        self.embed_tokens = Vocabulary(config.vocab, config.hidden, shard)
        self.layers = nn.ModuleList(
            Block(f"layers.{i}", layer, config, placement, shard) for i, layer in enumerate(config.layers)
        )
        self.norm = RMSNorm(config.hidden, config.eps, config.zero_centred)
        self.lm_head = self.embed_tokens if config.tied else Vocabulary(config.vocab, config.hidden, shard)
        self.mtp = nn.ModuleList(
            MTP(f"mtp.{i}", layer, config, placement, shard) for i, layer in enumerate(config.mtp[:num_mtp])
        )
        for block in self.mtp[1:]:
            block.share(self.mtp[0], config)  # type: ignore[operator]
        self.rotary: RotaryTable | None = None

    def new_cache(self, batch: int, slots: int) -> Cache:
        """Memory of the decoder for `batch` sequences of up to `slots` tokens."""
        return Cache([block.new_cache(batch, slots) for block in self.layers], batch)  # type: ignore[operator]

    def turn(self, step: Step, dtype: torch.dtype) -> None:
        """Give the rows their rotary cos and sin, once for all layers."""
        if self.rotary is None:
            self.rotary = RotaryTable(self.config.rope, step.rows.device)
        step.rows.cos, step.rows.sin = self.rotary(step.rows.positions, dtype)

    def forward(self, tokens: Tensor, step: Step, cache: Cache) -> Exit:
        """[T] ids -> [T, H] rows after the final norm. Writes the rows to the cache and counts them there."""
        self._check(step)
        x = Stream(embedded(self.embed_tokens, tokens, step, "embed"))
        self.turn(step, x.residual.data.dtype)
        for block, memory in zip(self.layers, cache.layers, strict=True):
            x = block(x, step, memory)
        cache.extend(step.rows)
        return leave(x, self.norm, step, "exit")

    def _check(self, step: Step) -> None:
        if step.strategy.placement != self.placement:
            raise ValueError(f"weights were loaded as {self.placement}, not as {step.strategy.placement}")

    def draft(self, index: int, tokens: Tensor, hidden: Activation, step: Step, cache: Cache) -> Exit:
        """One pass of MTP block `index`: row i joins token i [T] with the hidden [T, H] that preceded it."""
        self._check(step)
        block: MTP = self.mtp[index]  # type: ignore[assignment]
        self.turn(step, hidden.data.dtype)
        out: Exit = block(tokens, hidden, self.embed_tokens, step, cache)
        return out

    def draft_head(self, index: int) -> Vocabulary:
        block: MTP = self.mtp[index]  # type: ignore[assignment]
        return block.head if block.head is not None else self.lm_head

    def placed_pieces(self) -> Iterator[tuple[str, nn.Module, Piece]]:
        """Every region of every stored tensor that this rank holds: (key in the checkpoint, layer, piece)."""
        seen: set[int] = set()
        for name, layer in self.named_modules():
            if hasattr(layer, "pieces") and id(layer) not in seen:
                seen.add(id(layer))
                for piece in layer.pieces():
                    yield self.config.checkpoint_name(f"{name}.{piece.name}"), layer, piece


class MTP(nn.Module):
    """A multi-token-prediction block (DeepSeek-V3, section 2.2): drafts the token after next from a hidden row.

    Row i is proj([norm_e(embed(token i+1)), norm_h(hidden i)]) through one decoder block and the head's norm, once:
    the normed row feeds the head and is what the next draft step recycles.
    """

    def __init__(self, name: str, layer: Layer, config: Config, placement: Placement, shard: Shard) -> None:
        super().__init__()
        self.name = name
        self.enorm = RMSNorm(config.hidden, config.eps, config.zero_centred)
        self.hnorm = RMSNorm(config.hidden, config.eps, config.zero_centred)
        self.eh_proj = Linear(2 * config.hidden, config.hidden)
        self.block = Block(name, layer, config, placement, shard)
        self.norm = RMSNorm(config.hidden, config.eps, config.zero_centred)
        # Present only where the checkpoint has its own, different from the target's (models/load.py).
        self.embed_tokens: Vocabulary | None = None
        self.head: Vocabulary | None = None

    def share(self, first: MTP, config: Config) -> None:
        """Have the first block's layers for what the checkpoint stores once for all blocks."""
        for part in ("enorm", "hnorm", "eh_proj", "norm"):
            ours, theirs = (config.checkpoint_name(f"{block.name}.{part}.weight") for block in (self, first))
            if ours == theirs:
                setattr(self, part, getattr(first, part))

    def new_cache(self, batch: int, slots: int) -> Cache:
        return Cache([self.block.new_cache(batch, slots)], batch)

    def forward(self, tokens: Tensor, hidden: Activation, embedding: Vocabulary, step: Step, cache: Cache) -> Exit:
        at = self.name
        e = embedded(self.embed_tokens or embedding, tokens, step, f"{at}.embed")
        hidden.expect(REPLICATED, f"{at}.hidden")
        h = step.convert(hidden, step.stream, f"{at}.hidden")
        e, h = e.rowwise(self.enorm, f"{at}.enorm"), h.rowwise(self.hnorm, f"{at}.hnorm")
        x = e.beside(h, f"{at}.eh_proj").rowwise(self.eh_proj, f"{at}.eh_proj")
        out = self.block(Stream(x), step, cache.layers[0])
        cache.extend(step.rows)
        return leave(out, self.norm, step, f"{at}.exit")


def embedded(table: Vocabulary, tokens: Tensor, step: Step, at: str) -> Activation:
    """[T] ids -> [T, H] in the stream's layout. Each rank has some of the vocabulary, so the rows start PARTIAL."""
    return step.convert(Activation(table.embed(tokens), PARTIAL, tokens.shape[0]), step.stream, at)

"""Gated delta net (Yang et al., 2024) as in Qwen3-Next and Qwen3.5, and its memory: a state and the last inputs.

T rows, H hidden, B sequences, Q rows of a sequence; G key heads here, V value heads here, K and D their features;
C = 2GK + VD channels here of a convolution with W taps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.models.config import DeltaNet
from lockstep.models.delta_rule import CHUNK, Written, delta_rule, write
from lockstep.models.rows import Rows
from lockstep.models.weights import Linear, Piece, Range, RMSNorm, Shard, wider


class GatedDeltaNet(nn.Module):
    """[T, H] rows -> [T, H], this rank's value heads' part of a sum over ranks."""

    # Kept in float32 or wider whatever the model's dtype: they go through exponentials.
    wide_parameters = ("A_log", "dt_bias")

    def __init__(self, config: DeltaNet, hidden: int, eps: float, shard: Shard) -> None:
        super().__init__()
        self.config = c = config
        per = c.value_heads // c.key_heads
        self.values = values = shard.of(c.value_heads)
        # With fewer key heads than ranks each is held by several, each with some of its value heads.
        keys = (values[0] // per, -(-values[1] // per))
        self.num_keys, self.num_values = keys[1] - keys[0], values[1] - values[0]
        key, value = (keys[0] * c.key_dim, keys[1] * c.key_dim), (values[0] * c.value_dim, values[1] * c.value_dim)
        all_keys, all_values = c.key_heads * c.key_dim, c.value_heads * c.value_dim
        channels = [key, _moved(key, all_keys), _moved(value, 2 * all_keys)]
        if c.packed:
            # A key head's rows lie together in the checkpoint; here they come out as from the separate projections.
            self.in_proj_qkvz = Linear(
                hidden,
                2 * all_keys + 2 * all_values,
                rows=_from_packed(keys, values, per, [c.key_dim, c.key_dim], c.value_dim),
            )
            self.in_proj_ba = Linear(hidden, 2 * c.value_heads, rows=_from_packed(keys, values, per, [], 1))
        else:
            self.in_proj_qkv = Linear(hidden, 2 * all_keys + all_values, rows=channels)
            self.in_proj_z = Linear(hidden, all_values, rows=[value])
            self.in_proj_b = Linear(hidden, c.value_heads, rows=[values])
            self.in_proj_a = Linear(hidden, c.value_heads, rows=[values])
        self.conv1d = CausalConvolution(2 * all_keys + all_values, c.taps, channels)
        self.A_log = nn.Parameter(torch.empty(self.num_values), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(self.num_values), requires_grad=False)
        self.norm = RMSNorm(c.value_dim, eps)
        self.out_proj = Linear(all_values, hidden, cols=value)

    def pieces(self) -> Iterator[Piece]:
        for name in self.wide_parameters:
            yield Piece(name, name, (self.config.value_heads,), (slice(*self.values),))

    def new_cache(self, batch: int, slots: int) -> DeltaNetCache:
        c, weight = self.config, self.conv1d.weight
        state = torch.zeros(
            batch, self.num_values, c.key_dim, c.value_dim, dtype=wider(weight.dtype), device=weight.device
        )
        return DeltaNetCache(state, weight.new_zeros(batch, c.taps - 1, weight.shape[0]))

    def forward(self, x: Tensor, rows: Rows, cache: DeltaNetCache) -> Tensor:
        if rows.total == 0:
            return torch.zeros_like(x)
        qkv, z, b, a = self._project(x)
        wide = wider(x.dtype)
        log_decay = -self.A_log.exp() * F.softplus(a.to(wide) + self.dt_bias)
        beta = b.to(wide).sigmoid()

        state, inputs = cache.before(rows)
        inputs = torch.cat((inputs, rows.fold(qkv)), 1)  # [B, W - 1 + Q, C]
        query, key, value = self._heads(self.conv1d(inputs).to(wide))
        gates = (rows.fold(log_decay).transpose(1, 2), rows.fold(beta).transpose(1, 2))
        out, written = delta_rule(state, query, key, value, *gates)
        cache.after(Recent(rows, state, written, inputs))

        out = self.norm(rows.unfold(out.transpose(1, 2)).to(x.dtype))  # [T, V, D]
        out = out * F.silu(z.to(wide))
        y: Tensor = self.out_proj(out.to(x.dtype).flatten(1))
        return y

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The convolution's inputs [T, C], the output gate [T, V, D], and the rows' two gates [T, V]."""
        c, v = self.config, self.num_values
        if c.packed:
            qkv, z = self.in_proj_qkvz(x).split((self.conv1d.weight.shape[0], v * c.value_dim), -1)
            b, a = self.in_proj_ba(x).chunk(2, -1)
        else:
            qkv, z, b, a = self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)
        return qkv, z.unflatten(-1, (v, -1)), b, a

    def _heads(self, channels: Tensor) -> list[Tensor]:
        """[B, Q, C] -> queries, keys [B, V, Q, K] of length 1 (the queries also scaled), and values [B, V, Q, D]."""
        c, g, v = self.config, self.num_keys, self.num_values
        query, key, value = channels.split((g * c.key_dim, g * c.key_dim, v * c.value_dim), -1)
        query = _unit(query.unflatten(-1, (g, -1))) * c.key_dim**-0.5
        key = _unit(key.unflatten(-1, (g, -1)))
        heads = (query.repeat_interleave(v // g, 2), key.repeat_interleave(v // g, 2), value.unflatten(-1, (v, -1)))
        return [x.transpose(1, 2) for x in heads]


class CausalConvolution(nn.Module):
    """Each channel's sum over its last W inputs, through SiLU: [B, W - 1 + Q, C] -> [B, Q, C]."""

    def __init__(self, channels: int, taps: int, rows: Sequence[Range]) -> None:
        super().__init__()
        self.channels, self.rows = channels, tuple(rows)
        here = sum(b - a for a, b in rows)
        self.weight = nn.Parameter(torch.empty(here, 1, taps), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        taps, wide = self.weight.shape[2], wider(inputs.dtype)
        count = inputs.shape[1] - taps + 1
        weight = self.weight[:, 0].to(wide)
        out = inputs[:, :count] * weight[:, 0]
        for i in range(1, taps):
            out = out + inputs[:, i : i + count] * weight[:, i]
        return F.silu(out).to(inputs.dtype)

    def pieces(self) -> Iterator[Piece]:
        shape = (self.channels, 1, self.weight.shape[2])
        done = 0
        for a, b in self.rows:
            yield Piece("weight", "weight", shape, (slice(a, b),), (slice(done, done + b - a),))
            done += b - a


@dataclass
class Recent:
    """The rows of the last forward, which may still be forgotten: the state is the one before them."""

    rows: Rows
    state: Tensor  # [B, V, K, D], of the sequences that have rows
    written: Written
    inputs: Tensor  # [B, W - 1 + Q, C]


class DeltaNetCache:
    """A state [B, V, K, D] and the last inputs [B, W - 1, C] of each sequence, which both lag behind the last forward.

    The rows of one forward are written to the state when the next one begins, and only those that were kept: going back
    to any of them costs nothing. After a forward of more than one chunk all its rows are written at once.
    """

    def __init__(self, state: Tensor, inputs: Tensor) -> None:
        self.state, self.inputs = state, inputs
        self.lengths = [0] * state.shape[0]
        self.recent: Recent | None = None

    def before(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """State and last inputs of the sequences that have rows."""
        if rows.starts != self.lengths:
            raise ValueError(
                f"rows that begin at {rows.starts} cannot follow {self.lengths} rows in a delta net's state"
            )
        self._settle(rows.first_slots)
        if len(rows.present) == len(self.lengths):
            return self.state, self.inputs
        return self.state[rows.present], self.inputs[rows.present]

    def after(self, recent: Recent) -> None:
        """Remember what a forward did."""
        self.recent = recent
        self.lengths = [recent.rows.length(b) for b in range(len(self.lengths))]
        if max(recent.rows.counts) > CHUNK:
            self.settle()

    def keep(self, lengths: Sequence[int]) -> None:
        for b, (kept, held) in enumerate(zip(lengths, self.lengths, strict=True)):
            if kept != held and not (self.recent and self.recent.rows.starts[b] <= kept < held):
                raise ValueError(
                    f"sequence {b} has {held} rows in a delta net's state and cannot go back to {kept}: "
                    "only rows of the last forward, of one chunk, can be forgotten"
                )
        self.lengths = list(lengths)

    def select(self, sequences: Tensor) -> None:
        self.settle()
        self.state, self.inputs = self.state[sequences], self.inputs[sequences]
        self.lengths = [self.lengths[b] for b in sequences.tolist()]

    def num_bytes(self) -> int:
        tensors = [self.state, self.inputs, *([self.recent.inputs] if self.recent else [])]
        written = self.recent.written.num_bytes() if self.recent else 0
        return sum(t.numel() * t.element_size() for t in tensors) + written

    def settle(self) -> None:
        """Write the rows that were kept."""
        self._settle(torch.tensor(self.lengths).to(self.state.device))

    def _settle(self, lengths: Tensor) -> None:
        recent, self.recent = self.recent, None
        if recent is None:
            return
        counts = lengths - recent.rows.first_slots
        everyone = recent.state is self.state
        present = slice(None) if everyone else recent.rows.present
        counts = counts[present]
        write(recent.state, recent.written, counts)
        last = counts[:, None] + torch.arange(self.inputs.shape[1], device=counts.device)
        inputs = recent.inputs.gather(1, last[..., None].expand(-1, -1, self.inputs.shape[2]))
        if everyone:
            self.inputs = inputs
        else:
            self.state[present], self.inputs[present] = recent.state, inputs


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _moved(part: Range, by: int) -> Range:
    return part[0] + by, part[1] + by


def _from_packed(keys: Range, values: Range, per: int, key_widths: list[int], value_width: int) -> list[Range]:
    """Rows of a packed projection by kind instead of by key head.

    A key head has a block of each of `key_widths`, then two blocks of `per` value heads of `value_width`.
    """
    height = sum(key_widths) + 2 * per * value_width
    blocks: list[list[Range]] = [[] for _ in range(len(key_widths) + 2)]
    for head in range(*keys):
        at = head * height
        for kind, width in enumerate(key_widths):
            blocks[kind].append((at, at + width))
            at += width
        first, last = max(values[0] - head * per, 0), min(values[1] - head * per, per)
        for kind in (-2, -1):
            blocks[kind].append((at + first * value_width, at + last * value_width))
            at += per * value_width
    return [part for kind in blocks for part in kind]

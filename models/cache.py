"""What a model remembers of each sequence. `keep` forgets the rows that were drafted and not accepted.

B sequences, C slots, G key-value heads here, K key features, D value features.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lockstep.models.rows import Rows


class MixerCache(Protocol):
    """One layer's memory. The engine never asks which kind it is."""

    def keep(self, lengths: Sequence[int]) -> None:
        """Forget everything past the first `lengths[b]` rows of each sequence b."""

    def select(self, sequences: Tensor) -> None:
        """Keep only these sequences, in this order."""

    def num_bytes(self) -> int: ...


class KVCache:
    """Keys and values by slot. With `values` None (MLA) a row's value is the first part of its key.

    `index` holds the keys by which an indexer selects, where the layer has one.
    """

    def __init__(
        self,
        batch: int,
        slots: int,
        heads: int,
        key: int,
        value: int | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        index: KVCache | None = None,
    ) -> None:
        self.index = index
        self.keys = torch.zeros(batch, heads, slots, key, dtype=dtype, device=device)
        self.own_values = None if value is None else torch.zeros(batch, heads, slots, value, dtype=dtype, device=device)

    def write(self, rows: Rows, keys: Tensor, values: Tensor | None) -> None:
        """Store [T, G, K] and [T, G, D] at the rows' slots."""
        self.keys[rows.sequence, :, rows.slots] = keys
        if self.own_values is not None and values is not None:
            self.own_values[rows.sequence, :, rows.slots] = values

    def first(self, sequences: slice, count: int) -> tuple[Tensor, Tensor]:
        """The first `count` slots of each sequence: keys [B, G, count, K] and values."""
        keys = self.keys[sequences, :, :count]
        return keys, keys if self.own_values is None else self.own_values[sequences, :, :count]

    def at(self, sequences: slice, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The slots [B, Q, N] of Q rows of each sequence: keys [B * Q, G, N, K] and values. Slot -1 gives any."""
        numbers = torch.arange(self.keys.shape[0], device=slots.device)[sequences, None, None]
        slots = slots.clamp(min=0)
        keys = self.keys[numbers, :, slots].flatten(0, 1).transpose(1, 2)
        if self.own_values is None:
            return keys, keys
        return keys, self.own_values[numbers, :, slots].flatten(0, 1).transpose(1, 2)

    def keep(self, lengths: Sequence[int]) -> None:
        """Nothing to do: no row sees a slot past its own, and new rows overwrite the forgotten slots first."""

    def select(self, sequences: Tensor) -> None:
        self.keys = self.keys[sequences]
        if self.own_values is not None:
            self.own_values = self.own_values[sequences]
        if self.index is not None:
            self.index.select(sequences)

    def num_bytes(self) -> int:
        own = sum(t.numel() * t.element_size() for t in (self.keys, self.own_values) if t is not None)
        return own + (self.index.num_bytes() if self.index is not None else 0)


class Cache:
    """The memories of a stack of layers, and how many rows of each sequence they hold."""

    def __init__(self, layers: Iterable[MixerCache], batch: int) -> None:
        self.layers = list(layers)
        self.lengths = [0] * batch

    def rows(self, counts: Sequence[int], device: torch.device, shift: Sequence[int] | int = 0) -> Rows:
        """The next `counts[b]` rows of each sequence."""
        return Rows(counts, self.lengths, device, shift)

    def extend(self, rows: Rows) -> None:
        """Count rows that a forward has written."""
        self.lengths = [rows.length(b) for b in range(len(self.lengths))]

    def keep(self, lengths: Sequence[int]) -> None:
        """Forget all but the first `lengths[b]` rows of each sequence."""
        for b, (kept, held) in enumerate(zip(lengths, self.lengths, strict=True)):
            if not 0 <= kept <= held:
                raise ValueError(f"sequence {b} cannot keep {kept} of {held} cached rows")
        for layer in self.layers:
            layer.keep(lengths)
        self.lengths = list(lengths)

    def select(self, sequences: Sequence[int], device: torch.device) -> None:
        """Keep only these sequences, in this order."""
        index = torch.tensor(sequences, dtype=torch.long).to(device)
        for layer in self.layers:
            layer.select(index)
        self.lengths = [self.lengths[b] for b in sequences]

    def num_bytes(self) -> int:
        return sum(layer.num_bytes() for layer in self.layers)

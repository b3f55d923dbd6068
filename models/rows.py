"""The rows of one forward: which sequence, position and cache slot each belongs to.

T rows in all, B sequences, sequence-major: all rows of sequence 0, then of sequence 1, and so on; a sequence may have
none. Built on the host from integers that every rank knows; nothing is read back from a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Selection:
    """The cache slots [T, K] that each row attends to, -1 for none. A `final` one stands: no layer replaces it."""

    slots: Tensor
    final: bool = False


class Rows:
    """`counts[b]` new rows of sequence b, the first at cache slot `starts[b]`.

    A row's position (for RoPE) is its slot plus `shift[b]`; a row sees the slots of its sequence up to its own.
    """

    def __init__(
        self, counts: Sequence[int], starts: Sequence[int], device: torch.device, shift: Sequence[int] | int = 0
    ) -> None:
        self.counts, self.starts, self.device = list(counts), list(starts), device
        self.total = sum(self.counts)
        shifts = [shift] * len(self.counts) if isinstance(shift, int) else list(shift)
        sequence: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        for b, (count, start) in enumerate(zip(self.counts, self.starts, strict=True)):
            sequence += [b] * count
            slots += range(start, start + count)
            positions += range(start + shifts[b], start + shifts[b] + count)
        packed = torch.tensor([sequence, slots, positions], dtype=torch.long).to(device)
        self.sequence, self.slots, self.positions = packed
        self.cos: Tensor | None = None
        self.sin: Tensor | None = None
        # What each row attends to, where not everything: a layer with an indexer sets it for itself and those after it.
        self.selection: Selection | None = None

    @property
    def uniform(self) -> bool:
        """Whether every sequence has the same number of rows, so that they fold into [B, rows]."""
        return len(set(self.counts)) == 1

    def spans(self) -> list[tuple[int, int, int]]:
        """(sequence, first row, past-the-last row) of each sequence that has rows."""
        out, row = [], 0
        for b, count in enumerate(self.counts):
            if count:
                out.append((b, row, row + count))
            row += count
        return out

    @cached_property
    def first_slots(self) -> Tensor:
        """`starts` [B] on the device."""
        return torch.tensor(self.starts, dtype=torch.long).to(self.device)

    @cached_property
    def present(self) -> list[int]:
        """The sequences that have rows."""
        return [b for b, count in enumerate(self.counts) if count]

    @cached_property
    def places(self) -> Tensor | None:
        """Each row's place [T] in what `fold` flattens to; None where nothing lies between the rows."""
        longest = max(self.counts)
        if len(self.present) * longest == self.total:
            return None
        numbers = [i * longest + row for i, b in enumerate(self.present) for row in range(self.counts[b])]
        return torch.tensor(numbers, dtype=torch.long).to(self.device)

    def fold(self, x: Tensor) -> Tensor:
        """[T, ...] -> [sequences that have rows, most rows of one, ...], zero past a sequence's own rows."""
        if self.places is not None:
            spread = x.new_zeros(len(self.present) * max(self.counts), *x.shape[1:])
            spread[self.places] = x
            x = spread
        return x.view(len(self.present), -1, *x.shape[1:])

    def unfold(self, x: Tensor) -> Tensor:
        """Undo `fold`."""
        flat = x.flatten(0, 1)
        return flat if self.places is None else flat[self.places]

    def length(self, b: int) -> int:
        """Slots of sequence b in use once these rows are written."""
        return self.starts[b] + self.counts[b]

    def last(self) -> Tensor:
        """Row numbers [sequences that have rows] of each sequence's last row."""
        return torch.tensor([end - 1 for _, _, end in self.spans()], dtype=torch.long).to(self.device)

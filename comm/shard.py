"""Which part of `count` things a rank holds. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass

Range = tuple[int, int]


@dataclass(frozen=True)
class Shard:
    """This rank among the ranks that split a weight."""

    rank: int
    size: int

    def of(self, count: int) -> Range:
        """This rank's equal part of `count` (which `config.check` made divisible)."""
        return self.rank * count // self.size, (self.rank + 1) * count // self.size

    def copy_of(self, count: int) -> Range:
        """The same, or the one that it shares with other ranks where there are fewer than ranks (CASES D8)."""
        first, last = self.of(count)
        return first, max(last, first + 1)


def shard_range(count: int, rank: int, size: int) -> Range:
    """Like rows of an activation: chunks of ceil(count / size), of which the last may be short or empty."""
    chunk = -(-count // size)
    return min(rank * chunk, count), min((rank + 1) * chunk, count)

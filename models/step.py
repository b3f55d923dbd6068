"""What one forward is given beside its rows' values: the group, the strategy, the rows, and who watches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.comm.group import Group
from lockstep.comm.layout import Activation, Layout
from lockstep.comm.strategy import Strategy
from lockstep.models.rows import Rows


@dataclass
class Step:
    """One forward. The strategy belongs to it, not to the model: the next forward may use another."""

    group: Group
    strategy: Strategy
    rows: Rows
    kernel: str = "loop"
    watch: Callable[[str, Activation], None] | None = None

    @property
    def stream(self) -> Layout:
        return Layout(self.strategy.stream)

    @property
    def mid(self) -> Layout:
        return Layout(self.strategy.mid)

    @property
    def ffn_in(self) -> Layout:
        return Layout(self.strategy.ffn_in)

    def convert(self, x: Activation, to: Layout, at: str) -> Activation:
        """`x` in layout `to` (Group.convert), shown to the watcher."""
        y = self.group.convert(x, to, at)
        if self.watch:
            self.watch(at, y)
        return y

    def convert_pair(self, x: Activation, residual: Activation, to: Layout, at: str) -> tuple[Activation, Activation]:
        """A block's output and its residual in layout `to` (Group.convert_pair), shown to the watcher."""
        y, kept = self.group.convert_pair(x, residual, to, at)
        if self.watch:
            self.watch(at, y)
        return y, kept

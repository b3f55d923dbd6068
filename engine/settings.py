"""How a batch is decoded: what every forward of it has in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lockstep.comm.group import Group
from lockstep.comm.layout import Activation
from lockstep.comm.strategy import Strategy
from lockstep.models.rows import Rows
from lockstep.models.step import Step


@dataclass(frozen=True)
class Settings:
    """`draft_tokens` per round, `prefill_chunk` prompt tokens of a sequence per forward; `watch` as in Step."""

    group: Group
    strategy: Strategy
    draft_tokens: int = 0
    recycle: str = "post-norm"
    prefill_chunk: int = 512
    kernel: str = "loop"
    watch: Callable[[str, Activation], None] | None = None

    def step(self, rows: Rows) -> Step:
        return Step(self.group, self.strategy, rows, self.kernel, self.watch)

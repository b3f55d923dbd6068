"""When things happened on one rank: collectives, and the spans of the engine that asks for them.

Times are nanoseconds of the host's monotonic clock, which all ranks of a host share (comm/clock.py has the others).
Counting (comm/ledger.py) is always on; this is on only while someone has given the group a Timeline.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

COLLECTIVE = "collective"
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Span(NamedTuple):
    kind: str
    name: str
    begin: int
    end: int


@dataclass
class Timeline:
    """Spans in the order in which they ended. Ranks run in lockstep, so all have the same spans in the same order.

    On CUDA a span begins and ends with the device idle: only then can waiting be told from moving.
    """

    device: torch.device
    spans: list[Span] = field(default_factory=list)

    def now(self) -> int:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter_ns()

    def add(self, kind: str, name: str, begin: int) -> None:
        self.spans.append(Span(kind, name, begin, self.now()))

    def times(self) -> Tensor:
        """[spans, 2] begin and end, to be sent to rank 0."""
        return torch.tensor([[s.begin, s.end] for s in self.spans], dtype=torch.long).view(-1, 2)


def spanned(kind: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """For a method of an object with `settings.group`: each call is a span of that kind on the group's timeline."""

    def decorate(method: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(method)
        def timed(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            timeline = cast(Any, args[0]).settings.group.timeline
            if timeline is None:
                return method(*args, **kwargs)
            begin = timeline.now()
            result = method(*args, **kwargs)
            timeline.add(kind, kind, begin)
            return result

        return timed

    return decorate

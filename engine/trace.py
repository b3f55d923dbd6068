"""A run as a Chrome trace (Perfetto and chrome://tracing open it): one process per run, one thread per rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lockstep.comm.timeline import COLLECTIVE, Timeline
from lockstep.models.decoder import Block


def hook_layers(model: nn.Module, timeline: Timeline) -> Callable[[], None]:
    """Make every decoder block a span of the timeline; returns what undoes that."""
    begins: list[int] = []

    def enter(block: nn.Module, args: Any) -> None:
        begins.append(timeline.now())

    def leave(block: nn.Module, args: Any, out: Any) -> None:
        timeline.add("layer", str(block.name), begins.pop())

    handles = []
    for block in model.modules():
        if isinstance(block, Block):
            handles += [block.register_forward_pre_hook(enter), block.register_forward_hook(leave)]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def events(timeline: Timeline, times: list[Tensor]) -> list[list[Any]]:
    """[kind, name, [[begin, end] per rank]] of each span, in nanoseconds from the first."""
    start = min(int(t[:, 0].min()) for t in times) if timeline.spans else 0
    rows = zip(timeline.spans, *(t.tolist() for t in times), strict=True)
    return [[s.kind, s.name, [[a - start, b - start] for a, b in ranks]] for s, *ranks in rows]


def chrome(runs: dict[str, list[list[Any]]]) -> dict[str, Any]:
    """Runs by label, each with its `events`, as one Chrome trace document."""
    out: list[dict[str, Any]] = []
    for pid, (label, spans) in enumerate(runs.items()):
        num_ranks = len(spans[0][2]) if spans else 0
        out.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": label}})
        for rank in range(num_ranks):
            out.append({"ph": "M", "pid": pid, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}})
        last = [max(r[0] for r in ranks) for _, _, ranks in spans]
        for (kind, name, ranks), entered in zip(spans, last, strict=True):
            for rank, (begin, end) in enumerate(ranks):
                event = {"ph": "X", "pid": pid, "tid": rank, "cat": kind, "name": name}
                event |= {"ts": begin / 1000, "dur": (end - begin) / 1000}
                if kind == COLLECTIVE:
                    wait = max(min(entered, end) - begin, 0)
                    event["args"] = {"wait_us": wait / 1000, "transfer_us": (end - begin - wait) / 1000}
                out.append(event)
    return {"traceEvents": out, "displayTimeUnit": "ms"}

"""The tensor-parallel group, and `convert`: the one place where activations move between ranks.

T tokens, P ranks, c = ceil(T / P), W features.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterable

import torch
from torch import Tensor

from lockstep.comm.decisions import Decisions
from lockstep.comm.errors import LayoutError
from lockstep.comm.layout import PARTIAL, REPLICATED, SHARDED, Activation, Layout
from lockstep.comm.ledger import Ledger
from lockstep.comm.pulse import Pulse
from lockstep.comm.shard import shard_range
from lockstep.comm.timeline import Timeline
from lockstep.comm.transport import Transport
from lockstep.comm.wire import open_wire
from lockstep.comm.wiring import Wiring


class Group:
    """One rank's view of the ranks that share a model. With `transport` None it is the only rank.

    `hosts` is where each rank runs, by name.
    """

    def __init__(self, rank: int, size: int, device: torch.device, transport: Transport | None) -> None:
        self.rank, self.size, self.device, self.transport = rank, size, device, transport
        self.hosts: tuple[str, ...] = (socket.gethostname(),) * size
        self.ledger = Ledger()
        self.timeline: Timeline | None = None
        self.decisions: Decisions | None = None

    def time(self, timeline: Timeline | None) -> None:
        """Note when each collective begins and ends on `timeline`, or no longer."""
        self.timeline = timeline
        if self.transport is not None:
            self.transport.timeline = timeline

    @classmethod
    def local(cls, device: str | torch.device = "cpu") -> Group:
        """A group of one rank: conversions relabel, nothing is sent."""
        return cls(0, 1, torch.device(device), None)

    @property
    def wire(self) -> str | None:
        """What moves bytes here, such as "gloo"; None where nothing moves."""
        return self.transport.wire.name if self.transport else None

    def close(self) -> None:
        if self.transport:
            self.transport.close()

    def convert(self, x: Activation, to: Layout, at: str) -> Activation:
        """`x` in layout `to`. `at` names the boundary in the ledger and in errors.

        PARTIAL -> REPLICATED is an all-reduce, PARTIAL -> SHARDED a reduce-scatter, SHARDED -> REPLICATED an
        all-gather, REPLICATED -> SHARDED a local slice. Nothing becomes PARTIAL: that would count rows P times
        (vllm-project/vllm#48763).
        """
        if x.layout is to:
            return x
        if to is PARTIAL:
            raise LayoutError(
                f"{at} would turn a {x.layout} activation into PARTIAL, which counts it {self.size} times"
            )
        if self.transport is None:
            return Activation(x.data, to, x.tokens)
        if x.layout is REPLICATED:
            first, last = shard_range(x.tokens, self.rank, self.size)
            return Activation(x.data[first:last], SHARDED, x.tokens)
        if x.layout is SHARDED:
            return self._all_gather(x, at)
        return self._all_reduce(x, at) if to is REPLICATED else self._reduce_scatter(x, at)

    def convert_pair(self, x: Activation, residual: Activation, to: Layout, at: str) -> tuple[Activation, Activation]:
        """A block's output and its residual in layout `to`; one packed all-gather [T, 2H] where both are shards."""
        if x.layout is SHARDED and residual.layout is SHARDED and to is REPLICATED:
            return self.convert(x.beside(residual, at), to, at).split(x.data.shape[-1])
        return self.convert(x, to, at), self.convert(residual, to, at)

    def _all_reduce(self, x: Activation, at: str) -> Activation:
        # A strided or shared tensor would be reduced wrongly or under the caller's feet (CASES D10, D11).
        assert self.transport
        data = x.data.clone(memory_format=torch.contiguous_format)
        self.transport.all_reduce(data, at)
        self._record(at, "all-reduce", x, x.tokens, 2)
        return Activation(data, REPLICATED, x.tokens)

    def _reduce_scatter(self, x: Activation, at: str) -> Activation:
        assert self.transport
        chunk = -(-x.tokens // self.size)
        first, last = shard_range(x.tokens, self.rank, self.size)
        out = x.data.new_empty((chunk, *x.data.shape[1:]))
        self.transport.reduce_scatter(out, _padded(x.data, chunk * self.size), at)
        self._record(at, "reduce-scatter", x, chunk * self.size, 1)
        return Activation(out[: last - first], SHARDED, x.tokens)

    def _all_gather(self, x: Activation, at: str) -> Activation:
        assert self.transport
        chunk = -(-x.tokens // self.size)
        first, last = shard_range(x.tokens, self.rank, self.size)
        if x.data.shape[0] != last - first:
            raise LayoutError(
                f"{at} gathers {x.data.shape[0]} rows from rank {self.rank}, whose shard has {last - first}"
            )
        out = x.data.new_empty((chunk * self.size, *x.data.shape[1:]))
        self.transport.all_gather(out, _padded(x.data, chunk), at)
        self._record(at, "all-gather", x, chunk * self.size, 1)
        return Activation(out[: x.tokens], REPLICATED, x.tokens)

    def _record(self, at: str, collective: str, x: Activation, padded_rows: int, passes: int) -> None:
        row_bytes = _row_bytes(x.data)
        wire = passes * padded_rows * row_bytes * (self.size - 1) // self.size
        self.ledger.record(at, collective, rows=x.tokens, row_bytes=row_bytes, wire_bytes=wire)

    # Values that are not activations of T rows: routed rows, logits, decisions.

    def all_to_all(self, rows: Tensor, counts: Tensor, at: str, *, back: bool = False) -> Tensor:
        """Rows to the ranks they are sorted for. `counts` [P, P] on the host: rows from rank i to rank j.

        `back` sends rows that came this way home again (the transposed counts).
        """
        if self.transport is None:
            return rows
        table = counts.T if back else counts
        sent, received = table[self.rank].tolist(), table[:, self.rank].tolist()
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        self.transport.all_to_all(out, rows.contiguous(), received, sent, at)
        wire = (sum(sent) - sent[self.rank]) * _row_bytes(rows)
        self.ledger.record(at, "all-to-all", rows=int(counts.sum()), row_bytes=_row_bytes(rows), wire_bytes=wire)
        return out

    def all_counts(self, counts: Tensor, at: str) -> Tensor:
        """Every rank's `counts` [P], as [P, P] on the host."""
        if self.transport is None:
            return counts.cpu()[None]
        out = counts.new_empty(self.size * self.size)
        self.transport.all_gather(out, counts.contiguous(), at)
        self._note(at, "all-gather", out, (self.size - 1) * self.size)
        return out.cpu().view(self.size, self.size)

    def to_root(self, rows: Tensor, at: str) -> list[Tensor] | None:
        """Every rank's `rows`, on rank 0 only: what a decision needs, and no other rank."""
        if self.transport is None:
            return [rows]
        out = self.transport.gather(rows.contiguous(), at)
        size = _row_bytes(rows)
        self.ledger.record(
            at, "gather", rows=rows.shape[0], row_bytes=size * self.size, wire_bytes=rows.shape[0] * size
        )
        return out

    def broadcast(self, values: Tensor, at: str) -> Tensor:
        """Rank 0's `values` on every rank (in place, and returned)."""
        if self.transport is not None:
            self.transport.broadcast(values, at)
            self._note(at, "broadcast", values, values.numel())
        return values

    def barrier(self, at: str) -> None:
        if self.transport is not None:
            self.transport.barrier(at)

    def mark(self, stage: str, round: int | None = None, tokens: Iterable[int] = ()) -> None:
        """This rank begins `stage` (of `round`, where that is new) on `tokens`: for its heartbeat and --check-ranks."""
        if self.transport is not None:
            self.transport.mark(stage, round, tokens)

    def _note(self, at: str, collective: str, values: Tensor, sent: int) -> None:
        size = values.element_size()
        self.ledger.record(at, collective, rows=values.numel(), row_bytes=size, wire_bytes=sent * size)


def connect(
    rank: int,
    size: int,
    device: str | torch.device = "cpu",
    timeout_s: float = 60.0,
    init_method: str | None = None,
    wiring: Wiring = Wiring(),  # noqa: B008 (frozen)
    pulse: Pulse | None = None,
) -> Group:
    """Join the group as `rank` of `size`. Blocks until all have joined; `init_method` None reads the environment.

    `pulse` is where this rank's heartbeat is read by others; without it nobody does.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", rank % max(torch.cuda.device_count(), 1))
    if size == 1:
        return Group.local(device)
    pulse = pulse or Pulse.new()
    pulse.mark("start", 0)
    wire = open_wire(wiring, rank, size, device, timeout_s, init_method)
    wire.barrier()  # or a rank that is soon done leaves while another one still connects to it
    return Group(rank, size, device, Transport(rank, size, device, wire, pulse, timeout_s, wiring.check_ranks))


def _row_bytes(data: Tensor) -> int:
    return math.prod(data.shape[1:]) * data.element_size()


def _padded(data: Tensor, rows: int) -> Tensor:
    """`data`, contiguous, with zero rows appended up to `rows`. They are trimmed again by the receiver."""
    if data.shape[0] == rows:
        return data.contiguous()
    out = data.new_zeros((rows, *data.shape[1:]))
    out[: data.shape[0]] = data
    return out

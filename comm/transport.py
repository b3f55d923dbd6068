"""Every collective of a rank: the wire's, with a heartbeat, a deadline and, if asked for, a check before it."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lockstep.comm.errors import Disagreement, PeerLost
from lockstep.comm.pulse import Pulse
from lockstep.comm.supervise import PEER_LOST
from lockstep.comm.timeline import COLLECTIVE, Timeline
from lockstep.comm.wire import Wire

Result = TypeVar("Result")
DIGEST_BYTES = 512
HOPELESS_S = 0.5  # a collective that is not done this long after a rank has ended never will be


class Transport:
    """The collectives that a Group calls. `at` is the boundary, for messages only.

    `watched`: another Transport of this rank already watches the same heartbeat.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        device: torch.device,
        wire: Wire,
        pulse: Pulse,
        timeout_s: float,
        check: bool,
        *,
        watched: bool = False,
    ) -> None:
        self.rank, self.size, self.wire, self.pulse, self.timeout_s = rank, size, wire, pulse, timeout_s
        self.on_overdue: Callable[[str], None] = _leave
        self.is_peer_gone: Callable[[], bool] = lambda: False
        self.device = device
        self.timeline: Timeline | None = None
        self._check, self._tokens = check, 0
        self._watch = None if wire.ends_itself or watched else Watch(self)

    def all_reduce(self, tensor: Tensor, at: str) -> None:
        """Sum over ranks, in place."""
        self._call("all-reduce", at, tensor, None, self.wire.all_reduce, tensor)

    def all_gather(self, out: Tensor, tensor: Tensor, at: str) -> None:
        """`out` [P * rows, ...] becomes every rank's `tensor` [rows, ...] in rank order."""
        self._call("all-gather", at, tensor, None, self.wire.all_gather, out, tensor)

    def reduce_scatter(self, out: Tensor, tensor: Tensor, at: str) -> None:
        """`out` [rows, ...] becomes this rank's block of the sum of every rank's `tensor` [P * rows, ...]."""
        self._call("reduce-scatter", at, tensor, None, self.wire.reduce_scatter, out, tensor)

    def all_to_all(self, out: Tensor, tensor: Tensor, received: list[int], sent: list[int], at: str) -> None:
        """Rows to and from each rank: `sent[r]` rows of `tensor` go to rank r, `received[r]` come from it."""
        counts = sent, received
        self._call("all-to-all", at, tensor, counts, self.wire.all_to_all, out, tensor, received, sent)

    def gather(self, tensor: Tensor, at: str) -> list[Tensor] | None:
        """Every rank's `tensor`, on rank 0; None elsewhere."""
        return self._call("gather", at, tensor, None, self.wire.gather, tensor)

    def broadcast(self, tensor: Tensor, at: str) -> None:
        """Rank 0's `tensor`, everywhere, in place."""
        self._call("broadcast", at, tensor, None, self.wire.broadcast, tensor)

    def barrier(self, at: str) -> None:
        self._call("barrier", at, None, None, self.wire.barrier)

    def wait_for_root(self, tensor: Tensor, at: str) -> None:
        """A `broadcast` that may come late, if within the deadline. Unchecked: who waits is in step with nobody."""
        self.pulse.enter("broadcast", at)
        self.tell_waiting(tensor, at)
        self.pulse.leave()

    def tell_waiting(self, tensor: Tensor, at: str) -> None:
        """Rank 0's side of `wait_for_root`, from the midst of other work: its heartbeat stays where that is."""
        with self._loss_told("broadcast", at):
            self.wire.wait_for_root(tensor)

    def part(self, ranks: Sequence[int]) -> Transport | None:
        """The collectives of these ranks alone, rank 0 among them; None on the others. All ranks call this."""
        wire = self.wire.part(ranks)
        if wire is None:
            return None
        # In messages this rank keeps its number.
        settings = self.pulse, self.timeout_s, self._check
        return Transport(self.rank, len(ranks), self.device, wire, *settings, watched=True)

    def mark(self, stage: str, round: int | None, tokens: Iterable[int]) -> None:
        """What comes next, for the heartbeat and the check: Group.mark."""
        self.pulse.mark(stage, round)
        if self._check:
            self._tokens = zlib.crc32(array("q", tokens).tobytes())

    def close(self) -> None:
        if self._watch:
            self._watch.stop()
        self.wire.close()

    def _call(
        self,
        name: str,
        at: str,
        tensor: Tensor | None,
        counts: tuple[list[int], list[int]] | None,
        function: Callable[..., Result],
        *args: Any,
    ) -> Result:
        self.pulse.enter(name, at)
        with self._loss_told(name, at):
            if self._check:
                self._agree(name, at, tensor, counts)
            begin = self.timeline.now() if self.timeline else None
            result = function(*args)
            if self.timeline and begin is not None:
                self.timeline.add(COLLECTIVE, f"{at} {name}", begin)
        self.pulse.leave()
        return result

    @contextlib.contextmanager
    def _loss_told(self, name: str, at: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if self.wire.is_loss(error):
                raise PeerLost(f"{name} at {at} on rank {self.rank} failed: {error}") from error
            raise

    def _agree(self, name: str, at: str, tensor: Tensor | None, counts: tuple[list[int], list[int]] | None) -> None:
        """Raise Disagreement unless every rank is about to do the same collective on values of the same kind.

        gloo does not find this out: it aborts one rank, gives another wrong numbers, or waits (CASES D12, D13).
        """
        beat = self.pulse.read()
        shape = list(tensor.shape) if tensor is not None else []
        if counts:
            shape[0] = -1  # the ranks' own numbers of rows differ; who sends how many to whom is compared instead
        mine = {
            "collective": name,
            "boundary": at,
            "number": beat.sequence,
            "stage": beat.stage,
            "round": beat.round,
            "rows": shape[0] if shape else 0,
            "row shape": shape[1:],
            "dtype": str(tensor.dtype).removeprefix("torch.") if tensor is not None else "",
            "token ids": f"{self._tokens:08x}",
        }
        everyone = self._exchange(mine | ({"sent": counts[0], "received": counts[1]} if counts else {}))
        for rank, theirs in enumerate(everyone):
            differs = [key for key in mine if theirs[key] != everyone[0][key]]
            if differs:
                told = "; ".join(f"{key} {theirs[key]}, not {everyone[0][key]}" for key in differs)
                raise Disagreement(f"before {_named(everyone[0])} rank {rank} differs from rank 0: {told}")
        for sender, theirs in enumerate(everyone if counts else []):
            for receiver, others in enumerate(everyone):
                if theirs["sent"][receiver] != others["received"][sender]:
                    raise Disagreement(
                        f"before {_named(theirs)} rank {sender} is to send {theirs['sent'][receiver]} rows to rank "
                        f"{receiver}, which expects {others['received'][sender]}"
                    )

    def _exchange(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        text = json.dumps(mine).encode()
        length = DIGEST_BYTES + 32 * self.size
        padded = torch.frombuffer(bytearray(text.ljust(length)), dtype=torch.uint8).to(self.device)
        out = padded.new_empty(self.size * length)
        self.wire.all_gather(out, padded)
        return [json.loads(bytes(part.tolist())) for part in out.cpu().view(self.size, length)]


class Watch:
    """Ends this rank when one of its collectives takes longer than the deadline, on a wire that would wait forever."""

    def __init__(self, transport: Transport) -> None:
        self._transport, self._done = transport, threading.Event()
        threading.Thread(target=self._run, name="lockstep-watch", daemon=True).start()

    def stop(self) -> None:
        self._done.set()

    def _run(self) -> None:
        timeout_s = self._transport.timeout_s
        while not self._done.wait(min(HOPELESS_S, timeout_s / 4)):
            beat = self._transport.pulse.read()
            waited = time.monotonic() - beat.when if beat.inside else 0.0
            if waited > timeout_s or (waited > HOPELESS_S and self._transport.is_peer_gone()):
                what = f"{beat.collective} at {beat.boundary} on rank {self._transport.rank}"
                self._transport.on_overdue(f"{what} failed: no end after {waited:.1f} s")
                return


def _leave(message: str) -> None:
    sys.stderr.write(f"lockstep: {message}\n")
    sys.stderr.flush()
    os._exit(PEER_LOST)


def _named(digest: dict[str, Any]) -> str:
    return f"{digest['collective']} at {digest['boundary']} ({digest['stage']}, round {digest['round']})"

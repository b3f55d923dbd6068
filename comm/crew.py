"""Ranks that a launcher has started, as `world.run` to whoever wants fresh ones: rank 0 calls, the others serve.

A step of fewer ranks is done by the first of them, in a group of their own. The others wait for it, and rank 0 tells
them now and then that it still works, or their deadline would pass.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.errors import UsageError
from lockstep.comm.group import Group
from lockstep.comm.pulse import IDLE
from lockstep.comm.transport import Transport
from lockstep.comm.wiring import Wiring

BUSY, DONE, FAILED = -1, 0, -2  # what rank 0 says, where it is not how many ranks do the next step
Emit = Callable[[Any], None]


class Crew:
    """Steps, one after another, on any number of `group`'s ranks. A rank that fails ends all, as with any launcher.

    Rank 0 uses it as a context manager, so that the others go home with it.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._parts: dict[int, tuple[Transport | None, Transport | None]] = {}
        self._told, self._in_step = 0.0, False

    def call(
        self,
        target: Callable[..., Any],
        size: int,
        *,
        args: Sequence[Any] = (),
        on_event: Callable[[int, Any], None] | None = None,
        timeout_s: float,
        device: str,
        wiring: Wiring,
    ) -> Any:
        """`target(group, emit, *args)` on the first `size` ranks; rank 0's value. Only rank 0 calls this.

        The last three are world.run's; these ranks have met with them already.
        """
        assert size <= self._group.size
        self._in_step = True
        waiting = self._begin(size, pickle.dumps((target, tuple(args))))
        self._told = time.monotonic()

        def emit(event: Any) -> None:
            if waiting and time.monotonic() - self._told > timeout_s / 4:
                waiting.tell_waiting(self._word(BUSY), IDLE)
                self._told = time.monotonic()
            if on_event:
                on_event(0, event)

        value = target(self._members(size), emit, *args)
        if waiting:
            waiting.wait_for_root(self._word(DONE), IDLE)
        self._in_step = False
        return value

    def serve(self) -> None:
        """What the other ranks do, until rank 0 is done. Raises UsageError, of no words, where that cannot go on."""
        whole = self._transport()
        while (size := self._heard(whole)) > DONE:
            target, args = pickle.loads(self._payload(b"").numpy(force=True).tobytes())
            waiting = self._part(size)[1]
            if self._group.rank < size:
                target(self._members(size), _silent, *args)
                continue
            assert waiting
            self._group.mark(IDLE, 0)
            while self._heard(waiting) == BUSY:
                pass
        if size == FAILED:
            raise UsageError("")  # rank 0 says why

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not self._in_step:  # else they are somewhere in it, and will see that rank 0 has gone
            self._transport().wait_for_root(self._word(FAILED if kind else DONE), IDLE)

    def _begin(self, size: int, work: bytes) -> Transport | None:
        """Tell the others what comes. Who waits meanwhile can be told so through what is returned."""
        self._transport().wait_for_root(self._word(size), IDLE)
        self._payload(work)
        return self._part(size)[1]

    def _payload(self, work: bytes) -> Tensor:
        """Rank 0's bytes, on every rank."""
        length = self._group.broadcast(self._word(len(work)), "step")
        data = torch.frombuffer(bytearray(work or bytes(int(length))), dtype=torch.uint8).to(self._group.device)
        return self._group.broadcast(data, "step")

    def _part(self, size: int) -> tuple[Transport | None, Transport | None]:
        """The transports of the first `size` ranks, and of rank 0 with those that wait for them."""
        whole, everyone = self._transport(), range(self._group.size)
        if size not in self._parts:
            if size in (1, self._group.size):
                self._parts[size] = (None, whole) if size == 1 else (whole, None)
            else:
                self._parts[size] = whole.part(everyone[:size]), whole.part([0, *everyone[size:]])
        whole.pulse.restart()
        return self._parts[size]

    def _members(self, size: int) -> Group:
        group = Group(self._group.rank, size, self._group.device, self._parts[size][0])
        group.hosts = self._group.hosts[:size]
        return group

    def _heard(self, transport: Transport) -> int:
        word = self._word(DONE)
        transport.wait_for_root(word, IDLE)
        return int(word)

    def _word(self, number: int) -> Tensor:
        return torch.tensor([number], device=self._group.device)

    def _transport(self) -> Transport:
        assert self._group.transport
        return self._group.transport


def _silent(event: object) -> None:
    pass

"""What rank 0 does alone at the end, such as writing a file, while the others wait and would see it die or stop."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.comm.errors import PeerLost
from lockstep.comm.group import Group
from lockstep.comm.transport import Transport

BUSY, DONE = 1, 0
AT = "write"


def deliver(group: Group, work: Callable[[], None]) -> None:
    """`work()` on rank 0. It may take longer than the others' deadline: a thread tells them that it goes on."""
    group.mark(AT)
    if group.transport is None:
        work()
    elif group.rank == 0:
        with _Told(group.transport):
            work()
        group.transport.wait_for_root(_word(group, DONE), AT)
    else:
        word = _word(group, BUSY)
        while int(word):
            group.transport.wait_for_root(word, AT)


class _Told:
    """While this is open, the others hear from rank 0 often enough."""

    def __init__(self, transport: Transport) -> None:
        self._transport, self._closed = transport, threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-deliver", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        word = torch.tensor([BUSY], device=self._transport.device)
        while not self._closed.wait(self._transport.timeout_s / 4):
            try:
                self._transport.tell_waiting(word, AT)
            except PeerLost:  # the main thread will find out
                return


def _word(group: Group, number: int) -> Tensor:
    return torch.tensor([number], device=group.device)

"""A rank's heartbeat: where it is, in a page of memory that others can read when it no longer answers.

Writing it is one `pack_into` (about a microsecond) per collective. The page has no name in any file system: nothing is
left behind however the rank ends, and who has mapped it can read it after that.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
import time
from dataclasses import dataclass

PAGE = mmap.PAGESIZE
WHERE = struct.Struct("@qqd?16s80s")  # round, sequence number, when, inside a collective, collective, boundary
STAGE = struct.Struct("@q16s")  # round, stage
IDLE = "idle"  # the stage of a rank that waits while others work
STAGE_AT, HOST_AT, HOST_BYTES, GAVE_UP_AT = 256, 320, 64, 384


@dataclass(frozen=True)
class Beat:
    """Where a rank was last: stage and round, the collective, and since when (seconds of its host's clock).

    `gave_up` says that it ended, or is about to, because of another rank.
    """

    host: str
    stage: str
    round: int
    sequence: int
    collective: str
    boundary: str
    inside: bool
    when: float
    gave_up: bool = False

    def __str__(self) -> str:
        stage = self.stage or "start"
        during = f"{stage}, round {self.round}" if self.round else stage
        if not self.sequence:
            return f"on {self.host} in {during}, before its first collective"
        verb = "in" if self.inside else "after"
        return f"on {self.host} in {during}, {verb} collective {self.sequence} ({self.collective} at {self.boundary})"


class Pulse:
    """The page of one rank: written there, read anywhere on its host."""

    def __init__(self, page: mmap.mmap, fd: int | None) -> None:
        self._page, self.fd = page, fd
        self._sequence = self._round = 0
        self._last = (b"", b"")

    @classmethod
    def new(cls) -> Pulse:
        """A page of its own; on Linux one that others may open by the number of this process and of its `fd`."""
        if sys.platform == "linux":
            fd = os.memfd_create("lockstep-pulse")
            os.ftruncate(fd, PAGE)
            return cls(mmap.mmap(fd, PAGE), fd)
        return cls(mmap.mmap(-1, PAGE), None)

    @classmethod
    def of(cls, pid: int, fd: int) -> Pulse:
        """Another process's page. Raises OSError where that is gone, or not this user's."""
        opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls(mmap.mmap(opened, PAGE), None)
        finally:
            os.close(opened)

    def close(self) -> None:
        self._page.close()
        if self.fd is not None:
            os.close(self.fd)

    def mark(self, stage: str, round: int | None = None) -> None:
        """This rank begins `stage`, of `round` where that is new (0: before the first)."""
        self._round = self._round if round is None else round
        if not self._page.closed:
            STAGE.pack_into(self._page, STAGE_AT, self._round, stage.encode()[:16])
            if self._page[HOST_AT] == 0:
                host = socket.gethostname().encode()[: HOST_BYTES - 1]
                self._page[HOST_AT : HOST_AT + len(host)] = host

    def restart(self) -> None:
        """Count collectives from 0 again: ranks that have done different ones begin something together."""
        self._sequence = 0
        self._write(False)

    def enter(self, collective: str, boundary: str) -> None:
        self._sequence += 1
        self._last = collective.encode()[:16], boundary.encode()[:80]
        self._write(True)

    def leave(self) -> None:
        self._write(False)

    def give_up(self) -> None:
        """This rank is about to end because of another one."""
        if not self._page.closed:
            self._page[GAVE_UP_AT] = 1

    def _write(self, inside: bool) -> None:
        if not self._page.closed:
            WHERE.pack_into(self._page, 0, self._round, self._sequence, time.monotonic(), inside, *self._last)

    def read(self) -> Beat:
        _, sequence, when, inside, collective, boundary = WHERE.unpack_from(self._page, 0)
        round, stage = STAGE.unpack_from(self._page, STAGE_AT)
        host = self._page[HOST_AT : HOST_AT + HOST_BYTES]
        where = _text(collective), _text(boundary)
        gave_up = bool(self._page[GAVE_UP_AT])
        return Beat(_text(host) or socket.gethostname(), _text(stage), round, sequence, *where, inside, when, gave_up)


def _text(raw: bytes) -> str:
    return raw.partition(b"\0")[0].decode("utf-8", "replace")

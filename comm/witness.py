"""A rank's witness: a small process beside it that tells the ranks of other hosts how it is when it cannot.

It answers their questions, and tells their witnesses when its rank has ended. It ends a rank that is stopped, or that
another has given up on: where that is alone on its host nobody else would, and its launcher would wait for ever.
It is gone LINGER_S after its rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from lockstep.comm.mail import Address, Mailbox, own_host
from lockstep.comm.pulse import Beat, Pulse
from lockstep.comm.supervise import is_stopped

TICK_S = 0.25  # between two looks at the rank, and between two tries of what may be lost on the way
LINGER_S = 1.5
PATIENCE_S = 3.0  # how much longer than other ranks a witness waits for one that is stopped
TERM_S = 2.0  # from SIGTERM to SIGKILL
HERE = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")


@dataclass(frozen=True)
class Report:
    """How a rank is: `gone`, `stopped` (or ended because it was) or `alive`; and where it was last."""

    state: str
    beat: Beat


class Witness:
    """The rank's side of it."""

    def __init__(self, rank: int, pulse: Pulse, timeout_s: float, host: str) -> None:
        """Fork it: best before this process has threads. `host` is where it can be asked."""
        self._line, line = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid, pidfd = os.getpid(), os.pidfd_open(os.getpid())
        with Mailbox(host) as box, line:
            self.address = box.address
            self._pid = os.fork()
            if self._pid == 0:
                try:
                    _leave_all_but(box.fileno(), line.fileno(), pidfd)
                    _Watch(rank, pid, pidfd, pulse, timeout_s, box, line).run()
                finally:
                    os._exit(0)
        os.close(pidfd)

    def introduce(self, others: Sequence[Address]) -> None:
        """The witnesses of ranks on other hosts, for it to tell when this rank ends."""
        with contextlib.suppress(OSError):
            self._line.send(json.dumps(others).encode())

    def dismiss(self) -> None:
        """The rank ends in good order, or nobody needs a witness."""
        with contextlib.suppress(OSError):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self._line.close()

    def ask(self, others: Mapping[int, Address], seconds: float) -> dict[int, Report]:
        """How these ranks are, by their own witnesses, or by what those told this one before they ended."""
        reports: dict[int, Report] = {}
        deadline = time.monotonic() + seconds
        with Mailbox(self.address.host) as box:
            while (missing := others.keys() - reports) and time.monotonic() < deadline:
                for address in (self.address, *(others[rank] for rank in missing)):
                    box.send(address, "ask", box.address)
                until = min(deadline, time.monotonic() + TICK_S)
                while others.keys() - reports and (letter := box.receive(until)):
                    rank, state, beat = letter[1]
                    if rank in others:
                        reports[rank] = Report(state, Beat(*beat))
        return reports

    def give_up(self, other: Address) -> None:
        """Have a rank of another host ended that this one has waited for in vain."""
        with Mailbox(self.address.host) as box:
            for _ in range(3):  # one may be lost
                box.send(other, "end", None)


def witness(rank: int, size: int, pulse: Pulse, timeout_s: float) -> Witness | None:
    """A witness of this process, where ranks may be on several hosts and this host can be reached from others."""
    here = next((os.environ[name] for name in HERE if name in os.environ), None)
    if sys.platform != "linux" or here == str(size):
        return None
    with contextlib.suppress(OSError):
        return Witness(rank, pulse, timeout_s, host) if (host := own_host()) else None
    return None


class _Watch:
    """What runs in the witness. Makes system calls only: locks that the rank's threads held are held here for ever."""

    def __init__(
        self, rank: int, pid: int, pidfd: int, pulse: Pulse, timeout_s: float, box: Mailbox, line: socket.socket
    ) -> None:
        self._rank, self._pid, self._pidfd, self._pulse, self._timeout_s = rank, pid, pidfd, pulse, timeout_s
        self._box, self._lines = box, [line]
        self._others: list[Address] = []
        self._told: dict[int, Any] = {}  # the last reports of ranks on other hosts
        self._stopped_at: float | None = None
        self._doomed_at: float | None = None
        self._was_stopped = False

    def run(self) -> None:
        while not self._is_gone():
            select.select([self._pidfd, self._box.fileno(), *(line.fileno() for line in self._lines)], [], [], TICK_S)
            for line in select.select(self._lines, [], [], 0)[0]:  # it says one thing at most
                self._others = [Address(*other) for other in json.loads(line.recv(1 << 20) or "[]")]
                self._lines.clear()
            self._answer(time.monotonic())
            self._end_if_overdue(time.monotonic())
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # who reads the rank's errors to their end does not wait for us
        deadline = time.monotonic() + LINGER_S
        while self._others and time.monotonic() < deadline:
            for other in self._others:
                self._box.send(other, "told", self._report())
            self._answer(time.monotonic() + TICK_S)

    def _is_gone(self) -> bool:
        return bool(select.select([self._pidfd], [], [], 0)[0])

    def _report(self) -> tuple[int, str, tuple[Any, ...]]:
        state = "gone" if self._is_gone() else "stopped" if is_stopped(self._pid) else "alive"
        return self._rank, "stopped" if self._was_stopped else state, astuple(self._pulse.read())

    def _answer(self, until: float) -> None:
        while letter := self._box.receive(until):
            verb, content = letter
            if verb == "ask":
                for report in (self._report(), *self._told.values()):
                    self._box.send(Address(*content), "told", report)
            elif verb == "told":
                self._told[content[0]] = content
            else:
                self._end("another rank has given up on it")

    def _end_if_overdue(self, now: float) -> None:
        if not is_stopped(self._pid):
            self._stopped_at = None
        elif self._stopped_at is None:
            self._stopped_at = now
        elif now - self._stopped_at > self._timeout_s + PATIENCE_S:
            self._end(f"it was stopped for more than {self._timeout_s:g} s")
        if self._doomed_at is not None and now - self._doomed_at > TERM_S:
            self._signal(signal.SIGKILL)

    def _end(self, why: str) -> None:
        if self._doomed_at is None and not self._is_gone():
            self._doomed_at, self._was_stopped = time.monotonic(), is_stopped(self._pid)
            with contextlib.suppress(OSError):  # nobody reads it
                if select.select([], [2], [], 0)[1]:
                    os.write(2, f"lockstep: rank {self._rank} is ended, {why}: {self._pulse.read()}\n".encode())
            self._signal(signal.SIGKILL if self._was_stopped else signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)


def _leave_all_but(*kept: int) -> None:
    """Hold nothing of the rank's but these and its standard error; no signal to its group or terminal comes here."""
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    for fd in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *kept}:
        with contextlib.suppress(OSError):  # that of the list itself
            os.close(fd)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)

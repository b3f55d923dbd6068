"""The other ranks as one rank of a launcher sees them: who is to blame when a collective fails, and where they were.

Under our own supervisor the parent knows all this. Under torchrun, deepspeed or mpiexec the ranks find out themselves:
when they meet, each tells the others where its heartbeat is; on the same host a peer's page is mapped and its process
watched.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.comm.pulse import Pulse
from lockstep.comm.supervise import PEER_LOST, is_stopped
from lockstep.comm.transport import Transport

CARD_BYTES = 256
LOST = "lost a rank"  # the stage of a rank that ends because of another one
LOOK_S = 1.5  # how long a death may take to show after the collective that it broke


@dataclass(frozen=True)
class Peer:
    """`pulse` and `pidfd` are None where the rank is on another host."""

    rank: int
    host: str
    pid: int
    pulse: Pulse | None
    pidfd: int | None

    def state(self) -> str:
        """`gone`, `stopped`, `alive`, `echo` where it ends because of another, or `far` where this host cannot see."""
        if self.pidfd is None:
            return "far"
        if self.pulse and self.pulse.read().stage == LOST:
            return "echo"
        if select.select([self.pidfd], [], [], 0)[0]:
            return "gone"
        return "stopped" if is_stopped(self.pid) else "alive"

    def where(self) -> str:
        return str(self.pulse.read()) if self.pulse else f"on {self.host}"


class Peers:
    """Also answers the launcher's SIGTERM, which may come before this rank's own collective has failed."""

    def __init__(self, transport: Transport) -> None:
        """Meet: a collective."""
        self._transport, self._telling = transport, threading.Lock()
        self._alarm: int | None = None
        self._account = ""
        cards = _exchange(transport)
        self.others = [_peer(rank, card) for rank, card in enumerate(cards) if rank != transport.rank]
        transport.barrier("meet")  # nobody goes on, and perhaps dies, before all can see it
        transport.on_overdue, transport.is_peer_gone = self._leave, self._is_one_gone

    def answer_sigterm(self) -> None:
        """Wait for SIGTERM in a thread: the main one, which must call this, may be inside a collective then."""
        reader, self._alarm = os.pipe()
        os.set_blocking(self._alarm, False)
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.set_wakeup_fd(self._alarm, warn_on_full_buffer=False)
        threading.Thread(target=self._end_on_sigterm, args=(reader,), name="lockstep-sigterm", daemon=True).start()

    def account(self, message: str) -> str:
        """`message`, with who is to blame. Ends stopped peers: a launcher's SIGTERM would wait for them to go on."""
        with self._telling:
            blame = self._blame()
            for peer in self.others:
                if peer.pidfd is not None and peer.state() == "stopped":
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        signal.pidfd_send_signal(peer.pidfd, signal.SIGKILL)
            self._account = f"{blame} ({message})"
            self._transport.pulse.mark(LOST)
            return self._account

    def close(self) -> None:
        # After an account SIGTERM, which comes at once, is still answered, or this rank may end before it has said it.
        if self._alarm is not None and not self._account:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.close(self._alarm)
            self._alarm = None
        self._transport.is_peer_gone = lambda: False
        for peer in self.others:
            if peer.pulse:
                peer.pulse.close()
            if peer.pidfd is not None:
                os.close(peer.pidfd)

    def _end_on_sigterm(self, reader: int) -> None:
        number = b"none"
        while number and ord(number[:1]) != signal.SIGTERM:
            number = os.read(reader, 1)
        os.close(reader)
        if not number:
            return
        if not self._account and self._telling.acquire(blocking=False):
            with contextlib.suppress(ValueError, OSError):  # closed: the run is over
                self._transport.pulse.mark(LOST)
                for suspect in list(self._lost()) or self._late():
                    _say(f"{suspect} (this rank was told to end)")
        else:
            time.sleep(2 * LOOK_S)  # the main thread is about to say it, and to end
            _say(self._account)
        os._exit(128 + signal.SIGTERM)

    def _is_one_gone(self) -> bool:
        return any(peer.state() == "gone" for peer in self.others)

    def _leave(self, message: str) -> None:
        _say(self.account(message))
        os._exit(PEER_LOST)

    def _blame(self) -> str:
        """Which rank the failed collective waited for, as far as this host can tell."""
        deadline = time.monotonic() + LOOK_S
        # One that dies closes its connections before it is seen to be gone, and looks late in between.
        while not (found := list(self._lost())) and time.monotonic() < deadline:
            time.sleep(0.05)
        if found := found or list(self._late()):
            return "; ".join(found)
        far = [peer for peer in self.others if peer.state() == "far"]
        if far:
            names = ", ".join(f"rank {peer.rank} on {peer.host}" for peer in far)
            return f"no rank of this host is to blame: {names} did not answer, or the link to it is dead"
        return "no rank is dead or behind: all wait for each other"

    def _lost(self) -> Iterator[str]:
        """The dead before the stopped, and both before the late: the ones may be the others' cause."""
        by_state = {state: [p for p in self.others if p.state() == state] for state in ("gone", "stopped")}
        if by_state["gone"]:
            first = min(by_state["gone"], key=lambda peer: peer.pulse.read().sequence if peer.pulse else 0)
            yield f"rank {first.rank} has ended: last seen {first.where()}"
        elif by_state["stopped"]:
            yield from (f"rank {peer.rank} is stopped: {peer.where()}" for peer in by_state["stopped"])

    def _late(self) -> Iterator[str]:
        mine = self._transport.pulse.read().sequence
        for peer in self.others:
            if peer.state() == "alive" and peer.pulse and peer.pulse.read().sequence < mine:
                yield f"rank {peer.rank} is behind: {peer.where()}"


def _say(line: str) -> None:
    sys.stderr.write(f"lockstep: {line}\n")
    sys.stderr.flush()


def _exchange(transport: Transport) -> list[dict[str, str | int]]:
    card = {"host": socket.gethostname()[:64], "pid": os.getpid(), "fd": transport.pulse.fd, "place": _place()}
    text = json.dumps(card).encode().ljust(CARD_BYTES)
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(transport.device)
    out = mine.new_empty(transport.size * CARD_BYTES)
    transport.all_gather(out, mine, "meet")
    return [json.loads(bytes(part.tolist())) for part in out.cpu().view(transport.size, CARD_BYTES)]


def _place() -> str:
    """What two processes have in common if and only if the one's process numbers mean something to the other."""
    if sys.platform != "linux":
        return f"{socket.gethostname()}:{os.getpid()}"
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{os.readlink('/proc/self/ns/pid')}"


def _peer(rank: int, card: dict[str, str | int]) -> Peer:
    host, pid = str(card["host"]), int(card["pid"])
    if card["place"] == _place() and card["fd"] is not None:
        with contextlib.suppress(OSError):  # gone already, or another user's
            return Peer(rank, host, pid, Pulse.of(pid, int(card["fd"])), os.pidfd_open(pid))
    return Peer(rank, host, pid, None, None)

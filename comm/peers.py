"""The other ranks as one rank of a launcher sees them: who is to blame when a collective fails, and where they were.

Under our own supervisor the parent knows all this. Under torchrun, deepspeed or mpiexec the ranks find out themselves:
when they meet, each tells the others where its heartbeat is; on the same host a peer's page is mapped and its process
watched, on another its witness is asked.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.comm.mail import Address
from lockstep.comm.pulse import IDLE, Pulse
from lockstep.comm.supervise import PEER_LOST, is_stopped
from lockstep.comm.transport import Transport
from lockstep.comm.witness import Report, Witness

CARD_BYTES = 512
LOOK_S = 1.5  # how long a death may take to show after the collective that it broke
ANSWER_S = 1.0  # how long a witness may take to answer


@dataclass(frozen=True)
class Peer:
    """`pulse` and `pidfd` are None where the rank is on another host, `address` where it has no witness."""

    rank: int
    host: str
    pid: int
    pulse: Pulse | None
    pidfd: int | None
    address: Address | None

    def state(self) -> str:
        """`gone`, `stopped`, `alive`, or `far` where this host cannot see it."""
        if self.pidfd is None:
            return "far"
        if select.select([self.pidfd], [], [], 0)[0]:
            return "gone"
        return "stopped" if is_stopped(self.pid) else "alive"


class Peers:
    """Also answers the launcher's SIGTERM, which may come before this rank's own collective has failed."""

    def __init__(self, transport: Transport, witness: Witness | None) -> None:
        """Meet: a collective."""
        self._transport, self._witness, self._telling = transport, witness, threading.Lock()
        self._alarm: int | None = None
        self._account = ""
        cards = _exchange(transport, witness)
        self.hosts = tuple(str(card["host"]) for card in cards)
        self.others = [_peer(rank, card) for rank, card in enumerate(cards) if rank != transport.rank]
        if witness:
            witness.introduce([peer.address for peer in self.others if peer.pidfd is None and peer.address])
        transport.barrier("meet")  # nobody goes on, and perhaps dies, before all can see it
        transport.on_overdue, transport.is_peer_gone = self._leave, self._is_one_gone

    @property
    def are_here(self) -> bool:
        """Whether this host sees them all."""
        return all(peer.pidfd is not None for peer in self.others)

    def answer_sigterm(self) -> None:
        """Wait for SIGTERM in a thread: the main one, which must call this, may be inside a collective then."""
        reader, self._alarm = os.pipe()
        os.set_blocking(self._alarm, False)
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        signal.set_wakeup_fd(self._alarm, warn_on_full_buffer=False)
        threading.Thread(target=self._end_on_sigterm, args=(reader,), name="lockstep-sigterm", daemon=True).start()

    def account(self, message: str) -> str:
        """`message`, with who is to blame. Ends those whom no launcher ends: the stopped, and the late elsewhere."""
        with self._telling:
            self._transport.pulse.give_up()
            reports, found = self._search()
            for peer in self.others:
                stopped = peer.rank in reports and reports[peer.rank].state == "stopped"
                if peer.pidfd is None and (stopped or peer.rank in found) and self._witness and peer.address:
                    self._witness.give_up(peer.address)
                elif peer.pidfd is not None and stopped:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        signal.pidfd_send_signal(peer.pidfd, signal.SIGKILL)
            self._account = f"{'; '.join(found.values()) or self._unclear(reports)} ({message})"
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
                self._transport.pulse.give_up()
                for said in suspects(self._look(), self._transport.pulse.read().sequence).values():
                    _say(f"{said} (this rank was told to end)")
        else:
            time.sleep(LOOK_S + 2 * ANSWER_S)  # the main thread is about to say it, and to end
            _say(self._account)
        os._exit(128 + signal.SIGTERM)

    def _is_one_gone(self) -> bool:
        return any(peer.state() == "gone" for peer in self.others)

    def _leave(self, message: str) -> None:
        _say(self.account(message))
        os._exit(PEER_LOST)

    def _search(self) -> tuple[dict[int, Report], dict[int, str]]:
        """How the others are, and the suspects. One that has ended or is stopped may take a moment to show."""
        deadline = time.monotonic() + LOOK_S
        while True:
            reports = self._look()
            found = suspects(reports, self._transport.pulse.read().sequence)
            if time.monotonic() > deadline or any(reports[rank].state != "alive" for rank in found):
                return reports, found
            time.sleep(0.05)

    def _unclear(self, reports: dict[int, Report]) -> str:
        """What to say where there is no suspect."""
        mine = self._transport.pulse.read()
        silent = ", ".join(f"rank {peer.rank} on {peer.host}" for peer in self.others if peer.rank not in reports)
        if silent:
            return f"{silent} did not answer, or the link to it is dead; this rank waited {mine}"
        rank, last = min(reports.items(), key=lambda one: one[1].beat.sequence)
        if last.beat.sequence < mine.sequence or last.state == "gone":
            return f"rank {rank} {'is behind' if last.state == 'alive' else 'has ended too'}: last seen {last.beat}"
        return "no rank is dead or behind: all wait for each other"

    def _look(self) -> dict[int, Report]:
        """How the others are, but for those on other hosts whose witness does not answer."""
        reports = {peer.rank: Report(peer.state(), peer.pulse.read()) for peer in self.others if peer.pulse}
        far = {peer.rank: peer.address for peer in self.others if peer.pidfd is None and peer.address}
        return reports | self._witness.ask(far, ANSWER_S) if self._witness and far else reports


def suspects(reports: dict[int, Report], mine: int) -> dict[int, str]:
    """Ranks that one at its collective number `mine` may wait for in vain, and what to say of each.

    The dead before the stopped, the stopped before the late: the ones may be the others' cause. None that gave up, or
    that itself waits in an earlier collective.
    """
    beats = {rank: report.beat for rank, report in sorted(reports.items())}
    dead = [rank for rank in beats if reports[rank].state == "gone" and not beats[rank].gave_up]
    if dead:
        first = min(dead, key=lambda rank: beats[rank].sequence)
        return {first: f"rank {first} has ended: last seen {beats[first]}"}
    stopped = [rank for rank in beats if reports[rank].state == "stopped"]
    if stopped:
        return {rank: f"rank {rank} is stopped: {beats[rank]}" for rank in stopped}
    late = [
        rank
        for rank, beat in beats.items()
        if reports[rank].state == "alive" and beat.sequence < mine and not beat.inside and beat.stage != IDLE
    ]
    return {rank: f"rank {rank} is behind: {beats[rank]}" for rank in late}


def _say(line: str) -> None:
    sys.stderr.write(f"lockstep: {line}\n")
    sys.stderr.flush()


def _exchange(transport: Transport, witness: Witness | None) -> list[dict[str, Any]]:
    card = {"host": socket.gethostname()[:64], "pid": os.getpid(), "fd": transport.pulse.fd, "place": _place()}
    card["witness"] = witness.address if witness else None
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


def _peer(rank: int, card: dict[str, Any]) -> Peer:
    host, pid, address = card["host"], card["pid"], card["witness"] and Address(*card["witness"])
    if card["place"] == _place() and card["fd"] is not None:
        with contextlib.suppress(OSError):  # gone already, or another user's
            return Peer(rank, host, pid, Pulse.of(pid, card["fd"]), os.pidfd_open(pid), address)
    return Peer(rank, host, pid, None, None, address)

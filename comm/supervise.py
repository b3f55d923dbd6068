"""The parent's side of a run: hear every rank, tell the first real failure from its echoes, leave no process behind."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from lockstep.comm.errors import PeerLost, UsageError

PEER_LOST = 75  # exit code of a rank that gave up because of another one
LENGTH = struct.Struct("!Q")


class RankFailed(RuntimeError):
    """The rank that failed first, and `where` it was seen last.

    `traceback_text` is its own, or a waiting peer's if it was silent, or empty.
    """

    def __init__(self, rank: int, message: str, traceback_text: str = "", where: str = "") -> None:
        super().__init__(rank, message, traceback_text, where)
        self.rank, self.message, self.traceback_text, self.where = rank, message, traceback_text, where

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.message}" + (f"; last seen {self.where}" if self.where else "")


@dataclass(frozen=True)
class Event:
    value: Any


@dataclass(frozen=True)
class Result:
    value: Any


@dataclass(frozen=True)
class Failure:
    """What is left of an exception, as text: exceptions do not all pickle."""

    exit_code: int
    message: str
    traceback_text: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        told = traceback.TracebackException.from_exception(error)  # survives a __str__ that raises
        if isinstance(error, UsageError):
            return cls(2, str(told), "".join(told.format()))
        code = PEER_LOST if any(isinstance(e, PeerLost) for e in _chain(error)) else 1
        return cls(code, f"{type(error).__name__}: {told}", "".join(told.format()))

    @property
    def is_echo(self) -> bool:
        """Whether another rank is to blame."""
        return self.exit_code == PEER_LOST


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


class Sender:
    """The rank's end of the pipe. Each message is its length and its pickle."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def send(self, message: Event | Result | Failure) -> None:
        payload = pickle.dumps(message)
        data = memoryview(LENGTH.pack(len(payload)) + payload)
        with self._lock:
            while data:
                data = data[os.write(self._connection.fileno(), data) :]


class Rank:
    """One rank, seen from the parent: its process, what it has sent, and how it came out."""

    def __init__(self, number: int, process: BaseProcess, reader: Connection) -> None:
        assert process.pid
        self.number, self.pid = number, process.pid
        self.outcome: Result | Failure | None = None
        self.heard = time.monotonic()  # when the last message came
        # Not process.sentinel where that can be avoided: a child of the rank that outlives it holds that open.
        self.exit_fd = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else process.sentinel
        self._process, self._reader, self._buffer = process, reader, bytearray()
        self._exited = self._closed = False
        os.set_blocking(reader.fileno(), False)

    def waitables(self) -> list[int]:
        open_reader = [] if self._exited or self._closed else [self._reader.fileno()]
        return open_reader if self._exited else [*open_reader, self.exit_fd]

    def hear(self, ready: Sequence[Any]) -> Iterator[Any]:
        """The events that have come; outcome and exit are noted. What a rank sent before it died is heard first."""
        exited = not self._exited and self.exit_fd in ready
        if exited or (not self._exited and self._reader.fileno() in ready):
            yield from self._messages()
        if exited:
            self.reap()
            self.outcome = self.outcome or Failure(*_post_mortem(self._process.exitcode))

    def _messages(self) -> Iterator[Any]:
        # Never a blocking read: a rank can be stopped or killed in the middle of a message.
        with contextlib.suppress(BlockingIOError):
            chunk = os.read(self._reader.fileno(), 1 << 20)
            self._closed = not chunk
            self._buffer += chunk
        while len(self._buffer) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            try:
                message = pickle.loads(self._buffer[LENGTH.size : end])
            except Exception as error:
                message = Failure(1, f"sent something that cannot be unpickled: {error!r}", traceback.format_exc())
            del self._buffer[:end]
            self.heard = time.monotonic()
            if isinstance(message, Event):
                yield message.value
            else:
                self.outcome = self.outcome or message

    def signal(self, number: signal.Signals) -> None:
        """To the rank and, once it leads its own session, to all that it has started."""
        for send in () if self._exited else (os.kill, os.killpg):
            with contextlib.suppress(ProcessLookupError):
                send(self.pid, number)

    def reap(self) -> None:
        """End what the rank started and collect the process. Waits for it to exit."""
        if not self._exited:
            wait([self.exit_fd])
            self.signal(signal.SIGKILL)  # while its number cannot be anyone else's
            self._process.join()
            # Starting a process collects all that have exited, so another thread may have this one's exit code in hand.
            patience = time.monotonic() + 1.0
            while self._process.exitcode is None and time.monotonic() < patience:
                time.sleep(0.001)
            self._exited = True

    def close(self) -> None:
        self._reader.close()
        if self.exit_fd != self._process.sentinel:
            os.close(self.exit_fd)
        self._process.close()

    def is_stopped(self) -> bool:
        return is_stopped(self.pid)


def is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:
        return stat.read().rpartition(")")[2].split()[0] in "Tt"
    return False


def _post_mortem(exit_code: int | None) -> tuple[int, str]:
    if exit_code == PEER_LOST:
        return exit_code, "lost a peer, and could not say more"
    if exit_code is None or exit_code >= 0:
        return 1, f"ended with exit code {exit_code} and no result"
    names = {int(s): s.name for s in signal.Signals}
    hint = " (by hand, or by the kernel when memory is short)" if exit_code == -signal.SIGKILL else ""
    return 1, f"was killed by {names.get(-exit_code, f'signal {-exit_code}')}{hint}"


def supervise(
    ranks: Sequence[Rank], on_event: Callable[[int, Any], None] | None, timeout_s: float, grace_s: float
) -> object:
    """Rank 0's result, once every rank has delivered. Raises for the first real failure (RankFailed, UsageError)."""
    while any(rank.outcome is None for rank in ranks):
        deadline = _deadline(ranks, timeout_s, grace_s)
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait([fd for rank in ranks for fd in rank.waitables()], left)
        if not ready:
            break
        for rank in ranks:
            for event in rank.hear(ready):
                if on_event:
                    on_event(rank.number, event)
        for rank in ranks:
            if isinstance(rank.outcome, Failure) and not rank.outcome.is_echo:
                if rank.outcome.exit_code == 2:
                    raise UsageError(rank.outcome.message)
                raise RankFailed(rank.number, rank.outcome.message, rank.outcome.traceback_text)
    results = [rank.outcome.value for rank in ranks if isinstance(rank.outcome, Result)]
    if len(results) < len(ranks):
        raise _only_echoes(ranks, timeout_s)
    return results[0]


def _deadline(ranks: Sequence[Rank], timeout_s: float, grace_s: float) -> float | None:
    """Until when the silent ranks may stay so.

    A rank that lost a peer knows only that: the death it saw is reported within moments, and peers that hang in the
    same collective time out about when it did; a stopped rank will say nothing. And ranks that work in lockstep finish
    in lockstep.
    """
    losses = [rank.heard for rank in ranks if isinstance(rank.outcome, Failure)]
    if losses and all(rank.outcome or rank.is_stopped() for rank in ranks):
        return min(losses)
    if losses:
        return min(losses) + grace_s
    if any(rank.outcome for rank in ranks):
        return max(rank.heard for rank in ranks) + timeout_s
    return None


def _only_echoes(ranks: Sequence[Rank], timeout_s: float) -> RankFailed:
    """Nobody confessed. A rank that neither finished nor reported is the one that the others waited for."""
    losses = sorted((r for r in ranks if isinstance(r.outcome, Failure)), key=lambda r: r.heard)
    loss = losses[0].outcome if losses else None
    silent = sorted((r for r in ranks if r.outcome is None), key=lambda r: not r.is_stopped())
    if not silent:
        assert isinstance(loss, Failure)
        done = [str(r.number) for r in ranks if isinstance(r.outcome, Result)]
        also = f" (ranks that had already finished: {', '.join(done)})" if done else ""
        return RankFailed(losses[0].number, loss.message + also, loss.traceback_text)
    state = "is stopped" if silent[0].is_stopped() else "hangs or is far behind"
    others = "".join(f", and so may rank {r.number}" for r in silent[1:])
    if isinstance(loss, Failure):
        waited = f"rank {losses[0].number} waited for it ({loss.message})"
        return RankFailed(silent[0].number, f"{state}{others}: {waited}", loss.traceback_text)
    return RankFailed(
        silent[0].number, f"{state}{others}: no word for {timeout_s:g} s, while other ranks have finished"
    )


def end(ranks: Sequence[Rank], grace_s: float, *, terminate: bool) -> None:
    """Wait until the ranks have exited, after SIGTERM if asked; after `grace_s`, or a second Ctrl-C, kill them."""
    try:
        if terminate:
            for rank in ranks:
                rank.signal(signal.SIGTERM)
                rank.signal(signal.SIGCONT)  # a stopped process dies of SIGTERM only when it goes on
        running = {rank.exit_fd for rank in ranks if rank.exit_fd in rank.waitables()}
        deadline = time.monotonic() + grace_s
        while running and (gone := wait(running, max(0.0, deadline - time.monotonic()))):
            running.difference_update(fd for fd in gone if isinstance(fd, int))
    finally:
        with interrupt_deferred():
            for rank in ranks:
                rank.signal(signal.SIGKILL)
            for rank in ranks:
                rank.reap()
                rank.close()


@contextlib.contextmanager
def interrupt_deferred() -> Iterator[None]:
    """Hold Ctrl-C back until the block is done, so that no process is started and then forgotten."""
    if threading.current_thread() is not threading.main_thread():  # KeyboardInterrupt is raised only there
        yield
        return
    pending: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: pending.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if pending:
            signal.raise_signal(signal.SIGINT)

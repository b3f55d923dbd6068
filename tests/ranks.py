"""Ranks for tests: forked once per session and size, joined in one gloo group, ready for one call after the other.

def sums(group, n): ...                 # at module level, called on every rank

def test_sums(ranks):                   # the fixture; conftest.py imports it from here
    assert ranks(2).run(sums, 3) == [..., ...]
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch

from lockstep.comm.group import Group, connect
from lockstep.comm.ledger import Ledger
from lockstep.comm.supervise import Event, Failure, Rank, Result, Sender, end
from lockstep.comm.world import enter_rank, rendezvous

TIMEOUT_S = 60.0


class RankError(Exception):
    """What went wrong on one rank, with that rank's traceback."""

    def __init__(self, rank: int, traceback_text: str) -> None:
        super().__init__(rank, traceback_text)
        self.rank, self.traceback = rank, traceback_text

    def __str__(self) -> str:
        return f"on rank {self.rank}\n{self.traceback}"


class Pool:
    """`size` ranks that wait for calls. One rank alone is this process. After an error or a time-out, fresh ones."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: list[Rank] = []
        self._requests: list[Connection] = []
        self._stack = contextlib.ExitStack()

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """`function(group, *args)` on every rank, with an empty ledger; the results in rank order, copied by pickle."""
        __tracebackhide__ = True
        if self.size == 1:
            return [_call_here(function, args)]
        request = _by_reference(function), pickle.dumps(args)
        if not self._ranks:
            self._start()
        try:
            for connection in self._requests:
                with contextlib.suppress(BrokenPipeError):  # it has died, which is heard next
                    connection.send(request)
            return self._answers(timeout_s)
        except BaseException:
            self.close()  # a rank may wait inside a collective, or a message of one may still be under way
            raise

    def _answers(self, timeout_s: float) -> list[Any]:
        __tracebackhide__ = True
        answers: dict[int, Any] = {}
        echo: RankError | None = None
        deadline = time.monotonic() + timeout_s
        while len(answers) < self.size:
            waitables = [fd for rank in self._ranks for fd in rank.waitables()]
            ready = wait(waitables, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise echo or self._overdue(answers, timeout_s)
            for rank in self._ranks:
                for answer in [*rank.hear(ready), *([rank.outcome] if rank.outcome else [])]:
                    if not isinstance(answer, Failure):
                        answers[rank.number] = pickle.loads(answer.value)
                        continue
                    error = RankError(rank.number, answer.traceback_text or answer.message)
                    if not answer.is_echo:
                        raise error
                    answers[rank.number], echo = None, echo or error
                    deadline = min(deadline, time.monotonic() + 2.0)  # time for the rank that caused it to be heard
        if echo:
            raise echo
        return [answers[number] for number in range(self.size)]

    def _overdue(self, answers: dict[int, Any], timeout_s: float) -> RankError:
        late = [rank for rank in self._ranks if rank.number not in answers]
        for rank in late:
            rank.signal(signal.SIGUSR1)  # prints where it is
        time.sleep(0.2)
        names = ", ".join(str(rank.number) for rank in late)
        return RankError(late[0].number, f"no answer after {timeout_s:g} s from rank {names}; see stderr for where")

    def _start(self) -> None:
        torch.set_num_threads(1)  # or the fork hangs in its first product
        init_method = self._stack.enter_context(rendezvous())
        context = multiprocessing.get_context("fork")
        for number in range(self.size):
            theirs, ours = context.Pipe(duplex=False)
            reader, writer = context.Pipe(duplex=False)
            with theirs, writer:
                setup = (number, self.size, os.getpid(), init_method, theirs, writer)
                process = context.Process(target=_serve, args=setup, daemon=True)
                process.start()
            self._requests.append(ours)
            self._ranks.append(Rank(number, process, reader))

    def close(self) -> None:
        """End the ranks at once. The next `run` starts new ones."""
        end(self._ranks, 2.0, terminate=True)
        for connection in self._requests:
            connection.close()
        self._ranks, self._requests = [], []
        self._stack.close()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Pool]]:
    """`ranks(size)` is the session's pool of that size, started at its first use."""
    pools: dict[int, Pool] = {}
    yield lambda size: pools.setdefault(size, Pool(size))
    for pool in pools.values():
        pool.close()


def _call_here(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    __tracebackhide__ = True
    try:
        return function(Group.local(), *args)
    except Exception as error:
        raise RankError(0, traceback.format_exc()) from error


def _by_reference(function: Callable[..., Any]) -> tuple[str, str | None, str, list[str]]:
    """What finds `function` again in a rank that was forked before its module was imported."""
    module, name = function.__module__, function.__qualname__
    if getattr(sys.modules.get(module), name, None) is not function:
        raise TypeError(f"{name} is not a module-level function; ranks import it by its name")
    return module, inspect.getsourcefile(function), name, sys.path


def _find(module: str, file: str | None, name: str, path: list[str]) -> Callable[..., Any]:
    sys.path[:] = path
    if module not in sys.modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError:  # pytest's importlib mode makes up names
            spec = importlib.util.spec_from_file_location(module, file or "")
            assert spec and spec.loader
            sys.modules[module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[module])
    found: Callable[..., Any] = getattr(sys.modules[module], name)
    return found


def _serve(number: int, size: int, parent: int, init_method: str, requests: Connection, writer: Connection) -> None:
    enter_rank(parent)
    faulthandler.register(signal.SIGUSR1, file=2)
    sender = Sender(writer)
    group = connect(number, size, "cpu", TIMEOUT_S, init_method)
    while True:
        reference, args = requests.recv()
        group.ledger, group.decisions = Ledger(), None  # whatever the call before has left
        group.time(None)
        try:
            answer: Any = Result(pickle.dumps(_find(*reference)(group, *pickle.loads(args))))
        except BaseException as error:
            answer = Failure.of(error)
        sender.send(Event(answer))

"""Start and stop of a run's ranks: P local processes under one supervisor, or one rank of torchrun or deepspeed.

Importing this imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal

from lockstep.comm.errors import PeerLost, UsageError
from lockstep.comm.supervise import (
    PEER_LOST,
    Event,
    Failure,
    Rank,
    RankFailed,
    Result,
    Sender,
    end,
    interrupt_deferred,
    supervise,
)

if TYPE_CHECKING:
    from lockstep.comm.group import Group

__all__ = ["PEER_LOST", "RankFailed", "enter_rank", "rank_of_launcher", "rendezvous", "run", "run_as_rank"]

Target = Callable[..., Any]  # target(group, emit, *args)
OnEvent = Callable[[int, Any], None]
PR_SET_PDEATHSIG = 1


def run(
    target: Target,
    size: int,
    *,
    args: Sequence[Any] = (),
    on_event: OnEvent | None = None,
    timeout_s: float = 60.0,
    grace_s: float = 5.0,
    device: str = "cpu",
    start: Literal["fork", "spawn"] | None = None,
) -> Any:
    """Call `target(group, emit, *args)` on `size` ranks of this machine; return rank 0's value when all have returned.

    `emit(event)` on a rank becomes `on_event(rank, event)` here, in order of arrival. Raises UsageError if a rank did,
    else RankFailed for the first rank that failed of itself; whatever happens, all ranks have ended before this
    returns. `timeout_s` is how long a rank waits for another, `grace_s` how long ranks may take to end.

    Ranks are forked, or spawned (seconds slower) for CUDA. A lock that another thread of this process holds is held
    forever in a forked rank: start threads, such as a progress display, in `on_event` and not before this call.
    """
    if size < 1:
        raise UsageError(f"{size} ranks were asked for; at least 1 is needed")
    threads = _threads()
    start = start or ("spawn" if device.startswith("cuda") else "fork")
    work: Any = (target, tuple(args))
    if start == "fork":
        import torch

        torch.set_num_threads(1)  # a fork of a process with OpenMP threads hangs in its first product
    else:
        work = pickle.dumps(work)
    ranks: list[Rank] = []
    finished = False
    with rendezvous() as init_method:
        try:
            for number in range(size):
                shared = (size, os.getpid(), init_method, device, timeout_s, threads, work)
                with interrupt_deferred():
                    ranks.append(_start(start, number, shared))
            value = supervise(ranks, on_event, timeout_s, grace_s)
            finished = True
            return value
        finally:
            end(ranks, grace_s, terminate=not finished)


def rank_of_launcher() -> tuple[int, int] | None:
    """(rank, size) if torchrun, deepspeed or the like has started this process as one rank of several, else None."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    rank, size = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise UsageError(f"RANK={rank} WORLD_SIZE={size} in the environment is no rank; unset both, or use a launcher")
    return int(rank), int(size)


def run_as_rank(
    target: Target,
    *,
    args: Sequence[Any] = (),
    on_event: OnEvent | None = None,
    timeout_s: float = 60.0,
    device: str = "cpu",
) -> Any:
    """The same call where a launcher has already made this process a rank; it supervises, and we raise what we see.

    Returns the target's value on rank 0 and None on the others. Each rank hears only its own events. A PeerLost that
    comes out of here should end the process with code PEER_LOST, so that the launcher's report shows who failed first.
    """
    launched = rank_of_launcher()
    if launched is None:
        raise UsageError("this process is not a rank: RANK and WORLD_SIZE are not set")
    rank, size = launched
    group = _join(rank, size, device, timeout_s, None, _threads())

    def emit(event: Any) -> None:
        if on_event:
            on_event(rank, event)

    value = target(group, emit, *args)
    group.close()
    return value if rank == 0 else None


@contextlib.contextmanager
def rendezvous() -> Iterator[str]:
    """An init_method that no other run shares. On Linux the file has no name, so not even SIGKILL leaves it behind."""
    if sys.platform == "linux":
        fd = os.memfd_create("lockstep-rendezvous")
        try:
            yield f"file:///proc/{os.getpid()}/fd/{fd}"
        finally:
            os.close(fd)
    else:
        with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
            yield f"file://{folder}/rendezvous"


def enter_rank(parent: int) -> None:
    """Make this process a rank: it ends when `parent` does, and leaves the terminal's signals to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()  # its children can be ended with it, and writing to the terminal never stops it
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # gone before we asked
        os._exit(1)


def _start(start: str, number: int, shared: tuple[Any, ...]) -> Rank:
    context = multiprocessing.get_context(start)
    reader, writer = context.Pipe(duplex=False)
    with writer:
        process = context.Process(  # type: ignore[attr-defined]
            target=_rank_main, args=(number, writer, *shared), name=f"lockstep-rank-{number}", daemon=True
        )
        process.start()
    return Rank(number, process, reader)


def _rank_main(
    rank: int,
    writer: Connection,
    size: int,
    parent: int,
    init_method: str,
    device: str,
    timeout_s: float,
    threads: int,
    work: Any,
) -> None:
    enter_rank(parent)
    sender = Sender(writer)
    try:
        target, args = pickle.loads(work) if isinstance(work, bytes) else work
        if sys.platform == "linux":
            os.environ.setdefault(
                "GLOO_SOCKET_IFNAME", "lo"
            )  # all ranks are here, whatever the host's name resolves to
        group = _join(rank, size, device, timeout_s, init_method, threads)
        value = target(group, lambda event: sender.send(Event(event)), *args)
        group.close()  # waits for nobody
        sender.send(Result(value if rank == 0 else None))
    except BaseException as error:  # also SystemExit: a rank that leaves early is a failure, whatever its code
        failure = Failure.of(error)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, ValueError, OSError):  # no stream, a closed one, a broken pipe
                stream.flush()
        sender.send(failure)  # the parent ends us once it has read this
        os._exit(failure.exit_code)  # leave without closing the group: its peers may be gone


def _join(rank: int, size: int, device: str, timeout_s: float, init_method: str | None, threads: int) -> Group:
    import torch

    from lockstep.comm.group import connect

    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    torch.set_num_threads(threads)
    try:
        return connect(rank, size, device, timeout_s, init_method)
    except RuntimeError as error:
        raise PeerLost(f"rank {rank} of {size} could not join the group: {error}") from error


def _threads() -> int:
    """Threads per rank: one, unless the user has set OMP_NUM_THREADS."""
    asked = os.environ.get("OMP_NUM_THREADS") or "1"
    if not asked.isdecimal() or int(asked) < 1:
        raise UsageError(f"OMP_NUM_THREADS={asked} is not a number of threads; set it to 1 or more, or unset it")
    return int(asked)

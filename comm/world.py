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
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Literal

from lockstep.comm.errors import PeerLost, UsageError
from lockstep.comm.pulse import Pulse
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
from lockstep.comm.wiring import Wiring
from lockstep.comm.witness import Witness, witness

if TYPE_CHECKING:
    from lockstep.comm.group import Group
    from lockstep.comm.peers import Peers

__all__ = ["PEER_LOST", "RankFailed", "enter_rank", "rank_of_launcher", "rendezvous", "run", "run_as_rank"]

Target = Callable[..., Any]  # target(group, emit, *args)
OnEvent = Callable[[int, Any], None]
PR_SET_PDEATHSIG = 1
# Who says which rank this is: torchrun and deepspeed; the mpiexec of Intel MPI and MPICH; that of Open MPI.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)


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
    wiring: Wiring = Wiring(),  # noqa: B008 (frozen)
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
    if wiring.comm == "mpi" and size > 1:
        raise UsageError("--comm mpi needs ranks that an mpiexec has started: lockstep launch --launcher mpi -- ...")
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
    with rendezvous() as init_method, _pulses(size) as pulses:
        try:
            for number in range(size):
                shared = (size, os.getpid(), init_method, pulses[number].fd, device, timeout_s, wiring, threads, work)
                with interrupt_deferred():
                    ranks.append(_start(start, number, shared))
            value = supervise(ranks, on_event, timeout_s, grace_s)
            finished = True
            return value
        except RankFailed as error:
            error.where = str(pulses[error.rank].read())
            raise
        finally:
            end(ranks, grace_s, terminate=not finished)


def rank_of_launcher() -> tuple[int, int] | None:
    """(rank, size) if torchrun, deepspeed or the like has started this process as one rank of several, else None."""
    for ours, all_of_us in LAUNCHERS:
        if ours not in os.environ or all_of_us not in os.environ:
            continue
        rank, size = os.environ[ours], os.environ[all_of_us]
        if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
            raise UsageError(
                f"{ours}={rank} {all_of_us}={size} in the environment is no rank; unset both, or use a launcher"
            )
        return int(rank), int(size)
    return None


def run_as_rank(
    target: Target,
    *,
    args: Sequence[Any] = (),
    on_event: OnEvent | None = None,
    timeout_s: float = 60.0,
    device: str = "cpu",
    wiring: Wiring = Wiring(),  # noqa: B008 (frozen)
    deliver: Callable[[Any], None] | None = None,
) -> Any:
    """The same call where a launcher has already made this process a rank; it supervises, and we raise what we see.

    Returns the target's value on rank 0 and None on the others. With `deliver` rank 0 calls that with the value while
    the others wait, so that they see it die or stop. Each rank hears only its own events. A PeerLost that comes out
    of here should end the process with code PEER_LOST, so that the launcher's report shows who failed first.
    """
    launched = rank_of_launcher()
    if launched is None:
        raise UsageError("this process is not a rank: RANK and WORLD_SIZE are not set")
    rank, size = launched
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a launcher that is killed leaves us behind
    from lockstep.comm.delivery import deliver as while_others_wait

    threads, pulse = _threads(), Pulse.new()
    beside = witness(rank, size, pulse, timeout_s)
    group = _join(rank, size, device, timeout_s, None, threads, wiring, pulse)
    peers = _meet(group, beside)
    if beside and (peers is None or peers.are_here):
        beside.dismiss()
        beside = None

    def emit(event: Any) -> None:
        if on_event:
            on_event(rank, event)

    try:
        value = target(group, emit, *args)
        group.mark("end")
        if deliver:
            while_others_wait(group, lambda: deliver(value))
    except PeerLost as error:
        raise PeerLost(peers.account(str(error)) if peers else str(error)) from error
    except (UsageError, BrokenPipeError):
        raise
    except Exception as error:
        text = traceback.format_exc()
        raise RankFailed(rank, f"{type(error).__name__}: {error}", text, str(pulse.read())) from error
    finally:
        if peers:
            peers.close()
        pulse.close()
    group.close()
    if beside:
        beside.dismiss()
    return value if rank == 0 else None


def _meet(group: Group, beside: Witness | None) -> Peers | None:
    """Know the other ranks of a launcher by name and place."""
    if group.transport is None:
        return None
    from lockstep.comm.peers import Peers

    peers = Peers(group.transport, beside)
    peers.answer_sigterm()
    group.hosts = peers.hosts
    return peers


@contextlib.contextmanager
def _pulses(size: int) -> Iterator[list[Pulse]]:
    """The ranks' heartbeats, on pages that this process holds."""
    pulses = [Pulse.new() for _ in range(size)]
    try:
        yield pulses
    finally:
        for pulse in pulses:
            pulse.close()


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
    pulse: int | None,
    device: str,
    timeout_s: float,
    wiring: Wiring,
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
        heart = Pulse.new() if pulse is None else Pulse.of(parent, pulse)
        group = _join(rank, size, device, timeout_s, init_method, threads, wiring, heart)
        value = target(group, lambda event: sender.send(Event(event)), *args)
        group.mark("end")
        group.close()  # waits for nobody
        sender.send(Result(value if rank == 0 else None))
    except BaseException as error:  # also SystemExit: a rank that leaves early is a failure, whatever its code
        failure = Failure.of(error)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, ValueError, OSError):  # no stream, a closed one, a broken pipe
                stream.flush()
        sender.send(failure)  # the parent ends us once it has read this
        os._exit(failure.exit_code)  # leave without closing the group: its peers may be gone


def _join(
    rank: int,
    size: int,
    device: str,
    timeout_s: float,
    init_method: str | None,
    threads: int,
    wiring: Wiring,
    pulse: Pulse,
) -> Group:
    import torch

    from lockstep.comm.group import connect

    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    torch.set_num_threads(threads)
    try:
        return connect(rank, size, device, timeout_s, init_method, wiring, pulse)
    except RuntimeError as error:
        raise PeerLost(f"rank {rank} of {size} could not join the group: {error}") from error


def _threads() -> int:
    """Threads per rank: one, unless the user has set OMP_NUM_THREADS."""
    asked = os.environ.get("OMP_NUM_THREADS") or "1"
    if not asked.isdecimal() or int(asked) < 1:
        raise UsageError(f"OMP_NUM_THREADS={asked} is not a number of threads; set it to 1 or more, or unset it")
    return int(asked)

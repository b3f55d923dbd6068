"""Runs start, fail and end as they should, and whatever happens nothing is left: no process, no file, no descriptor."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.resource_tracker
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import popen_fork
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Pool, RankError

import lockstep.comm.world
from lockstep.comm.errors import PeerLost, UsageError
from lockstep.comm.group import Group
from lockstep.comm.world import PEER_LOST, RankFailed, rank_of_launcher, run, run_as_rank

Emit = Callable[[Any], None]


def children() -> set[str]:
    return {pid for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()}


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


def overdue(number: int, frame: Any) -> None:
    raise TimeoutError("the test hangs")


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Around every test here; none may hang."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    multiprocessing.resource_tracker.ensure_running()  # a spawned rank needs it; it ends with pytest
    before = children(), len(os.listdir("/proc/self/fd")), threading.active_count()
    signal.signal(signal.SIGALRM, overdue)
    signal.alarm(25)
    yield folder
    signal.alarm(0)
    assert (children(), len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert list(folder.iterdir()) == []


def meet(group: Group, at: str = "test") -> float:
    """A collective: the sum of 1, 2, ... P."""
    total = torch.tensor([0.0])
    if group.transport:
        total = torch.tensor([group.rank + 1.0])
        group.transport.all_reduce(total, at)
    return float(total)


def multiply() -> None:
    """Large enough for OpenMP to use all its threads."""
    assert (torch.ones(300, 300) @ torch.ones(300, 300)).eq(300).all()
    assert torch.ones(300_000).exp().gt(2).all()


# What ranks do in the tests. Each meets the others at least once, so that all are up.


def works(group: Group, emit: Emit, num_events: int) -> dict[str, Any]:
    multiply()
    for i in range(num_events):
        emit((group.rank, i))
    return {"rank": group.rank, "size": group.size, "sum": meet(group), "threads": torch.get_num_threads()}


def fails(group: Group, emit: Emit, culprit: int, how: Callable[[], Any]) -> None:
    meet(group)
    emit("before")
    if group.rank == culprit:
        how()
    meet(group)


def raise_value_error() -> None:
    raise ValueError("boom")


class Odd(Exception):
    """Neither pickles nor prints."""

    def __init__(self, one: int, two: int) -> None:
        self.lock = threading.Lock()

    def __str__(self) -> str:
        raise RuntimeError("no text")


def raise_odd() -> None:
    raise Odd(1, 2)


def raise_usage() -> None:
    raise UsageError("--tp 6 is too many")


def raise_over_lost_peer() -> None:
    """Not a culprit: what it fails with comes from a peer that is gone."""
    try:
        raise PeerLost("all-reduce failed")
    finally:
        raise KeyError("cleaning up")


def kill_self(number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)


def abort() -> None:
    faulthandler.disable()
    kill_self(signal.SIGABRT)


def stop() -> None:
    kill_self(signal.SIGSTOP)


def exit_7() -> None:
    os._exit(7)


def exit_0() -> None:
    os._exit(0)


def exit_as_echo() -> None:
    os._exit(PEER_LOST)


def leave() -> None:
    sys.exit("had enough")


# Success


@pytest.mark.parametrize("size", [1, 2, 4])
def test_value_and_events_in_order(size: int) -> None:
    events: dict[int, list[Any]] = {rank: [] for rank in range(size)}
    value = run(works, size, args=(200,), on_event=lambda rank, event: events[rank].append(event))
    assert value == {"rank": 0, "size": size, "sum": size * (size + 1) / 2 if size > 1 else 0.0, "threads": 1}
    assert events == {rank: [(rank, i) for i in range(200)] for rank in range(size)}


def sends_much(group: Group, emit: Emit) -> Any:
    emit(torch.full((1_500_000,), float(group.rank)))
    return torch.arange(1_000_000)


def test_messages_larger_than_a_pipe() -> None:
    events: list[tuple[int, torch.Tensor]] = []
    value = run(sends_much, 2, on_event=lambda rank, event: events.append((rank, event)))
    assert torch.equal(value, torch.arange(1_000_000))
    assert sorted((rank, float(event.sum())) for rank, event in events) == [(0, 0.0), (1, 1_500_000.0)]


def test_spawned_ranks() -> None:
    events: list[tuple[int, Any]] = []
    value = run(works, 2, args=(1,), on_event=lambda rank, event: events.append((rank, event)), start="spawn")
    assert value["sum"] == 3.0
    assert sorted(events) == [(0, (0, 0)), (1, (1, 0))]


def test_threads_per_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert run(works, 2, args=(0,))["threads"] == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    with pytest.raises(UsageError, match="OMP_NUM_THREADS=many"):
        run(works, 2, args=(0,))


def test_no_rank_is_refused() -> None:
    with pytest.raises(UsageError, match="0 ranks"):
        run(works, 0, args=(0,))


def test_many_runs_leave_nothing(nothing_left: Path) -> None:
    for _ in range(20):
        assert run(works, 2, args=(1,))["sum"] == 3.0


def prints(group: Group, emit: Emit) -> None:
    sys.stdout.write(f"[rank {group.rank} without a newline]")
    fails(group, emit, 1, raise_value_error)


def test_output_of_ranks_is_complete_and_not_doubled(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(1, "w", closefd=False) as buffered:  # pytest's own does not buffer
        monkeypatch.setattr(sys, "stdout", buffered)
        print("[parent]")
        with pytest.raises(RankFailed):
            run(prints, 2)
    out = capfd.readouterr().out
    assert out.count("[parent]") == 1
    assert "[rank 1 without a newline]" in out


# Failures: rank 0 waits in a collective for the culprit, and sees only that a peer is lost.


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (raise_value_error, "ValueError: boom"),
        (raise_odd, "Odd: "),
        (leave, "SystemExit: had enough"),
        (kill_self, "was killed by SIGKILL"),
        (abort, "was killed by SIGABRT"),
        (exit_7, "ended with exit code 7 and no result"),
        (exit_0, "ended with exit code 0 and no result"),
    ],
)
@pytest.mark.parametrize("culprit", [0, 1])
def test_one_failing_rank_ends_all_and_is_named(how: Callable[[], Any], message: str, culprit: int) -> None:
    events: list[tuple[int, Any]] = []
    with within(4.0), pytest.raises(RankFailed) as caught:
        run(fails, 2, args=(culprit, how), on_event=lambda rank, event: events.append((rank, event)))
    assert (caught.value.rank, caught.value.message[: len(message)]) == (culprit, message)
    assert (culprit, "before") in events
    if message[0].isupper():
        assert f"in {how.__name__}" in caught.value.traceback_text
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and str(again).startswith(f"rank {culprit}: {message}")


def test_usage_error_comes_as_itself() -> None:
    with within(4.0), pytest.raises(UsageError, match=r"^--tp 6 is too many$"):
        run(fails, 2, args=(1, raise_usage))


def raises_late(group: Group, emit: Emit, how: Callable[[], Any]) -> None:
    meet(group)
    if group.rank == 0:
        how()
    time.sleep(0.3)
    raise_value_error()


@pytest.mark.parametrize("how", [raise_over_lost_peer, exit_as_echo])
def test_a_rank_that_lost_a_peer_is_not_the_culprit(how: Callable[[], Any]) -> None:
    with within(4.0), pytest.raises(RankFailed, match="rank 1: ValueError: boom"):
        run(raises_late, 2, args=(how,))


@pytest.mark.parametrize("size", [2, 4])
def test_a_stopped_rank_is_named_after_the_time_out(size: int) -> None:
    with within(5.0), pytest.raises(RankFailed, match=r"rank 1: is stopped.* waited for it .*PeerLost") as caught:
        run(fails, size, args=(1, stop), timeout_s=1.0, grace_s=0.5)
    assert "in meet" in caught.value.traceback_text


def one_is_late_and_one_stops(group: Group, emit: Emit) -> None:
    meet(group)
    if group.rank == 1:
        time.sleep(60)
    if group.rank == 2:
        stop()
    meet(group)


def test_of_several_silent_ranks_the_stopped_one_is_named() -> None:
    with within(4.0), pytest.raises(RankFailed, match="rank 2: is stopped, and so may rank 1: rank 0 waited for it"):
        run(one_is_late_and_one_stops, 3, timeout_s=1.0, grace_s=0.3)


def stops_at_the_end(group: Group, emit: Emit) -> None:
    meet(group)
    if group.rank == 1:
        stop()


def test_a_rank_that_never_finishes_is_named() -> None:
    with within(4.0), pytest.raises(RankFailed, match=r"rank 1: is stopped: no word for 0\.5 s"):
        run(stops_at_the_end, 2, timeout_s=0.5)


def expects_more(group: Group, emit: Emit) -> None:
    meet(group)
    if group.rank == 0:
        meet(group)


def test_a_collective_too_many_is_told_with_who_had_finished() -> None:
    with within(4.0), pytest.raises(RankFailed, match=r"rank 0: PeerLost: .*already finished: 1\)"):
        run(expects_more, 2)


def never_joins(group: Group, emit: Emit) -> None:
    raise AssertionError("the group was joined")


def test_a_rank_that_dies_before_it_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(rank: int, *args: Any) -> Group:
        time.sleep(0.2)
        os._exit(7) if rank == 1 else time.sleep(60)
        raise AssertionError

    monkeypatch.setattr("lockstep.comm.group.connect", connect)
    with within(4.0), pytest.raises(RankFailed, match="rank 1: ended with exit code 7"):
        run(never_joins, 2)


def test_a_group_that_cannot_be_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(rank: int, *args: Any) -> Group:
        raise RuntimeError("no such interface")

    monkeypatch.setattr("lockstep.comm.group.connect", connect)
    with (
        within(4.0),
        pytest.raises(RankFailed, match=r"rank .: PeerLost: rank . of 2 could not join .*no such interface"),
    ):
        run(never_joins, 2)


def returns_a_lock(group: Group, emit: Emit) -> Any:
    return threading.Lock()


def emits_a_lock(group: Group, emit: Emit) -> None:
    emit(threading.Lock())


class Trap:
    """Pickles, but does not unpickle."""

    def __reduce__(self) -> Any:
        return int, ("x",)


def emits_a_trap(group: Group, emit: Emit) -> None:
    emit(Trap())


@pytest.mark.parametrize("target", [returns_a_lock, emits_a_lock, emits_a_trap])
def test_what_does_not_pickle_is_a_failure(target: Callable[..., Any]) -> None:
    with pytest.raises(RankFailed, match="pickle"):
        run(target, 1)


def blocks_in_an_event(group: Group, emit: Emit) -> None:
    meet(group)
    if group.rank == 1:
        emit(os.getpid())
        emit(bytes(20_000_000))
    meet(group)


@pytest.mark.parametrize(
    ("number", "text"), [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "is stopped")]
)
def test_a_rank_that_goes_in_the_middle_of_an_event(number: int, text: str) -> None:
    def on_event(rank: int, event: Any) -> None:
        assert isinstance(event, int), "half an event was delivered"
        time.sleep(0.2)  # meanwhile the pipe is full
        os.kill(event, number)

    with within(4.0), pytest.raises(RankFailed, match=f"rank 1: {text}"):
        run(blocks_in_an_event, 2, on_event=on_event, timeout_s=1.0, grace_s=0.5)


def test_an_error_in_on_event_ends_the_run() -> None:
    def on_event(rank: int, event: Any) -> None:
        raise ZeroDivisionError

    with within(4.0), pytest.raises(ZeroDivisionError):
        run(fails, 2, args=(1, time.sleep), on_event=on_event)


def ignores_sigterm(group: Group, emit: Emit, seconds: float) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    emit(os.getpid())
    meet(group)
    if group.rank == 0:
        raise_value_error()
    time.sleep(seconds)


def test_a_rank_that_ignores_sigterm_is_killed() -> None:
    with within(4.0), pytest.raises(RankFailed, match="rank 0: ValueError"):
        run(ignores_sigterm, 2, args=(60,), grace_s=0.3)


def has_children(group: Group, emit: Emit, how: Callable[[], Any]) -> str:
    meet(group)
    if group.rank == 1:
        emit(subprocess.Popen(["sleep", "60"]).pid)
        if (forked := os.fork()) == 0:  # keeps the rank's end of the pipe open
            time.sleep(60)
            os._exit(0)
        emit(forked)
        how()
    return "done"


@pytest.mark.parametrize(("how", "text"), [(meet, None), (exit_7, "exit code 7"), (raise_value_error, "boom")])
def test_children_of_a_rank_end_with_it(how: Callable[..., Any], text: str | None) -> None:
    pids: list[int] = []
    expected = pytest.raises(RankFailed, match=text) if text else contextlib.nullcontext()
    with within(4.0), expected:
        run(has_children, 2, args=(how if text else time.time,), on_event=lambda rank, pid: pids.append(pid))
    assert len(pids) == 2
    assert wait_until(lambda: not any(alive(pid) for pid in pids))


# Signals to the parent: here a fork of pytest, so that pytest survives.


def waits(group: Group, emit: Emit) -> None:
    kill_self(signal.SIGINT)  # as the terminal would; a rank leaves that to its parent
    assert os.getsid(0) == os.getpid() != os.getppid()
    emit(os.getpid())
    meet(group)
    time.sleep(60)


@contextlib.contextmanager
def supervisor(
    target: Callable[..., Any], *, grace_s: float = 5.0, first: Callable[[], Any] = time.time
) -> Iterator[tuple[Any, Any, list[int]]]:
    """A process that runs `target` on two ranks, what it says at its end, and its ranks (all are up)."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()

    def main() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        first()
        try:
            run(target, 2, on_event=lambda rank, event: theirs.send(event), grace_s=grace_s)
            theirs.send("returned")
        except BaseException as error:
            theirs.send(type(error).__name__)
        os._exit(3)

    process = context.Process(target=main)
    process.start()
    theirs.close()
    try:
        assert ours.poll(5.0)
        pids = [ours.recv(), ours.recv()]
        yield process, ours, pids
        assert wait_until(lambda: not any(alive(pid) for pid in pids))
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()


def test_ctrl_c_ends_the_ranks() -> None:
    with within(5.0), supervisor(waits) as (process, said, pids):
        os.kill(process.pid, signal.SIGINT)
        assert said.poll(3.0) and said.recv() == "KeyboardInterrupt"
        assert not any(alive(pid) for pid in pids)


def stays(group: Group, emit: Emit) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    emit(os.getpid())
    time.sleep(60)


def test_a_second_ctrl_c_does_not_wait_for_the_ranks() -> None:
    with within(5.0), supervisor(stays, grace_s=50.0) as (process, said, pids):
        os.kill(process.pid, signal.SIGINT)
        assert not said.poll(0.3)
        assert all(alive(pid) for pid in pids)
        os.kill(process.pid, signal.SIGINT)
        assert said.poll(3.0) and said.recv() == "KeyboardInterrupt"
        assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_end_with_a_killed_parent(number: int) -> None:
    with within(5.0), supervisor(waits) as (process, _, _):
        os.kill(process.pid, number)
        process.join(3.0)
        assert process.exitcode == -number


def test_ctrl_c_while_ranks_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_and_interrupt(*args: Any) -> Any:
        rank = start(*args)
        signal.raise_signal(signal.SIGINT)  # now it runs, and nobody has noted it yet
        return rank

    start = lockstep.comm.world._start
    monkeypatch.setattr("lockstep.comm.world._start", start_and_interrupt)
    with within(4.0), pytest.raises(KeyboardInterrupt):
        run(stays, 2, grace_s=0.2)


def compute_with_two_threads() -> None:
    torch.set_num_threads(2)
    multiply()


def multiplies(group: Group, emit: Emit) -> None:
    multiply()
    emit(os.getpid())


def test_ranks_of_a_parent_that_has_computed_with_threads() -> None:
    with within(7.0), supervisor(multiplies, first=compute_with_two_threads) as (_, said, _):
        assert said.poll(3.0) and said.recv() == "returned"


@pytest.mark.parametrize("slow", (False, True))
def test_two_runs_at_once(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`slow`: a thread that collects another's exited rank, as starting a process does, takes its time to say so."""
    if slow:
        monkeypatch.setattr(popen_fork.Popen, "poll", poll_slowly)
    values: dict[int, Any] = {}

    def one(size: int) -> None:
        values[size] = [run(works, size, args=(3,))["sum"] for _ in range(5)]

    threads = [threading.Thread(target=one, args=(size,)) for size in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert values == {2: [3.0] * 5, 3: [6.0] * 5}


def poll_slowly(self: Any, flag: int = os.WNOHANG) -> int | None:
    if self.returncode is None:
        try:
            pid, status = os.waitpid(self.pid, flag)
        except OSError:
            return None
        if pid == self.pid:
            time.sleep(0.01)
            self.returncode = os.waitstatus_to_exitcode(status)
    returned: int | None = self.returncode
    return returned


# Launched by someone else


def test_rank_of_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert rank_of_launcher() is None
    with pytest.raises(UsageError, match="not a rank"):
        run_as_rank(works, args=(0,))
    monkeypatch.setenv("RANK", "3")
    assert rank_of_launcher() is None
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert rank_of_launcher() == (3, 4)
    for rank, size in (("4", "4"), ("-1", "4"), ("x", "4"), ("0", "")):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", size)
        with pytest.raises(UsageError, match="RANK"):
            rank_of_launcher()


def test_run_as_rank() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def rank(number: int) -> None:
        os.environ.update(RANK=str(number), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        events: list[Any] = []
        value = run_as_rank(works, args=(2,), on_event=lambda *event: events.append(event), timeout_s=10.0)
        queue.put((number, value, events))

    processes = [context.Process(target=rank, args=(number,)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20.0)
        process.close()
    got = sorted((queue.get() for _ in range(2)), key=lambda item: item[0])
    queue.close()
    assert got[0] == (0, {"rank": 0, "size": 2, "sum": 3.0, "threads": 1}, [(0, (0, 0)), (0, (0, 1))])
    assert got[1] == (1, None, [(1, (1, 0)), (1, (1, 1))])


def test_importing_world_imports_no_torch() -> None:
    code = "import sys, lockstep.comm.world; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=False).returncode == 0


# The pool that other tests use


def sums(group: Group, n: int) -> tuple[int, torch.Tensor]:
    if group.transport:
        group.broadcast(torch.tensor([1]), "test")
        assert [row["calls"] for row in group.ledger.rows()] == [1]
    return group.rank, torch.full((n,), meet(group))


def fails_on(group: Group, culprit: int, how: Callable[[], Any]) -> int:
    if group.rank == culprit:
        how()
    meet(group)
    return os.getpid()


def rank_pid(group: Group) -> int:
    return os.getpid()


def expects_two(group: Group) -> None:
    assert group.rank == 2


@contextlib.contextmanager
def pool(size: int) -> Iterator[Pool]:
    opened = Pool(size)
    try:
        yield opened
    finally:
        opened.close()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_pool_returns_every_rank_in_order(size: int) -> None:
    with pool(size) as ranks:
        for n in (3, 1_000_000):
            got = ranks.run(sums, n)
            assert [rank for rank, _ in got] == list(range(size))
            assert all(torch.equal(value, got[0][1]) and value.shape == (n,) for _, value in got)
        pids = ranks.run(rank_pid)
        assert len(set(pids)) == size and pids == ranks.run(rank_pid)
        if size == 1:
            assert pids == [os.getpid()]


@pytest.mark.parametrize(
    ("how", "text"),
    [(raise_value_error, "in raise_value_error\n.*\n*ValueError: boom"), (kill_self, "SIGKILL"), (leave, "SystemExit")],
)
def test_pool_raises_what_a_rank_raised_and_recovers(how: Callable[[], Any], text: str) -> None:
    with pool(2) as ranks:
        before = ranks.run(rank_pid)
        with within(4.0), pytest.raises(RankError, match=text) as caught:
            ranks.run(fails_on, 1, how)
        assert caught.value.rank == 1
        assert not set(before) & set(ranks.run(rank_pid))


def test_pool_with_one_rank_raises_the_same_way() -> None:
    with pytest.raises(RankError, match="ValueError: boom"):
        Pool(1).run(fails_on, 0, raise_value_error)


def test_pool_shows_assertions_as_pytest_does() -> None:
    with pool(2) as ranks, pytest.raises(RankError, match=r"assert \d == 2"):
        ranks.run(expects_two)


def test_pool_ends_a_call_that_takes_too_long(capfd: pytest.CaptureFixture[str]) -> None:
    with pool(2) as ranks:
        with within(4.0), pytest.raises(RankError, match=r"no answer after 0\.5 s from rank 0, 1"):
            ranks.run(fails_on, 1, sleep_long, timeout_s=0.5)
        assert "in sleep_long" in capfd.readouterr().err
        assert ranks.run(sums, 1)[1][1].tolist() == [3.0]


def sleep_long() -> None:
    time.sleep(60)


def test_pool_finds_a_module_that_is_newer_than_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pool(2) as ranks:
        ranks.run(rank_pid)
        (tmp_path / "newer_help.py").write_text("two = 2\n")
        (tmp_path / "newer_module.py").write_text(
            "import newer_help\ndef twice(group, n):\n    return group.rank, newer_help.two * n\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        import newer_module  # type: ignore[import-not-found]

        assert ranks.run(newer_module.twice, 4) == [(0, 8), (1, 8)]


def test_pool_refuses_a_local_function() -> None:
    with pytest.raises(TypeError, match="not a module-level function"):
        Pool(2).run(lambda group: None)

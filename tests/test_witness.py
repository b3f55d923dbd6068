"""A rank's witness answers for it, ends it when it is stopped for too long, and is gone soon after it."""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_world import alive, children, wait_until

from lockstep.comm import mail, witness
from lockstep.comm.mail import Address, Mailbox
from lockstep.comm.peers import suspects
from lockstep.comm.pulse import Beat, Pulse
from lockstep.comm.supervise import is_stopped
from lockstep.comm.witness import Report, Witness

HERE = "127.0.0.1"
ASK_S = 5.0  # an answer takes milliseconds; this is for a machine with other work


@dataclass(frozen=True)
class Rank:
    """A process that is as good as rank 1 of another host; `errors` is what it and its witness write."""

    pid: int
    witness: int
    address: Address
    errors: int

    def said(self) -> str:
        """All of it: waits until nobody can write any more."""
        text = b""
        while select.select([self.errors], [], [], 10.0)[0] and (more := os.read(self.errors, 1 << 16)):
            text += more
        return text.decode()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = children(), len(os.listdir("/proc/self/fd"))
    yield
    assert (children(), len(os.listdir("/proc/self/fd"))) == before


@pytest.fixture
def asker() -> Iterator[Witness]:
    """Rank 0's witness."""
    pulse = Pulse.new()
    mine = Witness(0, pulse, 60.0, HERE)
    yield mine
    mine.dismiss()
    pulse.close()


@pytest.fixture
def rank(asker: Witness) -> Iterator[Callable[..., Rank]]:
    started: list[Rank] = []

    def start(timeout_s: float = 60.0, then: Callable[[Witness], None] = lambda mine: time.sleep(100)) -> Rank:
        started.append(_fork(asker.address, timeout_s, then))
        return started[-1]

    yield start
    for one in started:
        os.kill(one.pid, signal.SIGKILL)
        os.waitpid(one.pid, 0)
        os.close(one.errors)
        assert wait_until(lambda pid=one.witness: not alive(pid), witness.LINGER_S + 5)  # type: ignore[misc]


def _fork(asker: Address, timeout_s: float, then: Callable[[Witness], None]) -> Rank:
    reader, writer = os.pipe()
    errors, stderr = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(stderr, 2)
            os.close(stderr)
            pulse = Pulse.new()
            pulse.mark("verify", 2)
            pulse.enter("all-reduce", "exit")
            mine = Witness(1, pulse, timeout_s, HERE)
            mine.introduce([asker])
            os.write(writer, pickle.dumps((mine._pid, mine.address)))
            then(mine)
        finally:
            os._exit(0)
    os.close(writer)
    os.close(stderr)
    beside, address = pickle.loads(os.read(reader, 1 << 16))
    os.close(reader)
    return Rank(pid, beside, address, errors)


def how(asker: Witness, rank: Rank) -> str:
    """The state of rank 1; its place must be right."""
    reports = asker.ask({1: rank.address}, ASK_S)
    assert list(reports) == [1]
    assert "in verify, round 2, in collective 1 (all-reduce at exit)" in str(reports[1].beat)
    return reports[1].state


def test_it_answers_for_a_rank_that_works(asker: Witness, rank: Callable[..., Rank]) -> None:
    assert how(asker, rank()) == "alive"


def test_a_killed_rank_is_gone_and_stays_known_when_its_witness_has_gone_too(
    asker: Witness, rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(witness, "LINGER_S", 5.0)
    one = rank()
    os.kill(one.pid, signal.SIGKILL)
    assert one.said() == ""
    time.sleep(0.5)
    assert alive(one.witness)  # and keeps nobody waiting who reads to the end
    assert how(asker, one) == "gone"
    assert wait_until(lambda: not alive(one.witness), witness.LINGER_S + 5)
    assert how(asker, one) == "gone"


def test_a_stopped_rank_is_ended_when_another_gives_up_on_it(asker: Witness, rank: Callable[..., Rank]) -> None:
    one = rank()
    os.kill(one.pid, signal.SIGSTOP)
    assert wait_until(lambda: is_stopped(one.pid))
    assert how(asker, one) == "stopped"
    asker.give_up(one.address)
    assert "lockstep: rank 1 is ended, another rank has given up on it: on " in one.said()
    assert wait_until(lambda: not alive(one.pid))
    assert how(asker, one) == "stopped"  # which is why it ended


def test_a_stopped_rank_is_ended_when_nobody_asks(
    asker: Witness, rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(witness, "PATIENCE_S", 0.5)
    one = rank(timeout_s=0.5)
    time.sleep(1.5)
    assert alive(one.pid)
    os.kill(one.pid, signal.SIGSTOP)
    assert "rank 1 is ended, it was stopped for more than 0.5 s: on " in one.said()
    assert wait_until(lambda: not alive(one.pid))


def test_a_rank_that_goes_on_in_time_is_left_alone(
    asker: Witness, rank: Callable[..., Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(witness, "PATIENCE_S", 1.0)
    one = rank(timeout_s=1.0)
    for _ in range(3):
        os.kill(one.pid, signal.SIGSTOP)
        time.sleep(0.8)
        os.kill(one.pid, signal.SIGCONT)
        time.sleep(0.6)
    assert how(asker, one) == "alive"


def _deaf(mine: Witness) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(100)


def test_a_rank_that_hangs_is_ended_when_another_gives_up_on_it(asker: Witness, rank: Callable[..., Rank]) -> None:
    one = rank(then=_deaf)
    asker.give_up(one.address)
    assert one.said().count("another rank has given up on it") == 1
    assert wait_until(lambda: not alive(one.pid))
    assert how(asker, one) == "gone"


def test_who_does_not_know_the_token_is_not_answered_and_ends_nothing(
    asker: Witness, rank: Callable[..., Rank]
) -> None:
    one = rank()
    wrong = one.address._replace(token="0" * 32)
    assert asker.ask({1: wrong}, 1.0) == {}
    asker.give_up(wrong)
    with Mailbox(HERE) as box:
        for junk in (b"", b"{", b"\xff" * 2000, b"[" * 2000):
            box._socket.sendto(junk, (one.address.host, one.address.port))
    assert how(asker, one) == "alive"


def test_a_rank_that_ends_in_good_order_takes_its_witness_along(asker: Witness, rank: Callable[..., Rank]) -> None:
    one = rank(then=lambda mine: mine.dismiss())
    assert one.said() == ""
    assert not alive(one.witness)
    assert asker.ask({1: one.address}, 1.0) == {}


def test_signals_to_the_rank_s_group_do_not_reach_it(asker: Witness, rank: Callable[..., Rank]) -> None:
    one = rank(then=lambda mine: _in_a_group_of_its_own())
    assert wait_until(lambda: os.getpgid(one.pid) == one.pid)
    assert how(asker, one) == "alive"
    assert os.getsid(one.witness) == one.witness
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(one.witness, number)
    os.killpg(one.pid, signal.SIGTERM)
    assert wait_until(lambda: not alive(one.pid))
    assert how(asker, one) == "gone"


def _in_a_group_of_its_own() -> None:
    os.setpgid(0, 0)
    time.sleep(100)


def test_a_witness_holds_nothing_of_its_rank_s_but_what_it_needs(asker: Witness, rank: Callable[..., Rank]) -> None:
    one = rank()
    assert how(asker, one) == "alive"
    folder = Path(f"/proc/{one.witness}/fd")
    held = sorted(os.readlink(fd).partition(":")[0] for fd in folder.iterdir())
    assert held == [os.devnull, os.devnull, os.devnull, "anon_inode", "pipe", "socket", "socket"]


def test_ranks_of_one_host_have_no_witness(monkeypatch: pytest.MonkeyPatch) -> None:
    pulse = Pulse.new()
    for name in witness.HERE:
        with monkeypatch.context() as patch:
            patch.setenv(name, "2")
            assert witness.witness(0, 2, pulse, 60.0) is None
            mine = witness.witness(0, 4, pulse, 60.0)
            assert (mine is None) == (mail.own_host() is None)
            if mine:
                mine.dismiss()
    pulse.close()


def test_the_address_is_that_of_gloo_s_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert mail.own_host() == HERE
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    monkeypatch.setenv("MASTER_ADDR", HERE)
    assert mail.own_host() != HERE  # where others could not ask


def report(state: str, sequence: int) -> Report:
    """As of a rank that gave up where `state` ends so, that waits in its collective where it begins so."""
    inside, gave_up = state.startswith("waits"), state.endswith("gave up")
    beat = Beat("a", "verify", 2, sequence, "all-reduce", "exit", inside, 0.0, gave_up)
    return Report("gone" if gave_up else "alive" if inside else state, beat)


@pytest.mark.parametrize(
    ("reports", "says"),
    [
        ({1: ("gone", 6), 2: ("gone", 5), 3: ("stopped", 4)}, {2: "has ended: last seen"}),
        ({1: ("alive", 3), 2: ("stopped", 6), 3: ("stopped", 7)}, {2: "is stopped:", 3: "is stopped:"}),
        ({1: ("alive", 7), 2: ("alive", 6), 3: ("waits", 6)}, {2: "is behind:"}),
        ({1: ("gave up", 6), 2: ("gone", 7)}, {2: "has ended: last seen"}),
        ({1: ("gave up", 6), 2: ("stopped", 7)}, {2: "is stopped:"}),
        ({1: ("gave up", 6), 2: ("alive", 7)}, {}),
    ],
)
def test_the_dead_come_before_the_stopped_and_these_before_the_late(
    reports: dict[int, tuple[str, int]], says: dict[int, str]
) -> None:
    assert suspects({rank: report(*told) for rank, told in reports.items()}, 7) == {
        rank: f"rank {rank} {says[rank]} on a in verify, round 2, after collective {reports[rank][1]} "
        "(all-reduce at exit)"
        for rank in says
    }

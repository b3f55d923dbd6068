"""Where a job runs: in this process, on ranks started here, or as one rank of torchrun's or deepspeed's."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from lockstep.comm import world
from lockstep.comm.errors import PeerLost, UsageError
from lockstep.comm.wiring import Wiring

if TYPE_CHECKING:
    from lockstep.comm.group import Group
    from lockstep.engine.requests import Job

Result = dict[str, Any]
OnEvent = Callable[[int, object], None]


def ranks(tp: int | None) -> int:
    """How many ranks the job has: --tp, which must be what a launcher started; without it the launcher's, or 1."""
    launcher = world.rank_of_launcher()
    if launcher is None:
        return tp or 1
    started = launcher[1]
    if tp not in (None, started):
        raise UsageError(
            f"the launcher started {started} rank{'s' * (started > 1)}, but --tp is {tp}: start {tp} of them "
            f"(torchrun --nproc-per-node {tp}, deepspeed --num_gpus {tp}), or leave --tp out"
        )
    return started


def alone() -> bool:
    """Whether no launcher has started this process as a rank."""
    return world.rank_of_launcher() is None


def is_root() -> bool:
    """Whether this process prints and writes: always, but as one of a launcher's ranks other than the first."""
    launcher = world.rank_of_launcher()
    return launcher is None or launcher[0] == 0


def device(asked: str, tp: int) -> str:
    """`cpu` or `cuda`. Raises UsageError where there is no device for every rank on this host."""
    if asked == "cpu":
        return asked
    import torch

    found = torch.cuda.device_count()
    if asked == "auto":
        return "cuda" if found >= tp or (found and world.rank_of_launcher()) else "cpu"
    if not found:
        raise UsageError("--device cuda: torch finds no CUDA device here; use --device cpu")
    if found < tp and world.rank_of_launcher() is None:
        raise UsageError(f"--tp {tp} needs {tp} CUDA devices and {found} are here; use --tp {found} or --device cpu")
    return asked


def wiring(comm: str, algorithm: str, *, log: bool, check: bool) -> Wiring:
    """How ranks talk. Raises UsageError where what was asked for would do nothing."""
    if log and not comm.startswith("deepspeed"):
        raise UsageError(f"--comm-log is DeepSpeed's, and --comm is {comm}; use --comm deepspeed, or leave it out")
    if algorithm != "auto" and comm not in ("torch", "deepspeed"):
        raise UsageError(f"--comm-algorithm {algorithm} is for gloo, and --comm is {comm}; leave it out")
    return Wiring(comm, algorithm, check, log)


def run(
    job: Job,
    *,
    timeout_s: float,
    on_event: OnEvent,
    deliver: Callable[[Result], None],
    wiring: Wiring = Wiring(),  # noqa: B008 (frozen)
) -> None:
    """Call `deliver` with what `engine.run.generate` returns for `job` on rank 0; a launcher's other ranks wait."""
    from lockstep.engine.run import generate

    start(generate, (job,), job.tp, job.device, timeout_s, on_event, wiring, deliver)


def start(
    target: world.Target,
    args: tuple[Any, ...],
    tp: int,
    device: str,
    timeout_s: float,
    on_event: OnEvent,
    wiring: Wiring = Wiring(),  # noqa: B008 (frozen)
    deliver: Callable[[Any], None] | None = None,
) -> Any:
    """What `target(group, emit, *args)` returns on rank 0, after `deliver` of it; None on a launcher's other ranks.

    Raises UsageError for bad input that only a rank can find, RankFailed for the rank that failed first, and on a
    launcher's rank PeerLost where another one failed.
    """
    launcher = world.rank_of_launcher()
    common: dict[str, Any] = {"args": args, "on_event": on_event, "timeout_s": timeout_s, "device": device}
    if launcher is not None:
        with _failure_of(launcher[0]):
            return world.run_as_rank(target, wiring=wiring, deliver=deliver, **common)
    if tp > 1:
        value = world.run(target, tp, wiring=wiring, **common)
    else:
        with _failure_of(0):
            value = target(_alone(device), lambda event: on_event(0, event), *args)
    if deliver:
        deliver(value)
    return value


@contextlib.contextmanager
def _failure_of(rank: int) -> Iterator[None]:
    """What goes wrong in a rank that is this process, as a parent would tell it."""
    try:
        yield
    except (UsageError, PeerLost, BrokenPipeError, world.RankFailed):
        raise
    except Exception as error:
        raise world.RankFailed(rank, f"{type(error).__name__}: {error}", traceback.format_exc()) from error


def _alone(device: str) -> Group:
    """One rank needs no process of its own, and a debugger reaches it here. Like any rank it has one thread."""
    import torch

    from lockstep.comm.group import Group

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    return Group.local(device)

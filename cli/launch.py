"""Where a job runs: in this process, on ranks started here, or as one rank of torchrun's or deepspeed's."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lockstep.comm import world
from lockstep.comm.errors import PeerLost, UsageError

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


def run(job: Job, *, timeout_s: float, on_event: OnEvent) -> Result:
    """What `engine.run.generate` returns for `job` on rank 0; nothing on a launcher's other ranks.

    Raises UsageError for bad input that only a rank can find, RankFailed for the rank that failed first, and on a
    launcher's rank PeerLost where another one failed.
    """
    from lockstep.engine.run import generate

    launcher = world.rank_of_launcher()
    result: Result | None
    if launcher is None and job.tp > 1:
        result = world.run(generate, job.tp, args=(job,), on_event=on_event, timeout_s=timeout_s, device=job.device)
        return result or {}
    try:
        if launcher is None:
            return generate(_alone(job.device), lambda event: on_event(0, event), job)
        result = world.run_as_rank(generate, args=(job,), on_event=on_event, timeout_s=timeout_s, device=job.device)
        return result or {}
    except (UsageError, PeerLost, BrokenPipeError):
        raise
    except Exception as error:
        rank = launcher[0] if launcher else 0
        raise world.RankFailed(rank, f"{type(error).__name__}: {error}", traceback.format_exc()) from error


def _alone(device: str) -> Group:
    """One rank needs no process of its own, and a debugger reaches it here. Like any rank it has one thread."""
    import torch

    from lockstep.comm.group import Group

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
    return Group.local(device)

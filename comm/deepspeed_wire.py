"""The wire of deepspeed.comm, on request with DeepSpeed's shared-memory all-reduce for CPUs.

That operator needs help (all seen with 0.19.8): it is compiled at first use, for minutes; it crashes without
LOCAL_SIZE; it returns float64 unreduced; it waits forever for a lost rank; and it leaves 66 MiB per rank in /dev/shm.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.comm.errors import UsageError
from lockstep.comm.torch_wire import Calls, CallsWire, backend_of
from lockstep.comm.wiring import Wiring

SHM = "deepspeed_shm_comm"
PROBE_S = 900.0
PROBE = "import deepspeed.ops.op_builder.cpu as cpu; print(cpu.ShareMemCommBuilder().load().vector_kernel_level())"


def open_deepspeed(
    rank: int, size: int, device: torch.device, timeout: datetime.timedelta, init_method: str | None, wiring: Wiring
) -> CallsWire:
    """Join the group. Raises UsageError where deepspeed or its operator does not work here, with the reason."""
    shared = wiring.comm == "deepspeed-shm"
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    if shared:
        _prepare(rank, size, device)
    deepspeed, comm = _import()
    if not shared:
        deepspeed.ops.__compatible_ops__ = {}  # or it finds out which ones compile, for seconds, and compiles this one
    with contextlib.redirect_stdout(sys.stderr):  # it prints when it has loaded an operator
        comm.init_distributed(
            backend_of(device),
            auto_mpi_discovery=False,
            verbose=False,
            timeout=timeout,
            init_method=init_method or "env://",
            rank=rank,
            world_size=size,
        )
    calls = Calls(
        _shared_memory_all_reduce(comm) if shared else comm.all_reduce,
        comm.all_gather_into_tensor,
        comm.reduce_scatter_tensor,
        comm.all_to_all_single,
        comm.gather,
        comm.broadcast,
        comm.barrier,
    )
    name = f"deepspeed {'shared memory and ' if shared else ''}{backend_of(device)}"
    if shared:
        comm.barrier()  # all have opened all files
        _shared_file(rank).unlink(missing_ok=True)
    log = _log(comm, rank) if wiring.comm_log else None
    algorithm = "native" if shared else wiring.algorithm
    return CallsWire(calls, name, rank, size, algorithm, timeout=timeout, ends_itself=not shared, on_close=log)


def _import() -> tuple[Any, Any]:
    logging.disable(logging.INFO)  # each rank would tell which accelerator it has found
    try:
        import deepspeed
        import deepspeed.comm
    except ImportError as error:
        raise UsageError(f"--comm deepspeed: {error}; pip install 'lockstep-decode[deepspeed]'") from error
    finally:
        logging.disable(logging.NOTSET)
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed, deepspeed.comm


def _shared_memory_all_reduce(comm: Any) -> Callable[[Tensor], Any]:
    """float32 of all ranks through shared memory, the rest through the group: the operator ignores other types."""

    def all_reduce(tensor: Tensor, group: Any = None) -> None:
        if tensor.dtype is torch.float32 and group is None:
            comm.inference_all_reduce(tensor)
        else:
            comm.all_reduce(tensor, group=group)

    return all_reduce


def _prepare(rank: int, size: int, device: torch.device) -> None:
    """Set what the operator reads, and find out in another process whether it works: it may crash the one it is in."""
    if device.type != "cpu":
        raise UsageError(f"--comm deepspeed-shm is for CPU ranks, and --device is {device.type}; use --comm deepspeed")
    here = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or size)
    if here != size:
        raise UsageError(f"--comm deepspeed-shm needs all {size} ranks on one host, and {here} are on this one")
    os.environ["LOCAL_SIZE"] = str(size)
    # The names of its files come from these two; under our own supervisor nothing else sets them.
    os.environ.setdefault("MASTER_ADDR", "local")
    os.environ.setdefault("MASTER_PORT", str(os.getppid()))
    if rank == 0:
        sys.stderr.write(
            "lockstep: loading DeepSpeed's shared-memory operator; its first use compiles it, for minutes\n"
        )
    probe(PROBE_S)


def _find_ninja() -> None:
    """pip puts it beside this interpreter, where PATH need not lead."""
    if shutil.which("ninja") is None:
        os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])


def probe(timeout_s: float) -> None:
    """Build, load and call the operator in a child process. Raises UsageError with the last line of what it said."""
    _find_ninja()
    environment = os.environ | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    try:
        child = subprocess.run(
            [sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"--comm deepspeed-shm: its operator was not ready after {timeout_s:g} s") from None
    said = (child.stderr.strip() or child.stdout.strip()).splitlines() or [""]
    if child.returncode:
        reason = said[-1].strip() or f"exit code {child.returncode}"
        raise UsageError(f"--comm deepspeed-shm: its operator does not work here ({reason}); use --comm deepspeed")
    if int(child.stdout.split()[-1]) < 1:
        raise UsageError("--comm deepspeed-shm needs a CPU with AVX2; use --comm deepspeed")


def _shared_file(rank: int) -> Path:
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    return Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}")


def _log(comm: Any, rank: int) -> Callable[[], None]:
    """Turn DeepSpeed's own log of collectives on. Returns what prints it, on rank 0."""
    comm.configure(enabled=True, prof_all=True, verbose=False)
    logger = sys.modules["deepspeed.comm.comm"].comms_logger

    def summary() -> None:
        if rank == 0:
            with contextlib.redirect_stdout(sys.stderr):
                logger.log_all(print_log=True)

    return summary

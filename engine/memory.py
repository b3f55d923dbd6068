"""Peak memory of one rank."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
from pathlib import Path

import torch


class Memory:
    """Peak memory of this rank: the process's on a CPU, the allocator's on a GPU. `start` is what it had before.

    What an earlier run of this process has freed is given back first, or this one would seem to need less.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with contextlib.suppress(OSError, AttributeError):  # not glibc
                ctypes.CDLL(None).malloc_trim(0)
            _reset_peak()
        self.start = self.peak()

    def peak(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        try:
            status = Path("/proc/self/status").read_text(encoding="ascii")
            return int(status.split("VmHWM:")[1].split()[0]) * 1024
        except (OSError, IndexError):
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _reset_peak() -> None:
    with contextlib.suppress(OSError):  # not Linux: the peak is then that of the whole process's life
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

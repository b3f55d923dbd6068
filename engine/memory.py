"""Peak memory of one rank."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path

import torch


class Memory:
    """Peak memory of this rank: the process's on a CPU, the allocator's on a GPU. `start` is what it had before."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
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

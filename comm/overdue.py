"""An end for what nobody can interrupt: a library's start-up that waits for a rank that never comes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator


@contextlib.contextmanager
def killed_after(seconds: float, message: str) -> Iterator[None]:
    """Say `message` and kill this process if the block takes longer, even where that never comes back to Python."""
    if not hasattr(os, "fork"):
        yield
        return
    parent = os.getpid()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        until = time.monotonic() + seconds
        while os.getppid() == parent and time.monotonic() < until:
            time.sleep(min(0.25, seconds))
        if os.getppid() == parent:
            os.write(2, f"lockstep: {message}\n".encode())
            os.kill(parent, signal.SIGKILL)
        os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

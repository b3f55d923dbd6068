"""The ranks' exit codes, past a launcher that has one code for all or its own for a signal.

Each rank tells `lockstep launch` its code in a datagram, to a socket without a name in any file system. Linux only,
and on one host; elsewhere nobody is heard.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys

VARIABLE = "LOCKSTEP_EXIT_CODES"
RANK_FAILED = 3
NO_CAUSE = (0, 75, 143)  # of ranks that were done, lost another one, or were told to end


class Codes:
    def __init__(self) -> None:
        self.environment: dict[str, str] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if sys.platform == "linux" else None
        if self._socket:
            self._socket.bind("")  # any free name
            self._socket.setblocking(False)
            self.environment = {VARIABLE: self._socket.getsockname()[1:].hex()}

    def cause(self) -> int:
        """The code of the rank that failed first; 3 where none could say so."""
        code = RANK_FAILED
        with contextlib.suppress(BlockingIOError):
            while self._socket and (code := int(self._socket.recv(16))) in NO_CAUSE:
                code = RANK_FAILED
        return code

    def close(self) -> None:
        if self._socket:
            self._socket.close()


def tell(code: int) -> None:
    """What this process is about to exit with."""
    name = os.environ.get(VARIABLE)
    if name:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.sendto(str(code).encode(), b"\0" + bytes.fromhex(name))

"""Letters between hosts, as UDP datagrams: one may be lost, and one that does not begin with the token is not read."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import select
import socket
import struct
import time
from typing import Any, NamedTuple

SIOCGIFADDR = 0x8915
ELSEWHERE = "192.0.2.1"  # nobody's address: the way to it is the default route


class Address(NamedTuple):
    host: str
    port: int
    token: str


class Mailbox:
    """A socket of `host`, one of this host's own addresses. Raises OSError where it is not."""

    def __init__(self, host: str) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._socket.bind((host, 0))
        except OSError:
            self._socket.close()
            raise
        self.address = Address(host, self._socket.getsockname()[1], secrets.token_hex(16))

    def __enter__(self) -> Mailbox:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, to: Address, verb: str, content: Any) -> None:
        with contextlib.suppress(OSError):  # no way there, now
            self._socket.sendto(to.token.encode() + json.dumps([verb, content]).encode(), (to.host, to.port))

    def receive(self, until: float) -> tuple[str, Any] | None:
        """The next letter's verb and content, or None when it is `until`."""
        token = self.address.token.encode()
        while select.select([self], [], [], max(0.0, until - time.monotonic()))[0]:
            with contextlib.suppress(OSError):  # an earlier letter's port was closed
                letter = self._socket.recv(1 << 16)
                if letter.startswith(token):
                    verb, content = json.loads(letter[len(token) :])
                    return verb, content
        return None


def own_host() -> str | None:
    """This host's address for others: of gloo's interface where one is given, else of the way to the master."""
    name = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    if name:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            return socket.inet_ntoa(answer[20:24])
    for target in (os.environ.get("MASTER_ADDR"), ELSEWHERE):
        with contextlib.suppress(OSError):
            family, kind, _, _, address = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                host = str(probe.getsockname()[0])
            if not host.startswith("127.") and host != "::1":  # as the master may see itself
                return host
    return None

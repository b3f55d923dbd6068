"""Two hosts on this machine: network namespaces with a link, and with host names and process numbers of their own."""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
from collections.abc import Iterator

import relay
from launched import environment

LINK, SLOW = "lockstep", "slow"  # the veth pair, and what `slow_link` adds to it
NETWORK = {LINK: "10.77.9", SLOW: "10.77.10"}


class Hosts:
    """host-0 at 10.77.9.1 and host-1 at 10.77.9.2, on a link that has the same name in both."""

    def __init__(self) -> None:
        self.names = [f"lockstep-{os.getpid()}-{i}" for i in range(2)]

    def __enter__(self) -> Hosts:
        for name in self.names:
            ip("netns", "add", name)
        ends = [["name", LINK, "netns", name] for name in self.names]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for i, name in enumerate(self.names):
            ip("-n", name, "addr", "add", f"{NETWORK[LINK]}.{i + 1}/24", "dev", LINK)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", LINK, "up")
        return self

    def __exit__(self, *error: object) -> None:
        for name in self.names:
            ip("netns", "del", name)

    def start(self, i: int, line: list[str], link: str = LINK, **more: str) -> subprocess.Popen[str]:
        """Run `line` on host i. Killing what is returned kills all that it has started."""
        alone = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        named = ["sh", "-c", f'hostname host-{i}; exec "$@"', "sh"]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[i], *alone, *named, *line],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(GLOO_SOCKET_IFNAME=link, **more),
        )

    @contextlib.contextmanager
    def slow_link(self, delay_s: float, bits_per_s: float = math.inf) -> Iterator[None]:
        """A second link, SLOW: every packet arrives `delay_s` after it has been sent, at that rate."""
        ends = [f"{name}@{NETWORK[SLOW]}.{i + 1}/24" for i, name in enumerate(self.names)]
        line = [sys.executable, relay.__file__, *ends, SLOW, str(delay_s), str(bits_per_s)]
        process = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout
            assert process.stdout.readline() == "up\n"
            yield
        finally:
            process.kill()
            process.communicate()

    def both(
        self, launcher: str, *command: str, link: str = LINK, timeout: float = 240, **more: str
    ) -> list[tuple[int, str, str]]:
        """Launch the command's two ranks, one on each host: exit code, output and errors of both."""
        launch = [sys.executable, "-m", "lockstep.cli", "launch", "--launcher", launcher, "--nnodes", "2"]
        meet = ["--master-addr", f"{NETWORK[link]}.1", "--master-port", "29511"]
        lines = [[*launch, "--node-rank", str(i), *meet, "--", *command] for i in range(2)]
        started = [self.start(i, line, link, **more) for i, line in enumerate(lines)]
        try:
            results = []
            for process in started:
                out, err = process.communicate(timeout=timeout)
                results.append((process.returncode, out, err))
            return results
        finally:
            for process in started:
                process.kill()
                process.wait()


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)

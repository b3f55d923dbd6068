"""Two hosts on this machine: network namespaces with a link, and with host names and process numbers of their own."""

from __future__ import annotations

import os
import subprocess
import sys

from test_launchers import environment

LINK = "lockstep"


class Hosts:
    """host-0 at 10.77.9.1 and host-1 at 10.77.9.2, whose link is named as below in both."""

    def __init__(self) -> None:
        self.names = [f"lockstep-{os.getpid()}-{i}" for i in range(2)]

    def __enter__(self) -> Hosts:
        for name in self.names:
            ip("netns", "add", name)
        ends = [["name", LINK, "netns", name] for name in self.names]
        ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for i, name in enumerate(self.names):
            ip("-n", name, "addr", "add", f"10.77.9.{i + 1}/24", "dev", LINK)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", LINK, "up")
        return self

    def __exit__(self, *error: object) -> None:
        for name in self.names:
            ip("netns", "del", name)

    def start(self, i: int, line: list[str], **more: str) -> subprocess.Popen[str]:
        """Run `line` on host i. Killing what is returned kills all that it has started."""
        alone = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        named = ["sh", "-c", f'hostname host-{i}; exec "$@"', "sh"]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[i], *alone, *named, *line],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(GLOO_SOCKET_IFNAME=LINK, **more),
        )

    def both(self, launcher: str, *command: str, timeout: float = 240, **more: str) -> list[tuple[int, str, str]]:
        """Launch the command's two ranks, one on each host: exit code, output and errors of both."""
        launch = [sys.executable, "-m", "lockstep.cli", "launch", "--launcher", launcher, "--nnodes", "2"]
        meet = ["--master-addr", "10.77.9.1", "--master-port", "29511"]
        lines = [[*launch, "--node-rank", str(i), *meet, "--", *command] for i in range(2)]
        started = [self.start(i, line, **more) for i, line in enumerate(lines)]
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

"""What a slow interconnect costs: the same work on two hosts, on a fast link and on one with a delay and a rate."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints
import pytest
from hosts import LINK, NETWORK, SLOW, Hosts

from lockstep.cli import app

pytestmark = pytest.mark.skipif("LOCKSTEP_MULTIHOST" not in os.environ, reason="make test-multihost, as root")
ECHO = """
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("{address}", 7))
print("up", flush=True)
while True:
    server.sendto(*server.recvfrom(2000))
"""
PING = """
import socket, time
def seconds(size):
    start = time.monotonic()
    client.sendto(bytes(size), ("{address}", 7))
    client.recv(2000)
    return time.monotonic() - start
client = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
client.settimeout(10)
for size in (10, 1000):
    print(min(seconds(size) for _ in range(10)))
"""
DELAY_S, BITS_PER_S = 0.005, 80e6


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts() as hosts:
        yield hosts


def test_the_slow_link_has_its_delay_and_its_rate(hosts: Hosts) -> None:
    def there_and_back(bits_per_s: float) -> list[float]:
        with hosts.slow_link(DELAY_S, bits_per_s):
            address = f"{NETWORK[SLOW]}.2"
            echo = hosts.start(1, [sys.executable, "-c", ECHO.format(address=address)])
            try:
                assert echo.stdout
                assert echo.stdout.readline() == "up\n"
                with hosts.start(0, [sys.executable, "-c", PING.format(address=address)]) as ping:
                    out, err = ping.communicate(timeout=60)
            finally:
                echo.kill()
                echo.communicate()
        assert ping.returncode == 0, err
        return [float(line) for line in out.split()]

    small, large = there_and_back(1e9)
    assert 2 * DELAY_S <= small < 10 * DELAY_S
    assert 2 * DELAY_S <= large < 10 * DELAY_S
    small, large = there_and_back(1e6)
    assert large - small > 2 * 900 * 8 / 1e6


def test_delay_and_rate_show_in_every_collective(hosts: Hosts, tmp_path: Path) -> None:
    def rows(link: str) -> list[dict[str, Any]]:
        file = tmp_path / f"{link}.json"
        bench = ["comm-bench", "--tp", "2", "--collectives", "all-reduce,reduce-scatter,all-gather,all-to-all"]
        bench += ["--sizes", "1024,400000", "--calls", "5", "--json", str(file)]
        results = hosts.both("torchrun", *bench, link=link)
        assert [code for code, _, _ in results] == [0, 0], results
        found: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
        return found

    fast = rows(LINK)
    with hosts.slow_link(DELAY_S, BITS_PER_S):
        slow = rows(SLOW)
    for before, after in zip(fast, slow, strict=True):
        print(
            f"{before['collective']:14} {before['algorithm']:8} {before['bytes']:7} B:",
            f"{before['min_us'] / 1e3:6.1f} ms, on the slow link {after['min_us'] / 1e3:6.1f} ms",
        )
        # Each rank needs half of the bytes from the other.
        assert after["min_us"] > 1e6 * (DELAY_S + 8 * after["bytes"] / 2 / BITS_PER_S) > before["min_us"]


def test_compare_shows_what_a_slow_link_costs(hosts: Hosts, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt_ids": [5, 7, 9]}\n')
    command = ["compare", str(checkpoints.cached("deepseek_v3")), "--prompts", str(tmp_path / "prompts.jsonl")]
    command += ["--tp", "1,2", "--draft-tokens", "0", "--repeat", "1", "--max-new-tokens", "4", "--ignore-eos"]

    def rows(name: str, link: str) -> dict[str, dict[str, Any]]:
        results = hosts.both("torchrun", *command, "--out", str(tmp_path / name), link=link)
        assert [code for code, _, _ in results] == [0, 0], results
        return {row["label"]: row for row in json.loads((tmp_path / name / "report.json").read_text())["rows"]}

    before = rows("before", LINK)
    with hosts.slow_link(DELAY_S, BITS_PER_S):
        after = rows("after", SLOW)
    assert app.main(["report", *(str(tmp_path / name / "report.json") for name in ("before", "after"))]) == 0
    assert [row["label"] for row in after.values() if row["tp"] == 2] == ["tp@2+0", "sp-late@2+0"]
    for label, row in after.items():
        assert row["verdict"] == before[label]["verdict"] == "identical"
        assert moved(row) == moved(before[label])
        if row["tp"] == 2:
            assert row["hosts"] == ["host-0", "host-1"]
            assert in_collectives(row) > max(in_collectives(before[label]), DELAY_S * calls(row))
            assert tokens_per_s(row) < tokens_per_s(before[label])


def moved(row: dict[str, Any]) -> list[tuple[str, str, int, int]]:
    return [(c["boundary"], c["collective"], c["calls"], c["bytes"]) for c in row["collectives"]]


def calls(row: dict[str, Any]) -> int:
    return sum(c["calls"] for c in row["collectives"])


def in_collectives(row: dict[str, Any]) -> float:
    return float(sum(c["transfer_s"] + c["wait_s"] for c in row["collectives"]))


def tokens_per_s(row: dict[str, Any]) -> float:
    return float(row["speed"]["tokens_per_s"]["median"])

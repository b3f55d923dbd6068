"""Launch after launch, two at once: nothing is left on this host, and no run meets another."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import checkpoints
import pytest
from launched import FULL, LAUNCH, Traces, need

from lockstep.cli import app

TIMES = {"local": 100, "torchrun": 100, "deepspeed": 100, "mpi": 20}
PROMPTS = ("5,7,9", "50,96,3,4,11")  # in turn, so that two runs at once have different ones


def command(prompt: str, file: Path) -> list[str]:
    model = str(checkpoints.cached("deepseek_v3"))
    end = ["--max-new-tokens", "8", "--ignore-eos", "--tp", "2", "--json", str(file)]
    return ["generate", model, "--prompt-ids", prompt, *end]


def result(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    del found["timings"]
    return found


@pytest.mark.parametrize(("launcher", "times"), TIMES.items() if FULL else dict.fromkeys(TIMES, 4).items())
def test_many_launches_leave_nothing_and_do_not_collide(tmp_path: Path, launcher: str, times: int) -> None:
    need(launcher)
    expected = []
    for prompt in PROMPTS:
        assert app.main(command(prompt, tmp_path / "expected.json")) == 0
        expected.append(result(tmp_path / "expected.json"))
    traces = Traces(tmp_path / "tmp")

    def launch(number: int) -> dict[str, Any]:
        file = tmp_path / f"{number}.json"
        line = [*LAUNCH, "--launcher", launcher, "--", *command(PROMPTS[number % 2], file)]
        ran = subprocess.run(line, capture_output=True, text=True, env=traces.environment, timeout=300)
        assert ran.returncode == 0, ran.stderr
        return result(file)

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(launch, range(times)))
    assert all(found == expected[number % 2] for number, found in enumerate(results))
    assert traces.settled() == []

"""A comparison on the ranks of a launcher says what it says on ranks of its own, and goes on after one was lost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import checkpoints
import pytest
from launched import environment, need
from runs import job

from lockstep.cli import app
from lockstep.comm import launchers
from lockstep.comm.group import Group
from lockstep.comm.launchers import Plan, command
from lockstep.engine import compare as engine
from lockstep.engine.grid import grid
from lockstep.engine.report import Texts, build
from lockstep.engine.store import Store
from lockstep.models.checkpoint import open_checkpoint

RUN = ["--strategies", "tp,sp-late", "--draft-tokens", "2", "--repeat", "1", "--max-new-tokens", "6", "--ignore-eos"]
WIRES = {"torch": "gloo", "deepspeed": "deepspeed gloo", "mpi": "mpi"}
ROUNDED = ("boundaries", "logits")
TIMED = ("speed", "latency", "parts", "memory", "hosts", "wire")


@pytest.fixture(scope="module")
def model() -> Path:
    return checkpoints.cached("deepseek_v3")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text('{"prompt_ids": [5, 7, 9]}\n{"prompt_ids": [50, 96, 3, 4, 11]}\n')
    return file


def said(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows without what a clock, a place, memory or (of four ranks) the order of a sum decides."""
    rows = [{key: value for key, value in row.items() if key not in TIMED + ROUNDED} for row in document["rows"]]
    for row in rows:
        row["drafts"] = row["drafts"] and row["drafts"].get("broken")
        for collective in row["collectives"]:
            del collective["transfer_s"], collective["wait_s"]
    return rows


@pytest.fixture(scope="module")
def expected(model: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("local") / "out"
    assert app.main(["compare", str(model), *RUN, "--prompts", str(prompts), "--tp", "1,2,4", "--out", str(out)]) == 0
    yield said(json.loads((out / "report.json").read_text()))


@pytest.mark.parametrize(
    ("launcher", "comm", "tp"),
    [("torchrun", "torch", "1,2,4"), ("deepspeed", "deepspeed", "1,2"), ("mpi", "mpi", "1,2")],
)
def test_every_launcher_gives_the_same_report(
    model: Path, prompts: Path, expected: Any, tmp_path: Path, launcher: str, comm: str, tp: str
) -> None:
    need(launcher)
    out = tmp_path / "out"
    line = ["compare", str(model), *RUN, "--prompts", str(prompts), "--tp", tp, "--out", str(out)]
    ran = subprocess.run(
        [sys.executable, "-m", "lockstep.cli", "launch", "--launcher", launcher, "--", *line, "--comm", comm],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    document = json.loads((out / "report.json").read_text())
    assert said(document) == [row for row in expected if str(row["tp"]) in tp]
    assert {row["wire"] for row in document["rows"]} == {
        None,
        {"torch": "gloo", "mpi": "mpi"}.get(comm, "deepspeed gloo"),
    }
    assert document["settings"]["comm"] == comm
    assert ran.stdout.count("verdict") == 1  # rank 0 says it


@pytest.mark.parametrize(
    ("tp", "says"),
    [("1,4", "the launcher started 2 ranks, but --tp is 4"), ("1", "the launcher started 2 ranks, but --tp is 1")],
)
def test_a_launcher_s_ranks_are_what_the_largest_run_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, tp: str, says: str
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert app.main(["compare", "demo", "--tp", tp, "--out", str(tmp_path / "out")]) == 2
    assert says in capsys.readouterr().err


def test_a_reference_that_cannot_run_ends_all_ranks_in_one_line(model: Path, prompts: Path, tmp_path: Path) -> None:
    line = ["compare", str(model), *RUN, "--prompts", str(prompts), "--tp", "1,2", "--recycle", "pre-norm"]
    line += ["--strategies", "sp-late:gather-norm", "--reference", "sp-late:gather-norm@2+2"]
    ran = subprocess.run(
        [sys.executable, "-m", "lockstep.cli", "launch", "--", *line, "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=300,
    )
    assert ran.returncode == 2
    said = [text for text in ran.stderr.splitlines() if text.startswith("lockstep:")]
    assert len(said) == 1 and "the reference sp-late:gather-norm@2+2 cannot run: recycle = pre-norm" in said[0]


def test_mpi_without_its_launcher_is_refused_before_anything_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert app.main(["compare", "demo", "--comm", "mpi", "--out", str(tmp_path / "out")]) == 2
    assert "--comm mpi needs ranks that an mpiexec has started" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_had_finished_before_a_rank_was_lost_is_kept(model: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ["compare", str(model), *RUN, "--prompts", str(prompts), "--tp", "1,2", "--out", str(out)]
    line = command(Plan("torchrun", 2, tuple(arguments)))
    ran = subprocess.run(
        ["saboteur" if word == launchers.MODULE else word for word in line.argv],
        capture_output=True,
        text=True,
        env=environment(SABOTAGE="1:verify:kill") | line.environment,
        timeout=300,
    )
    assert ran.returncode != 0
    assert "rank 1 has ended: last seen on" in ran.stderr
    kept = sorted(file.name for file in (out / "results").iterdir())
    assert kept == ["any@1+0.0.json", "any@1+2.0.json"]
    assert not (out / "report.json").exists()
    assert app.main([*arguments, "--resume"]) == 0


def in_pool(group: Group, folder: str, out: str) -> Any:
    """A comparison by the ranks of a pool, each on a host of its own whose clock is ahead."""
    cells, reference = grid(["tp"], [2], [2], "any@1+0")
    work = replace(job(Path(folder), max_new_tokens=6), dtype="float32")
    plan = engine.Plan(work, cells, reference, open_checkpoint(Path(folder)).config, repeat=0)
    group.hosts = tuple(f"host-{rank}" for rank in range(group.size))
    outcomes = engine.compare_here(group, lambda event: None, plan, partial(Store, Path(out), resume=False))
    return outcomes and build(plan, outcomes, Texts("tiny", []))


def test_several_hosts_are_named(model: Path, ranks: Any, tmp_path: Path) -> None:
    from lockstep.engine.wording import setting

    document, _ = ranks(2).run(in_pool, str(model), str(tmp_path / "out"))
    ranks(2).close()  # its ranks have other hosts' names now
    assert document["rows"][1]["hosts"] == ["host-0", "host-1"]
    assert ", over gloo between host-0, host-1, 0 repetitions" in setting(document)

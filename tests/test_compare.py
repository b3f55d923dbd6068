"""A comparison from its grid to its document: what is run, kept, judged and counted, and what becomes of failures."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import cached
from comparisons import launcher, plan_of, row_of
from runs import PROMPTS

from lockstep.cli import app
from lockstep.comm.errors import UsageError
from lockstep.comm.strategy import CHOICES, resolve
from lockstep.comm.wiring import Wiring
from lockstep.engine import report
from lockstep.engine.compare import Step, compare
from lockstep.engine.grid import grid
from lockstep.engine.requests import Job
from lockstep.engine.stats import mcnemar, ratio_to
from lockstep.engine.store import Store, describe

H, SIZE = 64, 4  # hidden size and bytes of a number in the fixture


# ---------------------------------------------------------------------------------------------------------------- grid
def test_one_rank_is_run_once_per_number_of_drafts() -> None:
    cells, reference = grid(["tp", "sp-late", "sp-late:gather-sum"], [1, 2], [0, 3], "any@1+0")
    names = ["tp", "sp-late", "sp-late:gather-sum"]
    expected = ["any@1+0", *(f"{n}@2+0" for n in names), "any@1+3", *(f"{n}@2+3" for n in names)]
    assert [c.label for c in cells] == expected and reference == cells[0]


def test_a_reference_outside_the_grid_joins_it() -> None:
    cells, reference = grid(["tp"], [2], [3], "sp-late:gather-sum@2+0")
    assert [c.label for c in cells] == ["sp-late:gather-sum@2+0", "tp@2+3"]
    assert reference.strategy == resolve("sp-late:gather-sum")


@pytest.mark.parametrize("text", ("tp", "tp@2", "any@2+0", "tp@0+0", "tp@2+99", "nope@2+0"))
def test_a_reference_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        grid(["tp"], [2], [0], text)


# ---------------------------------------------------------------------------------------------------------------- runs
def test_repetitions_are_interleaved_and_judged_last(compared: Any) -> None:
    launched = compared[3]
    runs = [name.removeprefix("measure ") for name in launched if name.startswith("measure")]
    once = ["tp@1+0", "tp@2+0", "sp-late:gather-sum@2+0", "sp-early@2+0", "sp-dense@2+0"]
    drafting = ["tp@1+3", "tp@2+3", "sp-late:gather-sum@2+3"]
    again = [name for name in once if name != "sp-dense@2+0"] + drafting  # that one failed at first
    assert [n.replace("sp-late@", "sp-late:gather-sum@") for n in runs] == once + drafting + again + again
    assert all(name.startswith("replay") for name in launched[len(runs) :])


def test_what_failed_or_cannot_run_is_a_row_that_says_why(document: dict[str, Any]) -> None:
    refused, failed = row_of(document, "tp@3+0"), row_of(document, "sp-dense@2+0")
    assert refused["status"] == "refused" and "does not divide the 4 attention heads" in refused["why"]
    assert failed["status"] == "failed" and "LayoutError" in failed["why"] and "\n" not in failed["why"]
    assert refused["verdict"] is failed["verdict"] is None


def test_the_verdicts(document: dict[str, Any]) -> None:
    assert {row["label"]: row["verdict"] for row in document["rows"] if row["verdict"] != "identical"} == {
        "tp@3+0": None,
        "sp-early@2+0": "DIVERGED",
        "sp-dense@2+0": None,
    }
    broken = row_of(document, "sp-early@2+0")
    assert broken["where"]["boundary"] == "layers.1.ffn.combine"
    assert broken["where"]["causes"] == ["reduce-scatter at layers.1.ffn.combine"]
    first = broken["first_difference"]
    assert first["text_here"] != first["text_reference"] and first["text_before"]
    assert document["exit_code"] == 1


def test_exit_codes(compared: Any) -> None:
    outcomes = {o.cell.label: o for o in compared[1]}
    fine, broken, refused = outcomes["tp@2+0"], outcomes["sp-early@2+0"], outcomes["tp@3+0"]
    assert [report.exit_code(o) for o in ([fine], [fine, broken, refused], [fine, refused])] == [0, 1, 3]


def test_resume_runs_only_what_is_not_finished(compared: Any, ranks: Any) -> None:
    plan, outcomes, out, _ = compared
    with pytest.raises(UsageError, match="--resume"):
        Store(out, resume=False)
    launched: list[str] = []
    (out / "results" / "tp@2+3.1.json").unlink()
    again = compare(plan, Store(out, resume=True), launch=launcher(ranks, launched))
    assert launched == ["measure sp-dense@2+0", "measure tp@2+3"]  # what failed is tried again, what is gone too
    assert [o.judgement for o in again] == [o.judgement for o in outcomes]


def test_what_has_finished_survives_an_interruption(ranks: Any, tmp_path: Path) -> None:
    plan = plan_of(cached("deepseek_v3"), repeat=0)
    plan = replace(plan, cells=plan.cells[:2])
    launched: list[str] = []
    launch = launcher(ranks, launched)

    def interrupted(*args: Any, **options: Any) -> Any:
        if launched:
            raise KeyboardInterrupt
        return launch(*args, **options)

    with pytest.raises(KeyboardInterrupt):
        compare(plan, Store(tmp_path, resume=False), launch=interrupted)
    assert [f.name for f in (tmp_path / "results").iterdir()] == ["any@1+0.0.json"]
    compare(plan, Store(tmp_path, resume=True), launch=launch)
    assert launched[:2] == ["measure tp@1+0", "measure tp@2+0"] and launched.count("measure tp@1+0") == 1


def test_another_job_is_another_result(compared: Any) -> None:
    plan, _, out, _ = compared
    store, cell = Store(out, resume=True), plan.cells[1]

    def described(job: Job, wiring: Wiring = plan.wiring) -> dict[str, Any]:
        return describe(job, counted=True, trace=True, wiring=asdict(wiring), hosts=())

    work = cell.job(plan.job)
    assert store.get(f"{cell.label}.0", described(work)) is not None
    others: list[dict[str, Any]] = [{"max_new_tokens": 9}, {"prompts": (*PROMPTS[:2], (1, 2))}, {"batch": 3}]
    for other in (replace(work, **fields) for fields in others):
        assert store.get(f"{cell.label}.0", described(other)) is None


def test_ranks_talk_as_asked_and_another_way_is_another_result(ranks: Any, tmp_path: Path) -> None:
    plan = plan_of(cached("deepseek_v3"), repeat=0)
    plan = replace(plan, cells=plan.cells[:2], wiring=Wiring("deepspeed", "native"))
    asked, launched = list[Wiring](), list[str]()

    def launch(*args: Any, wiring: Wiring, **options: Any) -> Any:
        asked.append(wiring)
        return launcher(ranks, launched)(*args, **options)

    compare(plan, Store(tmp_path, resume=False), launch=launch)
    assert set(asked) == {plan.wiring}
    launched.clear()
    compare(replace(plan, wiring=Wiring()), Store(tmp_path, resume=True), launch=launch)
    assert [name for name in launched if name.startswith("measure")] == ["measure tp@2+0"]  # one rank talks to nobody


def test_a_reference_that_cannot_run_is_bad_input(tmp_path: Path) -> None:
    plan = plan_of(cached("deepseek_v3"))
    plan = replace(plan, reference=next(c for c in plan.cells if c.tp == 3))
    with pytest.raises(UsageError, match=r"the reference tp@3\+0 cannot run"):
        compare(plan, Store(tmp_path, resume=False), launch=lambda *a, **k: pytest.fail("nothing may be launched"))


def test_progress_counts_every_step(ranks: Any, tmp_path: Path) -> None:
    plan = plan_of(cached("deepseek_v3"), repeat=0)
    plan = replace(plan, cells=plan.cells[:2])
    steps: list[Step] = []
    compare(plan, Store(tmp_path, resume=False), launch=launcher(ranks, []), on_step=steps.append)
    assert [(s.number, s.total, s.of_cell) for s in steps] == [
        (0, 4, "any@1+0"), (1, 4, "tp@2+0"), (2, 4, "any@1+0"), (3, 4, "tp@2+0"),
    ]  # fmt: skip


def test_the_schema_is_documented(document: dict[str, Any]) -> None:
    """Every key of the document stands in docs/report.md, but for those that `generate --json` has too."""
    text = (Path(__file__).parent.parent / "docs" / "report.md").read_text()
    known = set(re.findall(r"`([a-z0-9_]+)`", text)) | set(CHOICES)

    def keys(value: Any) -> set[str]:
        if isinstance(value, dict):
            return set(value) | {key for name, inner in value.items() if name != "effective" for key in keys(inner)}
        return {key for inner in value for key in keys(inner)} if isinstance(value, list) else set()

    assert keys(document) - known == set()


# -------------------------------------------------------------------------------------------------------------- numbers
def test_bytes_follow_the_formula(compared: Any, document: dict[str, Any]) -> None:
    """DESIGN section 3: collectives per MoE layer, each of T x H, T being the rows of every forward of the run."""
    runs = {o.cell.label: o.runs[0] for o in compared[1] if o.runs}
    for label, per_layer in (
        ("tp@2+0", {"attention.out": "all-reduce", "ffn.out": "all-reduce"}),
        ("tp@2+3", {"attention.out": "all-reduce", "ffn.out": "all-reduce"}),
        (
            "sp-late:gather-sum@2+3",
            {"attention.in": "all-gather", "attention.out": "reduce-scatter", "ffn.dispatch": "all-gather",
             "ffn.combine": "reduce-scatter"},
        ),
    ):  # fmt: skip
        run = runs[label]
        target = sum(map(len, PROMPTS)) + sum(1 + len(r["drafts"]) for q in run["requests"] for r in q["rounds"])
        moe = ("layers.1.", "layers.2.")
        rows = [r for r in row_of(document, label)["collectives"] if r["boundary"].startswith(moe)]
        assert {(r["boundary"].split(".", 2)[2], r["collective"]) for r in rows} == set(per_layer.items())
        assert {(r["rows"], r["bytes"]) for r in rows} == {(target, target * H * SIZE)}
        wire = {r["collective"]: r["wire_bytes"] for r in rows}
        if "all-reduce" in wire:
            assert wire["all-reduce"] == target * H * SIZE  # 2 (P - 1) / P with P = 2
        tokens = sum(map(len, run["tokens"]))
        total = sum(r["bytes"] for r in row_of(document, label)["collectives"])
        assert row_of(document, label)["per_token"]["bytes"] == total / tokens


def test_the_parts_add_up_to_the_whole(document: dict[str, Any]) -> None:
    for row in document["rows"]:
        for part in row.get("parts", []):
            assert min(part["compute_s"], part["transfer_s"], part["wait_s"]) >= 0
            total = part["compute_s"] + part["transfer_s"] + part["wait_s"]
            assert total == pytest.approx(part["whole_s"], rel=0.05), row["label"]
        if row["tp"] > 1 and row.get("parts"):
            timed = sum(c["transfer_s"] + c["wait_s"] for c in row["collectives"])
            inside = sum(p["transfer_s"] + p["wait_s"] for p in row["parts"]) / row["tp"]
            assert timed == pytest.approx(inside, rel=1e-6)
            assert min(p["wait_s"] for p in row["parts"]) < max(p["whole_s"] for p in row["parts"])


def test_acceptance_counts_add_up(compared: Any, document: dict[str, Any]) -> None:
    run = next(o.runs[0] for o in compared[1] if o.cell.label == "tp@2+3")
    positions = row_of(document, "tp@2+3")["acceptance"]["per_position"]
    rounds = [r for q in run["requests"] for r in q["rounds"]]
    assert [p["accepted"] for p in positions] == [sum(r["accepted"] > i for r in rounds) for i in range(3)]
    assert positions[1]["conditional"] >= positions[1]["rate"]
    committed = sum(map(len, run["tokens"]))
    assert committed == len(PROMPTS) + sum(r["accepted"] + 1 for r in rounds) - _cut_short(run)


def _cut_short(run: dict[str, Any]) -> int:
    """Rounds that ended inside an accepted run: their last token is a draft, not the target's own."""
    return sum(
        1 + sum(r["accepted"] + 1 for r in q["rounds"]) - len(tokens)
        for q, tokens in zip(run["requests"], run["tokens"], strict=True)
    )


def test_accuracy_and_memory(document: dict[str, Any]) -> None:
    row = row_of(document, "tp@2+0")
    assert row["accuracy"] == {
        "right": 1, "of": 2, "rate": 0.5, "p_value": 1.0, "only_here": 0, "only_reference": 0,
    }  # fmt: skip
    assert len(row["memory"]) == 2 and all(m["peak_bytes"] >= m["start_bytes"] > 0 for m in row["memory"])
    assert row["repeats_agree"]


def test_the_trace_has_every_kind_of_span(compared: Any) -> None:
    from lockstep.engine.trace import chrome

    runs = {o.cell.label: o.runs[0]["trace"] for o in compared[1] if o.runs}
    events = json.loads(json.dumps(chrome(runs)))["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    drafting = list(runs).index("tp@2+3")
    kinds = {e["cat"] for e in spans if e["pid"] == drafting}
    assert kinds == {"round", "target", "draft", "draft step", "layer", "collective"}
    assert {e["tid"] for e in spans if e["pid"] == drafting} == {0, 1}
    assert {e["name"] for e in spans if e["cat"] == "layer"} >= {"layers.0", "layers.2", "mtp.0"}
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in spans)
    # A layer lies inside a pass of the target or of an MTP block, and a collective inside a round or prefill.
    mine = [e for e in spans if e["pid"] == drafting and e["tid"] == 1]
    passes = [e for e in mine if e["cat"] in ("target", "draft step")]
    for layer in (e for e in mine if e["cat"] == "layer"):
        assert any(p["ts"] <= layer["ts"] and layer["ts"] + layer["dur"] <= p["ts"] + p["dur"] + 1 for p in passes)


# ---------------------------------------------------------------------------------------------------------- statistics
def test_ratio_is_of_pairs() -> None:
    assert ratio_to([10, 20, 40], [5, 10, 20]) == {"ratio": 0.5, "low": 0.5, "high": 0.5}
    spread = ratio_to([10] * 9, [9, 9.5, 10, 10.5, 11, 10, 10, 9.8, 10.2])
    assert spread["low"] is not None and spread["low"] < spread["ratio"] == 1.0 < spread["high"]  # type: ignore[operator]
    assert ratio_to([10, 10], [5, 5])["low"] is None and ratio_to([], [])["ratio"] is None


def test_mcnemar_is_exact() -> None:
    right, wrong = [True] * 10, [False] * 10
    assert mcnemar(right, right) == 1.0
    assert mcnemar(right, wrong) == pytest.approx(2 / 2**10)
    assert mcnemar([True] * 8 + [False] * 2, [False] * 8 + [True] * 2) == pytest.approx(2 * (1 + 10 + 45) / 2**10)


# ------------------------------------------------------------------------------------------------------------- command
def test_the_command_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": list(p), "answer": "7"}) + "\n" for p in PROMPTS))
    out = tmp_path / "out"
    folder = cached("deepseek_v3")
    options = ["--strategies", "tp", "--tp", "1,2", "--draft-tokens", "2", "--reference", "any@1+2", "--repeat", "1"]
    options += ["--prompts", str(prompts), "--max-new-tokens", "6", "--out", str(out)]
    assert app.main(["compare", str(folder), *options, "--trace"]) == 0
    shown = capsys.readouterr()
    assert max(map(len, shown.out.splitlines()[:8])) <= 100 and "tp@2+2" in shown.out
    assert "[1/6] any@1+2: counted run" in shown.err
    assert {f.name for f in out.iterdir()} == {"report.json", "report.md", "report.html", "trace.json", "results"}
    assert app.main(["compare", str(folder), *options]) == 2
    assert "--resume" in capsys.readouterr().err
    assert app.main(["report", str(out)]) == 0
    assert app.main(["report", str(out), str(out / "report.json"), "--markdown", str(out / "changes.md")]) == 0
    assert "+0.0%" in capsys.readouterr().out
    assert (out / "changes.md").read_text().startswith("### Before and after")


@pytest.mark.parametrize(
    "options,message",
    (
        (["--tp", "1,,2"], "has an empty place"),
        (["--tp", "two"], "is not a number from 1"),
        (["--draft-tokens", "99"], "is not a number from 0 to 8"),
        (["--strategies", "nope"], "unknown strategy 'nope'"),
        (["--reference", "tp"], "is not STRATEGY@P+K"),
        ([], "give --prompts"),
        (["--prompts", "missing.jsonl"], "cannot be read"),
    ),
)
def test_bad_input_is_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["compare", str(cached("deepseek_v3")), *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_result_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.main(["report", str(tmp_path)]) == 2
    assert "has not finished" in capsys.readouterr().err
    (tmp_path / "report.json").write_text('{"schema": "lockstep-comparison/99"}')
    assert app.main(["report", str(tmp_path)]) == 2
    assert "lockstep-comparison/99" in capsys.readouterr().err

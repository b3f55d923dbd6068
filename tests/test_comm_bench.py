"""`lockstep comm-bench`: a row per case, as a table and as JSON, and refusals in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.cli import app

BOTH = ("native", "exchange")
CASES = ["--collectives", "all-reduce,all-to-all,barrier", "--sizes", "100,4096", "--dtypes", "float32,bfloat16"]


def test_a_row_for_every_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.json"
    assert app.main(["comm-bench", "--tp", "2", *CASES, "--calls", "5", "--json", str(file)]) == 0
    document = json.loads(file.read_text())
    assert (document["ranks"], document["device"], document["comm"]) == (2, "cpu", "torch")
    rows = document["rows"]
    assert (
        [(r["dtype"], r["collective"], r["bytes"], r["algorithm"]) for r in rows]
        == [
            (dtype, collective, size, algorithm)
            for dtype, small in (("float32", 104), ("bfloat16", 100))  # whole rows of both ranks
            for collective, sizes, algorithms in (
                ("all-reduce", (small, 4096), BOTH),
                ("all-to-all", (small, 4096), BOTH[:1]),
                ("barrier", (0,), BOTH[:1]),
            )
            for size in sizes
            for algorithm in algorithms
        ]
    )
    for row in rows:
        assert row["wire"] == "gloo"
        assert row["calls"] == 5
        assert 0 < row["min_us"] <= row["median_us"] <= row["p95_us"]
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["median_us"] / 1e3)
    assert rows[0]["bus_gb_per_s"] == rows[0]["gb_per_s"]  # an all-reduce of two ranks sends each byte once
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) == 2 + len(rows)
    assert "gloo, 2 ranks, 5 calls each" in shown


def test_json_alone_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["comm-bench", "--collectives", "broadcast", "--sizes", "64", "--calls", "3", "--json", "-"]
    assert app.main(line) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--tp 1", "one rank moves nothing; use --tp 2 or more"),
        ("--collectives all-reduce,sum", "--collectives 'sum' is not known; use all-reduce"),
        ("--collectives ,", "--collectives names nothing"),
        ("--sizes 1k", "--sizes '1k' must be numbers of bytes"),
        ("--sizes 0", "--sizes '0' must be numbers of bytes"),
        ("--dtypes int8", "--dtypes 'int8' is not known"),
        ("--comm mpi", "--comm mpi needs ranks that an mpiexec has started"),
        ("--comm mpi --comm-algorithm native", "--comm-algorithm native is for gloo, and --comm is mpi"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], options: str, says: str) -> None:
    assert app.main(["comm-bench", "--device", "cpu", *options.split()]) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1

"""How often the verdict is wrong about right runs: the built-in model in bf16, all strategies, many problems.

    python benchmarks/verdicts.py [--prompts 200] [--out DIR]

How often it sees a broken one is what tests/test_verdict_faults.py counts: every fault there must be found and placed.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from lockstep.cli import app

STRATEGIES = "tp,sp-chunk,sp-early,sp-late"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--strategies", default=STRATEGIES)
    parser.add_argument("--out", default="verdicts")
    given = parser.parse_args()
    options = (
        f"--tp 2 --draft-tokens 0,3 --batch 32 --max-new-tokens 64 --repeat 0 --resume --num-prompts {given.prompts}"
    )
    app.main(["compare", "demo", "--strategies", given.strategies, *options.split(), "--out", given.out])
    rows = json.loads((Path(given.out) / "report.json").read_text())["rows"]
    verdicts = Counter(row["verdict"] or row["status"] for row in rows if not row["is_reference"])
    differing = sum(row["requests_different"] for row in rows if row["verdict"])
    ties = sum(row["ties"] for row in rows if row["verdict"])
    print(f"{sum(verdicts.values())} right runs of {given.prompts} prompts: {dict(verdicts)}")
    print(f"{differing} requests differed from the reference, {ties} differences were ties")


if __name__ == "__main__":
    main()

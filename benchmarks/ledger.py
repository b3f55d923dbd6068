"""What counting costs: tokens/s with the ledger on against off, and with every collective timed too, as paired ratios.

    python benchmarks/ledger.py [MODEL] [--tp 2] [--pairs 20]

The three ways take turns in the same ranks, so that what else the machine does hits all of them.
"""

from __future__ import annotations

import argparse
from typing import Any

from lockstep.cli.inputs import model_folder
from lockstep.comm import world
from lockstep.comm.group import Group
from lockstep.comm.strategy import resolve
from lockstep.comm.timeline import Timeline
from lockstep.engine.requests import Job
from lockstep.engine.run import decode, load_for, sequences_of, settings_of, timings
from lockstep.engine.stats import ratio_to
from lockstep.models.checkpoint import open_checkpoint

WAYS = {"nothing": (False, False), "ledger": (True, False), "ledger and times": (True, True)}


def measure(group: Group, emit: Any, job: Job, pairs: int) -> dict[str, list[float]]:
    checkpoint = open_checkpoint(job.model)
    model, settings = load_for(job, checkpoint, group, emit).model, settings_of(job, checkpoint, group)
    speeds: dict[str, list[float]] = {way: [] for way in WAYS}
    ways = list(WAYS)
    for turn in range(pairs + 1):  # the first one warms up
        for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
            counted, timed = WAYS[way]
            group.ledger.enabled = counted
            group.time(Timeline(group.device) if timed else None)
            sequences = sequences_of(job, checkpoint)
            clocks = decode(job, model, settings, sequences, lambda event: None)
            if turn:
                speeds[way].append(timings(clocks, sequences)["tokens_per_s"])
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=20)
    arguments = parser.parse_args()
    prompts = tuple(tuple(range(2, 2 + n)) for n in (20, 25, 30, 35))
    job = Job(str(model_folder(arguments.model)), prompts, resolve("sp-late"), 32, 3, arguments.tp, ignore_eos=True)
    speeds = world.run(measure, arguments.tp, args=(job, arguments.pairs))
    for way in WAYS:
        found = ratio_to(speeds["nothing"], speeds[way])
        interval = "" if found["low"] is None else f" ({found['low']:.3f}-{found['high']:.3f})"
        print(f"{way:18} tokens/s against nothing: {found['ratio']:.3f}{interval}, best {max(speeds[way]):.1f}")


if __name__ == "__main__":
    main()

"""`lockstep inspect`: what a checkpoint is and what can run it, from headers alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from lockstep.cli import jsonfile, options
from lockstep.comm import strategy as strategies

MAX_KEYS = 8  # of a long list, in the table; --json has all


def command(
    model: options.Model,
    tp: options.Tp = None,
    strategy: options.Strategy = "tp",
    draft_tokens: options.InspectedDrafts = None,
    dtype: options.Dtype = "auto",
    load_format: options.LoadFormat = "auto",
    num_layers: options.NumLayers = None,
    weights: options.Weights = "auto",
    json_file: options.JsonFile = None,
    traceback: options.Traceback = False,
) -> None:
    """Show what a checkpoint is, what is missing, how large it is on P ranks, and what can run. Ends with 1 where the
    checkpoint is not as its config.json says."""
    from rich.console import Console

    from lockstep.cli.inputs import model_folder
    from lockstep.engine import choices
    from lockstep.engine.inspect import inspect, is_sound
    from lockstep.engine.requests import Job

    if json_file is not None:
        jsonfile.check(json_file)
    folder = model_folder(model)
    job = Job(
        model=str(folder),
        prompts=(),
        strategy=strategies.resolve(strategy),
        max_new_tokens=1,
        draft_tokens=options.MAX_DRAFT_TOKENS if draft_tokens is None else draft_tokens,
        tp=tp or 1,
        dtype=dtype,
        load_format="dummy" if load_format == "auto" and _is_config_alone(folder) else load_format,
        num_layers=num_layers,
        weights=weights,
    )
    gc.disable()  # 100 000 small values, none of them garbage: a quarter of the time
    try:
        document = inspect(job, choices.checkpoint_of(job))
    finally:
        gc.enable()
    console = Console(highlight=False, stderr=json_file == "-")
    console.print(_table(document))
    if json_file is not None:
        jsonfile.write(document, json_file)
    raise typer.Exit(0 if is_sound(document) else 1)


def _is_config_alone(path: Path) -> bool:
    if path.is_dir():
        return (path / "config.json").exists() and not list(path.glob("*.safetensors*"))
    return path.is_file()


def _table(document: dict[str, Any]) -> Any:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, line in _lines(document):
        grid.add_row(label, Text(line))
    return grid


def _lines(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    shapes, parameters = document["shapes"], document["parameters"]
    layers = f"{shapes['layers']} layers ({shapes['dense_layers']} dense)"
    sizes = f"hidden {shapes['hidden']}, vocabulary {shapes['vocabulary']}, {shapes['positions']} positions"
    yield "model", f"{document['family']}, {layers}, {sizes}"
    heads = f", heads {_listed(shapes['heads'])}" if shapes["heads"] else ""
    yield "attention", ", ".join(f"{name} in {n} layers" for name, n in shapes["attention"].items()) + heads
    if "experts" in shapes:
        e = shapes["experts"]
        routed = f"{e['number']} of width {e['width']} in {e['layers']} layers, {e['per_token']} per token"
        yield "experts", f"{routed}, shared width {e['shared_width']}"
    total, active, mtp = (_count(parameters[key]) for key in ("total", "active", "mtp"))
    yield "parameters", f"{total}, {active} of them active per token; MTP {mtp}"
    yield from _mtp(document)
    blocks = document["fp8_block"]
    yield "weights", document["weights"] + (f", FP8 in blocks of {blocks[0]} x {blocks[1]}" if blocks else "")
    for name, found in document["dtypes"].items():
        yield "", f"{name} {_bytes(found['bytes'])} in {found['tensors']} tensors"
    for what in ("missing", "unexpected", "unusable", "ignored"):
        if document[what]:
            yield what, _listed(document[what], MAX_KEYS)
    yield from _rank(document["rank"])
    yield from _verdicts("strategies", document["strategies"], f"at tp {document['rank']['tp']}")
    for device in ("cpu", "cuda"):
        yield from _verdicts("kernels", [k for k in document["kernels"] if k["device"] == device], f"on {device}")


def _mtp(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for number, block in enumerate(document["mtp"]):
        own = f", with {_listed(block['vocabulary'])}" if block["vocabulary"] else ""
        yield "MTP", f"block {number} at {block['where']}: {block['found']} of {block['needed']} tensors{own}"
    if not document["mtp"]:
        yield "MTP", "none"


def _rank(rank: dict[str, Any]) -> Iterator[tuple[str, str]]:
    where = f"tp {rank['tp']}, {rank['strategy']}"
    if "refused" in rank:
        yield "per rank", f"{where}: {rank['refused']}"
        return
    kept, fixed = rank.get("weights_bytes_kept_fp8"), rank["cache_bytes_per_sequence"]
    keep = f" ({_bytes(kept)} with --weights keep)" if kept else ""
    state = f" and {_bytes(fixed)} per sequence" if fixed else ""
    blocks = f"{rank['mtp_blocks']} MTP block" + "s" * (rank["mtp_blocks"] != 1)
    weights, cache = _bytes(rank["weights_bytes"]), _bytes(rank["cache_bytes_per_1000_tokens"])
    yield "per rank", f"{where}, {rank['dtype']}, {blocks}"
    yield "", f"weights {weights}{keep}, cache {cache} per 1000 tokens{state}"


def _verdicts(label: str, verdicts: list[dict[str, Any]], where: str) -> Iterator[tuple[str, str]]:
    """What runs; and what does not, together where the reason is the same."""
    able = [v["name"] for v in verdicts if v["runs"]]
    yield label, f"{where}: {', '.join(able) or 'none'}"
    for why in dict.fromkeys(v["why"] for v in verdicts if not v["runs"]):
        yield "", f"not {', '.join(v['name'] for v in verdicts if v['why'] == why)}: {why}"


def _listed(values: list[Any], most: int = 1000) -> str:
    rest = f" and {len(values) - most} more" if len(values) > most else ""
    return ", ".join(map(str, values[:most])) + rest


def _bytes(number: float) -> str:
    return _scaled(number, ("B", "kB", "MB", "GB"))


def _count(number: float) -> str:
    return _scaled(number, ("", "thousand", "million", "billion")).strip()


def _scaled(number: float, units: tuple[str, ...]) -> str:
    """Three digits or more, in the largest unit that fits."""
    power = 0
    while number >= 1000 and power < len(units) - 1:
        number, power = number / 1000, power + 1
    digits = 0 if number >= 100 or not power else 1 if number >= 10 else 2
    return f"{number:.{digits}f} {units[power]}"

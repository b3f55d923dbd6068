"""`lockstep make-checkpoint`: write random weights for a config.json, as such a model is released."""

from __future__ import annotations

import re

from lockstep.cli import options
from lockstep.comm.errors import UsageError

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def command(
    config: options.ConfigFile,
    out: options.NewFolder,
    num_layers: options.NumLayers = None,
    dtype: options.StoredDtype = None,
    fp8: options.Fp8 = None,
    seed: options.Seed = 0,
    max_shard_size: options.MaxShardSize = "5GB",
    traceback: options.Traceback = False,
) -> None:
    """Write a checkpoint of random weights for a config.json: what `--load-format dummy` takes, in files."""
    from rich.console import Console

    from lockstep.cli.show import Loading
    from lockstep.engine.bytewise import tokenizer_files
    from lockstep.engine.requests import Progress
    from lockstep.models.checkpoint import open_dummy
    from lockstep.models.write import write

    shard_bytes = num_bytes(max_shard_size)
    checkpoint = open_dummy(config, num_layers=num_layers, dtype=dtype, fp8=fp8, seed=seed)
    err = Console(stderr=True, highlight=False)
    texts = tokenizer_files(checkpoint.raw)
    bar = Loading(err)
    try:
        files = write(
            checkpoint,
            out,
            max_shard_bytes=shard_bytes,
            texts=texts,
            progress=lambda done, total: bar.update(Progress("write", done, total)),
        )
    finally:
        bar.stop()
    size = sum(file.stat().st_size for file in files)
    count = f"{len(files)} file" + "s" * (len(files) > 1)
    Console(highlight=False).print(f"{out}: {size / 1e9:.3g} GB in {count}", soft_wrap=True)
    if not (out / "tokenizer.json").exists():
        err.print("no tokenizer: the vocabulary has no room for 256 bytes; prompt with --prompt-ids", soft_wrap=True)


def num_bytes(size: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?i?B)", size, re.IGNORECASE)
    number = float(found[1]) * UNITS[found[2].upper()] if found and found[2].upper() in UNITS else 0
    if number < 1:
        raise UsageError(f"--max-shard-size {size!r} is not a size such as 5GB or 500MB")
    return int(number)

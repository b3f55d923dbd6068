"""What a checkpoint is, by its headers only: shapes, sizes, what is missing, and what can run. No torch here."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

from lockstep.comm import strategy as strategies
from lockstep.comm.errors import UsageError
from lockstep.comm.shard import Shard
from lockstep.engine import choices
from lockstep.engine.requests import Job
from lockstep.models import inventory, kernels, names
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.config import GQA, MLA, Config, Dense, MoE, check
from lockstep.models.inventory import Entry
from lockstep.models.kernels import ITEM_BYTES, Work
from lockstep.models.storage import ITEM_BYTES as STORED_BYTES
from lockstep.models.storage import Stored


def inspect(job: Job, checkpoint: Checkpoint) -> dict[str, Any]:
    """The document that `lockstep inspect --json` writes. `job` has no prompts; its device is where it would run."""
    config, tensors = checkpoint.config, checkpoint.tensors()
    why = refused(job, config, job.strategy.name)
    placement, shard = job.strategy.placement, Shard(0, 1 if why else job.tp)
    entries = list(inventory.tensors(config, placement, shard, len(config.mtp)))
    found = names.compare(config, entries, tensors, choices.num_mtp(job, config))
    return {
        "model": job.model,
        "family": config.family,
        "weights": "none: random numbers" if checkpoint.dummy_seed is not None else "stored",
        "shapes": shapes(config),
        "parameters": parameters(config, entries),
        "mtp": [mtp_block(config, tensors, entries, i) for i in range(len(config.mtp))],
        "dtypes": dtypes(tensors),
        "fp8_block": config.fp8_block,
        "missing": list(found.missing),
        "unexpected": list(found.unexpected),
        "unusable": list(found.unusable),
        "ignored": list(found.ignored),
        "rank": {"tp": job.tp, "strategy": job.strategy.name, "draft_tokens": job.draft_tokens}
        | ({"refused": why} if why else rank(job, config, tensors, entries)),
        "strategies": [verdict(name, refused(job, config, name)) for name in strategies.NAMED],
        "kernels": [usable(job, config, name, device) for device in ("cpu", "cuda") for name in kernels.KERNELS],
    }


def is_sound(document: dict[str, Any]) -> bool:
    """Whether everything that was asked for is there, and nothing else."""
    return not (document["missing"] or document["unexpected"] or document["unusable"])


def shapes(config: Config) -> dict[str, Any]:
    mixers = Counter(type(layer.mixer).__name__ for layer in config.layers)
    experts = [layer.ffn for layer in config.layers if isinstance(layer.ffn, MoE)]
    shown: dict[str, Any] = {
        "layers": len(config.layers),
        "hidden": config.hidden,
        "vocabulary": config.vocab,
        "positions": config.max_position,
        "attention": dict(mixers),
        "heads": sorted({layer.mixer.heads for layer in config.layers if isinstance(layer.mixer, MLA | GQA)}),
        "dense_layers": sum(isinstance(layer.ffn, Dense) for layer in config.layers),
        "tied": config.tied,
        "dtype": config.dtype,
    }
    if experts:
        first = experts[0]
        shown["experts"] = {
            "layers": len(experts),
            "number": first.router.experts,
            "per_token": first.router.top_k,
            "width": first.inter,
            "shared_width": first.shared_inter,
        }
    return shown


def parameters(config: Config, entries: list[Entry]) -> dict[str, int]:
    """Of the model without its MTP blocks, and how many of these a token meets; and of the MTP blocks."""
    total = sum(entry.size for entry in entries if entry.mtp is None)
    idle = sum(
        3 * config.hidden * layer.ffn.inter * (layer.ffn.router.experts - layer.ffn.router.top_k)
        for layer in config.layers
        if isinstance(layer.ffn, MoE)
    )
    mtp = sum(entry.size for entry in entries if entry.mtp is not None)
    return {"total": total, "active": total - idle, "mtp": mtp}


def mtp_block(config: Config, tensors: dict[str, Stored], entries: list[Entry], number: int) -> dict[str, Any]:
    """Where an MTP block's tensors are, how many there should be, and which optional ones are there."""
    needed = {entry.name for entry in entries if entry.mtp == number}
    example = config.checkpoint_name(f"mtp.{number}.block.input_layernorm.weight")
    stored = tensors.get(example)
    own = [config.checkpoint_name(f"mtp.{number}.{part}.weight") for part in ("embed_tokens", "head")]
    return {
        "where": (stored.key if stored else example).removesuffix("input_layernorm.weight"),
        "needed": len(needed),
        "found": len(needed & tensors.keys()),
        "vocabulary": [tensors[key].key for key in own if key in tensors],
    }


def dtypes(tensors: dict[str, Stored]) -> dict[str, dict[str, int]]:
    """Stored tensors by dtype; a stack of experts is one."""
    keys: dict[str, set[str]] = {}
    sizes: Counter[str] = Counter()
    for stored in tensors.values():
        for each in (stored, stored.scale):
            if each is not None:
                keys.setdefault(each.dtype, set()).add(each.key)
                sizes[each.dtype] += math.prod(each.shape) * STORED_BYTES.get(each.dtype, 0)
    return {dtype: {"tensors": len(found), "bytes": sizes[dtype]} for dtype, found in keys.items()}


def rank(job: Job, config: Config, tensors: dict[str, Stored], entries: list[Entry]) -> dict[str, Any]:
    """Bytes on the rank that holds most, which is the first."""
    dtype, num_mtp = choices.dtype_of(job, config), choices.num_mtp(job, config)
    item_bytes, block = ITEM_BYTES[dtype], config.fp8_block
    loaded = [entry for entry in entries if entry.mtp is None or entry.mtp < num_mtp]
    per_token, fixed = inventory.cache_bytes(config, Shard(0, job.tp), num_mtp, item_bytes)
    shown = {
        "dtype": dtype,
        "mtp_blocks": num_mtp,
        "weights_bytes": sum(entry.bytes_here(item_bytes) for entry in loaded),
        "cache_bytes_per_1000_tokens": per_token * 1000,
        "cache_bytes_per_sequence": fixed,
    }
    fp8 = {name for name, stored in tensors.items() if stored.scale}
    if block and fp8:
        shown["weights_bytes_kept_fp8"] = sum(
            e.scaled_bytes_here(block[1]) if e.scalable and e.name in fp8 else e.bytes_here(item_bytes) for e in loaded
        )
    return shown


def refused(job: Job, config: Config, strategy: str) -> str:
    """Why a strategy cannot run on the job's ranks, or nothing."""
    chosen = job.strategy if strategy == job.strategy.name else strategies.resolve(strategy)
    try:
        check(config, job.tp, chosen.placement, 0)
    except UsageError as error:
        return str(error)
    return ""


def usable(job: Job, config: Config, kernel: str, device: str) -> dict[str, Any]:
    keep_fp8 = choices.keeps_fp8(replace(job, device=device))
    tp = 1 if refused(job, config, job.strategy.name) else job.tp
    work = Work(config, job.strategy.placement, tp, choices.dtype_of(job, config), device, keep_fp8)
    return verdict(kernel, kernels.clash(kernel, work) or "") | {"device": device}


def verdict(name: str, why_not: str) -> dict[str, Any]:
    return {"name": name, "runs": not why_not, "why": why_not}

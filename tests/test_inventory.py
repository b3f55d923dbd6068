"""What the configuration alone says of a checkpoint and of a rank's memory is what the layers say."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from checkpoints import cached, copy
from quantise import quantise

from lockstep.comm.strategy import Placement, resolve
from lockstep.models import inventory
from lockstep.models.checkpoint import open_checkpoint
from lockstep.models.families import FAMILIES
from lockstep.models.load import load
from lockstep.models.model import Model
from lockstep.models.weights import Shard

PLACEMENTS = (
    Placement("owned", "sliced", "replicated"),
    Placement("owned", "replicated", "sliced"),
    Placement("sliced", "sliced", "sliced"),
)
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two MTP blocks": {"mtp_layers": 2},
    "tied": {"overrides": {"tie_word_embeddings": True}},
    "biases": {"overrides": {"attention_bias": True}},
    "no query compression": {"overrides": {"q_lora_rank": None}},
}


CASES = [(f, v) for f in FAMILIES for v in VARIANTS if v != "no query compression" or f == "deepseek_v3"]


def config_of(family: str, variant: str) -> Any:
    return open_checkpoint(cached(family, **VARIANTS[variant])).config


@pytest.mark.parametrize("size", (2, 4))
@pytest.mark.parametrize("family,variant", CASES)
def test_same_as_the_layers(family: str, variant: str, size: int) -> None:
    config = config_of(family, variant)
    for placement in PLACEMENTS:
        for rank in {0, size // 2, size - 1}:
            shard = Shard(rank, size)
            with torch.device("meta"):
                model = Model(config, placement, shard, len(config.mtp))
            here: Counter[str] = Counter()
            shapes = {}
            for key, layer, piece in model.placed_pieces():
                here[key] += layer.get_parameter(piece.parameter)[piece.target or ...].numel()
                shapes[key] = piece.shape
            entries = {entry.name: entry for entry in inventory.tensors(config, placement, shard, len(config.mtp))}
            assert {name: entry.size_here for name, entry in entries.items() if entry.size_here} == +here
            assert {name: entries[name].shape for name in shapes} == shapes


@pytest.mark.parametrize("family,variant", CASES)
def test_same_as_the_file(family: str, variant: str) -> None:
    config = config_of(family, variant)
    tensors = open_checkpoint(cached(family, **VARIANTS[variant])).tensors()
    names = [entry.name for entry in inventory.tensors(config, PLACEMENTS[0], Shard(0, 1), len(config.mtp))]
    assert len(names) == len(set(names))
    extra = inventory.optional(config, len(config.mtp))
    ignored = {name for name in tensors if name.startswith(config.ignored)} if config.ignored else set()
    assert set(names) - extra.keys() == tensors.keys() - extra.keys() - ignored


@pytest.mark.parametrize("dtype,item_bytes", ((torch.bfloat16, 2), (torch.float64, 8)))
@pytest.mark.parametrize("family", FAMILIES)
def test_bytes(family: str, dtype: torch.dtype, item_bytes: int, tmp_path: Any) -> None:
    """As loaded, dequantised and kept in FP8."""
    folder = quantise(copy(cached(family, overrides={"moe_intermediate_size": 40}), tmp_path / "fp8"))
    checkpoint = open_checkpoint(folder)
    tensors = checkpoint.tensors()
    for strategy, shard in (("tp", Shard(1, 4)), ("sp-late", Shard(1, 2))):
        placement = resolve(strategy).placement
        entries = list(inventory.tensors(checkpoint.config, placement, shard, 1))
        for keep in (False, True):
            loaded = load(
                checkpoint, placement, shard,
                draft_tokens=1, dtype=dtype, device=torch.device("cpu"), keep_fp8=keep,
            )  # fmt: skip
            told = sum(
                e.scaled_bytes_here(16) if keep and tensors[e.name].scale and e.scalable else e.bytes_here(item_bytes)
                for e in entries
            )
            assert told == loaded.num_bytes

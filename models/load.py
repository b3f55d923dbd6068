"""From a checkpoint to a model: every rank reads only its own regions of the stored tensors.

Names and shapes are checked against the headers before the first weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from lockstep.comm.strategy import Placement
from lockstep.models import names
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.fp8 import Scaled
from lockstep.models.model import MTP, Model
from lockstep.models.noise import Noise
from lockstep.models.read import Files, Reader
from lockstep.models.storage import Stored
from lockstep.models.weights import Piece, Shard, Vocabulary, wider


@dataclass(frozen=True)
class Loaded:
    """`weights` says what became of FP8 tensors: "keep", "dequantise", or "-" where there are none."""

    model: Model
    num_bytes: int
    weights: str
    notes: tuple[str, ...]


def load(
    checkpoint: Checkpoint,
    placement: Placement,
    shard: Shard,
    *,
    draft_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    keep_fp8: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Loaded:
    """The model with as many MTP blocks as `draft_tokens` can use. `progress(done, total)` counts bytes.

    FP8 weights become `dtype`, or with `keep_fp8` stay as they are where a product can take them so.
    Raises UsageError where the checkpoint is not what its config.json says (models/names.py).
    """
    num_mtp = min(draft_tokens, len(checkpoint.config.mtp))
    tensors = checkpoint.tensors()
    names.check(checkpoint, tensors, num_mtp)
    with torch.device("meta"):
        model = Model(checkpoint.config, placement, shard, num_mtp)
    placed = list(model.placed_pieces())
    scaled = _scaled(placed, tensors, checkpoint.config.fp8_block) if keep_fp8 else {}
    _materialise(model, dtype, device, scaled)
    placed.sort(key=lambda item: (str(tensors[item[0]].file), item[0]))
    total = num_bytes(model)
    source = Files() if checkpoint.dummy_seed is None else Noise(checkpoint.config)
    reader, done = Reader(source, checkpoint.config.fp8_block), 0
    for key, layer, piece in placed:
        weight = getattr(layer, piece.parameter)
        if isinstance(weight, Scaled):
            done += reader.into_scaled(weight, piece.target, tensors[key], piece.source)
        else:
            done += reader.into(weight[piece.target or ...], tensors[key], piece.source)
        progress(done, total)
    notes = [note for block in model.mtp for note in _own_vocabulary(block, model, tensors, reader, shard)]  # type: ignore[arg-type]
    notes += _unused_head(model, tensors, reader)
    notes += _passed_over(tensors, checkpoint.config.ignored)
    source.close()
    is_fp8 = any(tensors[key].scale for key, _, _ in placed)
    return Loaded(model.eval(), num_bytes(model), "keep" if scaled else "dequantise" if is_fp8 else "-", tuple(notes))


def num_bytes(model: Model) -> int:
    kept = [value for layer in model.modules() for value in vars(layer).values() if isinstance(value, Scaled)]
    return sum(p.nbytes for p in model.parameters()) + sum(weight.num_bytes() for weight in kept)


Parameter = tuple[nn.Module, str]


def _scaled(
    placed: list[tuple[str, nn.Module, Piece]], tensors: dict[str, Stored], block: tuple[int, int] | None
) -> dict[Parameter, tuple[int, int]]:
    """Parameters that can stay FP8, with the columns of a block and those that the first one lacks (Scaled.cut).

    All that a parameter is made of must be FP8, and cut alike.
    """
    cuts: dict[Parameter, set[int | None]] = {}
    for key, layer, piece in placed:
        if block and piece.parameter in getattr(layer, "scalable_parameters", ()):
            columns = piece.source[-1].start if len(piece.source) == len(piece.shape) else None
            cut = (columns or 0) % block[1]
            cuts.setdefault((layer, piece.parameter), set()).add(cut if tensors[key].scale else None)
    return {
        parameter: (block[1], cut)
        for parameter, found in cuts.items()
        if block and len(found) == 1 and (cut := next(iter(found))) is not None
    }


def _materialise(
    model: Model, dtype: torch.dtype, device: torch.device, scaled: dict[Parameter, tuple[int, int]]
) -> None:
    """Real, empty memory for every parameter; what a layer calls wide stays in float32 or wider."""
    for layer in model.modules():
        wide = getattr(layer, "wide_parameters", ())
        for name, parameter in list(layer.named_parameters(recurse=False)):
            kind = wider(dtype) if name in wide else dtype
            if (layer, name) in scaled:
                delattr(layer, name)
                setattr(layer, name, Scaled.empty(parameter.shape, *scaled[layer, name], kind, device))
            else:
                empty = torch.empty(parameter.shape, dtype=kind, device=device)
                setattr(layer, name, nn.Parameter(empty, requires_grad=False))


def _own_vocabulary(block: MTP, model: Model, tensors: dict[str, Stored], reader: Reader, shard: Shard) -> list[str]:
    """Give an MTP block its own embedding or head where the checkpoint stores one that is not the target's."""
    notes = []
    for part, shared in (("embed_tokens", model.embed_tokens), ("head", model.lm_head)):
        stored = tensors.get(model.config.checkpoint_name(f"{block.name}.{part}.weight"))
        if stored is None or reader.equals(shared.weight, stored, (shared.here,)):
            continue
        with torch.device("meta"):
            own = Vocabulary(shared.vocab, model.config.hidden, shard)
        own.weight = nn.Parameter(torch.empty_like(shared.weight), requires_grad=False)
        reader.into(own.weight, stored, (own.here,))
        setattr(block, part, own)
        notes.append(f"{block.name} uses its own {part} ({stored.key}), which differs from the target's")
    return notes


def _unused_head(model: Model, tensors: dict[str, Stored], reader: Reader) -> list[str]:
    stored = tensors.get("lm_head.weight")
    if not model.config.tied or stored is None or reader.equals(model.lm_head.weight, stored, (model.lm_head.here,)):
        return []
    return [f"{stored.key} differs from the embedding and is not used: config.json ties the head to the embedding"]


def _passed_over(keys: Iterable[str], prefixes: tuple[str, ...]) -> list[str]:
    present = [prefix for prefix in prefixes if any(key.startswith(prefix) for key in keys)]
    return [f"text only: tensors under {prefix} are not read" for prefix in present]

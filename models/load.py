"""From a checkpoint to a model: every rank reads only its own regions of the stored tensors.

Names and shapes are checked against the headers before the first weight is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from lockstep.comm.errors import UsageError
from lockstep.comm.strategy import Placement
from lockstep.models.checkpoint import Checkpoint, Stored
from lockstep.models.model import MTP, Model
from lockstep.models.weights import Piece, Shard, Vocabulary, wider

# Pages of a mapped file count as this process's memory until it is unmapped, so it is opened anew this often.
REOPEN_BYTES = 64 << 20
READABLE = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Loaded:
    model: Model
    num_bytes: int
    notes: tuple[str, ...]


class Reader:
    """Regions of stored tensors, holding little of a file in memory at a time."""

    def __init__(self) -> None:
        self.file: Path | None = None
        self.handle: Any = None
        self.read_bytes = 0

    def __call__(self, stored: Stored, region: tuple[slice, ...]) -> Tensor:
        if self.file != stored.file or self.read_bytes > REOPEN_BYTES:
            self.handle = None
            self.handle = safe_open(stored.file, framework="pt").__enter__()
            self.file, self.read_bytes = stored.file, 0
        part: Tensor = self.handle.get_slice(stored.key)[stored.region(region) or ...]
        self.read_bytes += part.numel() * part.element_size()
        return part


def load(
    checkpoint: Checkpoint,
    placement: Placement,
    shard: Shard,
    *,
    draft_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Loaded:
    """The model with as many MTP blocks as `draft_tokens` can use. `progress(done, total)` counts bytes.

    Raises UsageError naming tensors that are missing, unexpected, or of another shape than config.json says.
    """
    num_mtp = min(draft_tokens, len(checkpoint.config.mtp))
    with torch.device("meta"):
        model = Model(checkpoint.config, placement, shard, num_mtp)
    tensors = checkpoint.tensors()
    placed = list(model.placed_pieces())
    _check_names(checkpoint, tensors, {key: piece for key, _, piece in placed}, set(model.names_elsewhere()), num_mtp)
    _materialise(model, dtype, device)
    placed.sort(key=lambda item: (str(tensors[item[0]].file), item[0]))
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    reader, done = Reader(), 0
    for key, layer, piece in placed:
        target = layer.get_parameter(piece.parameter)[piece.target or ...]
        target.copy_(reader(tensors[key], piece.source))
        done += target.numel() * target.element_size()
        progress(done, total)
    notes = [note for block in model.mtp for note in _own_vocabulary(block, model, tensors, reader, shard)]  # type: ignore[arg-type]
    notes += _passed_over(tensors, checkpoint.config.ignored)
    return Loaded(model.eval(), sum(p.numel() * p.element_size() for p in model.parameters()), tuple(notes))


def _check_names(
    checkpoint: Checkpoint, tensors: dict[str, Stored], needed: dict[str, Piece], elsewhere: set[str], num_mtp: int
) -> None:
    config, folder = checkpoint.config, checkpoint.folder
    missing = sorted((set(needed) | elsewhere) - set(tensors))
    if missing:
        drafting = all(key.startswith(_mtp_prefixes(config.mtp_names, len(config.layers), num_mtp)) for key in missing)
        hint = "; without its MTP weights it runs with --draft-tokens 0" if drafting else ""
        raise UsageError(f"{folder} lacks {_some(missing)}{hint}")
    later = _mtp_prefixes(config.mtp_names, len(config.layers), len(config.mtp))
    unexpected = sorted(
        key for key in set(tensors) - set(needed) - elsewhere if not _ignored(key, config.ignored + later, config.tied)
    )
    if unexpected:
        raise UsageError(
            f"{folder} holds {_some(unexpected)}, which a {config.family} model of its config.json has no place for"
        )
    for key, piece in needed.items():
        stored = tensors[key]
        if stored.shape != piece.shape:
            raise UsageError(
                f"{stored.file}: {stored.key} has shape {list(stored.shape)}, config.json says {list(piece.shape)}"
            )
        if stored.dtype not in READABLE:
            raise UsageError(f"{stored.file}: {stored.key} is {stored.dtype}; readable are {', '.join(READABLE)}")


def _passed_over(keys: Iterable[str], prefixes: tuple[str, ...]) -> list[str]:
    present = [prefix for prefix in prefixes if any(key.startswith(prefix) for key in keys)]
    return [f"text only: tensors under {prefix} are not read" for prefix in present]


def _mtp_prefixes(names: Iterable[tuple[str, str]], depth: int, count: int) -> tuple[str, ...]:
    return tuple({theirs.format(i=i, n=depth + i) for i in range(count) for _, theirs in names})


def _ignored(key: str, prefixes: tuple[str, ...], tied: bool) -> bool:
    return key.startswith(prefixes) or key.endswith("rotary_emb.inv_freq") or (tied and key == "lm_head.weight")


def _some(keys: list[str]) -> str:
    return ", ".join(keys[:3]) + (f" and {len(keys) - 3} more tensors" if len(keys) > 3 else "")


def _materialise(model: Model, dtype: torch.dtype, device: torch.device) -> None:
    """Real, empty memory for every parameter; what a layer calls wide stays in float32 or wider."""
    for layer in model.modules():
        wide = getattr(layer, "wide_parameters", ())
        for name, parameter in layer.named_parameters(recurse=False):
            kind = wider(dtype) if name in wide else dtype
            empty = torch.empty(parameter.shape, dtype=kind, device=device)
            setattr(layer, name, nn.Parameter(empty, requires_grad=False))


def _own_vocabulary(block: MTP, model: Model, tensors: dict[str, Stored], reader: Reader, shard: Shard) -> list[str]:
    """Give an MTP block its own embedding or head where the checkpoint stores one that is not the target's."""
    notes = []
    for part, shared in (("embed_tokens", model.embed_tokens), ("head", model.lm_head)):
        stored = tensors.get(model.config.checkpoint_name(f"{block.name}.{part}.weight"))
        if stored is None:
            continue
        rows = reader(stored, (slice(shared.first, shared.last),)).to(shared.weight)
        if torch.equal(rows, shared.weight):
            continue
        with torch.device("meta"):
            own = Vocabulary(shared.vocab, rows.shape[1], shard)
        own.weight = nn.Parameter(rows, requires_grad=False)
        setattr(block, part, own)
        notes.append(f"{block.name} uses its own {part} ({stored.key}), which differs from the target's")
    return notes

"""From a checkpoint to a model: every rank reads only its own regions of the stored tensors.

Names and shapes are checked against the headers before the first weight is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from lockstep.comm.errors import UsageError
from lockstep.comm.strategy import Placement
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.config import Config
from lockstep.models.model import MTP, Model
from lockstep.models.read import DTYPES, Reader
from lockstep.models.storage import Stored
from lockstep.models.weights import Piece, Shard, Vocabulary, wider


@dataclass(frozen=True)
class Loaded:
    model: Model
    num_bytes: int
    notes: tuple[str, ...]


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
    _check_names(checkpoint, tensors, model, {key: piece for key, _, piece in placed})
    _materialise(model, dtype, device)
    placed.sort(key=lambda item: (str(tensors[item[0]].file), item[0]))
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    reader, done = Reader(), 0
    for key, layer, piece in placed:
        target = layer.get_parameter(piece.parameter)[piece.target or ...]
        reader.into(target, tensors[key], piece.source)
        done += target.numel() * target.element_size()
        progress(done, total)
    notes = [note for block in model.mtp for note in _own_vocabulary(block, model, tensors, reader, shard)]  # type: ignore[arg-type]
    notes += _unused_head(model, tensors, reader)
    reader.close()
    return Loaded(model.eval(), sum(p.numel() * p.element_size() for p in model.parameters()), tuple(notes))


def _check_names(checkpoint: Checkpoint, tensors: dict[str, Stored], model: Model, needed: dict[str, Piece]) -> None:
    config, folder, num_mtp = checkpoint.config, checkpoint.folder, len(model.mtp)
    elsewhere = set(model.names_elsewhere())
    missing = sorted((set(needed) | elsewhere) - set(tensors))
    if missing:
        drafting = all(key.startswith(_mtp_prefixes(config, 0, num_mtp)) for key in missing)
        hint = "; without its MTP weights it runs with --draft-tokens 0" if drafting else ""
        raise UsageError(f"{folder} lacks {_some(missing)}{hint}")
    optional = dict.fromkeys(model.optional_names(), (config.vocab, config.hidden))
    later = _mtp_prefixes(config, num_mtp, len(config.mtp))
    unexpected = sorted(
        key
        for key in set(tensors) - set(needed) - elsewhere - set(optional)
        if not _ignored(key, config.ignored + later)
    )
    if unexpected:
        raise UsageError(
            f"{folder} holds {_some(unexpected)}, which a {config.family} model of its config.json has no place for"
        )
    for key, shape in ({key: piece.shape for key, piece in needed.items()} | optional).items():
        stored = tensors.get(key)
        if stored and stored.shape != shape:
            raise UsageError(
                f"{stored.file}: {stored.key} has shape {list(stored.shape)}, config.json says {list(shape)}"
            )
        if stored and stored.dtype not in DTYPES:
            raise UsageError(f"{stored.file}: {stored.key} is {stored.dtype}; readable are {', '.join(DTYPES)}")


def _mtp_prefixes(config: Config, first: int, last: int) -> tuple[str, ...]:
    """What the keys of MTP blocks [first, last) start with."""
    depth = len(config.layers)
    return tuple({theirs.format(i=i, n=depth + i) for i in range(first, last) for _, theirs in config.mtp_names})


def _ignored(key: str, prefixes: tuple[str, ...]) -> bool:
    return key.startswith(prefixes) or key.endswith("rotary_emb.inv_freq")


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

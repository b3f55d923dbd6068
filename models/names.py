"""Whether a checkpoint has the tensors that its config.json calls for, found by headers only. No torch here."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from lockstep.comm.errors import UsageError
from lockstep.models import inventory
from lockstep.models.checkpoint import Checkpoint
from lockstep.models.config import Config
from lockstep.models.inventory import Entry
from lockstep.models.scales import unreadable
from lockstep.models.storage import Stored


@dataclass(frozen=True)
class Findings:
    """Keys that are missing, unexpected, or ignored on purpose, and a line on each tensor that cannot be used."""

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    ignored: tuple[str, ...]
    unusable: tuple[str, ...]


def compare(config: Config, entries: Iterable[Entry], tensors: dict[str, Stored], num_mtp: int) -> Findings:
    """`tensors` against those of the model's `entries` that it needs with `num_mtp` of its MTP blocks."""
    needed = {entry.name: entry.shape for entry in entries if entry.mtp is None or entry.mtp < num_mtp}
    usable = needed | inventory.optional(config, num_mtp)
    rest = tensors.keys() - usable.keys()
    prefixes = config.ignored + mtp_prefixes(config, num_mtp, len(config.mtp))
    ignored = {key for key in rest if key.startswith(prefixes) or key.endswith("rotary_emb.inv_freq")}
    unusable = []
    for key, shape in usable.items():
        stored = tensors.get(key)
        if stored and stored.shape != shape:
            why = f"{stored.key} has shape {list(stored.shape)}, config.json says {list(shape)}"
            unusable.append(f"{stored.file}: {why}")
        elif stored and (unread := unreadable(stored, config.fp8_block)):
            unusable.append(f"{stored.file}: {unread}")
    missing = sorted(needed.keys() - tensors.keys())
    return Findings(tuple(missing), tuple(sorted(rest - ignored)), tuple(sorted(ignored)), tuple(unusable))


def check(checkpoint: Checkpoint, tensors: dict[str, Stored], num_mtp: int) -> None:
    """Raises UsageError naming tensors that are missing, unexpected, misshapen or unreadable."""
    config, folder = checkpoint.config, checkpoint.folder
    found = compare(config, inventory.whole(config, num_mtp), tensors, num_mtp)
    if found.missing:
        drafting = all(key.startswith(mtp_prefixes(config, 0, num_mtp)) for key in found.missing)
        hint = "; without its MTP weights it runs with --draft-tokens 0" if drafting else ""
        raise UsageError(f"{folder} lacks {_some(found.missing)}{hint}")
    if found.unexpected:
        raise UsageError(
            f"{folder} holds {_some(found.unexpected)}, "
            f"which a {config.family} model of its config.json has no place for"
        )
    if found.unusable:
        raise UsageError(found.unusable[0])


def mtp_prefixes(config: Config, first: int, last: int) -> tuple[str, ...]:
    """What the keys of MTP blocks [first, last) start with."""
    depth = len(config.layers)
    return tuple({theirs.format(i=i, n=depth + i) for i in range(first, last) for _, theirs in config.mtp_names})


def _some(keys: Collection[str]) -> str:
    keys = list(keys)
    return ", ".join(keys[:3]) + (f" and {len(keys) - 3} more tensors" if len(keys) > 3 else "")

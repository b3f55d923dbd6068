"""Experts that a checkpoint stores as one stack per layer: taken apart into the matrices that others store, and back.

Nothing here imports torch. E experts, gate rows over up rows: gate_up_proj [E, 2I, H], down_proj [E, H, I].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from lockstep.comm.errors import UsageError
from lockstep.models.storage import ITEM_BYTES, Stored

PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def apart(tensors: dict[str, Stored], block: tuple[int, int] | None) -> dict[str, Stored]:
    """All tensors, with a matrix for each expert in place of a stack. `block` is Config.fp8_block."""
    out: dict[str, Stored] = {}
    for name, stored in tensors.items():
        for each, part in _matrices(name, stored, block or (1, 1)):
            if each in out:
                raise UsageError(f"{stored.file}: {stored.key} stands for {each}, which {out[each].key} does already")
            out[each] = part
    return out


def _matrices(name: str, stored: Stored, block: tuple[int, int]) -> Iterator[tuple[str, Stored]]:
    prefix, _, kind = name.rpartition(".")
    if kind not in PARTS or len(stored.shape) != 3 or (stored.scale and len(stored.scale.shape) != 3):
        yield name, stored
        return
    experts, height = stored.shape[:2]
    height //= len(PARTS[kind])
    for expert in range(experts):
        matrices = _rows(stored, expert)
        for i, part in enumerate(PARTS[kind]):
            first, last = i * height, (i + 1) * height
            matrix = _rows(matrices, slice(first, last))
            if stored.scale:
                # A block of the stack may have rows of both parts.
                rows = slice(first // block[0], None if part == PARTS[kind][-1] else -(-last // block[0]))
                scale = _rows(_rows(stored.scale, expert), rows)
                matrix = matrix._replace(scale=scale, rows_before=first % block[0])
            yield f"{prefix}.{expert}.{part}.weight", matrix


def together(tensors: Iterable[Stored]) -> Iterator[tuple[str, tuple[int, ...], list[Stored]]]:
    """Key, shape and parts of each tensor to write, with a stack in place of the matrices of a layer's experts.

    `tensors` has each expert's gate before its up, and the experts in order.
    """
    kinds = {f"{part}.weight": kind for kind, parts in PARTS.items() for part in parts}
    stacks: dict[str, list[Stored]] = {}
    for stored in tensors:
        before, found, rest = stored.key.partition(".experts.")
        kind = kinds.get(rest.partition(".")[2])
        stacks.setdefault(f"{before}.experts.{kind}" if found and kind else stored.key, []).append(stored)
    for key, parts in stacks.items():
        shape = parts[0].shape
        if key != parts[0].key:
            per_expert = len(PARTS[key.rpartition(".")[2]])
            shape = (len(parts) // per_expert, per_expert * shape[0], shape[1])
        yield key, shape, parts


def _rows(stored: Stored, part: int | slice) -> Stored:
    """One entry of the first dimension, or some."""
    length, *rest = stored.shape
    first, last, _ = slice(part, part + 1).indices(length) if isinstance(part, int) else part.indices(length)
    offset = stored.offset + first * math.prod(rest) * ITEM_BYTES[stored.dtype]
    shape = tuple(rest) if isinstance(part, int) else (last - first, *rest)
    return stored._replace(shape=shape, offset=offset)

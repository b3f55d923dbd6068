"""The safetensors format: where a file keeps each tensor, found by reading its header only.

Nothing here imports torch. A file is 8 bytes of header length, a JSON header, and the tensors' bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from lockstep.comm.errors import UsageError

ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1}
MAX_HEADER_BYTES = 100 << 20


class Stored(NamedTuple):  # a large checkpoint has 100 000, and a dataclass takes three times as long to make
    """One tensor in a file, under the key it has there; its bytes start at `offset`.

    An FP8 tensor has `scale`: another tensor, with one factor per block of its last two dimensions. Of its first row of
    blocks `rows_before` rows belong to another tensor.
    """

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    scale: Stored | None = None
    rows_before: int = 0


def read_header(file: Path) -> Iterator[Stored]:
    """Every tensor of a file. Raises UsageError where the file is not whole."""
    try:
        size = file.stat().st_size
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise damaged(file, f"its header cannot be {length} bytes long")
            header = json.loads(handle.read(length))
        header.pop("__metadata__", None)
        base = end = 8 + length
        for key, entry in header.items():
            dtype, shape, (first, last) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
            if dtype in ITEM_BYTES and last - first != math.prod(shape) * ITEM_BYTES[dtype]:
                raise damaged(file, f"{key} has {last - first} bytes for shape {list(shape)}")
            if base + last > end:
                end = base + last
            yield Stored(file, key, shape, dtype, base + first)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged(file, str(error)) from None
    if end != size:
        raise damaged(file, f"it has {size} of {end} bytes")


def header(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The beginning of a file in which tensors (key, dtype, shape) lie one after the other."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for key, dtype, shape in tensors:
        end = offset + math.prod(shape) * ITEM_BYTES[dtype]
        entries[key] = {"dtype": dtype, "shape": shape, "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def damaged(file: Path, why: str) -> UsageError:
    return UsageError(f"{file} is damaged or incomplete ({why}); download it again")

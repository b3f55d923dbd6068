"""Which stored tensors can be read: FP8 ones need their scales, one per block (DeepSeek-V3, 2024, section 3.3.2).

Each tensor decides for itself: one checkpoint may mix FP8 with other dtypes in any way. Nothing here imports torch.
"""

from __future__ import annotations

from lockstep.models.storage import Stored

FP8, SUFFIX = "F8_E4M3", "_scale_inv"
READABLE = ("F64", "F32", "F16", "BF16", FP8)
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")


def join(tensors: dict[str, Stored]) -> dict[str, Stored]:
    """Each FP8 tensor with its scales, where they are stored. Other scales stay what they are: unexpected."""
    out = dict(tensors)
    for name, stored in tensors.items():
        if stored.dtype == FP8 and name + SUFFIX in out:
            out[name] = stored._replace(scale=out.pop(name + SUFFIX))
    return out


def unreadable(stored: Stored, block: tuple[int, int] | None) -> str | None:
    """Why a tensor's values cannot be read, or None. `block` is Config.fp8_block."""
    if stored.dtype not in READABLE:
        return f"{stored.key} is {stored.dtype}; readable are {', '.join(READABLE)}"
    if stored.dtype != FP8:
        return None
    if block is None:
        return f"{stored.key} is FP8, and config.json has no quantization_config that says how"
    if len(stored.shape) < 2:
        return f"{stored.key} is FP8 and no matrix, so it has no blocks to scale"
    if stored.scale is None:
        return f"{stored.key} is FP8, and its scales {stored.key}{SUFFIX} are missing"
    *lead, rows, cols = stored.shape
    scale, shape = stored.scale, scale_shape((*lead, stored.rows_before + rows, cols), block)
    if scale.shape != shape or scale.dtype not in SCALE_DTYPES:
        blocks = f"blocks of {block[0]} x {block[1]} in {list(stored.shape)}"
        return f"{scale.key} is {scale.dtype} {list(scale.shape)}; {blocks} have {list(shape)} of {SCALE_DTYPES[0]}"
    return None


def scale_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """One scale per block of the last two dimensions; the last block of each may be partial."""
    *lead, rows, cols = shape
    return (*lead, -(-rows // block[0]), -(-cols // block[1]))

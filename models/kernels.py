"""Ways to run routed experts, by what each takes; chosen and refused before a weight is loaded. No torch here.

The functions are in models/experts.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.comm.errors import UsageError
from lockstep.comm.strategy import Placement
from lockstep.models.config import Config, MoE

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
EVERY = tuple(ITEM_BYTES)


@dataclass(frozen=True)
class Kernel:
    """What one takes: dtypes by device, rows of weights in multiples of `align` bytes, weights that stay FP8.

    Each takes any number of rows, none included.
    """

    dtypes: dict[str, tuple[str, ...]]
    align: int = 1
    fp8: bool = True


KERNELS = {
    "loop": Kernel({"cpu": EVERY, "cuda": EVERY}),
    # torch 2.13: torch.nn.functional.grouped_mm refuses other dtypes, and rows that are not multiples of 16 bytes.
    "grouped": Kernel({"cpu": ("float32", "bfloat16", "float16"), "cuda": ("bfloat16",)}, align=16, fp8=False),
    "dense": Kernel({"cpu": EVERY, "cuda": EVERY}),
}
# The first that takes the work. On CUDA the loop waits for the device in every layer, to learn how many rows each
# expert has; on a CPU the grouped product takes 0.45 to 0.8 of its time up to 256 rows (benchmarks/experts.py).
PREFERRED = ("grouped", "loop")


@dataclass(frozen=True)
class Work:
    """What a kernel is to run: a model's experts, as one rank holds them."""

    config: Config
    placement: Placement
    tp: int
    dtype: str
    device: str
    keep_fp8: bool

    def row_widths(self) -> list[int]:
        """Of a rank's expert weights: the hidden size, and an expert's width or its slice."""
        layers = (*self.config.layers, *self.config.mtp)
        parts = 1 if self.placement.experts == "owned" else self.tp
        inter = {layer.ffn.inter // parts for layer in layers if isinstance(layer.ffn, MoE)}
        return [self.config.hidden, *sorted(inter)]


def choose(asked: str, work: Work) -> str:
    """The kernel to use: the one that is asked for, or for `auto` the best. Raises UsageError naming what clashes."""
    if asked == "auto":
        return next(name for name in PREFERRED if clash(name, work) is None)
    if asked not in KERNELS:
        raise UsageError(f"--expert-kernel {asked!r} is not known; use auto, {', '.join(KERNELS)}")
    if why := clash(asked, work):
        raise UsageError(f"--expert-kernel {asked} {why}")
    return asked


def clash(name: str, work: Work) -> str | None:
    """Why a kernel cannot do the work, and what would help; or None."""
    kernel = KERNELS[name]
    takes = kernel.dtypes.get(work.device, ())
    if work.dtype not in takes:
        return f"does not take {work.dtype} on {work.device}; it takes {', '.join(takes) or 'nothing there'}"
    if work.keep_fp8 and work.config.fp8_block and not kernel.fp8:
        return "does not take weights that stay FP8; use --weights dequantise"
    for width in work.row_widths():
        if width * ITEM_BYTES[work.dtype] % kernel.align:
            return f"takes rows of multiples of {kernel.align} bytes, and here are rows of {width} {work.dtype} numbers"
    return None

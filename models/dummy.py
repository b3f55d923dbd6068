"""A checkpoint that is not there: random weights whose every element follows from a seed, its tensor and its place.

So all ranks, however many, see the same full tensors, and a written copy (models/write.py) holds the same numbers.
Nothing here imports torch; models/noise.py makes the numbers.
"""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path
from typing import Any

from lockstep.models import inventory
from lockstep.models.config import Config
from lockstep.models.scales import FP8, SUFFIX, scale_shape
from lockstep.models.storage import Stored

DTYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
KEPT_FLOAT32 = ("e_score_correction_bias", "A_log", "dt_bias")
# Matrices that stay in the model's dtype where a model is released in FP8, beside router, embedding and head.
NEVER_FP8 = re.compile(r"(eh_proj|mtp\.fc|shared_expert_gate|in_proj_(a|b|ba))\.weight$")
FP8_MAX = 448.0


def tensors(config: Config, raw: dict[str, Any], source: Path, seed: int) -> dict[str, Stored]:
    """What a released checkpoint of this configuration holds, by key without prefix; `offset` is a place in the noise.

    FP8 tensors where config.json has a quantization_config. A numbered MTP block repeats the embedding and the head.
    """
    prefix = "model.language_model." if "text_config" in raw else "model."
    out: dict[str, Stored] = {}

    def add(name: str, shape: tuple[int, ...], dtype: str, like: str | None = None) -> Stored:
        key = name if name.startswith(("lm_head.", "mtp.")) else prefix + name
        return Stored(source, key, shape, dtype, _place(seed, like or name))

    for entry in inventory.whole(config, len(config.mtp)):
        name, shape = entry.name, entry.shape
        dtype = "F32" if name.endswith(KEPT_FLOAT32) else DTYPES[config.dtype]
        out[name] = add(name, shape, dtype)
        if config.fp8_block and entry.scalable and not entry.wide and not NEVER_FP8.search(name):
            scale = add(name + SUFFIX, scale_shape(shape, config.fp8_block), "F32")
            out[name] = Stored(source, out[name].key, shape, FP8, out[name].offset, scale)
    head = "embed_tokens.weight" if config.tied else "lm_head.weight"
    for i in range(len(config.mtp)):
        for part, like in (("embed_tokens", "embed_tokens.weight"), ("head", head)):
            name = config.checkpoint_name(f"mtp.{i}.{part}.weight")
            if name.startswith("layers."):
                out[name] = add(name, out[like].shape, DTYPES[config.dtype], like)
    return out


def law(key: str, shape: tuple[int, ...], config: Config) -> tuple[float, float]:
    """Mean and half width of a tensor's values, uniform between; so that a row keeps its size through many layers.

    Norm weights are far from one another, or a norm in the wrong place would change nothing.
    """
    if key.endswith(SUFFIX):
        block = config.fp8_block or (1, 1)
        mean = math.sqrt(3.0 / (shape[-1] * block[1])) / FP8_MAX
        return mean, mean / 2
    if key.endswith("e_score_correction_bias"):
        return 0.0, 0.1
    if key.endswith("A_log"):
        return 1.4, 1.3
    if key.endswith("dt_bias"):
        return -1.5, 1.5
    if key.endswith("bias"):
        return 0.0, 0.2
    if "norm" in key.rsplit(".", 2)[-2]:
        return (0.0 if config.zero_centred and ".linear_attn." not in key else 1.0), 0.7
    if key.endswith("embed_tokens.weight"):
        return 0.0, math.sqrt(3.0)
    if key.endswith("conv1d.weight"):
        return 0.0, 0.5 * math.sqrt(3.0)
    return 0.0, math.sqrt(3.0 / shape[-1])


def _place(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=6).digest(), "little")

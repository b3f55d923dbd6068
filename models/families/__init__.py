"""One file per family: `config(raw)` translates its config.json. `read` picks the family by `model_type`."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from lockstep.comm.errors import UsageError
from lockstep.models.config import Config
from lockstep.models.families.common import fp8_block

FAMILIES = {  # model_type: the file that translates it
    "deepseek_v3": "deepseek_v3",
    "deepseek_v32": "deepseek_v32",
    "glm_moe_dsa": "glm_moe_dsa",
    "glm4_moe": "glm4_moe",
    "qwen3_next": "qwen3_next",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
}


def read(raw: dict[str, Any], source: str) -> Config:
    """The Config of a parsed config.json. Raises UsageError, naming `source`, for what is unknown or missing."""
    model_type = raw.get("model_type")
    if model_type not in FAMILIES:
        raise UsageError(f"{source}: model_type {model_type!r} is not one of {', '.join(FAMILIES)}")
    module = importlib.import_module(f"lockstep.models.families.{FAMILIES[model_type]}")
    try:
        config: Config = module.config(raw)
        config = dataclasses.replace(config, fp8_block=fp8_block(raw))
    except KeyError as error:
        raise UsageError(f"{source}: field {error} is missing, which a {model_type} config needs") from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"{source}: {error}") from None
    return config

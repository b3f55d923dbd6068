"""What is asked of the engine and what it tells on the way: plain values that cross process borders. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.comm.strategy import Strategy

MAX_DRAFT_TOKENS = 8


@dataclass(frozen=True)
class Job:
    """One generation run, as every rank is given it. `model` is a checkpoint folder, `dtype` "auto" the checkpoint's.

    `prefill_chunk` is the most prompt tokens of one sequence in one forward; `batch` the most sequences at once.
    `weights` "keep" leaves FP8 weights as they are in memory, "dequantise" does not, "auto" is keep on CUDA only.
    `load_format` "dummy" takes random weights for a config.json, with `num_layers` of its decoder layers.
    """

    model: str
    prompts: tuple[tuple[int, ...], ...]
    strategy: Strategy
    max_new_tokens: int
    draft_tokens: int = 0
    tp: int = 1
    dtype: str = "auto"
    device: str = "cpu"
    recycle: str = "post-norm"
    prefill_chunk: int = 512
    batch: int = 16
    ignore_eos: bool = False
    expert_kernel: str = "auto"
    weights: str = "auto"
    load_format: str = "auto"
    num_layers: int | None = None


@dataclass(frozen=True)
class Committed:
    """Event: `tokens` of request number `request` are final. The first `accepted` of them were drafts."""

    request: int
    tokens: tuple[int, ...]
    accepted: int
    finish_reason: str | None = None


@dataclass(frozen=True)
class Progress:
    """Event: `done` of `total` of a stage: bytes of "load", prompt tokens of "prefill", requests of "decode"."""

    stage: str
    done: int
    total: int

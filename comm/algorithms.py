"""What gloo does behind a conversion: its own collective, or an exchange (all-to-all) and a sum made here.

Small messages on gloo cost their number of steps: an exchange is one step where a ring takes P - 1 or 2(P - 1). Large
ones cost their bytes, of which an exchange sends more. Its sum is taken in rank order: the same bits on every rank.
The ledger counts the conversion, whatever stands behind it.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Bytes of the tensor that a rank puts in, up to which the exchange is used, per collective and number of ranks.
# A group of another size uses gloo's own. Where: `lockstep comm-bench`, 2 cores (Zen 3), torch 2.13.0, gloo over
# loopback, float32, one thread per rank, other work on the machine: minima of 100 to 300 calls. gloo's reduce-scatter
# is an all-reduce of which most is thrown away, so the exchange beats it at every size that was measured.
EXCHANGE_UP_TO = {
    "all-reduce": {2: 0, 3: 16_384, 4: 32_768},
    "reduce-scatter": {2: 4_194_304, 3: 262_144, 4: 1_048_576},
    "all-gather": {2: 0, 3: 0, 4: 0},
}


def exchange_up_to(collective: str, size: int) -> int:
    """The threshold in bytes for `size` ranks; 0 where it was not measured."""
    return EXCHANGE_UP_TO[collective].get(size, 0)


def sum_in_order(parts: Tensor) -> Tensor:
    """[P, ...] -> [...]: ((part 0 + part 1) + part 2) + ..., in the parts' own type."""
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def copies(tensor: Tensor, size: int) -> Tensor:
    """`tensor`, `size` times: what an exchange sends where every rank needs all of it."""
    return tensor.unsqueeze(0).expand(size, *tensor.shape).contiguous(memory_format=torch.contiguous_format)

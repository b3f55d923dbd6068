"""The gated delta rule (Yang et al., 2024): a state that decays, and to which each row writes a correction.

    S_t = a_t S_(t-1) + k_t (x) d_t      d_t = b_t (v_t - a_t k_t S_(t-1))      o_t = q_t S_t

A chunk of rows is worked off at once: its corrections depend on one another only through the lower triangle of one
small system. With one row that system is trivial, and the chunk form is the step form written above.
B sequences, V heads, C rows of a chunk, K and D features of a key and of a value.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CHUNK = 64


@dataclass
class Written:
    """What the rows of one chunk write to a state, which still is the one before them."""

    keys: Tensor  # [B, V, C, K]
    corrections: Tensor  # [B, V, C, D]
    decay: Tensor  # [B, V, C + 1]: log of what is left of the state after the first 0, 1, ... rows, in float64

    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.keys, self.corrections, self.decay))


def delta_rule(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor
) -> tuple[Tensor, Written]:
    """Q rows read and write `state` [B, V, K, D]: outputs [B, V, Q, D], and what the last chunk writes.

    The earlier chunks are written to `state` in place. `log_decay` and `beta` are [B, V, Q]; a row in which both are
    zero writes nothing.
    """
    rows = (query, key, value, log_decay, beta)
    out, written = _chunk(state, *(x[:, :, :CHUNK] for x in rows))
    outputs = [out]
    for first in range(CHUNK, query.shape[2], CHUNK):
        write(state, written, torch.full((state.shape[0],), CHUNK, device=state.device))
        out, written = _chunk(state, *(x[:, :, first : first + CHUNK] for x in rows))
        outputs.append(out)
    return torch.cat(outputs, 2), written


def _chunk(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor
) -> tuple[Tensor, Written]:
    count, dtype = query.shape[2], state.dtype
    # Sums of logs can be large where their differences are small.
    decay = torch.nn.functional.pad(log_decay.double().cumsum(-1), (1, 0))
    since_start = decay[..., 1:].exp().to(dtype)[..., None]  # [B, V, C, 1]
    corrections = beta[..., None] * (value - since_start * (key @ state))
    if count == 1:
        out = since_start * (query @ state) + (query * key).sum(-1, keepdim=True) * corrections
        return out, Written(key, corrections, decay)
    future = torch.ones(count, count, dtype=torch.bool, device=state.device).triu(1)
    between = (decay[..., 1:, None] - decay[..., None, 1:]).masked_fill(future, float("-inf")).exp().to(dtype)
    # d_i + b_i sum_(j<i) a_(j+1)..a_i (k_i . k_j) d_j = b_i (v_i - a_1..a_i k_i S), for all rows i of the chunk
    system = beta[..., None] * (key @ key.transpose(-1, -2)) * between
    corrections = torch.linalg.solve_triangular(system, corrections, upper=False, unitriangular=True)
    out = since_start * (query @ state) + (query @ key.transpose(-1, -2) * between) @ corrections
    return out, Written(key, corrections, decay)


def write(state: Tensor, written: Written, counts: Tensor) -> None:
    """Bring `state` [B, V, K, D], in place, to where it is after the first `counts[b]` rows of the chunk, or all."""
    rows = torch.arange(written.keys.shape[2] + 1, device=state.device)
    counts = counts.clamp(max=written.keys.shape[2])[:, None, None]  # [B, 1, 1]
    total = written.decay.gather(-1, counts.expand(-1, state.shape[1], -1))  # [B, V, 1]
    left = (total - written.decay).masked_fill(rows > counts, float("-inf"))[..., 1:].exp().to(state.dtype)
    state.mul_(total.exp().to(state.dtype)[..., None])
    keys = written.keys * left[..., None]
    state.view(-1, *state.shape[2:]).baddbmm_(keys.transpose(-1, -2).flatten(0, 1), written.corrections.flatten(0, 1))

"""Mixture of experts: router, routed experts, shared expert; and the dense MLP.

T rows, K experts per row, E experts, G expert groups, P ranks, H hidden.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.comm.layout import PARTIAL, REPLICATED, SHARDED, Activation
from lockstep.comm.strategy import Placement
from lockstep.models import config
from lockstep.models.experts import Experts
from lockstep.models.step import Step
from lockstep.models.weights import Linear, Piece, Shard, whole, wider


class MLP(nn.Module):
    """Gated MLP. With `part`, this rank's columns of it, whose output is a part of a sum over ranks."""

    def __init__(self, hidden: int, inter: int, part: tuple[int, int] | None) -> None:
        super().__init__()
        self.sliced = part is not None
        rows = None if part is None else [part]
        self.gate_proj = Linear(hidden, inter, rows=rows)
        self.up_proj = Linear(hidden, inter, rows=rows)
        self.down_proj = Linear(inter, hidden, cols=part)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return y

    def ffn(self, x: Activation, step: Step, at: str) -> Activation:
        """As a layer's whole feed-forward network: slices take full rows, a whole one the rows that are here."""
        if not self.sliced:
            return x.rowwise(self, f"{at}.mlp")
        x = step.convert(x, REPLICATED, f"{at}.dispatch")
        return Activation(self(x.data), PARTIAL, x.tokens)


class Router(nn.Module):
    """Scores of the experts; a bias, where there is one, takes part in the choice and not in the weights.

    Sigmoid scores with a bias are DeepSeek-V3's (section 2.1.2), softmax scores Qwen's.
    """

    def __init__(self, cfg: config.Router, hidden: int) -> None:
        super().__init__()
        self.config = cfg
        self.weight = nn.Parameter(torch.empty(cfg.experts, hidden), requires_grad=False)
        biased = cfg.scoring == "sigmoid"
        self.e_score_correction_bias = nn.Parameter(torch.empty(cfg.experts), requires_grad=False) if biased else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] -> weights [T, K] (float32 or wider) and expert ids [T, K]."""
        c = self.config
        logits = F.linear(x.to(self.weight.dtype), self.weight)
        scores = logits.sigmoid() if c.scoring == "sigmoid" else logits.softmax(-1)
        choice = scores if self.e_score_correction_bias is None else scores + self.e_score_correction_bias
        if c.groups > 1:
            grouped = choice.unflatten(-1, (c.groups, -1))  # [T, G, E / G]
            best = grouped.topk(2, -1).values.sum(-1).topk(c.top_groups, -1).indices
            kept = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=x.device).scatter_(1, best, True)
            choice = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(1)
        ids = choice.topk(c.top_k, -1).indices
        weights = scores.gather(1, ids)
        if c.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * c.scale, ids

    # Kept in float32 or wider whatever the model's dtype: routing is a choice, not a value.
    wide_parameters = ("weight", "e_score_correction_bias")

    def pieces(self) -> list[Piece]:
        return [whole(name, parameter) for name, parameter in self.named_parameters(recurse=False)]


class MoEFFN(nn.Module):
    """Routed experts and the shared expert of one layer. Where its weights lie decides which rows each part takes."""

    def __init__(self, cfg: config.MoE, hidden: int, placement: Placement, shard: Shard) -> None:
        super().__init__()
        self.config, self.placement = cfg, placement
        self.gate = Router(cfg.router, hidden)
        owned = placement.experts == "owned"
        self.experts = Experts(
            hidden,
            cfg.inter,
            cfg.router.experts,
            shard.of(cfg.router.experts) if owned else (0, cfg.router.experts),
            (0, cfg.inter) if owned else shard.of(cfg.inter),
        )
        part = shard.of(cfg.shared_inter) if placement.shared == "sliced" else None
        self.shared_experts = MLP(hidden, cfg.shared_inter, part) if cfg.shared_inter else None
        self.shared_expert_gate = Linear(hidden, 1) if cfg.shared_gate else None

    def ffn(self, x: Activation, step: Step, at: str) -> Activation:
        """Rows in the layout of `ffn_in` -> their sums: PARTIAL, or SHARDED where the rows had to travel."""
        if x.layout is SHARDED and step.strategy.dispatch == "all-to-all":
            routed = self._all_to_all(x, step, at)
        else:
            routed = self._gathered(x, step, at)
        if self.shared_experts is None or self.placement.shared == "sliced":
            return routed
        # The shared expert is whole on every rank, so it may join only a sum that is finished (vllm#49122).
        shared = x.rowwise(self._shared, f"{at}.shared")
        return step.convert(routed, shared.layout, f"{at}.combine").add(shared, f"{at}.shared")

    def _shared(self, x: Tensor) -> Tensor:
        assert self.shared_experts
        y: Tensor = self.shared_experts(x)
        return y if self.shared_expert_gate is None else y * self.shared_expert_gate(x).sigmoid()

    def _gathered(self, x: Activation, step: Step, at: str) -> Activation:
        full = step.convert(x, REPLICATED, f"{at}.dispatch")
        y = self.experts(full.data, *self.gate(full.data), step.kernel)
        if self.shared_experts is not None and self.placement.shared == "sliced":
            y = y + self._shared(full.data)
        part = Activation(y, PARTIAL, x.tokens)
        return step.convert(part, SHARDED, f"{at}.combine") if x.layout is SHARDED else part

    def _all_to_all(self, x: Activation, step: Step, at: str) -> Activation:
        """Each row travels once to every rank that owns one of its experts, and comes back as that rank's sum."""
        group, rows = step.group, x.expect(SHARDED, at)
        weights, ids = self.gate(rows)
        per_rank = self.config.router.experts // group.size
        goes = torch.zeros(rows.shape[0], group.size, dtype=torch.bool, device=rows.device)
        goes.scatter_(1, ids // per_rank, True)
        _, source = goes.T.nonzero(as_tuple=True)  # rows, sorted by the rank they go to
        counts = group.all_counts(goes.sum(0), f"{at}.dispatch")
        routing = torch.cat((weights[source], ids[source].to(weights.dtype)), -1)
        there = group.all_to_all(rows[source], counts, f"{at}.dispatch")
        weights, wide_ids = group.all_to_all(routing, counts, f"{at}.dispatch").chunk(2, -1)
        y = self.experts(there, weights, wide_ids.long(), step.kernel)
        back = group.all_to_all(y, counts, f"{at}.combine", back=True)
        out = torch.zeros(rows.shape, dtype=wider(rows.dtype), device=rows.device)
        out.index_add_(0, source, back.to(out.dtype))
        return Activation(out.to(rows.dtype), SHARDED, x.tokens)

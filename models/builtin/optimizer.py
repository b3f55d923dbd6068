"""Muon for the matrices of the blocks, AdamW for the experts, embeddings, head, norms and routers.

The experts hold most parameters: on one CPU core Muon would cost more for them than the backward pass.
"""

from torch import nn
from torch.optim import AdamW, Muon, Optimizer

ADAM_ONLY = ("embed_tokens", "lm_head", "norm", "gate.weight", "conv1d")


def optimizers(model: nn.Module, muon_lr: float = 0.02, adam_lr: float = 2e-3) -> list[Optimizer]:
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and not any(part in name for part in ADAM_ONLY)]
    chosen = {id(p) for p in matrices}
    rest = [p for _, p in named if id(p) not in chosen]
    return [Muon(matrices, lr=muon_lr, weight_decay=0.01), AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0)]

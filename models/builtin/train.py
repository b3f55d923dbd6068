"""Train a demo model, its MTP block included, on one CPU core.

    python -m lockstep.models.builtin.train --family deepseek_v3 --out models/builtin/demo --minutes 24

The schedule follows the clock: a slower machine sees fewer tokens and anneals all the same.
"""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.models.builtin import tokenizer as demo_tokenizer
from lockstep.models.builtin.evaluate import evaluate
from lockstep.models.builtin.network import FAMILIES, DemoModel
from lockstep.models.builtin.optimizer import optimizers
from lockstep.models.builtin.problems import END, completion, problems, prompt

DRAFT_STEPS = 3
PROMPT_WEIGHT = 0.1  # of a prompt token in the target's loss; a completion token has 1
DRAFT_WEIGHT = 0.5
DRAFT_FROM = 0.5  # of the time: drafting is learnt quickly from a good target, and slows every step
BALANCE_RATE = 1e-3  # DeepSeek: step of the router's correction bias
BALANCE_LOSS = 1e-2  # Qwen: weight of the load-balancing loss


class Balance:
    """Keeps the experts' loads alike, by each family's own means. Watches every router through a forward hook."""

    def __init__(self, model: DemoModel) -> None:
        self.loss: list[Tensor] = []
        self.loads: dict[nn.Module, Tensor] = {}
        for module in model.modules():
            if type(module).__name__.lower().endswith("topkrouter"):
                module.register_forward_hook(self._watch)

    def _watch(self, router: nn.Module, _inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        logits, _, chosen = output
        load = torch.bincount(chosen.flatten(), minlength=logits.shape[-1]).float()
        self.loads[router] = self.loads.get(router, torch.zeros(())) + load
        if not hasattr(router, "e_score_correction_bias"):
            self.loss.append(logits.shape[-1] * (load / load.sum() * logits.softmax(-1).mean(0)).sum())

    def take_loss(self) -> Tensor:
        loss = sum(self.loss, torch.zeros(()))
        self.loss = []
        return BALANCE_LOSS * loss

    def update(self) -> float:
        """Returns the largest share of one expert, relative to an even load."""
        for router, load in self.loads.items():
            if hasattr(router, "e_score_correction_bias"):
                router.get_buffer("e_score_correction_bias").add_(BALANCE_RATE * (load.mean() - load).sign())
        worst = max(float(load.max() / load.mean()) for load in self.loads.values())
        self.loads = {}
        return worst


def batches(tokenizer: Tokenizer, size: int, pad: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (ids [B, T], prompt lengths [B]), in random order: sorted by length a batch would be of one template."""
    while True:
        rows, lengths = [], []
        for p in problems("train", 64 * size, seed):
            start = tokenizer.encode(prompt(p)).ids
            rows.append(start + tokenizer.encode(completion(p)).ids)
            lengths.append(len(start))
            if len(rows) == size:
                longest = max(map(len, rows))
                yield torch.tensor([r + [pad] * (longest - len(r)) for r in rows]), torch.tensor(lengths)
                rows, lengths = [], []
        seed += 1


def _weighted(model: DemoModel, hidden: Tensor, labels: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Mean loss, and which predictions were right, over the rows with a weight."""
    keep = weight > 0
    logits = model.head(hidden[keep])
    loss = F.cross_entropy(logits, labels[keep], reduction="none")
    right = torch.ones_like(keep)
    right[keep] = logits.argmax(-1) == labels[keep]
    return (loss * weight[keep]).sum() / weight.sum(), right


def losses(model: DemoModel, ids: Tensor, lengths: Tensor, pad: int, steps: int) -> tuple[list[Tensor], list[float]]:
    """Of the target and each draft step: loss, and share of right completion tokens (target: of whole completions)."""
    column = torch.arange(ids.shape[1])[None]
    real = ids != pad
    hidden = model.target(ids)
    weight = torch.where(column >= lengths[:, None], 1.0, PROMPT_WEIGHT) * real
    loss, right = _weighted(model, hidden[:, :-1], ids[:, 1:], weight[:, 1:])
    whole = (right | (column[:, 1:] < lengths[:, None])).all(-1).float().mean()
    out, shares = [loss], [float(whole)]
    start = int(lengths.min()) - 1
    for s, rows in enumerate(model.draft_steps(ids, hidden, steps, start) if steps else []):
        first = start + s if s else 0
        wanted = (column >= lengths[:, None] + 1 + s) & real
        weight = wanted[:, first + 2 :].float()
        loss, right = _weighted(model, rows, ids[:, first + 2 :], weight)
        out.append(loss)
        shares.append(float((right * weight).sum() / weight.sum()))
    return out, shares


def train(
    model: DemoModel, tokenizer: Tokenizer, minutes: float, batch: int, pad: int, seed: int, lr_scale: float
) -> int:
    """Returns the number of tokens seen."""
    balance, optimizer = Balance(model), optimizers(model)
    base = [lr_scale * o.param_groups[0]["lr"] for o in optimizer]
    begin, tokens = time.monotonic(), 0
    for step, (ids, lengths) in enumerate(batches(tokenizer, batch, pad, seed)):
        done = (time.monotonic() - begin) / (60 * minutes)
        if done >= 1:
            return tokens
        for o, lr in zip(optimizer, base, strict=True):
            o.param_groups[0]["lr"] = lr * min(1.0, done / 0.02 + 0.02, (1 - done) / 0.6)
        steps = DRAFT_STEPS if done >= DRAFT_FROM else 0
        each, shares = losses(model, ids, lengths, pad, steps)
        loss = each[0] + DRAFT_WEIGHT * sum(each[1:], torch.zeros(())) / DRAFT_STEPS + balance.take_loss()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for o in optimizer:
            o.step()
            o.zero_grad(set_to_none=True)
        worst, tokens = balance.update(), tokens + int((ids != pad).sum())
        if step % 50 == 0:
            print(
                f"{step:6d} {done:5.1%} {tokens / 1e6:6.2f}M tokens, load {worst:.2f}, loss",
                *(f"{float(x.detach()):.4f}" for x in each),
                "right",
                *(f"{x:.3f}" for x in shares),
                flush=True,
            )
    raise AssertionError("batches are endless")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", choices=FAMILIES, default="deepseek_v3")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", type=Path, help="checkpoint to go on from")
    parser.add_argument("--minutes", type=float, default=24)
    parser.add_argument("--lr-scale", type=float, default=1.0, help="of both learning rates; less than 1 with --resume")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--problems", type=int, default=200, help="held-out problems to evaluate")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = demo_tokenizer.build()
    vocabulary = tokenizer.get_vocab()
    eos, pad = vocabulary[END], vocabulary[demo_tokenizer.PAD]
    if args.resume:
        model = DemoModel.load(args.resume).train()
    else:
        model = DemoModel(args.family, tokenizer.get_vocab_size(), eos, pad)
    tokens = train(model, tokenizer, args.minutes, args.batch, pad, args.seed, args.lr_scale)
    model.save(args.out)
    demo_tokenizer.save(tokenizer, args.out)
    size = sum(p.numel() for p in model.parameters())
    print(f"{size / 1e6:.2f}M parameters, {tokens / 1e6:.1f}M tokens")
    print(evaluate(DemoModel.load(args.out), tokenizer, list(problems("heldout", args.problems))))


if __name__ == "__main__":
    main()

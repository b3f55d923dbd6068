"""Greedy verification, decided once: rank 0 reads the logits, every other rank is told the tokens.

B sequences, T rows, V vocabulary, P ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.comm.group import Group
from lockstep.engine.sequence import Sequence
from lockstep.models.weights import Vocabulary

REASONS: tuple[str | None, ...] = (None, "stop", "length")


def greedy(head: Vocabulary, hidden: Tensor, group: Group, how: str, at: str) -> Tensor | None:
    """The best id [T] for each normed row [T, H], the lowest of equals; on rank 0, None elsewhere.

    `how` "gather" moves the logits of every vocabulary shard to rank 0, "argmax" only each shard's best (value, id).
    """
    logits = head.logits(hidden)
    if how == "argmax":
        return _best_of_shards(head, logits, group, at)
    full = gather_logits(head, logits, group, at)
    return None if full is None else _lowest_best(full)


def gather_logits(head: Vocabulary, logits: Tensor, group: Group, at: str) -> Tensor | None:
    """[T, V_here] of every rank -> [T, V] on rank 0, None elsewhere."""
    missing = head.chunk - logits.shape[1]
    if missing:
        logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
    shards = group.to_root(logits, at)
    return None if shards is None else torch.cat(shards, -1)[:, : head.vocab]


def _best_of_shards(head: Vocabulary, logits: Tensor, group: Group, at: str) -> Tensor | None:
    pairs = torch.full((logits.shape[0], 2), float("-inf"), dtype=torch.float64, device=logits.device)
    if logits.shape[1]:
        ids = _lowest_best(logits)
        pairs = torch.stack((logits.gather(1, ids[:, None])[:, 0].double(), (ids + head.first).double()), -1)
    shards = group.to_root(pairs, at)
    if shards is None:
        return None
    values, ids = torch.stack(shards, -1).unbind(1)  # [T, P] each; shards lie in the order of their ids
    return ids.gather(1, _lowest_best(values)[:, None])[:, 0].long()


def _lowest_best(scores: Tensor) -> Tensor:
    """Index [T] of the largest of [T, N], the lowest of equals (torch.argmax promises none)."""
    best = scores.amax(-1, keepdim=True)
    if best.isnan().any():
        raise FloatingPointError("logits are not a number; the activations before them are broken")
    index = torch.arange(scores.shape[-1], device=scores.device)
    return torch.where(scores == best, index, scores.shape[-1]).amin(-1).clamp(max=scores.shape[-1] - 1)


def tell(values: Tensor | None, count: int, group: Group, at: str) -> list[int]:
    """`count` integers that rank 0 decided, on every rank."""
    message = torch.empty(count, dtype=torch.long, device=group.device) if values is None else values.contiguous()
    told: list[int] = group.broadcast(message, at).tolist()
    return told if group.decisions is None else group.decisions.settle(told)


def verify(choice: Tensor | None, sequences: list[Sequence], drafts: list[list[int]], group: Group) -> list[int]:
    """Commit to each sequence the drafts that the target confirms and its own next token; count them.

    `choice` [T] is the target's best id after each row: per sequence, after its last token and after each draft.
    Keep drafts while they equal the choice of the row before; then one token of the target's own (greedy case of
    Leviathan et al., 2023). Returns how many tokens each sequence has committed, of which one was not a draft unless
    the request ended inside the accepted run.
    """
    width = 3 + max(len(d) for d in drafts) + 1
    verdict = None
    if choice is not None:
        ids, lines, row = choice.tolist(), [], 0
        for sequence, drafted in zip(sequences, drafts, strict=True):
            best = ids[row : row + len(drafted) + 1]
            row += len(drafted) + 1
            lines.append(_judge(sequence, drafted, best, width))
        verdict = torch.tensor(lines, dtype=torch.long).to(group.device).flatten()
    told = tell(verdict, len(sequences) * width, group, "decide")
    committed = []
    for b, (sequence, drafted) in enumerate(zip(sequences, drafts, strict=True)):
        accepted, count, reason, *tokens = told[b * width : (b + 1) * width]
        sequence.commit(tokens[:count], drafted, accepted, REASONS[reason])
        committed.append(count)
    return committed


def _judge(sequence: Sequence, drafted: list[int], best: list[int], width: int) -> list[int]:
    """[accepted, committed, reason, tokens...] in a fixed width."""
    confirmed = 0
    while confirmed < len(drafted) and drafted[confirmed] == best[confirmed]:
        confirmed += 1
    kept, reason = sequence.cut(best[: confirmed + 1])
    line = [min(confirmed, len(kept)), len(kept), REASONS.index(reason), *kept]
    return line + [0] * (width - len(line))

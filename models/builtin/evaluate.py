"""Greedy speculative decoding of held-out problems without caches: exact match and acceptance per draft position.

python -m lockstep.models.builtin.evaluate models/builtin/demo
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lockstep.models.builtin.network import DemoModel
from lockstep.models.builtin.problems import END, Problem, problems, prompt, score


@dataclass(frozen=True)
class Evaluation:
    num_problems: int
    exact: float  # share of problems whose final number is right
    rounds: int  # rounds that verified drafts
    accepted: tuple[int, ...]  # per draft position

    @property
    def mean_accepted(self) -> float:
        return sum(self.accepted) / self.rounds

    def __str__(self) -> str:
        rates = " ".join(f"{a / self.rounds:.3f}" for a in self.accepted)
        return (
            f"exact match {self.exact:.1%} of {self.num_problems} held-out problems; mean accepted "
            f"{self.mean_accepted:.2f} of {len(self.accepted)} drafts (per position {rates}; {self.rounds} rounds)"
        )


def _pad(rows: list[list[int]]) -> Tensor:
    return pad_sequence([torch.tensor(r) for r in rows], batch_first=True)


def _drafts(model: DemoModel, known: list[list[int]], hidden: list[Tensor], k: int) -> list[list[int]]:
    """known: tokens, one more than there are hidden rows."""
    ids, rows = [t[1:] for t in known], list(hidden)
    for step in range(k):
        out = model.draft(_pad(ids), pad_sequence(rows, batch_first=True))
        last = torch.stack([o[len(i) - 1] for o, i in zip(out, ids, strict=True)])
        best = model.head(last).argmax(-1).tolist()
        ids = [[*i, b] for i, b in zip(ids, best, strict=True)]
        if step + 1 < k:
            rows = [torch.cat((r, x[None])) for r, x in zip(rows, last, strict=True)]
    return [i[-k:] for i in ids]


@torch.no_grad()
def evaluate(
    model: DemoModel, tokenizer: Tokenizer, asked: list[Problem], k: int = 3, max_length: int = 128
) -> Evaluation:
    """Drafts after an end-of-text token count as not accepted."""
    model.eval()
    eos = tokenizer.token_to_id(END)
    start = [tokenizer.encode(prompt(p)).ids for p in asked]
    tokens, accepted, rounds = [list(s) for s in start], [0] * k, 0
    drafts: list[list[int]] = [[] for _ in start]
    running = list(range(len(asked)))
    while running:
        given = [tokens[i] + drafts[i] for i in running]
        hidden = model.target(_pad(given))
        best = model.head(hidden).argmax(-1).tolist()
        rows: list[Tensor] = []
        still = []
        for i, h, choice in zip(running, hidden, best, strict=True):
            committed = 0
            while committed < len(drafts[i]) and drafts[i][committed] == choice[len(tokens[i]) - 1 + committed]:
                committed += 1
            new = choice[len(tokens[i]) - 1 : len(tokens[i]) + committed]
            if eos in new:
                new = new[: new.index(eos) + 1]
            rounds += bool(drafts[i])
            for position in range(min(committed, len(new))):
                accepted[position] += 1
            tokens[i] += new
            if eos not in new and len(tokens[i]) < max_length:
                still.append(i)
                rows.append(h[: len(tokens[i]) - 1])
        running = still
        for i, d in zip(running, _drafts(model, [tokens[i] for i in running], rows, k) if running else [], strict=True):
            drafts[i] = d
    texts = [tokenizer.decode(t[len(s) :], skip_special_tokens=False) for t, s in zip(tokens, start, strict=True)]
    right = sum(score(text) == p.answer for text, p in zip(texts, asked, strict=True))
    return Evaluation(len(asked), right / len(asked), rounds, tuple(accepted))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--problems", type=int, default=200)
    parser.add_argument("--draft-tokens", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = DemoModel.load(args.folder), Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    print(evaluate(model, tokenizer, list(problems("heldout", args.problems, args.seed)), args.draft_tokens))


if __name__ == "__main__":
    main()

"""Drafting with the MTP blocks: their caches, the hidden rows they have not seen yet, and the chain of drafts.

Words: tokens 0..c are committed, so the target's hidden rows 0..c-1 are known; D MTP blocks are in use.
Block j's row i joins token i+1+j with the output of block j-1 at row i (of the target, for j = 0), so token ids shift
from block to block and hidden rows never do (DeepSeek-V3, section 2.2). At the end of a chain the tokens are drafts.
Draft step s uses block s mod D: the first D steps take every row that is new to the block, and the last row's output
gives the draft; later steps add one row each, which recycles the output of the step before. Where a model says so,
these recycled rows attend to what step 0 selected for the last row, the one that drafted (vllm-project/vllm#47352).
Rows that joined a draft are forgotten after the round: the last D-1 hidden rows are kept to make them anew.
"""

from __future__ import annotations

from collections.abc import Sequence as List

import torch
from torch import Tensor

from lockstep.comm.layout import REPLICATED, Activation
from lockstep.comm.timeline import spanned
from lockstep.engine.accept import greedy, tell
from lockstep.engine.sequence import Sequence
from lockstep.engine.settings import Settings
from lockstep.models.cache import Cache
from lockstep.models.decoder import Exit
from lockstep.models.model import MTP, Model
from lockstep.models.rows import Selection


class Drafter:
    """Drafts for the sequences of one batch."""

    def __init__(self, model: Model, settings: Settings, batch: int, slots: int) -> None:
        self.model, self.settings = model, settings
        blocks: list[MTP] = list(model.mtp)  # type: ignore[arg-type]
        self.depth = len(blocks)
        self.caches: list[Cache] = [block.new_cache(batch, slots) for block in blocks]
        # Hidden rows [rows, H] of each sequence that the blocks have not seen, or must see again.
        self.pending: list[list[Tensor]] = [[] for _ in range(batch)]

    def feed(self, b: int, hidden: Tensor) -> None:
        """The target's next hidden rows [rows, H] of sequence b."""
        self.pending[b].append(hidden)

    def fill(self, sequences: List[Sequence]) -> None:
        """Run the blocks over the prompt rows whose following tokens are all prompt tokens.

        At the border of a prefill chunk the token that follows is the next prompt token (vllm-project/vllm#14137).
        """
        counts = []
        for b, sequence in enumerate(sequences):
            waiting = sum(rows.shape[0] for rows in self.pending[b])
            counts.append(max(0, min(waiting, len(sequence.prompt) - self.depth - self.caches[0].lengths[b])))
        if not any(counts):
            return
        waiting_rows = {b: torch.cat(self.pending[b]) for b, n in enumerate(counts) if n}
        hidden = torch.cat([rows[: counts[b]] for b, rows in waiting_rows.items()])
        known = [list(s.prompt) for s in sequences]
        for j in range(self.depth):
            hidden = self._recycled(self._new_rows(j, known, counts, hidden)[0])
        for b, rows in waiting_rows.items():
            self.pending[b] = [rows[counts[b] :]]

    @spanned("draft")
    def propose(self, sequences: List[Sequence]) -> list[list[int]]:
        """Draft tokens of each sequence: as many as it can still use. Forgets the rows that joined drafts."""
        wanted = [s.num_drafts(self.settings.draft_tokens) for s in sequences]
        drafts: list[list[int]] = [[] for _ in sequences]
        rows = [torch.cat(self.pending[b]) if n else None for b, n in enumerate(wanted)]
        hidden: list[Tensor | None] = list(rows)  # what the next step joins its tokens with, per sequence
        shared: dict[int, Tensor] = {}  # the slots that step 0 selected for the last row of each sequence
        for step in range(max(wanted, default=0)):
            running = [b for b, n in enumerate(wanted) if n > step]
            counts = [0] * len(sequences)
            for b in running:
                counts[b] = _rows_in(hidden[b])
            joined = torch.cat([_present(hidden[b]) for b in running])
            known = [s.tokens + d for s, d in zip(sequences, drafts, strict=True)]
            block = step % self.depth
            last = torch.tensor(counts)[running].cumsum(0).to(joined.device) - 1
            if step < self.depth:
                out, selection = self._new_rows(block, known, counts, joined)
            else:
                reused = Selection(torch.stack([shared[b] for b in running]), final=True) if shared else None
                out, _ = self._recycled_row(block, known, counts, joined, reused)
            if step == 0 and selection is not None and self.model.config.shares_draft_selection:
                shared = dict(zip(running, selection.slots[last], strict=True))
            head = self.model.draft_head(block)
            at = f"mtp.{block}.head"
            best = greedy(head, out.rows(at)[last], self.settings.group, self.settings.strategy.head, at)
            for b, token in zip(running, tell(best, len(running), self.settings.group, "decide"), strict=True):
                drafts[b].append(token)
            parts = self._recycled(out).split([counts[b] for b in running])
            for b, part in zip(running, parts, strict=True):
                hidden[b] = part if step + 1 < self.depth else part[-1:]
        self._forget(sequences, rows)
        return drafts

    def select(self, sequences: List[int]) -> None:
        """Keep only these sequences, in this order."""
        for cache in self.caches:
            cache.select(sequences, self.settings.group.device)
        self.pending = [self.pending[b] for b in sequences]

    def _new_rows(
        self, j: int, known: list[list[int]], counts: list[int], hidden: Tensor
    ) -> tuple[Exit, Selection | None]:
        """Block j over each sequence's next `counts[b]` rows; a row's position is its token's."""
        first = [held + 1 + j for held in self.caches[j].lengths]
        tokens = [t for ids, a, n in zip(known, first, counts, strict=True) for t in ids[a : a + n]]
        return self._run(j, tokens, counts, hidden, 1 + j)

    def _recycled_row(
        self, j: int, known: list[list[int]], counts: list[int], hidden: Tensor, selection: Selection | None
    ) -> tuple[Exit, Selection | None]:
        """Block j over one more row per sequence: the newest draft, at its own position."""
        tokens = [ids[-1] for ids, n in zip(known, counts, strict=True) if n]
        shift = [len(ids) - 1 - held for ids, held in zip(known, self.caches[j].lengths, strict=True)]
        return self._run(j, tokens, counts, hidden, shift, selection)

    @spanned("draft step")
    def _run(
        self,
        j: int,
        tokens: list[int],
        counts: list[int],
        hidden: Tensor,
        shift: list[int] | int,
        selection: Selection | None = None,
    ) -> tuple[Exit, Selection | None]:
        """Block j over rows that attend to `selection`, or select for themselves; and what they attended to."""
        cache, device = self.caches[j], self.settings.group.device
        self.settings.group.mark("draft", tokens=tokens)
        rows = cache.rows(counts, device, shift)
        rows.selection = selection
        ids = torch.tensor(tokens, dtype=torch.long).to(device)
        out = self.model.draft(j, ids, Activation(hidden, REPLICATED, len(tokens)), self.settings.step(rows), cache)
        return out, rows.selection

    def _recycled(self, out: Exit) -> Tensor:
        return out.rows("recycle") if self.settings.recycle == "post-norm" else out.raw_rows("recycle")

    def _forget(self, sequences: List[Sequence], rows: List[Tensor | None]) -> None:
        """Drop the cached rows that joined a draft, and keep the hidden rows to make them anew."""
        certain = [max(0, len(s.tokens) - self.depth) for s in sequences]
        for b, hidden in enumerate(rows):
            self.pending[b] = [] if hidden is None else [hidden[max(0, len(hidden) - self.depth + 1) :]]
        for cache in self.caches:
            cache.keep([min(held, keep) for held, keep in zip(cache.lengths, certain, strict=True)])


def _rows_in(hidden: Tensor | None) -> int:
    return 0 if hidden is None else hidden.shape[0]


def _present(hidden: Tensor | None) -> Tensor:
    assert hidden is not None
    return hidden

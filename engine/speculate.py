"""Batched greedy speculative decoding (DESIGN section 4): prefill, then rounds of draft, verify, keep.

B sequences, T rows of one forward, H hidden.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from lockstep.comm.timeline import spanned
from lockstep.engine.accept import greedy, tell, verify
from lockstep.engine.draft import Drafter
from lockstep.engine.requests import Committed, Progress
from lockstep.engine.sequence import Sequence
from lockstep.engine.settings import Settings
from lockstep.models.decoder import Exit
from lockstep.models.model import Model


@dataclass
class Clock:
    """Seconds of a batch: prefill up to the last first token, and each round with the tokens it committed."""

    start: float = field(default_factory=time.perf_counter)
    first_token: list[float] = field(default_factory=list)
    prefill: float = 0.0
    rounds: list[tuple[float, int]] = field(default_factory=list)

    def since_start(self) -> float:
        return time.perf_counter() - self.start


class Batch:
    """Sequences that are decoded together. Those that end leave; none enter."""

    def __init__(self, model: Model, settings: Settings, sequences: list[Sequence]) -> None:
        self.model, self.settings, self.sequences = model, settings, sequences
        # A round writes its drafts before it knows whether they stay, and never more than fit under the limit.
        slots = max(s.limit for s in sequences)
        self.cache = model.new_cache(len(sequences), slots)
        drafts = settings.draft_tokens > 0
        self.drafter = Drafter(model, settings, len(sequences), slots + settings.draft_tokens) if drafts else None
        self.clock = Clock()

    @torch.inference_mode()
    def decode(self, emit: Callable[[Committed | Progress], None]) -> None:
        """From prompts to finished requests; `emit` is told of every commit and of every prefill chunk."""
        for b in self.prefill(emit):
            emit(_first(self.sequences[b]))
        self._drop_finished()
        while self.sequences:
            began = time.perf_counter()
            sequences = self.sequences
            committed = self.round()
            for sequence, count in zip(sequences, committed, strict=True):
                emit(_latest(sequence, count))
            self.clock.rounds.append((time.perf_counter() - began, sum(committed)))

    def prefill(self, emit: Callable[[Progress], None] = lambda event: None) -> Iterator[int]:
        """Chunks of the prompts; yields a sequence when its first token is committed."""
        chunk = self.settings.prefill_chunk
        longest = max(len(s.prompt) for s in self.sequences)
        self.settings.group.mark("prefill", 0)
        for start in range(0, longest, chunk):
            parts = [list(s.prompt[start : start + chunk]) for s in self.sequences]
            out = self._forward(parts, "prefill")
            self._feed(out, parts, [len(part) for part in parts])
            if self.drafter:
                self.drafter.fill(self.sequences)
            lengths = [len(s.prompt) for s in self.sequences]
            emit(Progress("prefill", sum(min(n, start + chunk) for n in lengths), sum(lengths)))
            ends = [b for b, s in enumerate(self.sequences) if start < len(s.prompt) <= start + chunk]
            if ends:
                self._commit_first(out, parts, ends)
                yield from ends
        self.clock.prefill = self.clock.since_start()

    @spanned("round")
    def round(self) -> list[int]:
        """Draft, verify, commit, and keep in the caches exactly what is committed. Tokens committed per sequence."""
        sequences = self.sequences
        self.settings.group.mark("draft", len(self.clock.rounds) + 1)
        drafts = self.drafter.propose(sequences) if self.drafter else [[] for _ in sequences]
        parts = [[s.tokens[-1], *d] for s, d in zip(sequences, drafts, strict=True)]
        out = self._forward(parts, "verify")
        group, how = self.settings.group, self.settings.strategy.head
        choice = greedy(self.model.lm_head, out.rows("head"), group, how, "head")
        committed = verify(choice, sequences, drafts, group)
        self.cache.keep([len(s.tokens) - 1 for s in sequences])
        self._feed(out, parts, committed)
        self._drop_finished()
        return committed

    @spanned("target")
    def _forward(self, parts: list[list[int]], stage: str) -> Exit:
        group, ids = self.settings.group, [t for part in parts for t in part]
        group.mark(stage, tokens=ids)
        rows = self.cache.rows([len(part) for part in parts], group.device)
        tokens = torch.tensor(ids, dtype=torch.long).to(group.device)
        return self.model(tokens, self.settings.step(rows), self.cache)  # type: ignore[no-any-return]

    def _feed(self, out: Exit, parts: list[list[int]], kept: list[int]) -> None:
        """Give the drafter the first `kept[b]` of each sequence's rows."""
        if self.drafter is None:
            return
        row, hidden = 0, out.rows("recycle")
        for b, (part, count) in enumerate(zip(parts, kept, strict=True)):
            if count:
                self.drafter.feed(b, hidden[row : row + count])
            row += len(part)

    def _commit_first(self, out: Exit, parts: list[list[int]], ends: list[int]) -> None:
        row, last = 0, []
        for part in parts:
            row += len(part)
            last.append(row - 1)
        group, how = self.settings.group, self.settings.strategy.head
        hidden = out.rows("head")[torch.tensor([last[b] for b in ends]).to(group.device)]
        choice = greedy(self.model.lm_head, hidden, group, how, "head")
        for b, token in zip(ends, tell(choice, len(ends), group, "decide"), strict=True):
            self.sequences[b].start(token)
            self.clock.first_token.append(self.clock.since_start())

    def _drop_finished(self) -> None:
        going = [b for b, s in enumerate(self.sequences) if s.finish_reason is None]
        if len(going) == len(self.sequences):
            return
        self.sequences = [self.sequences[b] for b in going]
        if going:
            self.cache.select(going, self.settings.group.device)
            if self.drafter:
                self.drafter.select(going)


def _first(sequence: Sequence) -> Committed:
    return Committed(sequence.request, tuple(sequence.generated[:1]), 0, sequence.finish_reason)


def _latest(sequence: Sequence, count: int) -> Committed:
    tokens = tuple(sequence.tokens[len(sequence.tokens) - count :])
    return Committed(sequence.request, tokens, sequence.rounds[-1].accepted, sequence.finish_reason)

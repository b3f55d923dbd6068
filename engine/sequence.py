"""One request while it is being decoded, and the rules that end it. Integers only."""

from __future__ import annotations

from dataclasses import dataclass, field

STOP, LENGTH = "stop", "length"


@dataclass
class Round:
    """The drafts of one round and how many leading ones were committed."""

    drafts: list[int]
    accepted: int


@dataclass
class Sequence:
    """`tokens` are the prompt and everything committed; at most `limit` of them. `request` is its number in the job."""

    request: int
    prompt: tuple[int, ...]
    limit: int
    eos: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    def num_drafts(self, draft_tokens: int) -> int:
        """Drafts worth making now: a round commits one token more than it accepts, and none may pass the limit."""
        return max(0, min(draft_tokens, self.limit - len(self.tokens) - 1))

    def cut(self, tokens: list[int]) -> tuple[list[int], str | None]:
        """The part of `tokens` that plain decoding would have committed next, and what ends the request, if any."""
        kept = tokens[: self.limit - len(self.tokens)]
        for i, token in enumerate(kept):
            if token in self.eos:
                return kept[: i + 1], STOP
        return kept, LENGTH if len(self.tokens) + len(kept) >= self.limit else None

    def commit(self, tokens: list[int], drafts: list[int], accepted: int, reason: str | None) -> None:
        """Append what one round committed."""
        self.tokens += tokens
        self.rounds.append(Round(drafts, accepted))
        self.finish_reason = reason

    def start(self, token: int) -> None:
        """Append the first token, which prefill gives: it belongs to no round."""
        kept, self.finish_reason = self.cut([token])
        self.tokens += kept

"""What rank 0 has told the others, in order: written down during a run, or given in advance to replay one."""

from __future__ import annotations


class Decisions:
    """With `given`, the run follows these whatever rank 0 decides; `own` is what it would have told."""

    def __init__(self, given: list[list[int]] | None = None) -> None:
        self.given, self.own = given, list[list[int]]()

    def settle(self, told: list[int]) -> list[int]:
        self.own.append(told)
        if self.given is None:
            return told
        planned = self.given[len(self.own) - 1]
        if len(planned) != len(told):
            raise ValueError(f"decision {len(self.own)} has {len(told)} numbers; the script has {len(planned)} there")
        return planned

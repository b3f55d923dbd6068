"""What moved: collectives, rows and bytes per boundary.

Counting is a few integer additions on the host; nothing here waits for a device or another rank.
"""

from __future__ import annotations

from dataclasses import dataclass

COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "gather", "broadcast")


@dataclass(slots=True)
class Entry:
    """Totals of one collective at one boundary. `bytes` is payload: rows x width x item size, padding apart."""

    calls: int = 0
    rows: int = 0
    bytes: int = 0
    wire_bytes: int = 0


class Ledger:
    """Totals per (boundary, collective). A boundary is named `layers.3.attention.out`, `mtp.0.exit`, `head`."""

    def __init__(self) -> None:
        self.entries: dict[tuple[str, str], Entry] = {}
        self.enabled = True

    def record(self, boundary: str, collective: str, *, rows: int, row_bytes: int, wire_bytes: int) -> None:
        """`row_bytes` is the payload of one row of the whole value; `wire_bytes` what one rank sends."""
        if not self.enabled:
            return
        entry = self.entries.get((boundary, collective))
        if entry is None:
            entry = self.entries[boundary, collective] = Entry()
        entry.calls += 1
        entry.rows += rows
        entry.bytes += rows * row_bytes
        entry.wire_bytes += wire_bytes

    def clear(self) -> None:
        self.entries.clear()

    def rows(self) -> list[dict[str, str | int]]:
        """One JSON object per boundary and collective, in the order in which they were first used."""
        return [
            {
                "boundary": boundary,
                "collective": collective,
                "calls": e.calls,
                "rows": e.rows,
                "bytes": e.bytes,
                "wire_bytes": e.wire_bytes,
            }
            for (boundary, collective), e in self.entries.items()
        ]

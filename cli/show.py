"""What the terminal shows while a job runs: texts as they are committed, and how far loading is.

On a terminal, accepted drafts are green and the target's own tokens plain. Several requests at once are shown as one
moving line each, and as whole texts once they are complete. Anywhere else the texts are plain and in order.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from lockstep.cli.inputs import Prompt
from lockstep.engine.prompts import Decode, TextStream, is_right
from lockstep.engine.requests import Committed
from lockstep.engine.requests import Progress as Done

ACCEPTED = "green"  # the style of accepted drafts
MAX_ROWS = 8  # requests that move on the terminal at once
BAR_AFTER_S = 2.0
# A model's bytes must not steer the terminal.
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\ufffd") | {ord("\r"): ""}


class Reply:
    """The text of one request so far, in pieces that are each an accepted draft's or the target's own."""

    def __init__(self, prompt: Prompt, decode: Decode | None) -> None:
        self.prompt = prompt
        self.complete = False
        self.pieces: list[tuple[str, bool]] = []
        self._stream = TextStream(decode) if decode else None

    def add(self, event: Committed) -> None:
        for i, token in enumerate(event.tokens):
            self._append(self._stream.push(token) if self._stream else f"{token} ", i < event.accepted)
        if event.finish_reason is not None:
            self.complete = True
            self._append(self._stream.flush() if self._stream else "", False)

    def _append(self, piece: str, accepted: bool) -> None:
        if piece:
            self.pieces.append((piece, accepted))

    @property
    def text(self) -> str:
        return "".join(piece for piece, _ in self.pieces)


class Display:
    """Shows the events of a job, until `finish`. `close` in any case: a display that moves has a thread."""

    def __init__(self, out: Console, loading: Loading, prompts: Sequence[Prompt], decode: Decode | None) -> None:
        self._out, self._loading = out, loading
        self._replies = [Reply(prompt, decode) for prompt in prompts]
        self._first = 0  # the first request that is not shown whole
        self._num_shown = 0  # how many of its pieces are
        self._live = Live(
            console=out, get_renderable=self._rows, refresh_per_second=8, transient=True, redirect_stderr=False
        )
        self._moves = out.is_terminal and len(prompts) > 1

    def on_event(self, rank: int, event: object) -> None:
        if rank != 0:
            return
        if isinstance(event, Done) and not self._live.is_started:
            self._loading.update(event)
        elif isinstance(event, Committed):
            self._loading.stop()
            if self._moves and not self._live.is_started:
                self._live.start()
            reply = self._replies[event.request]
            reply.add(event)
            self._show(end=False)

    def finish(self) -> None:
        """No more tokens come: show what is left."""
        self._show(end=True)

    def close(self) -> None:
        self._loading.stop()
        self._live.stop()

    def _show(self, *, end: bool) -> None:
        """In order, the requests that are complete, and of the one after them what there is."""
        while self._first < len(self._replies):
            reply = self._replies[self._first]
            complete = end or reply.complete
            if complete or not self._moves:
                self._write(reply, complete=complete)
            if not complete:
                return
            self._first, self._num_shown = self._first + 1, 0

    def _write(self, reply: Reply, *, complete: bool) -> None:
        pieces = reply.pieces[self._num_shown :]
        if self._num_shown == 0 and (pieces or complete) and len(self._replies) > 1:
            self._out.print(self._heading(self._first), soft_wrap=True)
        self._num_shown = len(reply.pieces)
        newline = "\n" if complete and not reply.text.endswith("\n") else ""
        if self._out.is_terminal:
            self._out.print(_styled(pieces), end=newline, soft_wrap=True)
        else:
            self._out.file.write("".join(piece for piece, _ in pieces) + newline)
            self._out.file.flush()
        if not complete:
            return
        if reply.prompt.answer is not None:
            right = is_right(reply.text, reply.prompt.answer)
            verdict = "right" if right else f"wrong: the answer is {reply.prompt.answer}"
            self._out.print(Text(f"({verdict})", style="dim" if right else "red"), soft_wrap=True)
        if self._first + 1 < len(self._replies):
            self._out.print()

    def _heading(self, number: int) -> Text:
        text = Text(f"[{number + 1}/{len(self._replies)}] ", style="bold")
        text.append(_clean(self._replies[number].prompt.title))
        return text

    def _rows(self) -> Table:
        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True, style="bold")
        table.add_column(no_wrap=True)
        moving = [i for i, r in enumerate(self._replies) if i >= self._first and r.pieces]
        width = max(self._out.width - 12, 10)
        for i in moving[:MAX_ROWS]:
            tail = [(piece.replace("\n", " "), accepted) for piece, accepted in self._replies[i].pieces[-width:]]
            table.add_row(Text(f"[{i + 1}/{len(self._replies)}]"), _styled(tail)[-width:])
        if len(moving) > MAX_ROWS:
            table.add_row("", f"and {len(moving) - MAX_ROWS} more")
        return table


class Loading:
    """A bar on a terminal for a stage that takes longer than two seconds; nothing elsewhere."""

    def __init__(self, err: Console) -> None:
        self._err = err
        self._stage, self._since = "", time.monotonic()
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def update(self, event: Done) -> None:
        if event.stage != self._stage:
            self.stop()
            self._stage = event.stage
        if not self._err.is_terminal or time.monotonic() - self._since < BAR_AFTER_S:
            return
        if self._bar is None:
            columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %")
            self._bar = Progress(*columns, console=self._err, transient=True, redirect_stdout=False)
            self._task = self._bar.add_task(self._stage, total=event.total)
            self._bar.start()
        self._bar.update(self._task, completed=event.done, total=event.total)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar, self._since = None, time.monotonic()


def _styled(pieces: Sequence[tuple[str, bool]]) -> Text:
    return Text.assemble(*((_clean(piece), ACCEPTED if accepted else "") for piece, accepted in pieces))


def _clean(text: str) -> str:
    return text.translate(_CONTROLS)

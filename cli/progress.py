"""How far a comparison is: one moving line on a terminal, one line per step elsewhere."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lockstep.engine.compare import Step


class Steps:
    """No thread of its own, for ranks are forked while it is shown: it moves when it is told something."""

    def __init__(self, err: Console) -> None:
        self._err = err
        self._bar: Progress | None = None

    def begin(self, step: Step) -> None:
        text = f"{step.of_cell}: {step.what}"
        if not self._err.is_terminal:
            self._err.print(f"[{step.number + 1}/{step.total}] {text}", soft_wrap=True, markup=False)
            return
        if self._bar is None:
            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=self._err, auto_refresh=False, transient=True)
            self._task = self._bar.add_task(text, total=step.total)
            self._bar.start()
        self._bar.update(self._task, completed=step.number, description=text, refresh=True)

    def on_event(self, rank: int, event: object) -> None:
        """A step, or a sign of life within one."""
        if isinstance(event, Step):
            self.begin(event)
        elif self._bar is not None:
            self._bar.refresh()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()

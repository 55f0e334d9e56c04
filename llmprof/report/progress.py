"""A progress bar on a terminal, and nothing where there is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress_bar(console: Console, what: str, *, total: int) -> Iterator[Callable[[int], None] | None]:
    """Something to call with the number of rows that are done; None where no terminal shows it.

    Args:
        what: is being done, such as "forecasting".
        total: number of rows.
    """
    if not console.is_terminal or not total:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)

"""Live view of a watched server in a terminal: a table that is redrawn, or one line per reading if the output is no
terminal.
"""

import asyncio
import os
from contextlib import aclosing, nullcontext, suppress

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from specdemo.analysis.watch import Row, Watch, watched
from specdemo.core.atomic_io import finite, json_text
from specdemo.servers.lane import KEY

SHOWN = 12  # rows of the table
FORMATS = {"time": "{:.0f} s", "tokens/s": "{:.1f}", "running": "{:.1f}", "tokens/pass": "{:.2f}"}
TITLES = {"running": "running requests", "accepted": "acceptance rate", "tokens/pass": "mean accepted length"}


def show_live(watch: Watch, every_s: float, readings: int, as_json: bool) -> None:
    """Show every reading until Ctrl-C, or until there are `readings` of them; then print the diagnosis.

    Raises ValueError, one line, if the server has no metrics.
    """
    console = Console(highlight=False, markup=False)
    drawn = Live(console=console, auto_refresh=False) if console.is_terminal and not as_json else None

    async def follow() -> None:
        async with aclosing(watched(watch, every_s, os.environ.get(KEY))) as updates:
            count = 0
            async for _ in updates:
                count += 1
                if drawn is not None:
                    drawn.update(Group(table(watch), watch.sentence()), refresh=True)
                elif watch.rows and count > 1:
                    row = watch.rows[-1]
                    print(json_text(finite(row)) if as_json else line(row), flush=True)
                if count == readings:
                    return

    with drawn or nullcontext(), suppress(KeyboardInterrupt):  # Ctrl-C is the usual end
        asyncio.run(follow())
    _conclude(watch, console, as_json)


def _conclude(watch: Watch, console: Console, as_json: bool) -> None:
    found = watch.diagnosis()
    if as_json:
        print(json_text({"server": watch.server, "diagnosis": found and found.as_dict()}))
        return
    lines = [watch.sentence(), *((*found.limits(), *found.recommendations) if found else ())]
    console.print("\n".join(lines), soft_wrap=True)


def table(watch: Watch) -> Table:
    """Return the last readings as a table."""
    rows = [*watch.rows][-SHOWN:]
    title = f"{watch.engine.title} at {watch.server}" if watch.engine else watch.server
    drawn = Table(title=title, title_justify="left")
    names = [*dict.fromkeys(name for row in rows for name in row)]
    for name in names:
        drawn.add_column(TITLES.get(name, name), justify="right")
    for row in rows:
        drawn.add_row(*(_cell(name, row.get(name)) for name in names))
    return drawn


def line(row: Row) -> str:
    """Return a reading as one line of text."""
    return ", ".join(f"{TITLES.get(name, name)}: {_cell(name, value)}" for name, value in row.items())


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return FORMATS[name].format(value) if name in FORMATS else f"{100 * value:.0f} %"

"""Record one run of `bench methods` in both places that show it, the README's table and the page's Sweep tab:

`python -m specdemo bench methods --repeats 12 --out result.json && python -m benchmarks.readme result.json`.
"""

import re
import sys
from pathlib import Path
from textwrap import fill

from specdemo.bench.report import markdown
from specdemo.bench.result import THOROUGH, Result, noisy, read_result, write_result
from specdemo.core.atomic_io import write_text

ROOT = Path(__file__).parents[1]
SUITE, TARGET = "methods", "stories"
PLACE = re.compile("(<!-- bench methods -->\n).*?(\n<!-- end of bench methods -->)", re.DOTALL)
WIDTH = 120


def record(source: str | Path, root: Path = ROOT) -> Result:
    """Write the result to the README and to the recorded sweeps below `root`, and return it.

    Raises ValueError with one line for a result that cannot stand there, before anything is written.
    """
    result = read_result(source)
    _check(result)
    readme = root / "README.md"
    text = readme.read_text(encoding="utf-8")
    if not PLACE.search(text):
        marks = "<!-- bench methods --> and <!-- end of bench methods -->"
        raise ValueError(f"{readme} has no place for the table; add {marks}")
    write_result(result, root / "presets" / "recorded" / "suites" / f"{SUITE}.json")
    write_text(readme, PLACE.sub(lambda found: found[1] + _section(result) + found[2], text))
    return result


def _check(result: Result) -> None:
    cure = f"run python -m specdemo bench {SUITE} --repeats {THOROUGH} --out result.json in a checkout"
    if result.suite != SUITE or result.config.get("target") != TARGET:
        raise ValueError(f"this is suite {result.suite} on {result.config.get('target')}; {cure}")
    if "prompts" in result.config or "questions" in result.config:
        raise ValueError(f"this result has custom prompts; {cure}")
    if result.repeats < THOROUGH or not result.environment.get("commit"):
        raise ValueError(f"a recorded result needs a commit and at least {THOROUGH} repeats; {cure}")


def _section(result: Result) -> str:
    conditions, table = markdown(result).split("\n\n")
    if {row["output"] for row in result.rows[1:]} == {"identical"}:
        conditions += " Every output is identical to that of plain decoding."
    return f"{fill(conditions, WIDTH, break_on_hyphens=False)}\n\n{table}"


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m benchmarks.readme RESULT.json", file=sys.stderr)
        return 2
    try:
        result = record(arguments[0])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(filter(None, ["Wrote README.md and the recorded sweep.", noisy(result)])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Write what the documents show of a result, and keep the result below presets/recorded.

`python -m specdemo bench models && python -m benchmarks.readme runs/models/results.json` draws the README's chart;
`python -m specdemo bench methods --repeats 12 --out result.json && python -m benchmarks.readme result.json` writes the
table of methods in docs/measurements.md, also a sweep of the page.
"""

import re
import sys
from pathlib import Path
from textwrap import fill

from benchmarks.chart import chart
from specdemo.bench.report import markdown
from specdemo.bench.result import THOROUGH, Result, noisy, read_result, write_result
from specdemo.core.atomic_io import write_text

ROOT = Path(__file__).parents[1]
COMMANDS = {
    "methods": f"bench methods --repeats {THOROUGH} --out result.json",
    "models": "bench models --out runs/models",
}
PAGES = {"methods": "docs/measurements.md", "models": "README.md"}
CHART = "docs/speed-ups.svg"
PLACE = "(<!-- bench {suite} -->\n).*?(\n<!-- end of bench {suite} -->)"
WIDTH = 120


def record(source: str | Path, root: Path = ROOT) -> Result:
    """Write the result to its page, to the chart and to the recorded suites below `root`, and return it.

    Raises ValueError with one line for a result that cannot stand there, before anything is written.
    """
    result = read_result(source)
    _check(result)
    page = root / PAGES[result.suite]
    text = page.read_text(encoding="utf-8")
    place = re.compile(PLACE.format(suite=result.suite), re.DOTALL)
    if not place.search(text):
        marks = f"<!-- bench {result.suite} --> and <!-- end of bench {result.suite} -->"
        raise ValueError(f"{page} has no place for the result; add {marks}")
    write_result(result, root / "presets" / "recorded" / "suites" / f"{result.suite}.json")
    write_text(page, place.sub(lambda place: place[1] + section(result) + place[2], text))
    if result.suite == "models":
        write_text(root / CHART, chart(result))
    return result


def section(result: Result) -> str:
    """Return what the page of a result shows of it."""
    return _models(result) if result.suite == "models" else _methods(result)


def _check(result: Result) -> None:
    advice = f"run python -m specdemo {COMMANDS.get(result.suite, COMMANDS['methods'])} in a checkout"
    if result.suite != "models" and (result.suite, result.config.get("target")) != ("methods", "stories"):
        raise ValueError(f"this is suite {result.suite} on {result.config.get('target')}; {advice}")
    if result.suite == "methods" and {"prompts", "questions"} & {*result.config}:
        raise ValueError(f"this result has custom prompts; {advice}")
    if result.repeats < THOROUGH or not result.environment.get("commit"):
        raise ValueError(f"a recorded result needs a commit and at least {THOROUGH} repeats; {advice}")


def _methods(result: Result) -> str:
    conditions, table = markdown(result).split("\n\n")
    if {row["output"] for row in result.rows[1:]} == {"identical"}:
        conditions += " Every output is identical to that of plain decoding."
    return f"{fill(conditions, WIDTH, break_on_hyphens=False)}\n\n{table}"


def _models(result: Result) -> str:
    """Return the chart and the conditions of the measurement."""
    models = ", ".join(dict.fromkeys(row["model"] for row in result.rows))
    where, versions = result.environment, result.environment["versions"]
    parts = [where["device"], *(f"{name} {number}" for name, number in versions.items()), where["date"]]
    parts += [f"commit `{where['commit'][:7]}`", f"{result.config['prompts']} prompts per kind of work"]
    parts += [f"{result.config['new_tokens']} new tokens", "wall time, 95 % intervals over the prompts"]
    picture = f"![Speed-up over plain decoding by kind of work, with 95 % intervals: {models}]({CHART})"
    return f"{picture}\n\n{fill(', '.join(parts) + '.', WIDTH, break_on_hyphens=False)}"


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m benchmarks.readme RESULT.json", file=sys.stderr)
        return 2
    try:
        result = record(arguments[0])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(filter(None, [f"Wrote {PAGES[result.suite]} and the recorded result.", noisy(result)])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

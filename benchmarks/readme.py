"""Write a table of the README from a result, and keep the result below presets/recorded:

`python -m specdemo bench methods --repeats 12 --out result.json && python -m benchmarks.readme result.json`, also a
sweep of the page, and `python -m specdemo bench models && python -m benchmarks.readme runs/models/results.json`.
"""

import re
import sys
from itertools import groupby
from pathlib import Path
from textwrap import fill

from specdemo.bench.report import markdown
from specdemo.bench.result import THOROUGH, Result, Row, is_baseline, noisy, read_result, write_result
from specdemo.core.atomic_io import write_text
from specdemo.core.estimate import Estimate

ROOT = Path(__file__).parents[1]
COMMANDS = {
    "methods": f"bench methods --repeats {THOROUGH} --out result.json",
    "models": "bench models --out runs/models",
}
PLACE = "(<!-- bench {suite} -->\n).*?(\n<!-- end of bench {suite} -->)"
WIDTH = 120


def record(source: str | Path, root: Path = ROOT) -> Result:
    """Write the result to the README and to the recorded suites below `root`, and return it.

    Raises ValueError with one line for a result that cannot stand there, before anything is written.
    """
    result = read_result(source)
    _check(result)
    readme = root / "README.md"
    text = readme.read_text(encoding="utf-8")
    place = re.compile(PLACE.format(suite=result.suite), re.DOTALL)
    if not place.search(text):
        marks = f"<!-- bench {result.suite} --> and <!-- end of bench {result.suite} -->"
        raise ValueError(f"{readme} has no place for the table; add {marks}")
    write_result(result, root / "presets" / "recorded" / "suites" / f"{result.suite}.json")
    write_text(readme, place.sub(lambda found: found[1] + section(result) + found[2], text))
    return result


def section(result: Result) -> str:
    """Return what the README shows of a result."""
    return _models(result) if result.suite == "models" else _methods(result)


def _check(result: Result) -> None:
    cure = f"run python -m specdemo {COMMANDS.get(result.suite, COMMANDS['methods'])} in a checkout"
    if result.suite != "models" and (result.suite, result.config.get("target")) != ("methods", "stories"):
        raise ValueError(f"this is suite {result.suite} on {result.config.get('target')}; {cure}")
    if result.suite == "methods" and {"prompts", "questions"} & {*result.config}:
        raise ValueError(f"this result has custom prompts; {cure}")
    if result.repeats < THOROUGH or not result.environment.get("commit"):
        raise ValueError(f"a recorded result needs a commit and at least {THOROUGH} repeats; {cure}")


def _methods(result: Result) -> str:
    conditions, table = markdown(result).split("\n\n")
    if {row["output"] for row in result.rows[1:]} == {"identical"}:
        conditions += " Every output is identical to that of plain decoding."
    return f"{fill(conditions, WIDTH, break_on_hyphens=False)}\n\n{table}"


def _models(result: Result) -> str:
    """Return the conditions and a table of lanes by kind of work: tokens/s of plain decoding, the others' speed-up."""
    cells: dict[tuple[str, str], dict[str, Row]] = {}
    for row in result.rows:
        cells.setdefault((row["model"], row["lane"]), {})[row["category"]] = row
    kinds = list(dict.fromkeys(row["category"] for row in result.rows))
    lines = [f"| model, lane | {' | '.join(kinds)} | over its peer |", "|---" * (len(kinds) + 2) + "|"]
    for model, lanes in groupby(cells, key=lambda name: name[0]):
        threads = sorted({str(row["threads"]) for row in result.rows if row["model"] == model})
        lines.append(f"| **{model}, threads: {' or '.join(threads)}** |" + " |" * (len(kinds) + 1))
        for lane in lanes:
            of = cells[lane]
            speeds = [_speed(of[kind]) if kind in of else "" for kind in kinds]
            peer = [row["over its peer"] for row in of.values() if row["over its peer"]]
            lines.append(f"| {lane[1]} | {' | '.join(speeds)} | {_range(peer)} |")
    where, versions = result.environment, result.environment["versions"]
    parts = [where["device"], *(f"{name} {number}" for name, number in versions.items()), where["date"]]
    parts += [f"commit `{where['commit'][:7]}`", f"{result.config['prompts']} prompts per kind of work"]
    parts += [f"{result.config['new_tokens']} new tokens", "wall time, 95 % intervals over the prompts"]
    return fill(", ".join(parts) + ".", WIDTH, break_on_hyphens=False) + "\n\n" + "\n".join(lines)


def _speed(row: Row) -> str:
    return f"{row['tokens/s'].format('', 0)} /s" if is_baseline(row["speed-up"]) else row["speed-up"].format()


def _range(ratios: list[Estimate]) -> str:
    """Return the least and the greatest of some ratios, a single one with its interval."""
    values = [each.value for each in ratios]
    return ratios[0].format() if len(ratios) == 1 else f"{min(values):.2f}x to {max(values):.2f}x" if ratios else ""


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m benchmarks.readme RESULT.json", file=sys.stderr)
        return 2
    try:
        result = record(arguments[0])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(filter(None, ["Wrote README.md and the recorded result.", noisy(result)])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

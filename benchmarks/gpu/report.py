"""Report of the sections: a Markdown page and a device profile."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.lab import Lab
from benchmarks.gpu.sections import COMMAND, PLAIN
from specdemo.bench.device import provenance, slug
from specdemo.core.atomic_io import write_text
from specdemo.costs.profiles import Figure, Profile, write_profile

NO_GPU = "Not a GPU measurement: a trial with tiny models on a CPU."
RESULTS = "results.json"
MAX_ROWS = 40  # largest number of rows of a table on the page; the JSON has all

StoredSection = Mapping[str, Any]
Row = dict[str, Any]


def write_report(
    folder: Path, sections: Mapping[str, StoredSection], environment: StoredSection, lab: Lab
) -> list[str]:
    """Write the page and the profile; return their names."""
    write_text(folder / "report.md", _page(sections, environment, lab))
    profile = profile_of(sections, environment)
    if profile is None:
        return ["report.md"]
    write_profile(profile, folder / f"{profile.name}.profile.json")
    return ["report.md", f"{profile.name}.profile.json"]


def rows_of(sections: Mapping[str, StoredSection], prefix: str) -> list[Row]:
    """Return the rows of all sections whose name starts with `prefix`."""
    return [row for name, found in sections.items() if name.startswith(prefix) for row in found.get("rows", ())]


def methods_of(sections: Mapping[str, StoredSection]) -> list[Row]:
    """Return the steps of all methods and their ratio to plain decoding."""
    rows = rows_of(sections, "method-")
    plain = {row["shape"]: row["tokens/s"] for row in rows if row["method"] == PLAIN}
    return [
        row | ({"speed-up": round(row["tokens/s"] / plain[row["shape"]], 3)} if row["shape"] in plain else {})
        for row in rows
    ]


def _page(sections: Mapping[str, StoredSection], environment: StoredSection, lab: Lab) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in environment["versions"].items())
    commit = f", commit `{str(environment['commit'])[:7]}`" if environment["commit"] else ""
    parts = [f"# {environment['device']}", f"{environment['date']}, {versions}{commit} (`{COMMAND}`)."]
    parts += [f"**{NO_GPU}**"] * lab.small
    for title, rows, remarks in _chapters(sections):
        parts.append(f"## {title}")
        parts += [_table(rows)] * bool(rows)
        parts += ["\n".join(f"- {remark}" for remark in remarks)] * bool(remarks)
    return "\n\n".join(parts) + "\n"


def _chapters(sections: Mapping[str, StoredSection]) -> Iterator[tuple[str, list[Row], list[str]]]:
    """Yield title, rows and remarks; related sections share a chapter."""
    together = {"plain-": "Plain decoding", "method-": "A step of every method, at synthetic acceptance"}
    printed = set()
    for name, found in sections.items():
        prefix = next((p for p in together if name.startswith(p)), "")
        if prefix in printed:
            continue
        if not prefix:
            yield str(found["title"]), list(found.get("rows", ())), _remarks({name: found})
            continue
        printed.add(prefix)
        same_chapter = {n: f for n, f in sections.items() if n.startswith(prefix)}
        rows = methods_of(same_chapter) if prefix == "method-" else rows_of(same_chapter, prefix)
        yield together[prefix], rows, _remarks(same_chapter)


def _remarks(found: Mapping[str, StoredSection]) -> list[str]:
    several = len(found) > 1
    remarks = []
    for one in found.values():
        lines = list(one.get("remarks", ()))
        if one["state"] == "failed":
            lines.append(f"failed: {one['error']}")
        if one["state"] == "started":
            lines.append("was interrupted")
        remarks += [f"{one['title']}: {line}" if several else line for line in lines]
    return remarks


def _table(rows: list[Row]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    names = [name for name in names if any(row.get(name) not in (None, "") for row in rows)]
    lines = [names, ["---"] * len(names), *([_cell(row.get(name)) for name in names] for row in rows[:MAX_ROWS])]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return text if len(rows) <= MAX_ROWS else f"{text}\n\n{len(rows) - MAX_ROWS} more rows are in {RESULTS}."


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        around = f" [{value['low']:.4g}, {value['high']:.4g}]" if value.get("low") is not None else ""
        return f"{value['value']:.4g}{around}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def profile_of(sections: Mapping[str, StoredSection], environment: StoredSection) -> Profile | None:
    """Return the device profile; None until the device itself was measured."""
    measured_parts = {name: found.get("profile") or {} for name, found in sections.items()}
    device = measured_parts.get("device")
    if not device:
        return None
    over = [row["overhead"]["value"] for row in rows_of(sections, "overhead") if row.get("overhead")]
    source = f"measured by {COMMAND}, the worst of {len(over)}"
    title = str(environment["device"])
    return Profile.model_validate(
        {
            **device,
            "name": slug(title),
            "title": title,
            "step_overhead": Figure(value=max(over), source=source) if over else None,
            "passes": [one for part in measured_parts.values() for one in part.get("passes", ())],
            "steps": [one for part in measured_parts.values() for one in part.get("steps", ())],
            "measured": provenance(COMMAND),
        }
    )

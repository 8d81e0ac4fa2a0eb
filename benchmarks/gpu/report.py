"""Report of the sections: a Markdown page, a JSON file, a device profile and plots.

The plots show v(n) by batch size, plain decoding against bandwidth, and the parts of a step.
"""

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.gpu.lab import Lab
from benchmarks.gpu.sections import COMMAND, METHODS, PLAIN, shape_of_draft
from specdemo.bench.device import CONTEXT, measured, slug
from specdemo.bench.html_page import write_charts
from specdemo.bench.plot import Chart, line
from specdemo.core.atomic_io import finite, json_text, write_text
from specdemo.models.devices import device_kind
from specdemo.prediction.profiles import Figure, MeasuredStep, Passes, Profile, write_profile

NO_GPU = "Not a GPU measurement: a trial with tiny models on a CPU."
RESULTS = "results.json"
LONGEST = 40  # largest number of rows of a table on the page; the JSON has all

LAPS = ("draft", "verify", "accept", "commit", "observe")

StoredSection = Mapping[str, Any]
Row = dict[str, Any]


def write_report(
    folder: Path, sections: Mapping[str, StoredSection], environment: StoredSection, lab: Lab
) -> list[str]:
    """Write all files and return their names."""
    write_text(folder / RESULTS, json_text(finite({"environment": environment, "sections": sections}), indent=1) + "\n")
    write_text(folder / "report.md", _page(sections, environment, lab))
    files = ["report.md", RESULTS]
    profile = profile_of(sections, environment, lab)
    if profile is not None:
        write_profile(profile, folder / f"{profile.name}.profile.json")
        files.append(f"{profile.name}.profile.json")
    drawn = write_plots(folder / "plots.html", sections, environment, NO_GPU * lab.small)
    return [*files, "plots.html"] if drawn else files


def rows_of(sections: Mapping[str, StoredSection], prefix: str) -> list[Row]:
    """Return the rows of all sections whose name starts with `prefix`."""
    return [row for name, found in sections.items() if name.startswith(prefix) for row in found.get("rows", ())]


def methods_of(sections: Mapping[str, StoredSection]) -> list[Row]:
    """Return the steps of all methods and their ratio to plain decoding."""
    rows = rows_of(sections, "method-")
    plain = next((row for row in rows if row["method"] == PLAIN), None)
    if plain is None:
        return rows
    return [row | {"speed-up": round(row["tokens/s"] / plain["tokens/s"], 3)} for row in rows]


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
    lines = [names, ["---"] * len(names), *([_cell(row.get(name)) for name in names] for row in rows[:LONGEST])]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return text if len(rows) <= LONGEST else f"{text}\n\n{len(rows) - LONGEST} more rows are in {RESULTS}."


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        around = f" [{value['low']:.4g}, {value['high']:.4g}]" if value.get("low") is not None else ""
        return f"{value['value']:.4g}{around}"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value).replace("|", "\\|").replace("\n", " ")


def profile_of(sections: Mapping[str, StoredSection], environment: StoredSection, lab: Lab) -> Profile | None:
    """Return the device profile; None until the device itself was measured."""
    numbers = {row["what"]: row["is"] for row in rows_of(sections, "device")}
    if not numbers:
        return None
    source = f"measured by {COMMAND}"

    def figure(name: str) -> Figure | None:
        return Figure(value=numbers[name], source=source) if name in numbers else None

    rates = {what.split()[1]: figure(what) for what in numbers if what.startswith("compute_tflop_per_s ")}
    over = [row["overhead"]["value"] for row in rows_of(sections, "overhead") if row.get("overhead")]
    title = str(environment["device"])
    return Profile.model_validate(
        {
            "name": slug(title),
            "title": title,
            "kind": "cpu" if lab.small else "gpu",
            "compute_tflop_per_s": rates,
            **{name: figure(name) for name in ("memory_gb", "bandwidth_gb_per_s", "launch_us", "node_us", "wait_us")},
            "link_gb_per_s": figure("link_gb_per_s"),
            "step_overhead": Figure(value=max(over), source=f"{source}, the worst of {len(over)}") if over else None,
            "passes": tuple(_passes(rows_of(sections, "widths"), lab)),
            "steps": tuple(_steps(rows_of(sections, "method-"), lab)),
            "measured": measured(COMMAND),
        }
    )


def _passes(rows: list[Row], lab: Lab) -> Iterator[Passes]:
    for name in dict.fromkeys(row["shape"] for row in rows):
        own = [row for row in rows if row["shape"] == name]
        ms: dict[int, dict[int, float]] = {}
        for row in own:
            ms.setdefault(row["batch"], {})[row["slots"]] = row["ms"]
        yield Passes(
            model=name,
            dtype=device_kind(lab.device).default_dtype(lab.device),
            kernels=own[0]["layers"],
            context=CONTEXT,
            ms=ms,
        )


def _steps(rows: list[Row], lab: Lab) -> Iterator[MeasuredStep]:
    """Return greedy steps only, because predictions cover no others."""
    for row in rows:
        known, drafted = METHODS.get(row["method"]), row["drafted/step"]
        if known is None or known.temperature:
            continue
        full_draft = "nodes" not in (known.options or {}) and drafted == known.k
        yield MeasuredStep(
            model=row["shape"],
            method=known.method,
            dtype=row["precision"],
            draft=shape_of_draft(lab) if known.draft else "",
            context=CONTEXT + (4 if lab.small else 64),
            k=known.k if full_draft else 0,
            ms={name.removesuffix(" ms"): value for name, value in row.items() if name.endswith(" ms")},
            drafted=drafted,
            kept=row["kept/step"],
        )


def write_plots(path: Path, sections: Mapping[str, StoredSection], environment: StoredSection, note: str) -> bool:
    """Write the plots; return False if there is nothing to draw. note: text below the title."""
    drawn = [chart for chart in (_widths(sections), _bandwidth(sections), _laps(sections)) if chart]
    if drawn:
        write_charts(path, f"{environment['device']}, {environment['date']}", drawn, above=f"<p>{escape(note)}</p>")
    return bool(drawn)


def _widths(sections: Mapping[str, StoredSection]) -> Chart:
    rows = rows_of(sections, "widths")
    own = [row for row in rows if row["shape"] == rows[0]["shape"]]
    title = f"Time of a pass over n tokens, relative to one token, {rows[0]['shape']}" if rows else ""
    lines = [
        line(f"batch {batch}", number, [(row["slots"], row["v"]) for row in own if row["batch"] == batch])
        for number, batch in enumerate(dict.fromkeys(row["batch"] for row in own))
    ]
    return {"title": title, "label": title, "lines": lines, "unit": "n, tokens per row"} if rows else {}


def _bandwidth(sections: Mapping[str, StoredSection]) -> Chart:
    rows = rows_of(sections, "plain-")
    precisions = [*dict.fromkeys(row["precision"] for row in rows)]
    title = "Plain decoding: weights read, as a share of the measured bandwidth"
    groups: dict[str, list[Chart]] = {}
    for row in rows:
        bar = {"name": row["precision"], "value": row["of the bandwidth"]}
        groups.setdefault(row["shape"], []).append(bar | {"series": 1 + precisions.index(row["precision"])})
    return _bars(title, groups, percentage=True, level=0.8)


def _laps(sections: Mapping[str, StoredSection]) -> Chart:
    groups = {
        row["method"]: [
            {"name": lap, "value": row.get(f"{lap} ms") or 0.0, "series": number}
            for number, lap in enumerate(LAPS, start=1)
        ]
        for row in methods_of(sections)
    }
    return _bars("Time of the parts of a step", groups, stacked=True, suffix=" ms", unit="ms")


def _bars(title: str, groups: Mapping[str, list[Chart]], **options: object) -> Chart:
    drawn = [{"name": name, "bars": bars} for name, bars in groups.items()]
    return {"title": title, "label": title, "groups": drawn, **options} if groups else {}

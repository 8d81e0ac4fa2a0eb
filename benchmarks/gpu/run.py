"""Runner of the sections within a time limit. The results of all calls are one file, and the next call continues with
the sections that are missing in it or failed.
"""

import gc
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.lab import Absent, Found, Lab
from benchmarks.gpu.report import NO_GPU, RESULTS, write_report
from benchmarks.gpu.sections import PLANS, Section, sections
from specdemo.bench.base import Report
from specdemo.bench.result import Result
from specdemo.core.atomic_io import finite, json_text, write_text
from specdemo.core.safe_io import FILE_BYTES, read_json
from specdemo.engine.lanes import clear_traceback, reason
from specdemo.models.devices import pick_device
from specdemo.models.machine import device_name, versions

TRIES = 2  # attempts at a section that fails, or ends the process or the call
TRIAL_SECONDS = 5.0  # estimated time of a section on a CPU, with tiny models

StoredSection = dict[str, Any]


def measure(
    folder: Path,
    device: str,
    minutes: float,
    repeats: int,
    report: Report,
    cancelled: Callable[[], bool],
    now: Callable[[], float] = time.monotonic,
    plan: str = "all",
    commit: str = "",
) -> Result:
    """Measure the sections of a plan. commit: of the code, where git does not know it.

    Raises ValueError, one line, if the folder contains measurements of another device.
    """
    lab = Lab(pick_device(device), repeats, PLANS[plan][0], commit)
    begin, table = now(), sections(lab, plan)
    folder.mkdir(parents=True, exist_ok=True)
    finished = _stored(folder, lab)
    lost = ""
    for name, section in table.items():
        left = 60.0 * minutes - (now() - begin)
        if name in finished and _over(finished[name]):
            continue
        if cancelled() or lost or (TRIAL_SECONDS if lab.small else section.seconds) > left:
            continue  # a shorter section may still fit
        report(sum(_over(finished[k]) for k in table if k in finished) / len(table), section.title)
        tries = finished.get(name, {}).get("tries", 0) + 1
        finished[name] = _entry(section, lab, "started", tries)
        _write(folder, finished, lab)
        finished[name] = _run(section, lab, tries, now)
        _write(folder, finished, lab)
        if not lab.alive():
            lost = f"The device was lost during {section.title!r}."
    environment = _environment(lab)
    _write(folder, finished, lab)
    files = [RESULTS, *write_report(folder, finished, environment, lab)]
    return _result(table, finished, environment, lab, [lost] * bool(lost), files)


def _stored(folder: Path, lab: Lab) -> dict[str, StoredSection]:
    if not (folder / RESULTS).is_file():
        return {}
    stored: dict[str, StoredSection] = read_json(folder / RESULTS, FILE_BYTES)["sections"]
    here = device_name(lab.device)
    for found in stored.values():
        there = found["environment"]["device"]
        if there != here:
            raise ValueError(f"{folder} contains measurements of {there}, this device is {here}; choose another --out")
    return stored


def _over(found: StoredSection) -> bool:
    return found["state"] == "done" or int(found["tries"]) >= TRIES


def _run(section: Section, lab: Lab, tries: int, now: Callable[[], float]) -> StoredSection:
    begin = now()
    entry = _entry(section, lab, "done", tries)
    try:
        found = section.run(lab)
    except Absent as error:
        found = Found(remarks=[f"Skipped: {error}."])
    except Exception as error:
        found = Found()
        entry |= {"state": "failed", "error": reason(error)}
        clear_traceback(error)
        lab.forget()
    gc.collect()
    return entry | asdict(found) | {"seconds": round(now() - begin, 1)}


def _entry(section: Section, lab: Lab, state: str, tries: int) -> StoredSection:
    return {"title": section.title, "state": state, "tries": tries, "environment": _environment(lab)}


def _environment(lab: Lab) -> dict[str, Any]:
    threads = torch.get_num_threads() if lab.small else None
    dtype = "several precisions"
    facts = {"device": device_name(lab.device), "threads": threads, "dtype": dtype, "versions": versions()}
    return facts | {"commit": lab.commit, "date": time.strftime("%Y-%m-%d", time.gmtime())}


def _write(folder: Path, sections: dict[str, StoredSection], lab: Lab) -> None:
    """Write all results after every section, so that a call that is cut off loses one."""
    content = {"environment": _environment(lab), "sections": sections}
    write_text(folder / RESULTS, json_text(finite(content), indent=1) + "\n")


def _result(
    table: dict[str, Section],
    sections: dict[str, StoredSection],
    environment: StoredSection,
    lab: Lab,
    remarks: list[str],
    files: list[str],
) -> Result:
    rows = [
        {
            "section": name,
            "state": _state(sections.get(name)),
            "seconds": sections.get(name, {}).get("seconds"),
            "what": _status_line(found),
        }
        for name in table
        for found in [sections.get(name, {})]
    ]
    open_ = [section.seconds for name, section in table.items() if not (name in sections and _over(sections[name]))]
    if open_:
        remarks.append(
            f"{len(open_)} of {len(table)} sections remain, about {sum(open_) / 60.0:.0f} minutes on a large GPU: "
            "run the same command again, with a larger --minutes if none was run."
        )
    remarks += [NO_GPU] * lab.small
    return Result("gpu", lab.repeats, {}, environment, rows, [*remarks, f"Written: {', '.join(files)}."])


def _state(found: StoredSection | None) -> str:
    if found is None:
        return "to come"
    return "cut off" if found["state"] == "started" else str(found["state"])


def _status_line(found: StoredSection) -> str:
    remark: str = found.get("error") or next(iter(found.get("remarks", ())), "")
    return remark or (f"{len(found['rows'])} rows" if found.get("rows") else "")

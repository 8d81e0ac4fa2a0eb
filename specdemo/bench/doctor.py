"""Checks of `doctor`: the installation and this machine, or the drafters of a target.

Versions are printed before anything imports torch, which may be broken.
"""

import os
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from specdemo import __version__
from specdemo.bench.candidates import lanes_to_try
from specdemo.bench.report import table
from specdemo.costs.passes import pass_rows
from specdemo.engine.comparison import Lane
from specdemo.methods import PLUG_INS, detect_head, unusable
from specdemo.models.gguf_files import is_here
from specdemo.models.packaged import DOWNLOADS, EMBEDDED
from specdemo.models.ref import ModelRef
from specdemo.presets.drafters import (
    RULES,
    UNKNOWN,
    all_published,
    drafters_of,
    drafts_for,
    published_drafters,
)
from specdemo.presets.files import DEFAULT, preset, thinking_remarks

if TYPE_CHECKING:
    from specdemo.core.protocol import Target

LIBRARIES = (
    "torch transformers gradio accelerate bitsandbytes safetensors tokenizers llguidance llama-cpp-python gguf".split()
)


def check_machine() -> int:
    """Print versions, devices and the cost of verification. Return the exit code."""
    libraries = {name: _version(name) for name in LIBRARIES}
    for name, value in {"specdemo": __version__, "python": platform.python_version(), **libraries}.items():
        print(f"{name:<18}{value}")
    print(f"{'cpu cores':<18}{os.cpu_count()}; the number of threads for decoding is measured")
    reasons = unusable()
    for name in PLUG_INS:
        print(f"{'plug-in':<18}{reasons.get(name, name)}")

    from specdemo.engine.session import environment
    from specdemo.models.devices import DEVICE_KINDS, best_device
    from specdemo.models.load import load_target

    embedded = [*map(ModelRef, EMBEDDED)]
    missing = [name for name in embedded if not (name.path and name.path.is_dir())]
    if missing:
        print(f"{'embedded models':<18}missing: {', '.join(missing)}")
        return 1
    heads = {name: head for name in embedded if (head := detect_head(name))}
    print(f"{'embedded models':<18}{', '.join(name for name in embedded if name not in heads)}")
    print(f"{'embedded heads':<18}{', '.join(f'{name} ({head})' for name, head in heads.items())}")
    stories = load_target("stories")
    print(f"{'device':<18}{environment(stories)['device']}")
    for name, row in DEVICE_KINDS.items():
        if row.count():
            auto = f"{name} (auto)" if name == best_device().type else name
            print(f"{auto:<18}{row.count()}, {row.title}: {row.describe()}")
    print(_passes(stories))
    return 0


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _passes(target: "Target") -> str:
    """Measure the passes of a target."""
    from specdemo.engine.session import environment
    from specdemo.models.pass_cost import checking_note, measure_passes

    measure_passes(target)
    rows = [*pass_rows(environment(target)), ("Verification", checking_note(target))]
    return "\n".join(f"{title.lower():<18}{words}" for title, words in rows)


def check_drafters(target: ModelRef, drafter: ModelRef | None) -> int:
    """Print which drafters fit a target, and why others do not; the verification of a target on this machine. drafter:
    check only this one, and run it if it is a head. Return the exit code, 2 if it does not fit."""
    from specdemo.engine.session import Session
    from specdemo.methods.pairs import check_pair, outline
    from specdemo.models.load import load_target

    named = not target.is_gguf_file or target in DOWNLOADS  # a file that does not exist is an error
    if drafter is None and target.gguf and named and not is_here(target):
        print(f"{'not tried':<18}it is not on this machine\n\nPublished drafters:\n{published(target)}")
        return 0
    described = outline(target)
    if described.tokenizer is None:
        print(f"{target} has no tokenizer, so it does not run; put its tokenizer.json into the same folder\n")
    found = [check_pair(described, drafter)] if drafter else drafters_of(target, described)
    lanes = [] if drafter else lanes_to_try(target, (), ()).values()
    fits = {True: "fits", False: "no", None: "unknown"}
    rows = [("none", lane.method, "fits", "needs no drafter") for lane in lanes if not lane.model]
    rows += [(p.drafter, p.method, fits[p.fits], p.reason + (f" ({p.place})" if p.place else "")) for p in found]
    print(table(("drafter", "method", "fits", "why"), rows))
    fitting = [Lane(method=p.method, model=p.drafter) for p in found if p.fits][:1]  # the best one
    if fitting:
        about = Session().memory(preset(DEFAULT).with_changes(target=target, lanes=[fitting[0].model_dump()]))
        print(f"\n{'memory':<18}with {fitting[0].model}: {about}")
    if drafter is None:
        if target.gguf or target.path:
            print(f"\n{_passes(described if target.gguf else load_target(target))}")
        print(f"\nPublished drafters:\n{published(target)}")
    for remark in thinking_remarks(target, [pair.drafter for pair in found if pair.fits], described):
        print(remark)
    if drafter and found[0].fits and detect_head(drafter) and target.path:
        from specdemo.bench.quality import quality

        print()
        for text in quality(target, Lane(method=found[0].method, model=drafter)):
            print(text, flush=True)
    return 2 if drafter and not found[0].fits else 0


def published(target: ModelRef) -> str:
    """Return the published drafters of a target as text."""
    rows = [_entry(entry.row()) for entry in published_drafters(target)]
    rules = [f"No drafter of {target} is in the catalogue. Rules for choosing one:", *(f"- {rule}" for rule in RULES)]
    lines = rows or rules
    alike = {entry.target: 0 for entry in all_published() if target.base_name in entry.target.base_name}
    lines += [f"Targets of the catalogue with this name: {', '.join(alike)}"] if alike and not rows else []
    lines += [f"As a drafter: {name} drafts for {', '.join(larger)}" for name, larger in drafts_for(target).items()]
    return "\n".join(lines)


def _entry(row: Mapping[str, str]) -> str:
    """Format a published drafter: its name, and below it what is known."""
    words = {"size": "size {}", "licence": "licence {}", "trained": "trained {}"}
    known = [words.get(name, "{}").format(row[name]) for name in ("kind", "size", "format", "licence", "trained")]
    facts = ", ".join(fact for fact in known if not fact.endswith(UNKNOWN))
    lines = [row["drafter"], f"{facts}; {row['engines']}", row["accepted"], row["source"]]
    return "\n  ".join(line for line in lines if line != UNKNOWN)

"""Check of the presets against the hub, without downloading weights: `PYTHONPATH=. python .github/check_presets.py`.

Every repository must exist at its revision, with a config and weights. Its gating and licence must be as stated in the
presets, and a preset's weights must fit into the memory that it states. Exit codes: 1 if something is wrong, 2 if the
hub cannot be asked.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from huggingface_hub import ModelInfo, constants

from specdemo.models.errors import Unreachable
from specdemo.models.gguf_files import gguf_on_hub
from specdemo.models.packaged import SMOLLM2_GGUF
from specdemo.models.ref import ModelRef
from specdemo.models.sources import PICKLED, Repository, model_info, select_files
from specdemo.presets.files import Preset, load_presets

UNNAMED = ("other", "unknown")  # the hub's names for an unknown licence


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Facts from the hub about one repository, or about a preset's weights."""

    name: str
    text: str
    wrong: tuple[str, ...] = ()
    weights: int = 0  # bytes when loaded in half precision

    def __str__(self) -> str:
        return f"{'WRONG' if self.wrong else 'ok':5}  {self.name}: {'; '.join((*self.wrong, self.text))}"


def answers(presets: Iterable[Preset]) -> Iterator[CheckResult]:
    """Yield one answer per repository, then one per preset that states too little memory.

    Raises ValueError, one line, if the hub is disabled or cannot be reached.
    """
    if constants.HF_HUB_OFFLINE:
        raise ValueError("HF_HUB_OFFLINE is set, but the check needs the hub; unset it")
    users: dict[ModelRef, list[Preset]] = {}
    for preset in presets:
        for model in dict.fromkeys(preset.models):
            if not model.embedded and model != SMOLLM2_GGUF:
                users.setdefault(model, []).append(preset)
    sizes: dict[str, int] = {}
    for name, those in users.items():
        answer = _query_hub(name, those)
        sizes[name] = answer.weights
        yield answer
    yield from _cramped({preset.id: preset for those in users.values() for preset in those}, sizes)


def _query_hub(name: ModelRef, users: list[Preset]) -> CheckResult:
    try:
        info = model_info(name)
        found = gguf_on_hub(name) if name.gguf else select_files(name, info, PICKLED)
    except Unreachable:
        raise ValueError(f"{constants.ENDPOINT} cannot be reached; try again later") from None
    except ValueError as error:
        return CheckResult(name, f"presets {_ids(users)}", (str(error),))
    size = sum(found.files[file] for file in found.weights)
    licence, gate = _licence(info), "gated" if info.gated else "open"
    facts = f"{size / 1e9:.1f} GB, licence {licence or 'not stated'}, {gate}, at {(info.sha or '')[:8]}"
    return CheckResult(
        name, facts, (*_files(found), *_terms(name, info, users)), size - 2 * found.numbers.get("F32", 0)
    )


def _files(found: Repository) -> Iterator[str]:
    if "config.json" not in found.files and not all(ModelRef(file).is_gguf_file for file in found.files):
        yield "has no config.json"
    if not found.weights:
        yield "has no weights"
    yield from (f"{file} is empty" for file in found.weights if not found.files[file])


def _terms(name: str, info: ModelInfo, users: list[Preset]) -> Iterator[str]:
    """Yield remarks about gating and licence. A preset has the licence of its target."""
    silent = [p for p in users if info.gated and not p.gated]
    if silent:
        yield f"is gated, which {_ids(silent)} does not state"
    open_again = [p for p in users if p.target == name and p.gated and not info.gated]
    if open_again:
        yield f"is open, but {_ids(open_again)} states that it is gated"
    licence = _licence(info)
    other = [
        p for p in users if p.target == name and licence not in ("", *UNNAMED) and not _same_licence(licence, p.licence)
    ]
    if other:
        yield f"has licence {licence!r}, but {_ids(other)} states {other[0].licence!r}"


def _cramped(presets: Mapping[str, Preset], sizes: Mapping[str, int]) -> Iterator[CheckResult]:
    """Yield presets whose weights exceed the stated memory. Quantised presets are skipped: they need less than their
    files.
    """
    for id, preset in presets.items():
        weights = sum(sizes.get(model, 0) for model in {*preset.models})
        if preset.memory_gb and preset.quantization is None and weights > preset.memory_gb * 1e9:
            yield CheckResult(
                f"preset {id}", f"it states {preset.memory_gb:g} GB", (f"weights of {weights / 1e9:.1f} GB",)
            )


def _licence(info: ModelInfo) -> str:
    return str(info.card_data.get("license") or "") if info.card_data else ""


def _same_licence(licence: str, words: str) -> bool:
    """Return True for different spellings of a licence, such as llama3.1 and Llama 3.1 Community License."""
    short, long = (re.sub(r"[^a-z0-9]", "", text.lower()) for text in (licence, words))
    return short in long


def _ids(presets: Iterable[Preset]) -> str:
    return ", ".join(preset.id for preset in presets)


def main() -> int:
    """Print one line per repository and per wrong preset; return the exit code."""
    found = []
    try:
        for answer in answers(load_presets().values()):
            found.append(answer)
            print(answer, flush=True)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    wrong = sum(bool(answer.wrong) for answer in found)
    print(f"{wrong} of {len(found)} are wrong" if wrong else f"all {len(found)} are as the presets state")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

"""The comparison that a user names: a preset with changes, or a target and a drafter as a preset of this process."""

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from specdemo.core.atomic_io import check_output
from specdemo.core.suggest import program
from specdemo.core.trace import RunTrace
from specdemo.engine.comparison import Lane
from specdemo.methods import detect_method
from specdemo.models.errors import checkpoint_errors
from specdemo.models.gguf_files import check_files, fetch_parts, has_chat_template, local_header
from specdemo.models.gguf_header import TAGS
from specdemo.models.local_models import draft_beside
from specdemo.models.packaged import DOWNLOADS
from specdemo.models.ref import ModelRef
from specdemo.presets.files import DEFAULT, Preset, load_presets, preset, read_yaml, save_trace
from specdemo.presets.link import OWN

LOOKUPS = ("suffix", "ngram")  # methods that need no draft model
COPIED = 7  # draft length for a text that is corrected: where it is copied, long drafts are accepted
ADAPTIVE_LOOKUP = Lane(method="adaptive", k=COPIED, options={"drafter": "ngram"})  # loses little without copies
CORRECTING = (Lane(method="suffix", k=COPIED), ADAPTIVE_LOOKUP)
CODES = re.compile("(?<!de)(?<!en)code|codestral")  # in names of models that write code
OWN_LENGTH = 3  # draft length of a prediction layer, trained for the next token
QUESTION = "Explain to a ten-year-old why the sky is blue, in six sentences."
TASKS = {  # name -> kind of work, whose first prompt it is, and the prompt's end for a model without a chat template
    "Correct": ("edit", "Corrected text:"),
    "Rewrite code": ("code", "The new code:"),
    "Summarise": ("summary", "Summary:"),
    "Extract": ("json", "JSON:"),
    "Chat": ("chat", "Answer:"),
}


@lru_cache(maxsize=1)
def work_prompts() -> Mapping[str, list[str]]:
    """Return the built-in prompts by kind of work."""
    texts = read_yaml(Path(__file__).with_name("work.yaml"))
    assert isinstance(texts, dict)
    return texts | {"chat": [QUESTION, *texts["chat"]]}


def add_pair(target: ModelRef, draft: ModelRef | None = None, **settings: object) -> Preset:
    """Add the comparison of `pair` to the presets and return it."""
    load_presets()[OWN] = comparison = pair(target, draft, **settings)
    return comparison


def add_race(target: ModelRef, draft: ModelRef | None = None, **settings: object) -> Preset:
    """Add the race that a page of these models starts with to the presets and return it: the drafter, or a draft model
    beside the target's file, and adaptive lookup; without a drafter, lookups."""
    beside = None if draft else draft_beside(target)
    with suppress(ValueError):  # both models may need more memory than there is
        draft = pair(target, beside, **settings).lanes[0].model if beside else draft
    comparison = add_pair(target, draft, **settings)
    if draft:
        load_presets()[OWN] = comparison = comparison.changed(lanes=[*comparison.lanes, ADAPTIVE_LOOKUP])
    return comparison


def pair(target: ModelRef, draft: ModelRef | None = None, **settings: object) -> Preset:
    """Return the comparison of two models. Reads headers and configs, no weights.

    draft: a draft model or a head; None: lookups. settings: other settings of the comparison.
    Raises ValueError, one line, for a model that cannot be read or does not fit into memory, and for a drafter that
    does not fit the target.
    """
    from specdemo.engine.session import Session  # imports torch

    method = drafter_method(target, draft)
    corrects = draft is None and not target.embedded
    lookups = [*CORRECTING] if corrects else [Lane(method=name) for name in LOOKUPS]
    lookups += [Lane(method="mtp", model=target, k=OWN_LENGTH)] if has_prediction_layer(target) else []
    lanes = [Lane(method=method, model=draft)] if draft else lookups
    chat = has_chat_template(target)
    title = f"{target.short_name} with {draft.short_name if draft else 'suffix and n-gram lookup'}"
    about = {"id": OWN, "title": title[:80], "chip": "Your models", "description": "", "chat": chat}
    start = preset(DEFAULT).with_changes(target=target, lanes=[lane.model_dump() for lane in lanes], **settings)
    comparison = start.changed(**about, prompt=prompt_for(target, corrects))
    Session().check_room(comparison)
    return comparison


def prompt_for(target: ModelRef, corrects: bool = False) -> str:
    """Return a prompt of the target's kind: code to rewrite, a question, or a text to continue. corrects: for lookups,
    a text to correct instead of a question."""
    chat = has_chat_template(target)
    if not target.embedded and (corrects or _codes(target)):
        return task("Rewrite code" if _codes(target) else "Correct", chat is not False)
    return preset(DEFAULT).prompt if chat is False else QUESTION


def task(name: str, chat: bool) -> str:
    """Return the prompt for a kind of work. chat: for a model with a chat template."""
    kind, end = TASKS[name]
    words = work_prompts()[kind][0]
    return words if chat else f"{words}\n\n{end}\n"


def kind_of_work(preset_id: str, prompt: str) -> str:
    """Return the kind of work of a task's, a built-in or the preset's own prompt; empty for another one."""
    kinds = {text: kind for kind, texts in work_prompts().items() for text in texts}
    kinds |= {task(name, chat=False): kind for name, (kind, _) in TASKS.items()}
    base = load_presets().get(preset_id)
    return kinds.get(prompt) or (base.work if base and base.prompt == prompt else "")


def comparison(preset_id: str | None, changes: Mapping[str, object]) -> Preset:
    """Return a preset with changes. Without a preset, that of `add_pair` for the target and the model in the changes.

    A prompt that was written as a text to continue is not sent to the chat template of another target. Raises
    ValueError, one line.
    """
    changes = dict(changes)
    target, drafter = changes.get("target"), changes.get("model")
    if preset_id is not None:
        name = ModelRef(preset_id)
        if "/" in name or name.gguf or name.embedded or name in DOWNLOADS:
            raise ValueError(f"{preset_id} is a model, not a preset; name it as the target (--target)")
        start = preset(preset_id)
        race = start.with_changes(**changes)
        written = "prompt" in changes or race.target == start.target or has_chat_template(start.target) is not False
        chats = race.chat is not False and has_chat_template(race.target)
        return race.changed(prompt=QUESTION) if chats and not written else race
    if not isinstance(target, str):
        raise ValueError(
            f"Missing argument 'PRESET'. `{program()} presets` lists them; or name a model: --target MODEL"
        )
    named = ModelRef(target)
    if changes.get("method") == "mtp" and drafter is None and named.gguf:
        changes["model"] = target
    if isinstance(drafter, str) and "method" not in changes:
        others = {name: it for name, it in changes.items() if name != "model"}
        return add_pair(named, ModelRef(drafter)).with_changes(**others)
    return add_pair(named).with_changes(**changes)


def run(
    preset_id: str | None = None,
    prompt: str | None = None,
    out: str | Path | None = None,
    force: bool = False,
    **overrides: object,
) -> RunTrace:
    """Run the comparison and return its trace; also write it to `out` if given.

    preset_id: None for a `target` in overrides: it is raced with n-gram lookup and suffix decoding, or with `model`.
    force: overwrite a file that specdemo did not write. overrides: any setting of `Preset.with_changes` (k, method,
    max_new_tokens, temperature, seed, ...). Raises ValueError, one line with the fix.
    """
    from specdemo.engine.session import session  # imports torch

    changes = overrides if prompt is None else {**overrides, "prompt": prompt}
    spec = comparison(preset_id, changes)
    check_output(out, force)
    trace = session().run(spec)
    if out is not None:
        save_trace(trace, out)
    return trace


def drafter_method(target: ModelRef, draft: ModelRef | None) -> str:
    """Return the method of the drafter. Raises ValueError if one of the models is unusable, or they do not fit."""
    from specdemo.methods.pairs import check_pair, gguf_head, outline

    head = gguf_head(draft, target) if draft and draft.gguf else ""
    for name in filter(None, (target, None if head else draft)):
        if name.gguf:
            _check_gguf(name)
    if head:
        return head
    if target.gguf:
        return "ngram" if draft is None else _method_of(draft)
    described = outline(target)
    if draft is None or draft.gguf:
        return "draft_model" if draft else "ngram"
    pair = check_pair(described, draft)
    if not pair.fits:
        raise ValueError(f"{draft} does not fit {target}: {pair.reason}")
    return pair.method


def _codes(target: ModelRef) -> bool:
    """Return whether the name of a model, or the tags of its file, say that it writes code."""
    tags: object = ()
    with suppress(ValueError):
        header = local_header(target) if target.gguf else None
        tags = header.metadata.get(TAGS, ()) if header else ()
    tagged = isinstance(tags, list) and "code" in tags
    return tagged or CODES.search(f"{target.base_name} {target.short_name}".lower()) is not None


def has_prediction_layer(name: ModelRef) -> bool:
    """Return True for a GGUF file on this machine that states a prediction layer."""
    with suppress(ValueError):
        return bool(name.gguf and (header := local_header(name)) and header.prediction_layer)
    return False


def _check_gguf(name: ModelRef) -> None:
    """Check a GGUF model without loading it. Its files are checked if they are on this machine."""
    from specdemo.models.llamacpp import library

    header = local_header(name)
    library()
    if header is not None:
        check_files(fetch_parts(name), name)


def _method_of(draft: ModelRef) -> str:
    """Return the method that reads a drafter for a GGUF target. Raises ValueError if it cannot be read."""
    from specdemo.models.checkpoints import open_meta_checkpoint

    if draft.gguf:
        return "draft_model"
    with checkpoint_errors(draft):
        return detect_method(open_meta_checkpoint(draft))

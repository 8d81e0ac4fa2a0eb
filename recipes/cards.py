"""Model cards: `MODEL_CARD.md` and `ATTRIBUTION.md` of a trained folder, made from its provenance and its weights.

The samples are the first ones from fixed prompts and fixed seeds. They are neither selected nor edited.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from specdemo.core.files import write_text
from specdemo.training.collect import continue_texts

PROMPTS = {
    "stories": (
        "Once upon a time, there was a little dragon who",
        "One day, Tom and his dog went to the park.",
        "The old clock on the wall",
    ),
    "code": (
        'def read_config(path):\n    """Read the configuration file."""',
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):",
        "def area(width, height):\n    return width * height\n\n\n# Rename width to size.\ndef",
    ),
}
SAMPLE_TOKENS = 140
CURVE_ROWS = 12
BARS = "▁▂▃▄▅▆▇█"

DATA = {
    "stories": """\
Excerpts of TinyStories (Eldan & Li 2023, arXiv 2305.07759; data licence CDLA-Sharing-1.0) and English picture books of
the African Storybook and of Pratham Books' StoryWeaver (CC-BY; every title and author is named in {attribution}).
About a tenth of the stories are repeated with one name or thing changed, so that the models learn to copy.
150 stories were held out; losses and agreements below are on them.""",
    "code": """\
Python source: the standard library of the Python that ran the recipe, and the packages listed with their licences in
{attribution}, fetched from PyPI by pinned hashes. Left out are tests, vendored and generated files, and documents in
which more than half of the five-line sequences were seen before. Docstrings are cut to their first line. A fifth of the
documents (four fifths in the last part of the training) are edits, about 4 % and 40 % of the text: a function, an
instruction as a comment, and the function again with names, types or a constant changed. Projects marked as held out
were never trained on; losses, agreements and measurements below are on them.""",
}

LICENCE = "The weights: Apache-2.0. The data have their own licences, named above; they are not part of this folder."

HONESTY = f"Neither edited nor selected. A text ends where the model ended it, or after {SAMPLE_TOKENS} tokens."

ABOUT = {
    "stories-target": """\
A small story model: the target of specdemo's default comparison. It writes simple English stories in the style of its
data.""",
    "stories-draft-wide": """\
A draft model for `stories`: one wide layer, so that a draft token costs little time.""",
    "stories-draft-deep": """\
A draft model for `stories`: four narrow layers with as many parameters as `stories-draft-wide`. Comparing the two shows
the cost of depth (arXiv 2402.01528).""",
    "stories-draft-other": """\
A draft model for `stories` with its own vocabulary: three of four tokens are also in the target's.""",
    "code-target": """\
A small Python model: the target of specdemo's code presets. Its output looks like code and mostly parses; it does not
know what a program is for.""",
    "code-draft": """\
A draft model for `code` with two layers, the fewest that can copy.""",
    "stories-bytes": """\
A story model that reads and writes bytes, trained together with seven heads (`stories-bytes-heads`) that predict the
bytes after the next one. It demonstrates multi-token prediction.""",
}

JOINT_METHOD = """\
Model and heads were trained together from scratch: both with cross-entropy on the text; in the second half the heads
learn the model's own distribution. All heads together have the same weight as the model's loss. Muon for the hidden
matrices, AdamW for the rest; matrix products in bf16 if the CPU supports it; windows of 256 bytes, and of 1,024 after
70 % of the time; the learning rate is constant for 40 % of the time, then falls linearly to 2 %."""

METHOD = {
    "stories-target": """\
Cross-entropy; dropout of 15 % on the outputs of the embedding and of every branch for 80 % of the time; Muon for the
hidden matrices, AdamW for the rest; matrix products in bf16 if the CPU supports it; windows of 256 tokens, and of 512
after 70 % of the time; the learning rate is constant for 40 % of the time, then falls linearly to 2 %. A run that
starts from trained weights has windows of 512 throughout and half the learning rates, constant for 20 % of the time. At
its end the initial weights are averaged in, with the share that gives the lowest held-out loss.""",
    "code-target": """\
Cross-entropy, in three parts. First a model of four layers, which sees three times the text in the same time (seed).
Then the same model, mostly on edits (a function, an instruction and the function again), so that it learns to copy
(copying). Then a model of twelve layers, made by inserting copies of layers that add nothing at first (block expansion,
Wu et al. 2024, arXiv 2401.02415), on text and edits. Windows of 256 tokens in the first part and 384 later; after 70 %
of each part's time 512, in the last part 1,024. Muon for the hidden matrices, AdamW for the rest; matrix products in
bf16 if the CPU supports it; the learning rate falls linearly to half in the first two parts, and from three quarters to
2 % in the last. At the end the initial weights are averaged in, with the share that gives the lowest held-out loss.""",
    "stories-bytes": JOINT_METHOD,
    "stories-draft-other": """\
Cross-entropy on the text and, twice per epoch, on the target's own samples (temperatures 0, 0.7 and 1, with prompts
from training stories): sequence-level distillation (Kim & Rush 2016, arXiv 1606.07947), which needs no shared tokens.
Its byte-level BPE splits words as GPT-2 does. It was trained on the first fifteenth of the documents, the picture
books, so that its vocabulary differs. Muon for the hidden matrices, AdamW for the rest; matrix products in bf16 if the
CPU supports it; windows of 256 tokens, and of 512 after 70 % of the time; the learning rate is constant for 40 % of the
time, then falls linearly to 2 %.""",
    "code-draft": """\
Initialised from the target's embedding and its first and seventh layer. Forward KL to the target's recorded
distributions (its 32 most probable tokens at every position, the rest as one class); in the second half of the time
half of the rows are the target's own samples (temperatures 0, 0.7 and 1), and part of the loss is cross-entropy to the
target's greedy choice. Muon for the hidden matrices, AdamW for the rest; matrix products in bf16 if the CPU supports
it; the learning rate falls linearly to 2 %.""",
    "draft": """\
Cross-entropy on text first, then forward KL to the target's recorded distributions (its 32 most probable tokens at
every position, the rest as one class); in the last part half of the rows are the target's own samples (temperatures 0,
0.7 and 1), and part of the loss is cross-entropy to the target's greedy choice. Muon for the hidden matrices, AdamW for
the rest; matrix products in bf16 if the CPU supports it; the learning rate falls linearly to 2 %.""",
}

LIMITS = {
    "stories-target": """\
English children's stories only. It knows no facts, follows no instructions and is not safe for any use beyond
demonstrations. Greedy text tends to repeat itself; names and objects drift after a few sentences. A quarter of the
training stories had their capitals restored by rule, so some names stay lower-case. The context is 512 tokens.""",
    "code-target": """\
Python only. It knows no library well and follows no instructions beyond the edits it was trained on. It is not safe for
any use beyond demonstrations; do not run its output. The context is 1,024 tokens.""",
    "code-draft": """\
Made to predict its target, not to write. It fits only a target with the same tokenizer. The context is 1,024
tokens.""",
    "stories-draft-other": """\
Made to predict its target, not to write: on its own its text soon becomes incoherent. It predicts less well beyond
simple stories, and where the target uses a token that it lacks. The context is 512 of its own tokens.""",
    "stories-bytes": """\
English children's stories only, and worse ones than those of `stories`: single bytes are hard for a model of this size.
It knows no facts, follows no instructions and is not safe for any use beyond demonstrations. The context is 1,024
bytes.""",
    "draft": """\
Made to predict its target, not to write: on its own its text soon becomes incoherent. It fits only a target with the
same tokenizer, and predicts less well beyond simple stories. The context is 512 tokens.""",
}


def sparkline(values: list[float]) -> str:
    """Return one bar per value, scaled from the lowest to the highest value."""
    low, high = min(values), max(values)
    step = (high - low) / (len(BARS) - 1) or 1.0
    return "".join(BARS[round((v - low) / step)] for v in values)


def evenly(rows: list[dict[str, float]], count: int) -> list[dict[str, float]]:
    """Return at most `count` evenly spaced `rows`, including the first and the last."""
    if len(rows) <= count:
        return rows
    return [rows[round(i * (len(rows) - 1) / (count - 1))] for i in range(count)]


def curve(evaluations: list[dict[str, float]]) -> str:
    """Return a sparkline and a table of the measurements of a run."""
    if not evaluations:
        return "(nothing was evaluated)"
    names = [n for n in evaluations[0] if n not in ("step", "seconds", "tokens")]
    lines = [f"`{sparkline([e[n] for e in evaluations])}` {n.replace('_', ' ')}  " for n in names]
    heads = ["minutes", "tokens seen", *(n.replace("_", " ") for n in names)]
    lines += ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for e in evenly(evaluations, CURVE_ROWS):
        numbers = " | ".join(f"{e[n]:.3f}" for n in names)
        lines.append(f"| {e['seconds'] / 60:.1f} | {e['tokens'] / 1e6:.2f} M | {numbers} |")
    return "\n".join(lines)


def sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompt: str, temperature: float) -> str:
    """Continue `prompt` until the story ends or `SAMPLE_TOKENS` tokens are generated, with seed 0."""
    ids = tokenizer.encode(prompt)
    generator = torch.Generator().manual_seed(0)
    text = continue_texts(model, torch.tensor([ids]), len(ids) + SAMPLE_TOKENS, torch.tensor([temperature]), generator)
    continuation = text[0, len(ids) :].tolist()
    ended = continuation.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in continuation else len(continuation)
    return str(tokenizer.decode(continuation[:ended], clean_up_tokenization_spaces=False))


def samples(folder: Path, world: str) -> str:
    """Generate the samples of the model in `folder`, in fp32 with the arithmetic of one CPU thread."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    lines = []
    for temperature, name in ((0.0, "greedy"), (0.7, "temperature 0.7, seed 0")):
        for prompt in PROMPTS[world]:
            continuation = sample(model, tokenizer, prompt, temperature)
            if world == "code":
                lines.append(f"{name}:\n\n~~~python\n{prompt}{continuation}\n~~~\n")
            else:
                lines.append(f"- {name}: **{prompt}** {' '.join(continuation.split())}")
    return "\n".join(lines)


def recipe_facts(facts: dict[str, Any], config: dict[str, object], recipe: str) -> str:
    """Return the paragraph of a model card that describes how the weights were made."""
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    minutes = facts.get("minutes", round(facts["seconds"] / 60))
    shape = (
        f"Llama, {config['num_hidden_layers']} x {config['hidden_size']}, feed-forward {config['intermediate_size']}, "
        f"{config['num_attention_heads']} heads, vocabulary {config['vocab_size']}, tied"
    )
    start = f" --start {facts['start']}" if "start" in facts else ""
    corpus = "" if recipe.startswith("code") else " --corpus CORPUS"
    source = f"source commit {facts['commit'] or 'not recorded'}, corpus sha256 `{facts['data_sha256'][:16]}`"
    lines = [
        f"- command: `python -m specdemo train {recipe}{corpus}{start} --minutes {minutes:g}`",
        f"- shape: {shape}; {facts['parameters']:,} parameters, stored in bf16",
        f"- seen: {facts['tokens']:,} tokens in {facts['step']:,} steps and {facts['seconds'] / 60:.0f} minutes",
        f"- software: {versions}; {source}",
    ]
    if "start_share" in facts:
        lines.append(f"- averaged: {facts['start_share']:.0%} of the initial weights")
    for seed in facts.get("seeds", ()):
        lines.append(
            "- earlier part: {name}, {layers} layer(s), {tokens:,} tokens in {minutes:.0f} minutes".format(**seed)
        )
    if "hardware" in facts:
        lines.append(f"- hardware: {facts['hardware']}, {facts['threads']} thread(s)")
    return "\n".join([*lines, *remark(facts)])


def remark(facts: dict[str, object]) -> list[str]:
    """Return a line for a remark that was added to the provenance by hand."""
    return [f"- remark: {facts['remark']}"] if "remark" in facts else []


def measured(found: dict[str, object]) -> str:
    """Return the measurements on held-out text, by name."""
    return "\n".join(f"- {name}: {value}" for name, value in found.items())


def write_card(folder: Path, recipe: str | None = None) -> Path:
    """Write `MODEL_CARD.md` in `folder` from its provenance, config and weights. `recipe` applies if the provenance
    names none.
    """
    facts = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = facts.get("recipe") or recipe or "stories-target"
    kind, world = name if name in METHOD else "draft", name.partition("-")[0]
    has_attribution = (folder / "ATTRIBUTION.md").exists()
    attribution = "[ATTRIBUTION.md](ATTRIBUTION.md)" if has_attribution else f"the ATTRIBUTION.md of `{world}`"
    sections = {
        "Data": DATA[world].format(attribution=attribution),
        "Licence": LICENCE,
        "Recipe": f"{METHOD[kind]}\n\n{recipe_facts(facts, config, name)}",
        "Curve": curve(facts["evaluations"]),
        **({"Measured": measured(facts["measured"])} if "measured" in facts else {}),
        "Samples": f"{HONESTY}\n\n{samples(folder, world)}",
        "Limits": LIMITS.get(name, LIMITS["draft"]),
    }
    body = "\n\n".join(f"## {head}\n\n{text}" for head, text in sections.items())
    card = folder / "MODEL_CARD.md"
    write_text(card, f"# {name.removesuffix('-target')}\n\n{ABOUT.get(name, 'A small story model.')}\n\n{body}\n")
    return card


HEAD_METHOD = """\
The target is frozen. The head learned from the target's recorded hidden states and distributions (its 32 most probable
tokens at every position): first on text, then half on the target's own samples (temperatures 0, 0.7 and 1). Muon for
the hidden matrices, AdamW for the rest; the learning rate is constant for 30 % of the time, then falls linearly to
2 %."""


def write_head_card(folder: Path, title: str, speed: dict[str, object] | None = None) -> Path:
    """Write `MODEL_CARD.md` of a head from its provenance. `speed`: benchmark results by name."""
    facts = json.loads((folder / "provenance.json").read_text(encoding="utf-8"))
    target = facts.get("target", folder.name.removesuffix("-heads"))
    last = facts["evaluations"][-1] if facts["evaluations"] else {}
    positions = sorted(n for n in last if n.startswith("agree_"))
    agreement = [f"| {n.removeprefix('agree_')} | {last[n]:.3f} |" for n in positions]
    world = facts.get("target", facts["recipe"]).partition("-")[0]
    versions = ", ".join(f"{name} {number}" for name, number in facts["versions"].items())
    command = f"python -m specdemo train {facts['recipe']} --corpus CORPUS --minutes {facts['minutes']:g}"
    accepted = [
        "Top-1 agreement of the head with the target, on held-out text with the true prefix:",
        "",
        "| tokens ahead | agreement |",
        "|---|---|",
        *agreement,
    ]
    made = [
        f"{HEAD_METHOD if 'target' in facts else JOINT_METHOD}\n",
        f"- command: `{command}`",
        f"- {facts['parameters']:,} parameters, stored in bf16",
        f"- seen: {facts['tokens']:,} tokens in {facts['step']:,} steps and {facts['seconds'] / 60:.0f} minutes",
        f"- software: {versions}; source commit {facts['commit'] or 'not recorded'}",
        f"- hardware: {facts['hardware']}, {facts['threads']} thread(s)",
        *remark(facts),
    ]
    sections = {
        "Acceptance by position": "\n".join(accepted),
        "Speed": measured(speed) if speed else "Not measured yet.",
        "Data": DATA[world].format(attribution=f"the ATTRIBUTION.md of `{world}`"),
        "Licence": LICENCE,
        "Recipe": "\n".join(made),
        "Curve": curve([{k: v for k, v in e.items() if k != "train_loss"} for e in facts["evaluations"]]),
    }
    body = "\n\n".join(f"## {head}\n\n{text}" for head, text in sections.items())
    card = folder / "MODEL_CARD.md"
    about = f"{title}: a drafter for `{target}`. It needs this target."
    write_text(card, f"# {folder.name}\n\n{about}\n\n{body}\n")
    return card


def write_attribution(corpus: Path, folder: Path) -> None:
    """Write `ATTRIBUTION.md` in `folder` from the corpus's `ORIGIN-*.md` files, which must accompany derived works."""
    origins = [p.read_text(encoding="utf-8").strip() for p in sorted(corpus.glob("ORIGIN-*.md"))]
    if origins:
        head = "# Sources of the training text"
        write_text(folder / "ATTRIBUTION.md", "\n\n".join([head, *("#" + o for o in origins)]) + "\n")

"""Model cards: `MODEL_CARD.md` and `ATTRIBUTION.md` of a trained folder, made from its provenance, its weights and
the texts in cards.yaml.

The samples are the first ones from fixed prompts and fixed seeds. They are neither selected nor edited.
"""

import json
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from specdemo.core.atomic_io import write_text
from specdemo.training.collect import continue_texts

TEXTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
SAMPLE_TOKENS = 140
CURVE_ROWS = 12
BARS = "▁▂▃▄▅▆▇█"

HONESTY = f"Neither edited nor selected. A text ends where the model ended it, or after {SAMPLE_TOKENS} tokens."


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
        for prompt in TEXTS["prompts"][world]:
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
    methods, limits, world = TEXTS["method"], TEXTS["limits"], name.partition("-")[0]
    has_attribution = (folder / "ATTRIBUTION.md").exists()
    attribution = "[ATTRIBUTION.md](ATTRIBUTION.md)" if has_attribution else f"the ATTRIBUTION.md of `{world}`"
    sections = {
        "Data": TEXTS["data"][world].format(attribution=attribution),
        "Licence": TEXTS["licence"],
        "Recipe": f"{methods.get(name, methods['draft'])}\n\n{recipe_facts(facts, config, name)}",
        "Curve": curve(facts["evaluations"]),
        **({"Measured": measured(facts["measured"])} if "measured" in facts else {}),
        "Samples": f"{HONESTY}\n\n{samples(folder, world)}",
        "Limits": limits.get(name, limits["draft"]),
    }
    body = "\n\n".join(f"## {head}\n\n{text}" for head, text in sections.items())
    card = folder / "MODEL_CARD.md"
    about = TEXTS["about"].get(name, "A small story model.")
    write_text(card, f"# {name.removesuffix('-target')}\n\n{about}\n\n{body}\n")
    return card


def write_head_card(folder: Path, title: str) -> Path:
    """Write `MODEL_CARD.md` of a head from its provenance."""
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
        TEXTS["method"]["head" if "target" in facts else "stories-bytes"] + "\n",
        f"- command: `{command}`",
        f"- {facts['parameters']:,} parameters, stored in bf16",
        f"- seen: {facts['tokens']:,} tokens in {facts['step']:,} steps and {facts['seconds'] / 60:.0f} minutes",
        f"- software: {versions}; source commit {facts['commit'] or 'not recorded'}",
        f"- hardware: {facts['hardware']}, {facts['threads']} thread(s)",
        *remark(facts),
    ]
    sections = {
        "Acceptance by position": "\n".join(accepted),
        "Speed": measured(facts["measured"]) if "measured" in facts else "Not measured yet.",
        "Data": TEXTS["data"][world].format(attribution=f"the ATTRIBUTION.md of `{world}`"),
        "Licence": TEXTS["licence"],
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

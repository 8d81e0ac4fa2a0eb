"""Model cards: `MODEL_CARD.md` and `ATTRIBUTION.md` of a trained folder, made from its provenance, its weights, the
texts of its recipe and those in cards.yaml.

The samples are the first ones from fixed prompts and fixed seeds. They are neither selected nor edited.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from recipes.llama import load
from specdemo.core.atomic_io import write_text
from specdemo.core.suggest import counted
from specdemo.training.collect import continue_texts

if TYPE_CHECKING:
    from recipes.job import Recipe

TEXTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
SETTINGS: dict[str, Any] = {"undefined": StrictUndefined, "trim_blocks": True, "keep_trailing_newline": True}
TEMPLATE = Environment(loader=FileSystemLoader(Path(__file__).parent), **SETTINGS).get_template("card.md.jinja")
TEMPLATE.globals["counted"] = counted
SAMPLE_TOKENS = 140
CURVE_ROWS = 12
BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float]) -> str:
    """Return one bar per value, scaled from the lowest to the highest value."""
    low, high = min(values), max(values)
    step = (high - low) / (len(BARS) - 1) or 1.0
    return "".join(BARS[round((v - low) / step)] for v in values)


def curve(evaluations: list[dict[str, float]]) -> dict[str, Any]:
    """Return the measurements of a run for the template: a sparkline per name, and CURVE_ROWS rows with the last."""
    names = [n for n in (evaluations or [{}])[0] if n not in ("step", "seconds", "tokens", "train_loss")]
    every = -(-len(evaluations) // CURVE_ROWS) or 1
    return {"bars": {n: sparkline([e[n] for e in evaluations]) for n in names}, "rows": evaluations[::-every][::-1]}


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
    model, tokenizer = load(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    lines = [f"Neither edited nor selected. A text ends where the model ended it, or after {SAMPLE_TOKENS} tokens.\n"]
    for temperature, name in ((0.0, "greedy"), (0.7, "temperature 0.7, seed 0")):
        for prompt in TEXTS["prompts"][world]:
            text = sample(model, tokenizer, prompt, temperature)
            as_code = f"{name}:\n\n~~~python\n{prompt}{text}\n~~~\n"
            lines.append(as_code if world == "code" else f"- {name}: **{prompt}** {' '.join(text.split())}")
    return "\n".join(lines)


def write_card(folder: Path, recipe: "Recipe") -> Path:
    """Write `MODEL_CARD.md` in `folder` from its recipe, provenance, config and weights."""
    shape, usual = json.loads((folder / "config.json").read_text(encoding="utf-8")), TEXTS["limits"]["draft"]
    about = {"name": recipe.name.removesuffix("-target"), "about": recipe.about, "limits": recipe.limits or usual}
    method = recipe.method or TEXTS["method"]["draft"]
    return _write(folder, recipe.name, recipe.text, method, shape=shape, samples=samples(folder, recipe.text), **about)


def write_head_card(folder: Path, title: str, target: str, recipe: "Recipe") -> Path:
    """Write `MODEL_CARD.md` of a head from its provenance."""
    about = f"{title}: a drafter for `{target}`. It needs this target."
    method = recipe.method or TEXTS["method"]["head"]
    return _write(folder, recipe.name, recipe.text, method, name=folder.name, about=about)


def _write(folder: Path, recipe: str, world: str, method: str, **texts: object) -> Path:
    """Write a card. world: kind of its training text."""
    facts = {"recipe": recipe, **json.loads((folder / "provenance.json").read_text(encoding="utf-8"))}
    own = (folder / "ATTRIBUTION.md").exists()
    attribution = "[ATTRIBUTION.md](ATTRIBUTION.md)" if own else f"the ATTRIBUTION.md of `{world}`"
    texts |= {"data": TEXTS["data"][world].format(attribution=attribution), "licence": TEXTS["licence"]}
    card = folder / "MODEL_CARD.md"
    write_text(card, TEMPLATE.render(facts | {"curve": curve(facts["evaluations"]), "method": method, **texts}))
    return card


def write_attribution(corpus: Path, folder: Path) -> None:
    """Write `ATTRIBUTION.md` in `folder` from the corpus's `ORIGIN-*.md` files, which must accompany derived works."""
    origins = [p.read_text(encoding="utf-8").strip() for p in sorted(corpus.glob("ORIGIN-*.md"))]
    if origins:
        head = "# Sources of the training text"
        write_text(folder / "ATTRIBUTION.md", "\n\n".join([head, *("#" + o for o in origins)]) + "\n")

"""Quality of the code models: `python -m benchmarks.code_quality MODEL CORPUS` prints the figures of their cards.

Reports bits per byte on held-out projects, compared with gzip, zstd, an n-gram model of order 5 on the same tokens and
the story model, and how many completions of held-out code parse or break off only at their end.
"""

import ast
import codeop
import gzip
import math
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from recipes.corpus import token_stream
from recipes.losses import cross_entropy
from specdemo.core.files import json_text
from specdemo.models.resolve import resolve
from specdemo.training.collect import continue_texts
from specdemo.training.corpus import Corpus, read_corpus, windows

ORDER = 5
READ = 4  # the model read a quarter of the training documents
BITS = 12  # bits of a token id
COMPLETIONS, TOKENS = 100, 64


def bits_per_byte(model_name: str, documents: list[str]) -> float:
    """Return bits per byte in windows of the model's context, each read from its beginning."""
    model = AutoModelForCausalLM.from_pretrained(resolve(model_name), dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(resolve(model_name)).backend_tokenizer
    stream = token_stream(documents, tokenizer)
    rows = windows(stream, min(model.config.max_position_embeddings, len(stream)))
    nats = 0.0
    with torch.no_grad():
        for row in rows.split(4):
            nats += float(cross_entropy(model(row[:, :-1]).logits, row[:, 1:])) * row[:, 1:].numel()
    share = rows[:, 1:].numel() / (len(stream) - len(documents))  # share of the text that was read
    return nats / math.log(2) / (share * sum(len(d.encode()) for d in documents))


def n_gram_bits_per_byte(corpus: Corpus, model_name: str) -> float:
    """Return bits per byte of a Witten-Bell interpolation of orders 1 to ORDER, trained on about as much text as the
    model.
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(resolve(model_name)).backend_tokenizer
    seen = token_stream(corpus.train[::READ], tokenizer).numpy()
    valid = token_stream(corpus.valid, tokenizer).numpy()
    probability = np.full(len(valid), 1.0 / tokenizer.get_vocab_size())
    for order in range(1, ORDER + 1):
        grams, counts = np.unique(packed(seen, order), return_counts=True)
        contexts, first, kinds = np.unique(grams >> BITS, return_index=True, return_counts=True)
        totals = np.add.reduceat(counts, first)
        queries = packed(valid, order)
        count = looked_up(grams, counts, queries)
        total, kind = looked_up(contexts, totals, queries >> BITS), looked_up(contexts, kinds, queries >> BITS)
        lower = probability[order - 1 :]
        mixed = (count + kind * lower) / np.maximum(total + kind, 1)
        probability[order - 1 :] = np.where(total > 0, mixed, lower)
    token_probs = probability[valid != 0]
    return float(-np.log2(token_probs).sum() / sum(len(d.encode()) for d in corpus.valid))


def packed(stream: np.ndarray, order: int) -> np.ndarray:
    """Encode every run of `order` tokens as one number."""
    runs = np.zeros(len(stream) - order + 1, dtype=np.int64)
    for i in range(order):
        runs = (runs << BITS) | stream[i : len(stream) - order + 1 + i]
    return runs


def looked_up(keys: np.ndarray, values: np.ndarray, queries: np.ndarray) -> np.ndarray:
    place = np.minimum(np.searchsorted(keys, queries), len(keys) - 1)
    return np.where(keys[place] == queries, values[place], 0)


def compressed(documents: list[str]) -> dict[str, float]:
    text = "\n".join(documents).encode()
    sizes = {"gzip -9": len(gzip.compress(text, 9))}
    if shutil.which("zstd"):
        sizes["zstd -19"] = len(subprocess.run(["zstd", "-19", "-c"], input=text, capture_output=True).stdout)
    return {name: 8 * size / len(text) for name, size in sizes.items()}


def holds(code: str) -> bool:
    """Return whether the code parses, or parses up to its last line with only a bracket, block or string still open."""
    lines = code.split("\n")
    return any(parses("\n".join(lines[:end])) for end in (len(lines), len(lines) - 1))


def parses(code: str) -> bool:
    try:
        ast.parse(code)
        return True
    except SyntaxError:
        pass
    try:
        return codeop.compile_command(code + "\n", symbol="exec") is None
    except (SyntaxError, ValueError, OverflowError):
        return False


def completions(model_name: str, documents: list[str]) -> list[tuple[str, str]]:
    """Complete held-out code greedily from the end of a line. The line break belongs to the next token."""
    model = AutoModelForCausalLM.from_pretrained(resolve(model_name), dtype=torch.float32).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(resolve(model_name))
    rng = random.Random(0)
    pairs: list[tuple[str, str]] = []
    while len(pairs) < COMPLETIONS:
        lines = rng.choice(documents).split("\n")
        prefix = "\n".join(lines[: rng.randrange(3, max(4, len(lines)))])
        if not 200 <= len(prefix) <= 2000:
            continue
        ids = tokenizer.encode(prefix)
        out = continue_texts(
            model, torch.tensor([ids]), len(ids) + TOKENS, torch.tensor([0.0]), torch.Generator().manual_seed(0)
        )
        new = out[0, len(ids) :].tolist()
        new = new[: new.index(0)] if 0 in new else new
        pairs.append((prefix, tokenizer.decode(new)))
    return pairs


def main(model: str, folder: str) -> None:
    corpus = read_corpus(Path(folder))
    found = {"code": bits_per_byte(model, corpus.valid), "stories": bits_per_byte("stories", corpus.valid)}
    found |= compressed(corpus.valid)
    found[f"{ORDER}-gram on the same tokens"] = n_gram_bits_per_byte(corpus, model)
    pairs = completions(model, corpus.valid)
    parsed = sum(holds(prefix + more) for prefix, more in pairs)
    bits = ", ".join(f"{name} {value:.2f}" for name, value in found.items())
    results = {
        "bits per byte of held-out projects": bits,
        f"completions of {TOKENS} tokens that parse or are only cut off at the end": f"{parsed} of {len(pairs)}",
    }
    print(json_text(results, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])

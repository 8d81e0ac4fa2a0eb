"""A head for a chat model, trained on dialogues that the model writes (Magpie, arXiv 2406.08464).

The model continues after the user's header, so that it writes question and answer, then further turns. R rows, T
tokens, H hidden, W draft vocabulary. A shard holds `tokens` [R, T], `roles` [R, T - 1] of the next token (0: given,
else its place in ROLES), and the `states` that the target had [R, T, (taps + 1) H]: those of the taps and, last, that
after the final norm.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from recipes.cards import write_head_card
from recipes.job import Job, side_by_side
from specdemo.core.atomic_io import make_folder
from specdemo.kv.store import KVStore, cache_argument
from specdemo.methods.heads.eagle import DECAY, Eagle, EagleHead
from specdemo.methods.heads.formats.eagle import EagleConvention
from specdemo.methods.heads.mlp_speculator import MLPSpeculator, Speculator
from specdemo.methods.heads.runtime import training_columns, unrolled_mask
from specdemo.methods.pairs import load_target
from specdemo.models.layers import Rotary, llama_config_like
from specdemo.models.machine import device_name, matmul_dtype
from specdemo.models.packaged import HUB_ID
from specdemo.models.target import HFTarget
from specdemo.training.collect import autocast, fast_copy, write_shard
from specdemo.training.fit import Batch, Schedule, write_provenance
from specdemo.training.heads import evaluate_rows

KINDS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
ROLES = ("", "assistant", "user")
TEMPERATURES = (0.0, 0.0, 0.6, 0.8, 1.0)  # of a row's answers; questions are sampled at 1
LEAST_PROBABILITY = 0.05  # of a sampled token, relative to the most likely one
DRAFT_VOCAB, STEPS, HARD, DROPOUT = 8192, 3, 0.5, 0.1
BLOCK = 32  # columns by which the cache grows
HELD_OUT, ROWS = 24, 8  # rows for validation, and per update
LATER = 100_000  # epochs of a run that goes on have other orders
LEAST_DISTINCT = 0.45  # share of different sequences of four tokens; rows with fewer repeat themselves

Drafted = Callable[[Tensor, Tensor, float], Iterator[Tensor]]


class Template(NamedTuple):
    """Token ids of a chat template."""

    turns: Mapping[str, list[int]]  # role -> tokens that open its turn after another
    end: int  # the token that ends a turn


def template_of(tokenizer: Any) -> Template:
    """Return the template of a tokenizer with ChatML."""
    turns = {role: tokenizer.encode(f"\n<|im_start|>{role}\n", add_special_tokens=False) for role in ROLES[1:]}
    return Template(turns, tokenizer.convert_tokens_to_ids("<|im_end|>"))


def beginnings(tokenizer: Any, rows: int, rng: random.Random) -> list[list[int]]:
    """Return the first tokens of `rows` dialogues of random kinds."""
    found = []
    for kind in rng.choices([*KINDS], [one["weight"] for one in KINDS.values()], k=rows):
        system = rng.choice(KINDS[kind].get("systems", [""]))
        messages = [{"role": "system", "content": system}] if system else []
        text = tokenizer.apply_chat_template([*messages, {"role": "user", "content": "\0"}], tokenize=False)
        first = text.partition("\0")[0] + rng.choice(KINDS[kind]["openings"])
        found.append(list(tokenizer.encode(first, add_special_tokens=False)))
    return found


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: object,
    *,
    scaling: float,
    columns: int,
    **_: object,
) -> tuple[Tensor, None]:
    """Return the attention of one query per row [B, heads, 1, D] over the first columns of key and value [B, H, T, D].

    Keys and values are read once for all heads of a group.
    """
    groups = query.flatten(0, 1).view(key.shape[0] * key.shape[1], -1, key.shape[-1])
    scores = torch.bmm(groups, key.flatten(0, 1).mT).float() * scaling
    scores[..., columns:] = -torch.inf
    read = torch.bmm(scores.softmax(-1).to(value.dtype), value.flatten(0, 1))
    return read.view(len(query), 1, *query.shape[1::2]), None


ALL_ATTENTION_FUNCTIONS.register("grouped", grouped_attention)


@torch.no_grad()
def write_dialogues(
    model: PreTrainedModel, texts: Sequence[list[int]], template: Template, length: int, taps: Sequence[int], seed: int
) -> dict[str, Tensor]:
    """Continue the rows to `length` tokens with `grouped_attention` and return the columns of a shard."""
    model.set_attn_implementation("grouped")
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    given, role = [list(row) for row in texts], ["user"] * len(texts)
    answers = [rng.choice(TEMPERATURES) for _ in texts]
    temperature = torch.ones(len(texts), 1)
    cache = KVStore(model.device, model.dtype, model.config.num_hidden_layers)
    cache.start(len(texts), BLOCK)
    cache.full_read = True  # whole blocks: a product would copy a part of them
    named: dict[str, Any] = {cache_argument(model.forward): cache}
    tokens, roles, states = [torch.tensor([row.pop(0) for row in given])], list[Tensor](), list[Tensor]()
    while True:
        cache.reserve(-(-len(tokens) // BLOCK) * BLOCK)
        read = model(tokens[-1][:, None], output_hidden_states=True, columns=len(tokens), **named)
        cache.longest += 1
        states.append(torch.cat([read.hidden_states[tap][:, 0] for tap in taps], -1))
        if len(tokens) == length:
            break
        drawn = sample(read.logits[:, 0].float(), temperature, generator).tolist()
        roles.append(torch.tensor([0 if rest else ROLES.index(who) for rest, who in zip(given, role, strict=True)]))
        for row, token in enumerate(drawn):
            if given[row]:
                drawn[row] = given[row].pop(0)
            elif token == template.end:
                role[row] = "assistant" if role[row] == "user" else "user"
                given[row] = list(template.turns[role[row]])
                temperature[row] = answers[row] if role[row] == "assistant" else 1.0
        tokens.append(torch.tensor(drawn))
    columns = {"tokens": torch.stack(tokens, 1).int(), "roles": torch.stack(roles, 1).to(torch.int8)}
    return columns | {"states": torch.stack(states, 1).bfloat16()}


def sample(logits: Tensor, temperature: Tensor, generator: torch.Generator) -> Tensor:
    """Sample tokens [R] from logits [R, V] at temperatures [R, 1], without unlikely tokens."""
    probs = ((logits - logits.amax(-1, keepdim=True)) / temperature.clamp_min(0.02)).exp()
    probs = probs.masked_fill(probs < LEAST_PROBABILITY, 0.0).cumsum(-1)
    places = torch.rand(len(probs), 1, generator=generator) * probs[:, -1:]
    return torch.searchsorted(probs, places)[:, 0].clamp_max(logits.shape[-1] - 1)


def read_dialogues(job: Job, target: HFTarget) -> list[Batch]:
    """Return the dialogues in `job.cache` as rows (tokens, roles, states), mapped from their files, without later ones
    that repeat themselves; write the missing shards.
    """
    plan, tokenizer = job.recipe.plan, target.tokenizer
    model, template = fast_copy(target.model), template_of(tokenizer)
    names = [job.cache / f"dialogues-{i:03d}.safetensors" for i in range(plan.text_rows // plan.rows_per_shard)]
    job.cache.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(names):
        if not name.exists():
            texts = beginnings(tokenizer, plan.rows_per_shard, random.Random(seed))
            write_shard(name, write_dialogues(model, texts, template, plan.context, (*plan.taps, -1), seed))
    shards = [load_file(name) for name in names]
    columns = ([row for shard in shards for row in shard[name]] for name in ("tokens", "roles", "states"))
    return [row for i, row in enumerate(zip(*columns, strict=True)) if i < HELD_OUT or varied(row[0])]


def batch_of(rows: Sequence[Batch]) -> Batch:
    """Return the columns of rows."""
    tokens, roles, states = (torch.stack(column) for column in zip(*rows, strict=True))
    return tokens.long(), roles, states


def varied(tokens: Tensor) -> bool:
    """Return False for a row of tokens [T] that repeats itself."""
    row = tokens.tolist()
    parts = [*zip(row, row[1:], row[2:], row[3:], strict=False)]
    return len(set(parts)) > LEAST_DISTINCT * len(parts)


def frequent_tokens(rows: Sequence[Batch], vocab_size: int) -> Tensor:
    """Return the draft vocabulary [W]: the tokens that the target wrote most often, then the lowest ids."""
    counts = Counter(token for tokens, roles, _ in rows for token in tokens[1:][roles > 0].tolist())
    order = dict.fromkeys([token for token, _ in counts.most_common()] + [*range(vocab_size)])
    return torch.tensor(sorted([*order][:DRAFT_VOCAB]))


@torch.no_grad()
def untrained_head(target: HFTarget, ids: Tensor, taps: Sequence[int]) -> EagleHead:
    """Return a head that starts from the target's last layer and last tap, without an lm_head of its own."""
    names = {"norm.weight", "layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"}
    d2t, convention = ids - torch.arange(len(ids)), EagleConvention(tuple(taps))
    head = EagleHead(target, llama_config_like(target), convention, names, d2t)
    source: Any = target.model.model.layers[-1]
    layer: Any = head.layers[0]
    size = target.hidden_size
    head.fc.weight.mul_(0.3)[:, -size:] += torch.eye(size)
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(source.self_attn, name).weight
        getattr(layer.self_attn, name).weight.copy_(torch.cat([torch.randn_like(weight) * 0.02, weight], 1))
    layer.self_attn.o_proj.load_state_dict(source.self_attn.o_proj.state_dict())
    layer.mlp.load_state_dict(source.mlp.state_dict())
    layer.hidden_norm.weight.copy_(source.input_layernorm.weight)
    layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
    assert head.norm is not None
    head.norm.weight.copy_(target.model.model.norm.weight)
    return head


class DialogueLoss:
    """Loss of a head. Columns: tokens [R, T], roles [R, T - 1], states [R, T, (taps + 1) H].

    drafted(tokens, states, dropout) yields the logits of STEPS unrolled steps, of step i [R, T - 2 - i, W].
    """

    def __init__(self, drafted: Drafted, target: HFTarget, ids: Tensor) -> None:
        self.drafted, self.ids, self.size = drafted, ids, target.hidden_size
        self.all_rows = target.lm_head.get_parameter("weight").detach().to(matmul_dtype(target.device))
        self.rows = self.all_rows[ids]

    def loss(self, tokens: Tensor, roles: Tensor, states: Tensor) -> Tensor:
        """Return the loss over STEPS unrolled steps."""
        return self.steps(tokens, roles, states, DROPOUT)[0]

    def measure(self, tokens: Tensor, roles: Tensor, states: Tensor) -> dict[str, float]:
        """Return the loss and the agreement of each step with the target's most likely token, in answers."""
        loss, logits = self.steps(tokens, roles, states, 0.0)
        expected = self.of_target(states, self.all_rows).argmax(-1)
        found = {"held_out_loss": float(loss)}
        for step, drafted in enumerate(logits, start=1):
            counted = roles[:, step:] == ROLES.index("assistant")
            hits = self.ids[drafted.argmax(-1)] == expected[:, step:]
            found[f"agree_{step}"] = float(hits[counted].float().mean())
        return found

    def of_target(self, states: Tensor, rows: Tensor) -> Tensor:
        """Return the target's logits [R, T - 1, W] for these output rows [W, H]."""
        return F.linear(states[:, :-1, -self.size :].to(rows.dtype), rows)

    def steps(self, tokens: Tensor, roles: Tensor, states: Tensor, dropout: float) -> tuple[Tensor, list[Tensor]]:
        """Return the loss, and the logits of every step."""
        labels = self.of_target(states, self.rows).float().softmax(-1)
        likeliest = labels.argmax(-1, keepdim=True)
        labels.mul_(1.0 - HARD).scatter_add_(-1, likeliest, labels.new_tensor(HARD).expand(likeliest.shape))
        total, found = torch.zeros(()), []
        for step, logits in enumerate(self.drafted(tokens, states, dropout)):
            wrote = roles[:, step + 1 :] > 0
            total = total + DECAY**step * F.cross_entropy(logits[wrote].float(), labels[:, step + 1 :][wrote])
            found.append(logits)
        return total, found


def eagle_steps(head: EagleHead, target: HFTarget, ids: Tensor) -> Drafted:
    """Return the unrolled steps of an EAGLE-3 head (its training-time test)."""
    angles, device, size = Rotary.of_config(head.config, target.device), target.device, target.hidden_size
    rows = target.lm_head.get_parameter("weight").detach()[ids].to(matmul_dtype(device))
    norm = head.norm or nn.Identity()

    def drafted(tokens: Tensor, states: Tensor, dropout: float) -> Iterator[Tensor]:
        count = tokens.shape[1] - 2
        columns, cache = torch.arange(count), DynamicCache()
        with autocast(device):
            embedded = F.dropout(head.embed(tokens[:, 1 : count + 1]), dropout)
            features = head.features(F.dropout(states[:, :count, :-size].float(), dropout))
        for step in range(STEPS):
            mask = unrolled_mask(columns, step) if step else None
            new = training_columns(columns[None, step:], angles, count, mask, cache)
            with autocast(device):
                out = head(embedded[:, step:], features, new)
                logits = F.linear(norm(out), rows)
            yield logits
            features = head.feedback_features(out)[:, :-1]

    return drafted


def speculator_steps(head: Speculator, target: HFTarget) -> Drafted:
    """Return the teacher-forced steps of an MLPSpeculator."""
    device, size = target.device, target.hidden_size

    def drafted(tokens: Tensor, states: Tensor, dropout: float) -> Iterator[Tensor]:
        count = tokens.shape[1] - 2
        state = head.initial_state(F.dropout(states[:, :count, -size:].float(), dropout))
        for step in range(STEPS):
            with autocast(device):
                state, logits = head(state[:, : count - step], tokens[:, step + 1 : count + 1], step)
            yield logits

    return drafted


class Student(NamedTuple):
    """A head in training."""

    head: nn.Module
    ids: Tensor  # [W]: its draft vocabulary
    drafted: Drafted
    drafter: Callable[[], Eagle | MLPSpeculator]  # with the trained head in bfloat16


def eagle(job: Job, target: HFTarget, rows: Sequence[Batch]) -> Student:
    """Return an EAGLE-3 head: a new one, or `job.start`, whose draft vocabulary it keeps."""
    taps, weights = job.recipe.plan.taps, {}
    if job.start is None:
        ids = frequent_tokens(rows, target.vocab_size)
    else:
        trained = Eagle.load_trainable(job.start, target)
        assert trained.draft_vocab.ids is not None
        ids, weights = trained.draft_vocab.ids, trained.state_dict()
    head = untrained_head(target, ids, taps)
    if weights:
        head.load_state_dict({name: weights[name] for name in head.state_dict()})
    return Student(head, ids, eagle_steps(head, target, ids), lambda: Eagle(target, nn.Module.to(head, torch.bfloat16)))


def speculator(job: Job, target: HFTarget, rows: Sequence[Batch]) -> Student:
    """Return a new MLPSpeculator with output rows only for its draft vocabulary."""
    if job.start:
        raise ValueError(f"recipe {job.recipe.name!r} starts from scratch; omit --start")
    ids = frequent_tokens(rows, target.vocab_size)
    head = MLPSpeculator.fresh(target, STEPS, job.recipe.shape["inner_dim"])
    output = nn.Linear(head.inner_dim, len(ids), bias=False)
    with torch.no_grad():  # the main directions of the target's output rows
        centred = target.lm_head.get_parameter("weight").float()
        centred = centred - centred.mean(0)
        found = centred @ torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -head.inner_dim :]
        found *= head.inner_dim**-0.5 / found.std()
        head.emb[0].get_parameter("weight").copy_(found)
        output.weight.copy_(found[ids])
    head.head = nn.ModuleList([output] * STEPS)

    def drafter() -> MLPSpeculator:
        every = nn.Linear(head.inner_dim, target.vocab_size, bias=False)
        with torch.no_grad():
            every.weight.copy_(output.weight.amin(0) - 1.0)  # states after GELU are hardly ever negative
            every.weight[ids] = output.weight
        head.head = nn.ModuleList([every] * STEPS)
        return MLPSpeculator(target, nn.Module.to(head, torch.bfloat16))

    return Student(head, ids, speculator_steps(head, target), drafter)


def train_dialogues(job: Job, student: Callable[[Job, HFTarget, Sequence[Batch]], Student]) -> None:
    """Let the target write dialogues, then train a head on the states that it had."""
    make_folder(job.out)
    target = load_target(job.target, "float32", str(job.device), None, kernels="transformers")
    assert isinstance(target, HFTarget)
    rows = read_dialogues(job, target)
    held_out, rows = batch_of(rows[:HELD_OUT]), rows[HELD_OUT:]
    first, ids, drafted, drafter = student(job, target, rows)
    head = nn.Module.float(first).requires_grad_(True)
    lessons = DialogueLoss(drafted, target, ids)
    order, rates = (LATER, job.recipe.rates_later) if job.start else (0, 1.0)

    def batches(progress: float, step: int) -> Batch:
        per_epoch = max(1, len(rows) // ROWS)
        shuffled = torch.randperm(len(rows), generator=torch.Generator().manual_seed(order + step // per_epoch))
        return batch_of([rows[i] for i in shuffled[step % per_epoch * ROWS :][:ROWS]])

    evaluate = partial(evaluate_rows, held_out, ROWS, lessons.measure)
    options: dict[str, Any] = {"micro_tokens": ROWS // 2 * job.recipe.plan.context, "vocab_size": DRAFT_VOCAB}
    schedule = Schedule(job.minutes, muon=0.01, adamw=job.recipe.adamw, warmup_steps=10, decay_from=0.3)
    options["schedule"] = schedule.scaled(rates)
    with side_by_side(job) as pool:
        history = job.run(head, batches, lessons.loss, evaluate, pool=pool, **options)
    trained = drafter()
    trained.save(job.out, HUB_ID)
    facts = {"recipe": job.recipe.name, "minutes": job.minutes, "target": job.recipe.text, "threads": job.threads}
    facts |= {"start": Path(job.start).name} if job.start else {}
    numbers = {
        "parameters": sum(p.numel() for p in trained.head.parameters()),
        "dialogue_tokens": sum(int((roles > 0).sum()) for _, roles, _ in rows),
    }
    write_provenance(job.out, history, **facts, **numbers, hardware=device_name(job.device))
    write_head_card(job.out, trained.title, job.recipe.text, job.recipe)

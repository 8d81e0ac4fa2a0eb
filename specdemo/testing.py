"""Conformance test of drafting methods: `check_method("name")`. Also for methods of other packages.

It runs on the toy target (models/toy.py), whose distributions are known exactly, and takes a few seconds.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from specdemo.core.protocol import Budget, GenerationConfig, Progress, Target
from specdemo.core.sampling import Sampling
from specdemo.core.trace import StepEvent
from specdemo.core.tree import ABSENT, depths
from specdemo.engine.loop import generate
from specdemo.methods import BASELINE, load_drafter, method, method_options, model_method, parse_options, reads
from specdemo.methods.base import Method
from specdemo.methods.heads.head import Head
from specdemo.models.checkpoints import open_checkpoint
from specdemo.models.toy import ToyTarget
from specdemo.training.losses import Trainable

VOCABULARY = 16
PROMPT = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]])


def check_method(name: str) -> None:
    """Check a method against the contract of methods/base.py. Raises AssertionError if it is violated."""
    for check in CHECKS:
        check(name)


def output_matches_baseline(name: str) -> None:
    """Greedy and sampled output equals plain decoding for short and long drafts, in every row of a batch."""
    if not method(name).exact:
        return
    target, prompts = ToyTarget(VOCABULARY, seed=1), torch.cat([PROMPT, PROMPT.flip(1)])
    for sampling in (Sampling(), Sampling(0.9, top_k=9, top_p=0.95)):
        expected = output_tokens(target, load_drafter(BASELINE, target), GenerationConfig(24, sampling), prompts)
        for k in (1, 12):
            config = GenerationConfig(24, sampling, Budget(k, k))
            assert output_tokens(target, make_drafter(name, target), config, prompts) == expected


def rows_are_independent(name: str) -> None:
    """A row of a batch has the same output as in a batch of one, also when other rows end earlier or later."""
    if not method(name).exact:
        return
    target = ToyTarget(VOCABULARY, seed=2, stop_token_ids=(7,))
    prompts = torch.stack([PROMPT[0], PROMPT[0].flip(0), PROMPT[0].roll(3)])
    config = GenerationConfig(30)
    expected = [output_tokens(target, load_drafter(BASELINE, target), config, prompt[None])[0] for prompt in prompts]
    assert output_tokens(target, make_drafter(name, target), config, prompts) == expected


def draft_fits_budget(name: str) -> None:
    """A draft is at most as large and as deep as its budget."""
    target = ToyTarget(VOCABULARY)
    made = make_drafter(name, target)
    made.start(1, Sampling(), torch.Generator().manual_seed(0))
    forward = target.start(PROMPT[:, :-1], made.taps)
    made.observe(Progress(PROMPT[:, :-1], PROMPT[:, 1:], [PROMPT.shape[1] - 1], forward.hidden))
    for budget in (Budget(0, 0), Budget(1, 1), Budget(3, 2), Budget(4, 4)):
        draft = made.propose(budget)
        assert draft.nodes <= budget.nodes
        assert int(depths(draft.parents).max()) <= budget.depth
        assert bool(((draft.tokens >= 0) | (draft.tokens == ABSENT)).all())
        assert bool((draft.tokens < VOCABULARY).all())


def start_resets_state(name: str) -> None:
    """A generation does not depend on the one before, and no state is held between them."""
    target = ToyTarget(VOCABULARY, seed=3)
    made = make_drafter(name, target)
    first = events(target, made, GenerationConfig(25))
    assert made.history_bytes == 0
    output_tokens(target, made, GenerationConfig(9), PROMPT.flip(1))
    second = events(target, made, GenerationConfig(25))
    assert [event.emitted for event in second] == [event.emitted for event in first]
    assert made.learns or [event.drafted for event in second] == [event.drafted for event in first]


def sampling_is_reproducible(name: str, **options: object) -> None:
    """Sampling with the same seed returns the same output."""
    target = ToyTarget(VOCABULARY, seed=4)
    config = GenerationConfig(25, Sampling(temperature=1.0), seed=11)
    first, second = (output_tokens(target, make_drafter(name, target, **options), config) for _ in range(2))
    assert first == second


def confidence_is_a_probability(name: str) -> None:
    """Events have one draft and one target probability per draft token, each None or in [0, 1]."""
    target = ToyTarget(VOCABULARY, seed=5)
    for event in events(target, make_drafter(name, target), GenerationConfig(20)):
        assert len(event.draft_probs[0]) == len(event.target_probs[0]) == len(event.drafted[0])
        assert all(p is None or 0.0 <= p <= 1.0 for p in event.draft_probs[0] + event.target_probs[0])


def metadata_is_complete(name: str) -> None:
    """The method has a title and a summary sentence; every option has a help text and a default within its range."""
    assert method(name).title and method(name).summary.endswith(".")
    for option in method_options(name):
        assert option.help
        assert getattr(parse_options(name, {option.name: option.default}), option.name) == option.default


def saved_head_loads(name: str) -> None:
    """A saved head is recognised and gives the same drafts and the same loss when loaded."""
    cls = method(name)
    if not issubclass(cls, Head):
        return
    target = ToyTarget(VOCABULARY, seed=6, hidden_size=32)
    torch.manual_seed(0)
    drafter = cls(target, cls.fresh(target))
    with TemporaryDirectory() as folder:
        drafter.save(Path(folder), "toy")
        assert reads(name, open_checkpoint(folder))
        loaded = cls(target, folder)
    drafts = [[event.drafted for event in events(target, made, GenerationConfig(12))] for made in (drafter, loaded)]
    assert drafts[0] == drafts[1]
    if not (isinstance(drafter, Trainable) and isinstance(loaded, Trainable)):
        return
    batch = Progress(PROMPT[:, :-1], PROMPT[:, 1:], [15], target.start(PROMPT[:, :-1], drafter.taps).hidden)
    (loss, metrics), (loaded_loss, _) = drafter.loss(batch), loaded.loss(batch)
    assert "agree_1" in metrics
    torch.testing.assert_close(loss, loaded_loss)


CHECKS: tuple[Callable[[str], None], ...] = (
    output_matches_baseline,
    rows_are_independent,
    draft_fits_budget,
    start_resets_state,
    sampling_is_reproducible,
    confidence_is_a_probability,
    metadata_is_complete,
    saved_head_loads,
)


def make_drafter(name: str, target: Target, **options: object) -> Method:
    """Build a drafter, with an untrained head or a random draft model if it needs one."""
    cls = method(model_method(name))
    if not cls.needs_model:
        return load_drafter(name, target, **options)
    torch.manual_seed(0)
    model = cls.fresh(target) if issubclass(cls, Head) else tiny_llama(target.vocab_size)
    return load_drafter(name, target, model, **options)


def tiny_llama(vocab_size: int) -> LlamaForCausalLM:
    """Return a one-layer Llama with fixed random weights, whose last token is also PARD's mask token."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=256,
    )
    config.pard_token = vocab_size - 1
    model: LlamaForCausalLM = LlamaForCausalLM(config).eval()
    return model


def events(target: Target, drafter: Method, config: GenerationConfig, prompt: Tensor = PROMPT) -> list[StepEvent]:
    """Return all steps of one generation."""
    return list(generate(target, drafter, prompt, config))


def output_tokens(
    target: Target, drafter: Method, config: GenerationConfig, prompt: Tensor = PROMPT
) -> list[list[int]]:
    """Return the output tokens of every row."""
    steps = events(target, drafter, config, prompt)
    return [[token for event in steps for token in event.emitted[row]] for row in range(len(prompt))]

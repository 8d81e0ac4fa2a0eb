"""The generation loop. It knows no methods: plain decoding is an empty draft, greedy decoding is temperature 0, the
prompt is the first observation.

B rows, N draft nodes, S = N + 1 slots, A accepted columns, V vocabulary.
"""

from collections.abc import Callable, Generator, Iterable
from contextlib import closing
from dataclasses import replace
from math import isfinite

import torch
from torch import Tensor

from specdemo.core.accept import AcceptResult, AcceptRule, token_probs
from specdemo.core.constraint import constrained
from specdemo.core.coupled import Coupled
from specdemo.core.host_copy import on_host, to_device
from specdemo.core.protocol import Budget, Drafter, Forward, GenerationConfig, Progress, Target
from specdemo.core.sampling import PositionNoise, to_probs
from specdemo.core.suggest import EMPTY, counted
from specdemo.core.trace import StepEvent
from specdemo.core.tree import ABSENT, Draft, chain_parents, clamp_ids, depths, first_branch, is_chain, validate_ids
from specdemo.engine.clock import Stopwatch, stopwatch_for
from specdemo.models.cpu_threads import step_threads, thread_limit
from specdemo.models.errors import Cancelled, cancellation
from specdemo.models.shared import SharedTarget, graph_target

WARM_UP_TOKENS = 12
WARM_UP_STEPS, WARM_UP_MS = 2, 2000.0  # a slow model warms up for no more steps once they have taken this time
TOP_TOKENS = 3  # of the target, per accepted slot, for the inspector


def never_cancelled() -> bool:
    """Return False: `cancelled` of a run that cannot be stopped."""
    return False


def generate(
    target: Target,
    drafter: Drafter,
    prompt_ids: Tensor,
    config: GenerationConfig,
    *,
    accept: AcceptRule | None = None,
    stopwatch: Stopwatch | None = None,
    cancelled: Callable[[], bool] = never_cancelled,
) -> Generator[StepEvent, None, None]:
    """Decode prompt_ids [B, T] int64; yield one StepEvent per target pass, the first is the prefill.

    Ends when every row has met a stop token or its limit, when `cancelled()` is true at the start of a step or, with
    some targets, while the prompt is read, or when the caller closes the iterator. Target and drafter are released in
    every case. `ms` counts decoding only; probabilities for the inspector are computed after the stopwatch has stopped.
    Raises ValueError for an empty prompt, for one that leaves no room, and for an invalid draft. The ids and parents of
    a draft are clamped on the device and validated when they are read back for the event, so that an invalid one
    neither reads foreign memory nor needs a synchronisation.
    """
    _check(target, prompt_ids, config)
    if config.grammar is not None:
        target, drafter = constrained(target, drafter, config.grammar, config.max_new_tokens)
    watch = stopwatch or stopwatch_for(prompt_ids.device, target.facts.wall_time)
    no_grad = torch.no_grad()
    with closing(_steps(target, drafter, prompt_ids, config, accept or Coupled(), watch, cancelled)) as steps:
        while True:
            try:
                # not inference_mode: drafters may train on tensors
                with no_grad, step_threads(target), cancellation(cancelled):
                    event = next(steps, None)
            except Cancelled:
                return
            if event is None:
                return
            yield event


def _steps(
    target: Target,
    drafter: Drafter,
    prompt_ids: Tensor,
    config: GenerationConfig,
    accept: AcceptRule,
    watch: Stopwatch,
    cancelled: Callable[[], bool],
) -> Generator[StepEvent, None, None]:
    rng = _generator(target, prompt_ids, config, accept)
    noise = None if config.sampling.greedy else rng
    count = len(prompt_ids)
    rows = _Rows(count, config, target)
    try:
        watch.start()
        drafter.start(len(prompt_ids), config.sampling, rng)
        accept = drafter.accept_rule(accept)
        argmax_alone = noise is None and accept.exact  # where nothing was drafted
        forward = target.start(prompt_ids, drafter.taps, reserve=config.max_new_tokens + config.budget.nodes)
        first = forward.logits[:, -1:]
        scores = first if noise is None else to_probs(first, config.sampling)
        root = accept(Draft.empty(len(scores), scores.device), scores, noise).next_token[:, None]
        _advance(rng, [1] * len(root))
        watch.lap("prefill")
        drafter.observe(_prompt_progress(prompt_ids, root, forward))
        watch.lap("observe")
        yield _prefill_event(watch, rows.emit(root.tolist()))
        index = 0
        while rows.running and not cancelled():
            index += 1
            watch.start()
            proposed = rows.trim(drafter.propose(rows.budget()))
            if not target.capabilities.trees and not is_chain(proposed.parents):
                proposed = first_branch(proposed)
            draft = clamp_ids(proposed, count, target.vocab_size)
            watch.lap("draft")
            tokens = torch.cat([root, draft.tokens], 1) if draft.nodes else root
            forward = target.forward(tokens, draft.parents, drafter.taps)
            watch.lap("verify")
            if argmax_alone and not draft.nodes:
                best = forward.argmax()
                outputs = best.tolist() if on_host(target.device) else None
                result = AcceptResult([[0] for _ in range(count)], best, outputs)
            else:
                target_scores = forward.logits if noise is None else to_probs(forward.logits, config.sampling)
                result = accept(draft, target_scores, noise)
            result = rows.clear_finished(result)
            next_root = result.root
            progress = _progress(tokens, result, next_root, forward)
            if result.output_tokens is not None:
                progress.set_output_ids(result.output_tokens)
            _advance(rng, [len(path) for path in result.path])
            watch.lap("accept")
            target.commit(result.path)
            watch.lap("commit")
            drafter.observe(progress)
            watch.lap("observe")
            ms = watch.read()
            thread_limit.record(ms["verify"], tokens.numel(), target.threads, target.pass_ms)
            drafter.on_step_timed(ms)
            root = next_root if rows.all_running else torch.where(rows.running_mask(root.device), next_root, root)
            nodes = proposed.tokens.tolist(), proposed.parents.tolist()
            validate_ids(*nodes, target.vocab_size)
            emitted = rows.emit(progress.output_ids())
            shown = target_scores if noise else forward
            waited = {} if watch.waited_ms is None else {"waited_ms": watch.waited_ms}
            notes = {**draft.notes, **_expert_notes(forward, tokens, target.num_experts), **waited}
            names = drafter.name or "the drafter", target.name or "the target"
            yield _event(index, draft, names, notes, nodes, result, emitted, shown, ms, watch.wall_ms)
    finally:
        try:
            target.release()
        finally:
            drafter.release()


def _generator(
    target: Target, prompt_ids: Tensor, config: GenerationConfig, accept: AcceptRule
) -> torch.Generator | PositionNoise:
    """Return the random numbers of a generation: by position for a coupled rule, else in sequence."""
    if getattr(accept, "coupled", False) and not config.sampling.greedy:
        rows, position = prompt_ids.shape
        return PositionNoise(config.seed, rows, position, target.vocab_size, prompt_ids.device)
    return torch.Generator(prompt_ids.device).manual_seed(config.seed)


def _advance(rng: torch.Generator, lengths: list[int]) -> None:
    """Move noise by position forward by the number of tokens of every row."""
    if isinstance(rng, PositionNoise):
        rng.advance(lengths)


class _Rows:
    """Remaining length of each row. A finished row stays in the batch, with an empty draft and an empty path."""

    def __init__(self, rows: int, config: GenerationConfig, target: Target) -> None:
        stop = target.stop_token_ids if config.stop_token_ids is None else config.stop_token_ids
        self._stop = frozenset(stop)
        self._remaining = [config.max_new_tokens] * rows
        self._budget = config.budget

    @property
    def running(self) -> bool:
        return any(self._remaining)

    def budget(self) -> Budget:
        """Return the budget, no deeper than the longest row needs besides the target's token."""
        depth = min(self._budget.depth, max(self._remaining) - 1)
        return Budget(depth, self._budget.nodes if depth else 0)

    @property
    def all_running(self) -> bool:
        return all(self._remaining)

    def running_mask(self, device: torch.device) -> Tensor:
        """Return which rows [B, 1] still run."""
        return to_device([[left > 0] for left in self._remaining], device, torch.bool)

    def trim(self, draft: Draft) -> Draft:
        """Remove nodes beyond a row's limit, since the budget is the longest row's. Whether a node is removed does not
        depend on its token, so verification stays lossless."""
        if len(set(self._remaining)) == 1 or min(self._remaining) > draft.nodes:
            return draft
        remaining = to_device(self._remaining, draft.tokens.device)[:, None]
        too_deep = depths(draft.parents)[:, 1:] >= remaining
        return replace(draft, tokens=draft.tokens.masked_fill(too_deep, ABSENT))

    def clear_finished(self, result: AcceptResult) -> AcceptResult:
        if self.all_running:
            return result
        path = [p if left else [] for p, left in zip(result.path, self._remaining, strict=True)]
        output_tokens = result.output_tokens and [
            s if left else [] for s, left in zip(result.output_tokens, self._remaining, strict=True)
        ]
        changed = result.changed and [n if left else 0 for n, left in zip(result.changed, self._remaining, strict=True)]
        return AcceptResult(path, result.next_token, output_tokens, changed)

    def emit(self, outputs: list[list[int]]) -> list[list[int]]:
        """Cut each row's outputs at its limit and after its first stop token, and count them."""
        emitted = []
        for row, tokens in enumerate(outputs):
            new_tokens = tokens[: self._remaining[row]]
            stop_index = next((i for i, t in enumerate(new_tokens) if t in self._stop), None)
            if stop_index is not None:
                new_tokens = new_tokens[: stop_index + 1]
            self._remaining[row] = 0 if stop_index is not None else self._remaining[row] - len(new_tokens)
            emitted.append(new_tokens)
        return emitted


def _check(target: Target, prompt_ids: Tensor, config: GenerationConfig) -> None:
    if getattr(prompt_ids, "ndim", 0) != 2:
        raise ValueError("prompt_ids must be a tensor [B, T]; pass torch.tensor([ids]) for a list of ids")
    if prompt_ids.numel() == 0:
        raise ValueError(f"the prompt {EMPTY}")
    rows, limit = len(prompt_ids), target.capabilities.batch
    if rows > limit:
        raise ValueError(f"{target.name} decodes {counted(limit, 'text')} at a time, not {rows}; lower the batch size")
    if not 0 <= int(prompt_ids.min()) <= int(prompt_ids.max()) < target.vocab_size:
        raise ValueError(
            f"prompt_ids must be 0 to {target.vocab_size - 1}; encode the text with the target's tokenizer"
        )
    room = target.max_length - prompt_ids.shape[1]
    if room < 1:
        raise ValueError(
            f"the prompt has {prompt_ids.shape[1]} tokens, the model's context holds {target.max_length}; shorten it"
        )
    if room < config.max_new_tokens:
        raise ValueError(
            f"a prompt of {prompt_ids.shape[1]} tokens leaves room for {room} of the {config.max_new_tokens} new "
            f"tokens in a context of {target.max_length}; shorten it or reduce max_new_tokens to {room}"
        )


def _prompt_progress(prompt: Tensor, root: Tensor, forward: Forward) -> Progress:
    outputs = torch.cat([prompt[:, 1:], root], 1)
    return Progress(prompt, outputs, [prompt.shape[1]] * len(prompt), forward.hidden)


def _progress(tokens: Tensor, result: AcceptResult, next_root: Tensor, forward: Forward) -> Progress:
    """Gather the accepted slots; short rows are padded with slot 0. next_root: [B, 1]."""
    lengths = [len(p) for p in result.path]
    width = max(lengths)
    if result.path == [list(range(width))] * len(lengths):  # the same prefix of the chain in every row: no gather
        slots = chain_parents(len(lengths), width, tokens.device)
        hidden = {tap: h[:, :width] for tap, h in forward.hidden.items()}
        inputs = tokens if width == tokens.shape[1] else tokens[:, :width]
        outputs = torch.cat([tokens[:, 1:width], next_root], 1) if width > 1 else next_root
        return Progress(inputs, outputs, lengths, hidden, forward=forward, slots=slots)
    slots = to_device([p + [0] * (width - len(p)) for p in result.path], tokens.device)
    inputs = tokens.gather(1, slots)
    outputs = torch.cat([inputs[:, 1:], next_root], 1)
    if min(lengths) < width:
        last = to_device([max(n - 1, 0) for n in lengths], tokens.device)[:, None]
        outputs = outputs.scatter(1, last, next_root)
    rows = torch.arange(len(tokens), device=tokens.device)[:, None]
    hidden = {tap: h[rows, slots] for tap, h in forward.hidden.items()}
    return Progress(inputs, outputs, lengths, hidden, forward=forward, slots=slots)


def _expert_notes(forward: Forward, tokens: Tensor, total: int) -> dict[str, float]:
    """Return the experts per layer that the tokens [B, S] of a pass used, and one token uses; empty if unknown."""
    if forward.experts is None or not total:
        return {}
    used = forward.experts[tokens >= 0].transpose(0, 1).flatten(1)  # [L, tokens K]
    touched = torch.zeros(len(used), total, device=used.device).scatter_(1, used, 1.0)
    per_layer = round(float(touched.sum(1).mean()), 2)
    return {"experts": per_layer, "experts_per_token": forward.experts.shape[-1], "experts_in_all": total}


def _prefill_event(watch: Stopwatch, emitted: list[list[int]]) -> StepEvent:
    nodes: list[list[int]] = [[] for _ in emitted]
    probs: list[list[float | None]] = [[] for _ in emitted]
    return StepEvent(0, nodes, nodes, [[0] for _ in emitted], emitted, probs, probs, watch.read(), {}, watch.wall_ms)


def _event(
    index: int,
    draft: Draft,
    names: tuple[str, str],
    notes: dict[str, float],
    nodes: tuple[list[list[int]], list[list[int]]],
    result: AcceptResult,
    emitted: list[list[int]],
    target_scores: Forward | Tensor,
    ms: dict[str, float],
    wall_ms: float | None,
) -> StepEvent:
    """Create the event with the probabilities for the inspector: those used by the rule when sampling, the softmax when
    greedy, where the rule needs the argmax only.

    names: of drafter and target. nodes: the draft's tokens and parents on the host. Raises ValueError for logits that
    are not finite.
    """
    tokens, parents = nodes
    if draft.nodes:
        p = target_scores.logits.float().softmax(-1) if isinstance(target_scores, Forward) else target_scores
        target_probs = _rounded(token_probs(p, draft.parents, draft.tokens), tokens, names[1])
        top = _top_tokens(p[0, result.path[0]], emitted[0])
        _check_finite((p for row in top for _, p in row), names[1])
    else:
        target_probs, top = [[] for _ in tokens], []
    draft_probs: list[list[float | None]] = [[None] * len(t) for t in tokens]
    if draft.confidence is not None:
        draft_probs = _rounded(draft.confidence, tokens, names[0])
    notes = {name: float(value) for name, value in notes.items()}
    if result.changed is not None:
        notes["changed"] = float(sum(result.changed))
    _check_finite(notes.values(), names[0])
    path = [p or [0] for p in result.path]
    probs = draft_probs, target_probs
    return StepEvent(index, tokens, parents, path, emitted, *probs, ms, notes, wall_ms, top, [*draft.forced])


def _rounded(probs: Tensor, tokens: list[list[int]], name: str) -> list[list[float | None]]:
    rows = [
        [round(p, 4) if t != ABSENT else None for p, t in zip(ps, ts, strict=True)]
        for ps, ts in zip(probs.tolist(), tokens, strict=True)
    ]
    _check_finite((p for row in rows for p in row if p is not None), name)
    return rows


def _check_finite(numbers: Iterable[float], name: str) -> None:
    if not all(map(isfinite, numbers)):
        raise ValueError(
            f"the logits of {name} are not finite: its weights, or numbers in its config, are too large; choose "
            "another file, or float32 where it runs in float16"
        )


def _top_tokens(probs: Tensor, emitted: list[int]) -> list[list[tuple[int, float]]]:
    """Return the most likely tokens of each slot with their probabilities, and the output token if it is not among
    them.

    probs: [A, V] at the accepted slots. emitted: at most A output tokens.
    """
    if not len(probs):  # the row is finished
        return []
    best = probs.topk(min(TOP_TOKENS, probs.shape[-1]))
    outputs = to_device(emitted + [0] * (len(probs) - len(emitted)), probs.device)
    emitted_probs = probs.gather(-1, outputs[:, None])[:, 0].tolist()
    ranked = [list(zip(*row, strict=True)) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    for row, token, p in zip(ranked, emitted, emitted_probs, strict=False):
        if token not in (id for id, _ in row):
            row.append((token, p))
    return [[(token, round(p, 4)) for token, p in row] for row in ranked]


def warm_up(
    target: Target,
    drafter: Drafter,
    prompt_ids: Tensor,
    config: GenerationConfig,
    accept: AcceptRule | None = None,
    cancelled: Callable[[], bool] = never_cancelled,
) -> None:
    """Run the first tokens of the lane's text, to execute every code path and allocate every buffer. With CUDA graphs,
    also capture those that later steps may need."""
    generated, ms = 0, 0.0
    config = replace(config, stop_token_ids=())
    with closing(generate(target, drafter, prompt_ids, config, accept=accept, cancelled=cancelled)) as run:
        for event in run:
            if not event.index and (captured := graph_target(target)):
                _capture_graphs(captured, drafter, config.budget)
            generated += len(event.emitted[0])
            ms += sum(event.ms.values())
            if generated >= WARM_UP_TOKENS or (event.index >= WARM_UP_STEPS and ms > WARM_UP_MS):
                break


@torch.no_grad()
def _capture_graphs(target: SharedTarget, drafter: Drafter, budget: Budget) -> None:
    if budget.chain:
        drafter.capture_graphs(budget)
    target.capture_graphs(budget.depth + 1, drafter.taps)
    if budget.nodes > budget.depth:
        target.capture_graphs(budget.nodes + 1, drafter.taps, tree=True)

"""Losslessness of servers: greedy answers of two servers, or of the local engine and a server, compared token by token.

Where two answers part, the reference names the log-probabilities of both next tokens. A small margin is a near-tie,
which rounding decides; a large one is a bug. Reading the class needs no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, takewhile
from math import comb
from typing import TYPE_CHECKING, Self

from specdemo.bench.base import Decoding, Dtype, File, Report, Stop
from specdemo.bench.prompts import CODE, COPYING, EDITS, PROMPTS, openings, read_questions
from specdemo.bench.result import Result, Row
from specdemo.bench.server_requests import IDENTICAL, KINDS, REFUSED, UNEXPLAINED, UNSTABLE, ChatServer, check_requests
from specdemo.core.settings import setting
from specdemo.core.suggest import DEVICES, suggest
from specdemo.core.trace import LaneTrace
from specdemo.costs.acceptance import solve
from specdemo.engine.comparison import Model, Server
from specdemo.methods import BASELINE, load_drafter
from specdemo.models.ref import ModelRef
from specdemo.servers.address import host
from specdemo.servers.engines import same_bits_options

BUILT_IN_PROMPTS = (*PROMPTS, *COPYING, *CODE, *EDITS)
COUNT, MOST = 20, 10_000  # prompts: default and maximum
LISTED = 30  # longest complete table
MARGIN = 0.3  # nats; logits of about 20 in bfloat16 are multiples of 0.125
ALTERNATIVES = 5  # log-probabilities to request; OpenAI's limit
CONFIDENCE = 0.95
TIE, DIFFERS = "near-tie", "differs"
LOSSLESS = (IDENTICAL, TIE, REFUSED, UNSTABLE)
NOT_CHECKED = (
    "Only plain greedy decoding of one request at a time was compared, without penalties, logit bias and grammars."
)

if TYPE_CHECKING:  # imports torch
    from specdemo.core.protocol import Target
    from specdemo.servers.lane import Form, RemoteLane

LogProbs = Mapping[str, float]  # text of a token -> its log-probability, of the most likely tokens


@dataclass(frozen=True, slots=True)
class GreedyAnswer:
    """A greedy answer. pieces: the text of each token, or of each piece that arrived. lead: white space before them.
    ids: the token of each piece, without one that only ends the text; empty if they are unknown."""

    pieces: Sequence[str]
    finish: str
    lead: str = ""
    ids: Sequence[int] = ()

    @classmethod
    def without_leading_space(cls, pieces: Sequence[str], finish: str, ids: Sequence[int] = ()) -> Self:
        """Return an answer with its leading white space apart, because some servers remove it."""
        text = "".join(pieces)
        lead = len(text) - len(text.lstrip())
        ends = [max(end - lead, 0) for end in accumulate(map(len, pieces))]
        parts = [text[lead:][start:end] for start, end in pairwise([0, *ends])]
        tokens = () if -1 in ids else tuple(ids)
        if finish == "stop" and tokens and not pieces[-1]:  # some servers leave out the stop token
            tokens = tokens[:-1]
        return cls(parts, finish, text[:lead], tokens)

    @property
    def text(self) -> str:
        """Return the complete text."""
        return "".join(self.pieces)

    def after(self, tokens: int, common: str) -> str:
        """Return the text after so many tokens, which have the text `common`: of the next token if it is known."""
        text = self.text[len(common) :] if self.text.startswith(common) else "".join(self.pieces[tokens:])
        piece = "".join(self.pieces[tokens : tokens + 1]) if self.ids else ""
        return piece if piece and text.startswith(piece) else text


class ServerCheck(Decoding):
    """Check of a server. server: it is checked. reference: a server of the same model without speculation; None: the
    local engine.
    """

    name = "check-server"
    title = "Servers"
    server: Server
    reference: Server | None = None
    target: Model | None = setting(None, "Model of the servers; the local engine runs it if one server is given.")
    served_model: Model | None = setting(None, "Name of the model on the servers.", metavar="NAME")
    prompts: int | None = setting(
        None, f"Number of prompts; default: all of the file, or {COUNT} built-in ones.", 1, MOST
    )
    prompt_file: File | None = setting(None, "Prompts, one per line, or Spec-Bench's question.jsonl.", metavar="FILE")
    margin: float = setting(
        MARGIN, "Largest margin of a near-tie, in nats; larger ones are differences.", above=0.0, high=10.0
    )
    new_tokens: int = setting(128, "Output tokens per prompt.", 2, 1024)
    requests: str = setting(
        "",
        "Further requests to compare, separated by commas: tools, json, concurrent, thinking, long, sampled, or all.",
        metavar="KINDS",
    )
    dtype: Dtype = setting("auto", "Data type of the local engine.")
    device: str = setting("auto", f"Device of the local engine: {DEVICES}.")

    def run(self, report: Report, cancelled: Stop) -> Result:
        texts, _ = self._texts(), self.kinds
        checked = RemoteSide(self.server, self.target, self.served_model, cancelled)
        sides: list[Side] = [self._reference(), checked]
        rows: list[Row] = []
        for number, prompt in enumerate(texts):
            report(number / len(texts), f"prompt {number + 1} of {len(texts)}")
            if cancelled():
                break
            rows.append(compare(sides[0], sides[1], prompt, self.new_tokens, self.margin))
        if not rows:
            raise ValueError("stopped before the first prompt was complete, so nothing was checked")
        from specdemo.engine.session import environment  # imports torch

        config = self.config(self.target or "unknown") | {"prompts": len(rows)}
        remarks = [verdict(rows, self.margin, *(side.name for side in sides))]
        remarks += [] if all(row["output"] == IDENTICAL for row in rows) else same_bits_options()
        if not self.kinds:
            remarks.append(NOT_CHECKED)
        elif not cancelled():
            report(0.9, ", ".join(self.kinds))
            addresses = self.reference or self.server, self.server
            servers = [ChatServer(address, checked.served, self.new_tokens) for address in addresses]
            more, to_attach = check_requests(self.kinds, *servers)
            rows, remarks = [*rows, *more], [*remarks, requests_verdict(more, *map(host, addresses)), *to_attach]
        return Result(self.name, 1, config, environment(sides[0].model), rows, remarks)

    @property
    def kinds(self) -> Sequence[str]:
        """Return the kinds of further requests. Raises ValueError for an unknown one."""
        names = [name.strip() for name in self.requests.split(",") if name.strip()]
        for name in names:
            if name not in (*KINDS, "all"):
                raise ValueError(f"unknown kind of request {name!r}; {suggest(name, (*KINDS, 'all'))}")
        return list(KINDS) if "all" in names else names

    def _texts(self) -> Sequence[str]:
        """Return the prompts. Raises ValueError with one line if the file has too few."""
        if self.prompt_file is None:
            count = self.prompts or COUNT
            return [*BUILT_IN_PROMPTS[:count], *openings(count - len(BUILT_IN_PROMPTS))]
        texts = [text for texts in read_questions(self.prompt_file).values() for text in texts]
        if self.prompts and self.prompts > len(texts):
            raise ValueError(f"{self.prompt_file} has {len(texts)} prompts, not {self.prompts}; lower --prompts")
        return texts[: self.prompts]

    def _reference(self) -> "Side":
        if self.reference is not None:
            return RemoteSide(self.reference, self.target, self.served_model)
        if self.target is None:
            raise ValueError("one server is checked against the local engine, which needs the model; add --target NAME")
        return LocalSide(self.target, self.dtype, self.device)


class RemoteSide:
    """A server. Both sides have a name, a model if they run it themselves, and two methods."""

    model = None

    def __init__(self, server: str, target: str | None, model: str | None, cancelled: Stop = lambda: False) -> None:
        self.name = host(server)
        self._server, self._target, self._model, self._cancelled = server, ModelRef(target or ""), model, cancelled
        self._forms: Sequence[Form] = ("completions", "chat/completions")
        self.served = model or ""  # name of the model there, known after an answer

    def answer(self, prompt: str, tokens: int) -> GreedyAnswer:
        """Return the greedy answer. Raises ValueError with one line."""
        lane = self._request(prompt, tokens, self._forms)
        self.served = lane.trace.service.model
        if lane.trace.service.endpoint == "/v1/chat/completions":
            self._forms = ("chat/completions",)
        return GreedyAnswer.without_leading_space(lane.trace.pieces, lane.trace.finish, lane.trace.token_ids)

    def next_tokens(self, prompt: str, text: str, tokens: int) -> LogProbs:
        """Return the most likely tokens after `text`, the start of the answer of at most `tokens` tokens to the prompt;
        empty if they are unknown.
        """
        try:
            if "completions" in self._forms:
                return self._request(prompt + text, 1, ("completions",), ALTERNATIVES).next_tokens
            # a chat cannot continue a text, so the answer is repeated
            return after(text, self._request(prompt, tokens, self._forms, ALTERNATIVES).token_alternatives)
        except ValueError:  # the margin is then unknown
            return {}

    def _request(self, prompt: str, tokens: int, forms: "Sequence[Form]", alternatives: int = 0) -> "RemoteLane":
        from specdemo.core.protocol import GenerationConfig
        from specdemo.servers.lane import RemoteLane

        trace = LaneTrace(self.name, BASELINE, {}, True, [])
        config = GenerationConfig(tokens)
        lane = RemoteLane(trace, self._server, self._model, self._target, prompt, config, forms)
        lane.alternatives = alternatives
        try:
            for _ in lane.events(self._cancelled):
                pass
        except RuntimeError as error:
            raise ValueError(str(error)) from None
        return lane


def after(text: str, alternatives: Sequence[tuple[str, LogProbs]]) -> LogProbs:
    """Return the most likely tokens after `text`; empty if no tokens add up to it.

    alternatives: each token of an answer, and the most likely ones in its place.
    """
    at = 0
    for token, likely in alternatives:
        if at == len(text):
            return likely
        if not text.startswith(token, at):
            break
        at += len(token)
    return {}


class LocalSide:
    """Plain decoding on this machine."""

    name = "the local engine"

    def __init__(self, target: str, dtype: str, device: str) -> None:
        from specdemo.methods.pairs import load_target
        from specdemo.models.text import tokenizer_of

        self.model: Target = load_target(target, dtype, device)
        tokenizer_of(self.model)  # raises ValueError if it has none

    def answer(self, prompt: str, tokens: int) -> GreedyAnswer:
        """Return the greedy answer. Raises ValueError with one line."""
        import torch

        from specdemo.core.protocol import GenerationConfig
        from specdemo.engine.loop import generate
        from specdemo.models.text import Detokenizer, encode

        ids = encode(self.model.tokenizer, prompt, self.model.max_length - tokens)
        text = Detokenizer(self.model.tokenizer, ids)
        prompt_ids = torch.tensor([ids], device=self.model.device)
        events = generate(self.model, load_drafter(BASELINE, self.model), prompt_ids, GenerationConfig(tokens))
        output = [token for event in events for token in event.emitted[0]]
        finish = "stop" if output[-1] in self.model.stop_token_ids else "length"
        *pieces, last = text.push(output)
        return GreedyAnswer.without_leading_space([*pieces, last + text.flush()], finish, output)

    def next_tokens(self, prompt: str, text: str, tokens: int) -> LogProbs:
        """Return the most likely tokens after `text`, the start of an answer to the prompt."""
        import torch

        from specdemo.models.text import encode, token_text

        ids = torch.tensor([encode(self.model.tokenizer, prompt + text, self.model.max_length)])
        with torch.no_grad():
            logits = self.model.start(ids.to(self.model.device)).logits[0, -1].float()
        self.model.release()
        best = logits.log_softmax(-1).topk(ALTERNATIVES)
        texts = [token_text(self.model.tokenizer, token) for token in best.indices.tolist()]
        return dict(zip(texts, best.values.tolist(), strict=True))


Side = RemoteSide | LocalSide


def compare(reference: Side, server: Side, prompt: str, tokens: int, most: float) -> Row:
    """Return the row of a prompt: where the answers part, the margin there in nats, and what it means."""
    first, second = reference.answer(prompt, tokens), server.answer(prompt, tokens)
    row: Row = {"prompt": prompt[:40], "tokens": len(first.pieces), "parts at": None, "margin": None}
    if same_tokens(first, second):
        return row | {"output": IDENTICAL}
    at = common_ids(first, second) if first.ids and second.ids else common_pieces(first, second)
    common = "".join(first.pieces[:at])
    rests = [answer.after(at, common) for answer in (first, second)]
    likely = reference.next_tokens(prompt, (first.lead if common else "") + common, tokens)
    margin = margin_between(likely if common else {token.lstrip(): p for token, p in likely.items()}, *rests)
    output = UNEXPLAINED if margin is None else TIE if margin <= most else DIFFERS
    texts = {"reference": rests[0][:20], "server": rests[1][:20]}
    return row | {"parts at": at, "margin": margin, "output": output, **texts}


def same_tokens(first: GreedyAnswer, second: GreedyAnswer) -> bool:
    """Return whether two answers have the same tokens; the same text if the tokens of one are unknown.

    Text need not be the same: one server sends U+FFFD for half a character, another holds it back. Of two answers with
    the same text, one may end with a stop token.
    """
    if not (first.ids and second.ids):
        return first.text == second.text
    shorter, longer = sorted((first.ids, second.ids), key=len)
    stopped = first.finish == second.finish == "stop" and first.text == second.text
    return shorter == longer[: len(shorter)] and len(longer) - len(shorter) <= stopped


def common_ids(first: GreedyAnswer, second: GreedyAnswer) -> int:
    """Return how many tokens the answers have in common from the start."""
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(first.ids, second.ids, strict=False))])


def common_pieces(first: GreedyAnswer, second: GreedyAnswer) -> int:
    """Return how many pieces of the first answer end within the text that both have in common."""
    common = len([*takewhile(lambda pair: pair[0] == pair[1], zip(first.text, second.text, strict=False))])
    return sum(1 for end in accumulate(map(len, first.pieces)) if end <= common and end < len(first.text))


def margin_between(tokens: LogProbs, first: str, second: str) -> float | None:
    """Return the difference of the log-probabilities of the tokens with which two texts continue.

    A token that is not among the most likely ones counts as the least likely of them. An empty text continues with a
    token of another text than all, such as the end of the answer. None: unknown, also if both texts start with the same
    token.
    """
    token, other = (_next_token(tokens, text) for text in (first, second))
    if token is None or token == other:
        return None
    return round(abs(tokens[token] - (min(tokens.values()) if other is None else tokens[other])), 4)


def _next_token(tokens: LogProbs, text: str) -> str | None:
    fitting = [token for token in tokens if token and text.startswith(token)]
    ends = [token for token in tokens if not token.strip() or (token[:1] == "<" and token[-1:] == ">")]
    return max(fitting, key=len, default=None) if text else max(ends, key=tokens.__getitem__, default=None)


def without_identical(result: Result) -> Result:
    """Return a result of more than LISTED prompts without the rows of identical texts, of which one stays."""
    if len(result.rows) <= LISTED:
        return result
    return replace(result, rows=[row for row in result.rows if row["output"] != IDENTICAL] or result.rows[:1])


def verdict(rows: Sequence[Row], most: float, reference: str, server: str) -> str:
    """Return the result as a sentence, with the 95 % interval of the share of prompts that differ."""
    count = len(rows)
    wrong = [row for row in rows if row["output"] not in LOSSLESS]
    ties = [row["margin"] for row in rows if row["output"] == TIE]
    low, high = share_interval(len(wrong), count)
    interval = f"95 % interval of the share: {100 * low:.0f} to {100 * high:.0f} %"
    if wrong:
        worst = max(wrong, key=lambda row: row["margin"] or 0.0)
        margin = worst["margin"]
        why = "whose margin is unknown" if margin is None else f"where its margin is {margin:.2f} nats"
        return (
            f"Not lossless: in {len(wrong)} of {count} prompts {server} chose another token than {reference}, "
            f"{why} (near-ties are below {most:g}); {interval}."
        )
    rounding = f"{len(ties)} part at near-ties of at most {max(ties):.3f} nats, which rounding explains" if ties else ""
    same = f"{count - len(ties)} of {count} texts are identical"
    facts = "; ".join(filter(None, (same, rounding, interval)))
    return f"No difference found between {reference} and {server}: {facts}."


def requests_verdict(rows: Sequence[Row], reference: str, server: str) -> str:
    """Return the result of further requests as a sentence."""
    wrong = [row for row in rows if row["output"] not in LOSSLESS]
    if not wrong:
        return f"No difference found in {len(rows)} further requests to {server}, compared with {reference}."
    kinds = ", ".join(dict.fromkeys(str(row["prompt"]).partition(":")[0] for row in wrong))
    return f"{len(wrong)} of {len(rows)} further requests to {server} differ from {reference} ({kinds})."


def share_interval(hits: int, count: int) -> tuple[float, float]:
    """Return the exact (Clopper-Pearson) interval of a share."""
    tail = (1.0 - CONFIDENCE) / 2.0

    def at_most(share: float, most: int) -> float:
        return sum(comb(count, n) * share**n * (1.0 - share) ** (count - n) for n in range(most + 1))

    low = 0.0 if not hits else solve(lambda share: 1.0 - at_most(share, hits - 1), tail)
    high = 1.0 if hits == count else solve(lambda share: -at_most(share, hits), -tail)
    return low, high

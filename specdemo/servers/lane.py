"""Lane on a server with OpenAI's completions API, such as vLLM, SGLang, llama.cpp or TGI.

Its clock is wall time from the request to the arrival of each piece of text, including the network. It never runs at
the same time as another lane. If the server reports its drafts step by step, pieces become steps at the end of the
answer. What it does not report stays unknown: which tokens were drafted and, with some servers, the token ids and even
their number. SPECDEMO_API_KEY is sent to listed servers only and never appears in
traces, links or messages.
"""

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import httpx
from pydantic import BaseModel, Field, ValidationError

from specdemo.core.generation import Thinking, template_arguments
from specdemo.core.trace import MAX_TEXT, LaneTrace, Remote, StepEvent
from specdemo.models.ref import ModelRef
from specdemo.servers import client
from specdemo.servers.address import check_listed, host
from specdemo.servers.client import Client, Patience, ReportedError, StatusError, connect
from specdemo.servers.counters import ServerStats
from specdemo.servers.engines import counts_unverified, request_fields, stats_between
from specdemo.servers.stream import Alternatives, Finish, Piece, Span, StreamParser, step_events, token_pieces

if TYPE_CHECKING:
    from specdemo.core.protocol import GenerationConfig

KEY = "SPECDEMO_API_KEY"
TOKEN_S = 0.5  # timeout per token, in addition to SILENCE_S
MODELS_BYTES = 1_000_000
POLL_S = 0.05  # how often a lane checks whether it was stopped
# not the prompt of the run, which the server would then have in its prefix cache
WARM_UP = "Count to ten: one, two, three,"
WARM_UP_TOKENS = 8
INTERNAL_ERROR = 500  # llama-cpp-python's server reports so what it does not accept

Form = Literal["completions", "chat/completions"]
Text = str | list[dict[str, str]]  # text, or messages with role and content


class _ListedModel(BaseModel):
    id: Annotated[str, Field(max_length=500, pattern=r"^\P{C}*$")]  # printable characters only


class _ModelList(BaseModel):
    data: list[_ListedModel]


@dataclass
class RemoteLane:
    """Streams one continuation. `trace` is written as it comes; its `remote` and `finish` are right once `events` ends,
    and its events are then steps instead of pieces if `has_steps`.

    model: the target's name on the server, None: what the server serves, which then has to be one model or one named
    as `target`. forms: how the prompt may be put, the first that the server takes. draft: fields of the request that
    make the server draft. Raises ValueError for a server that is not listed.
    """

    trace: LaneTrace
    server: str
    model: str | None
    target: ModelRef
    prompt: Text
    config: "GenerationConfig"
    forms: Sequence[Form]
    thinking: Thinking = "default"
    draft: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.server = check_listed(self.server)
        self._finish: Finish | None = None
        self._spans: list[Span] | None = []
        self._patience = Patience()
        self._past_end = 0  # accepted draft tokens after the end of the text
        self.has_steps = False
        self.alternatives = 0  # number of most likely tokens to request
        self.next_tokens: dict[str, float] = {}  # most likely first tokens and their log-probabilities
        self.token_alternatives: list[Alternatives] = []  # of each token of a chat
        self.trace.remote = Remote(host(self.server), self.model or "", "")

    def events(self, cancelled: Callable[[], bool]) -> Iterator[StepEvent]:
        """Yield every event. Raises only RuntimeError, one line, if the server fails or takes
        too long; text that has arrived stays in the trace.
        """
        self.trace.finish = "cancelled"
        limit = self.config.max_new_tokens
        seconds = client.SILENCE_S + limit * TOKEN_S
        try:
            for event, text in _in_background(self._talk, cancelled, lambda: seconds + self._patience.waited_s):
                ids, room = event.emitted[0], MAX_TEXT - len(self.trace.text)
                text, cut = text[:room], len(text) > room
                self.trace.events.append(event)
                self.trace.token_ids += ids
                self.trace.pieces += [*[""] * (len(ids) - 1), text]
                self.trace.text += text
                yield event
                if cut:
                    self._note(f"cut off at {MAX_TEXT:,} characters, the limit of a trace")
                    self.trace.finish = "length"
                    return
        except TimeoutError:
            late = f"{host(self.server)} took longer than {seconds:g} seconds for {limit} tokens"
            raise RuntimeError(late) from None
        if not cancelled() and self._finish:
            self.trace.finish = self._finish
            self._replace_pieces()
            if self._past_end and not self.trace.steps_known:
                what = f"its server counted {self._past_end} accepted draft tokens past the end of its text"
                self._note(f"{what}; the totals leave them out")

    def _replace_pieces(self) -> None:
        """Replace the pieces by steps, if the server reports these."""
        if self._spans is None:
            self._note("tokens are not coloured, since the server's draft counts do not fit its text")
        if not self._spans:
            return
        trace, texts, start = self.trace, [], 0
        for event in trace.events:
            start += len(event.emitted[0])
            texts.append(trace.pieces[start - 1])
        trace.pieces, split = token_pieces(trace.events, texts, self._decoder())
        trace.events, self.has_steps = step_events(trace.events, self._spans, split), True
        if not trace.steps_known:
            self._note("grey tokens: their text or their draft is not known token by token")

    def _decoder(self) -> Callable[[list[int]], list[str]]:
        """Return a function for the texts of token ids; they are empty without the target's tokenizer."""
        from specdemo.models.load import local_tokenizer
        from specdemo.models.text import Detokenizer, encode

        try:
            tokenizer = local_tokenizer(self.target)
            if tokenizer is not None:
                return Detokenizer(tokenizer, encode(tokenizer, self.prompt, MAX_TEXT, self.thinking)).push
        except ValueError:
            pass
        return lambda ids: []

    def _update(self, **values: Any) -> None:
        self.trace.remote = replace(self.trace.service, **values)

    def _note(self, text: str) -> None:
        self.trace.note = f"{self.trace.note}; {text}" if self.trace.note else text

    async def _talk(self, emit: Callable[[Piece], None]) -> None:
        key = os.environ.get(KEY)
        limit = self.config.max_new_tokens
        parser = StreamParser(emit, limit)
        try:
            async with connect(self.server, key) as http:
                self._update(model=self.model or await self._served(http))
                form, standard = await self._warm_up(http)
                self._update(endpoint=f"/v1/{form}")
                before = await http.metrics()
                request = self._request(form, standard, self.prompt, limit)
                await self._patience.answer(lambda: parser.read_stream(http, f"/v1/{form}", request))
                counted = stats_between(before, await http.metrics())
        except Exception as error:
            raise RuntimeError(_reason(error, host(self.server), key, parser.pieces)) from None
        finally:
            self._update(tokens=parser.reported_tokens, counted=parser.all_counted)
        alone = _alone(counted, parser)
        stats = counted if alone else parser.drafted or counted
        if stats is parser.drafted or alone:
            tokens = parser.tokens_after_first
            if not stats.is_possible(tokens):
                stats, parser.drafted = ServerStats(), None
                self._note("its server's draft counts are more than its text can hold, so they are not shown")
            past_end = stats.counters.get("accepted") or 0.0
            stats = stats.within(tokens).over_all_passes(tokens, of_text=True)
            self._past_end = round(past_end - (stats.counters.get("accepted") or 0.0))
        if stats.counters.get("drafted") and counts_unverified(self.trace.method):
            self._note("its server counts all draft tokens: those after the accepted ones were rejected or unverified")
        self._update(counters=stats.counters, accept_by_position=stats.accept_by_position, source=stats.source)
        self._update(accept_histogram=stats.accept_histogram, times=parser.times or counted.times)
        self._spans, self._finish, self.next_tokens = parser.spans(), parser.finish, parser.next_tokens
        self.token_alternatives = parser.alternatives
        if parser.finish_note:
            self._note(_printable(parser.finish_note, key))
        if self._patience.waited_s:
            self._note(f"its server was not ready for {self._patience.waited_s:g} s (status {self._patience.status})")

    async def _served(self, http: Client) -> str:
        try:
            listed = await self._patience.answer(lambda: http.read("/v1/models", MODELS_BYTES))
        except StatusError:  # the server does not list its models
            return self.target
        models = _ModelList.model_validate_json(listed).data
        names = [model.id for model in models]
        if self.target in names or len(names) == 1:
            return self.target if self.target in names else names[0]
        shown = ", ".join(names[:5]) or "no listed model"
        raise ValueError(f"it serves {shown}; choose one with served_model")

    async def _warm_up(self, http: Client) -> tuple[Form, bool]:
        """Send a short request that is not measured, and find a form of request that the server accepts.

        Returns the form, and whether only standard settings are accepted. Raises the first error if all forms are
        rejected, or if the server takes no request for now.
        """
        # if both are off, a request without them is equivalent
        sampling = self.config.sampling
        droppable = not sampling.top_k and not sampling.min_p and self.thinking == "default"
        refusal: StatusError | None = None
        for form, standard in product(self.forms, (False, True) if droppable else (False,)):
            try:
                await self._patience.answer(partial(self._try_form, http, form, standard))
            except StatusError as error:
                if error.patience_s and error.status != INTERNAL_ERROR:
                    raise
                refusal = refusal or error
                continue
            if standard:
                self._note("its server accepts only standard settings; the others have its defaults")
            if form != self.forms[0]:
                self._note(f"its server accepts the prompt only at /v1/{form}")
            return form, standard
        assert refusal is not None
        raise refusal

    async def _try_form(self, http: Client, form: Form, standard: bool) -> None:
        """Send a short request."""
        limit = min(WARM_UP_TOKENS, self.config.max_new_tokens)
        request = self._request(form, standard, WARM_UP, limit)
        await StreamParser(lambda piece: None, limit).read_stream(http, f"/v1/{form}", request)

    def _request(self, form: Form, standard: bool, prompt: Text, limit: int) -> dict[str, object]:
        """Build the request. All settings are explicit, because servers may take defaults from the model's
        generation_config.
        """
        sampling = self.config.sampling
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        put: dict[str, object] = {"prompt": prompt} if form == "completions" else {"messages": messages}
        request: dict[str, object] = {
            "model": self.trace.service.model,
            "max_tokens": limit,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": self.config.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            **put,
            **self.draft,
        }
        if self.alternatives:
            chat = {"logprobs": True, "top_logprobs": self.alternatives}
            request |= {"logprobs": self.alternatives} if form == "completions" else chat
        if not standard:
            request["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
            request |= {
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "repetition_penalty": 1.0,
                "return_token_ids": True,
                **request_fields(),
            }
            arguments = template_arguments(self.thinking)
            request |= {"chat_template_kwargs": arguments} if arguments else {}
        return request


def _alone(counted: ServerStats, parser: StreamParser) -> bool:
    """Return whether the server's counters cover this answer only and say more than those of the answer."""
    own = parser.drafted.counters if parser.drafted else {}
    return "drafted" in own and "steps" not in own and counted.counters.get("drafted") == own["drafted"]


Item = TypeVar("Item")


def _in_background(
    work: Callable[[Callable[[Item], None]], Awaitable[None]],
    cancelled: Callable[[], bool],
    seconds: Callable[[], float],
) -> Iterator[Item]:
    """Yield the items of `work` as they arrive, so that neither arrival times nor stopping depend on the reader.

    Raises its errors, and TimeoutError if it is not finished after `seconds`, which may grow.
    """
    queue: SimpleQueue[Any] = SimpleQueue()
    over = object()
    stop = threading.Event()

    async def watched() -> None:
        task = asyncio.ensure_future(work(queue.put))
        while not task.done():
            await asyncio.wait({task}, timeout=POLL_S)
            if stop.is_set():
                task.cancel()
        if not task.cancelled() and task.exception():
            queue.put(task.exception())
        queue.put(over)

    thread = threading.Thread(target=lambda: asyncio.run(watched()), daemon=True, name="remote lane")
    began = time.monotonic()
    thread.start()
    try:
        while not cancelled():
            try:
                item = queue.get(timeout=POLL_S)
            except Empty:
                if time.monotonic() > began + seconds():
                    raise TimeoutError from None
                continue
            if item is over:
                return
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join(client.CONNECT_S)


def _printable(words: str, key: str | None) -> str:
    """Return a server's words as one short printable line, without the key, which a server may repeat."""
    words = words.replace(key, "***") if key else words
    return " ".join("".join(c if c.isprintable() else " " for c in words[:1000]).split())[:300]


def _reason(error: Exception, where: str, key: str | None, pieces: int) -> str:
    """Format an error as one printable line."""
    words = str(error)
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        words = f"{'.'.join(map(str, first['loc'])) or 'an event'}: {first['msg']}"
    words = _printable(words, key)
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return f"{where} cannot be reached; start the server or correct its address"
    if isinstance(error, httpx.TimeoutException):
        return f"{where} sent nothing for {client.SILENCE_S:g} seconds"
    if isinstance(error, StatusError):
        later = f"; try again in {error.asked_s:g} seconds" if error.asked_s else "; try again later"
        return f"{where} answered {words}{later if error.patience_s else ''}"
    if isinstance(error, ReportedError):
        return f"{where} reports an error: {words}"
    if isinstance(error, ValueError | RecursionError):
        return f"{where} sent an invalid response: {words}"
    return f"{where} closed the connection after {pieces} pieces of text"

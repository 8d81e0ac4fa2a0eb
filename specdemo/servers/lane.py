"""A lane that runs on a server: any that speaks OpenAI's completions, such as vLLM, SGLang, llama.cpp's or TGI.

Its clock is wall time, from the request to the arrival of each piece of text, the network included. It runs when no
other lane does, so that no lane waits for another's machine. What the server does not tell stays unknown: which tokens
were drafted, and with some servers the tokens' ids and even their number.

The key for servers that want one is the environment's SPECDEMO_API_KEY; it goes to listed servers alone, and nowhere
into traces, links or messages. Redirects are not followed.
"""

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Literal

from specdemo.core.trace import LaneTrace, Remote, StepEvent
from specdemo.servers import counters
from specdemo.servers.address import check_listed, host

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from specdemo.core.protocol import GenerationConfig

KEY = "SPECDEMO_API_KEY"
NO_KEY = "none"  # the client wants one
CONNECT_S = 5.0
SILENCE_S = 60.0  # the longest wait for the next piece; a server may load its model before the first
METRICS_S = 3.0
POLL_S = 0.05  # how soon a lane notices that it was stopped
WARM_UP = "Count to ten: one, two, three,"  # not the run's prompt, which a server would then have in its cache
WARM_UP_TOKENS = 8

Form = Literal["completions", "chat/completions"]
Piece = tuple[StepEvent, str]
Prompt = str | list[dict[str, str]]  # a text, or messages with role and content


class RemoteLane:
    """Streams one continuation. `trace` is written as it comes; its `remote` and `finish` are right once `events` ends.

    model: the target's name on the server, None: what the server serves, which then has to be one model or one named
    as `target`. forms: how the prompt may be put, the first that the server takes. Raises ValueError for a server
    that is not listed.
    """

    def __init__(
        self,
        trace: LaneTrace,
        server: str,
        model: str | None,
        target: str,
        prompt: Prompt,
        config: "GenerationConfig",
        forms: Sequence[Form],
    ) -> None:
        self.trace = trace
        self._server = check_listed(server)
        self._model = model
        self._target = target
        self._prompt = prompt
        self._config = config
        self._forms = forms
        self._finish: Literal["stop", "length"] | None = None
        trace.remote = Remote(host(self._server), model or "", "")

    def events(self, cancelled: Callable[[], bool]) -> Iterator[Piece]:
        """Each event with the text it added. Raises RuntimeError, one line, when the server fails; what had arrived
        stays in the trace."""
        self.trace.finish = "cancelled"
        for event, text in _in_background(self._talk, cancelled):
            ids = event.emitted[0]
            self.trace.events.append(event)
            self.trace.token_ids += ids
            self.trace.pieces += [*[""] * (len(ids) - 1), text]
            self.trace.text += text
            yield event, text
        if not cancelled() and self._finish:
            self.trace.finish = self._finish

    @property
    def _remote(self) -> Remote:
        assert self.trace.remote is not None
        return self.trace.remote

    def _tell(self, **known: Any) -> None:
        self.trace.remote = replace(self._remote, **known)

    def _note(self, text: str) -> None:
        self.trace.note = f"{self.trace.note}; {text}" if self.trace.note else text

    async def _talk(self, say: Callable[[Piece], None]) -> None:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient, Timeout

        limits = Timeout(SILENCE_S, connect=CONNECT_S)
        key = os.environ.get(KEY) or NO_KEY
        heard = _Heard(say)
        try:
            async with (
                DefaultAsyncHttpxClient(timeout=limits, follow_redirects=False) as http,
                AsyncOpenAI(
                    base_url=f"{self._server}/v1", api_key=key, max_retries=0, timeout=limits, http_client=http
                ) as client,
            ):
                self._tell(model=self._model or await self._served(client))
                form, standard = await self._warm_up(client)
                self._tell(endpoint=f"/v1/{form}")
                before = await self._metrics(http)
                await self._stream(client, form, standard, self._prompt, self._config.max_new_tokens, heard)
                told = heard.drafted or counters.between(before, await self._metrics(http))
        except Exception as error:
            raise RuntimeError(_reason(error, host(self._server), key, heard.pieces)) from None
        finally:
            self._tell(tokens=heard.told, counted=heard.counted or heard.told == heard.pieces)
        self._tell(counters=told.counters, accept_by_position=told.accept_by_position, source=told.source)
        self._finish = heard.finish

    async def _served(self, client: "AsyncOpenAI") -> str:
        from openai import APIStatusError

        try:
            names = [model.id for model in (await client.models.list()).data]
        except APIStatusError:  # it does not list what it serves
            return self._target
        if self._target in names or len(names) == 1:
            return self._target if self._target in names else names[0]
        shown = ", ".join(names[:5]) or "nothing it lists"
        raise ValueError(f"it serves {shown}; say which one with served_model")

    async def _warm_up(self, client: "AsyncOpenAI") -> tuple[Form, bool]:
        """A few tokens off the clock, which also find out how the server wants to be asked.

        -> the form, and whether standard settings are all that it takes. Raises the first refusal when all are refused.
        """
        from openai import APIConnectionError, APIStatusError, APITimeoutError

        refusal: APIStatusError | None = None
        for form in self._forms:
            for standard in (False, True) if self._droppable else (False,):
                limit = min(WARM_UP_TOKENS, self._config.max_new_tokens)
                ask = partial(self._stream, client, form, standard, WARM_UP, limit)
                try:
                    try:
                        await ask(_Heard(lambda piece: None))
                    except APIConnectionError as error:
                        if refusal is None or isinstance(error, APITimeoutError):
                            raise
                        await ask(_Heard(lambda piece: None))  # a refusal may have closed the connection it came on
                except APIStatusError as error:
                    refusal = refusal or error
                    continue
                if standard:
                    self._note("its server takes standard settings only, the others are at its own defaults")
                if form != self._forms[0]:
                    self._note(f"its server takes the prompt at /v1/{form} only")
                return form, standard
        assert refusal is not None
        raise refusal

    @property
    def _droppable(self) -> bool:
        """Without the settings that are not standard the same is asked for."""
        return not self._config.sampling.top_k and not self._config.sampling.min_p

    def _request(self, form: Form, standard: bool, prompt: Prompt, limit: int) -> dict[str, Any]:
        """Everything a server might set by itself is named: many take defaults from the model's generation_config."""
        sampling = self._config.sampling
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        put: dict[str, Any] = {"prompt": prompt} if form == "completions" else {"messages": messages}
        request: dict[str, Any] = {
            "model": self._remote.model,
            "max_tokens": limit,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": self._config.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            **put,
        }
        if not standard:
            request["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
            request["extra_body"] = {
                "top_k": sampling.top_k or -1,
                "min_p": sampling.min_p,
                "repetition_penalty": 1.0,
                "return_token_ids": True,
            }
        return request

    async def _stream(
        self, client: "AsyncOpenAI", form: Form, standard: bool, prompt: Prompt, limit: int, heard: "_Heard"
    ) -> None:
        ask: Any = client.completions if form == "completions" else client.chat.completions
        heard.begin()
        async with await ask.create(**self._request(form, standard, prompt, limit)) as stream:
            async for chunk in stream:
                heard.hear(chunk.to_dict(warnings=False))
                if heard.tokens > limit:
                    raise ValueError(f"it sends more than the {limit} tokens it was asked for")
        if heard.finish is None:
            raise ConnectionError

    async def _metrics(self, http: Any) -> str:
        """The text of /metrics; empty where there is none."""
        key = os.environ.get(KEY)
        try:
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            response = await http.get(f"{self._server}/metrics", headers=headers, timeout=METRICS_S)
        except Exception:  # whatever it is, a server without metrics is one whose counters are unknown
            return ""
        return str(response.text) if response.status_code == 200 else ""


class _Heard:
    """Turns the chunks of one answer into events."""

    def __init__(self, say: Callable[[Piece], None]) -> None:
        self._say = say
        self._last = 0.0
        self.pieces = 0
        self.tokens = 0  # as many as are told, and where nothing is told one a piece
        self.counted = False  # every piece so far came with the number of its tokens
        self.told: int | None = None  # tokens of the whole text so far, in the server's own count
        self.finish: Literal["stop", "length"] | None = None
        self.drafted: counters.Told | None = None

    def begin(self) -> None:
        self._last = time.perf_counter()

    def hear(self, chunk: dict[str, Any]) -> None:
        usage = chunk.get("usage") or {}
        total = usage.get("completion_tokens")
        for choice in chunk.get("choices") or []:
            said = choice.get("delta") or choice
            parts = (said.get("reasoning_content") or said.get("reasoning"), said.get("content") or said.get("text"))
            text = "".join(part for part in parts if isinstance(part, str))
            ids = choice.get("token_ids") or []
            # a count that comes with every piece tells each one's tokens, one that comes at the end only their sum
            grown = 0
            if total is not None and (self.counted or not self.pieces):
                grown = max(total - (self.told or 0), 0)
            if text or ids or grown:
                self._piece(text, ids, grown)
            self._end(choice.get("finish_reason"))
        if total is not None:
            self.told = total
        self._timings(chunk.get("timings"))

    def _piece(self, text: str, ids: list[int], grown: int) -> None:
        now = time.perf_counter()
        emitted = ids or [-1] * (grown or 1)
        self.counted = bool(ids or grown) and (self.counted or not self.pieces)
        ms = {"stream" if self.pieces else "prefill": round((now - self._last) * 1000.0, 4)}
        whole = text.encode("utf-8", "replace").decode()  # JSON can hold halves of characters that UTF-8 cannot
        self._say((StepEvent(self.pieces, [[]], [[]], [[]], [emitted], [[]], [[]], ms), whole))
        self._last = now
        self.pieces += 1
        self.tokens += len(emitted)

    def _end(self, reason: str | None) -> None:
        if reason is None:
            return
        if reason not in ("stop", "length"):
            raise ValueError(f"it ended the text early: {reason}")
        self.finish = "stop" if reason == "stop" else "length"

    def _timings(self, timings: Any) -> None:
        """llama.cpp's own count of this one answer."""
        drafted, accepted = (timings or {}).get("draft_n"), (timings or {}).get("draft_n_accepted")
        if drafted and accepted is not None:
            self.drafted = counters.Told(
                {"drafted": drafted, "accepted": accepted, "acceptance_rate": round(accepted / drafted, 4)},
                [],
                "llama.cpp's count for this answer: accepted / drafted tokens",
            )


def _in_background(
    work: Callable[[Callable[[Any], None]], Awaitable[None]], cancelled: Callable[[], bool]
) -> Iterator[Any]:
    """What `work` says, as it says it: arrival times do not depend on who reads, nor stopping on what comes."""
    said: SimpleQueue[Any] = SimpleQueue()
    over = object()
    stop = threading.Event()

    async def watched() -> None:
        task = asyncio.ensure_future(work(said.put))
        while not task.done():
            await asyncio.wait({task}, timeout=POLL_S)
            if stop.is_set():
                task.cancel()
        if not task.cancelled() and task.exception():
            said.put(task.exception())
        said.put(over)

    thread = threading.Thread(target=lambda: asyncio.run(watched()), daemon=True, name="remote lane")
    thread.start()
    try:
        while not cancelled():
            try:
                item = said.get(timeout=POLL_S)
            except Empty:
                continue
            if item is over:
                return
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join(CONNECT_S)


def _reason(error: Exception, where: str, key: str, pieces: int) -> str:
    """One line, without the key, which a server may quote back."""
    from openai import APIConnectionError, APIError, APIStatusError

    words = " ".join(str(error).split())[:300]
    if key != NO_KEY:
        words = words.replace(key, "***")
    cause = type(error.__cause__ or error).__name__  # of the HTTP library below
    if cause in ("ConnectError", "ConnectTimeout"):
        return f"{where} cannot be reached; start the server, or mend its address"
    if "Timeout" in cause:
        return f"{where} was silent for {SILENCE_S:g} seconds"
    if isinstance(error, APIStatusError):
        return f"{where} answered {words}"
    if isinstance(error, ValueError) or (isinstance(error, APIError) and not isinstance(error, APIConnectionError)):
        return f"{where} gave no usable answer: {words}"
    return f"{where} broke off after {pieces} pieces of text"

"""Ollama. Fields: docs/api.md and api/types.go of August 2026. Its answers report nothing about drafts.

OpenAI's API lacks `draft_num_predict`, so lanes that choose it use Ollama's own API. It belongs to the loaded model:
the runner of llama.cpp loads the model again when it changes, which happens in the warm-up request of a lane.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import BaseModel

from specdemo.core.thinking import NAMES
from specdemo.core.trace import Span
from specdemo.servers.counters import Milliseconds, ServerStats, reported
from specdemo.servers.engines.base import NativeAPI, ReportingEngine

NS_PER_MS = 1e6


class _Durations(BaseModel):
    """Times in nanoseconds, in the last object of a stream."""

    prompt_eval_duration: Milliseconds = None
    eval_duration: Milliseconds = None


class OllamaAPI(NativeAPI):
    """`/api/generate` and `/api/chat`: a JSON object per line."""

    probe = ("/", "Ollama is running")
    paths: ClassVar = {"completions": "/api/generate", "chat/completions": "/api/chat"}
    fields = "options.draft_num_predict"

    def request(self, standard: Mapping[str, Any], k: int) -> dict[str, object]:
        options = {
            "num_predict": standard["max_tokens"],
            "temperature": standard["temperature"],
            "top_p": standard["top_p"],
            "seed": standard["seed"],
            "top_k": max(standard.get("top_k", 0), 0),  # 0: off
            "min_p": standard.get("min_p", 0.0),
            "repeat_penalty": 1.0,
            "draft_num_predict": k,
        }
        text = {"prompt": standard["prompt"], "raw": True} if "prompt" in standard else {}
        chat = {"messages": standard["messages"]} if "messages" in standard else {}
        arguments = standard.get("chat_template_kwargs", {})
        think = {"think": arguments[NAMES[0]]} if arguments else {}
        return {"model": standard["model"], "stream": True, "options": options, **text, **chat, **think}

    def chunk(self, event: Mapping[str, Any]) -> dict[str, object]:
        message = event.get("message")
        found = message if isinstance(message, dict) else {**event, "content": event.get("response")}
        text = {"reasoning": found.get("thinking"), "content": found.get("content")}
        finish = event.get("done_reason", "stop") if event.get("done") else None
        usage = {"completion_tokens": event.get("eval_count")}
        return {**event, "choices": [{"delta": text, "finish_reason": finish}], "usage": usage}


class Ollama(ReportingEngine):
    """Ollama's server."""

    name = "ollama"
    title = "Ollama"
    native = OllamaAPI()

    def acceptance(self, chunk: Mapping[str, Any]) -> ServerStats | None:
        found = reported(_Durations, chunk)
        if found is None or found.prompt_eval_duration is None or found.eval_duration is None:
            return None
        ttft, decoding = found.prompt_eval_duration / NS_PER_MS, found.eval_duration / NS_PER_MS
        times: dict[Span, float] = {"ttft_ms": ttft, "decode_ms": decoding}
        return ServerStats(times=times)

"""Trial runs of untrusted tokenizers and chat templates in a child process.

Their regular expressions, normalizers and templates are programs: they may run forever, use all memory, or abort the
process. In the child they are limited to CPU_S seconds and MEMORY_BYTES, and a failure becomes one line. The child runs
this file as a script, so nothing of this package is imported at the top.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

Request = Mapping[str, Any]  # JSON from the parent process
CPU_S = 3  # CPU time, so that a busy machine rejects nothing
WALL_S = 30
MEMORY_BYTES = 2 << 30
MAX_OUTPUT = 4_000_000  # most characters of a template's output
MAX_ENTRY = 4096  # most characters of a vocabulary entry
MAX_DECODERS = 8
EMPTY = {"model": {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}, "added_tokens": []}
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
SAMPLE = "Once upon a time, there was a dog.\n" + "a" * 10_000


def try_tokenizer(path: str) -> None:
    """Load a tokenizer.json and encode a sample. Raises ValueError with a clause that says what is wrong."""
    _run_child({"path": path})


def try_text(parts: Mapping[str, object], text: str) -> None:
    """Split a text as a tokenizer would. Raises ValueError with a clause that says what is wrong.

    parts: its normalizer and pre_tokenizer, as in tokenizer.json, and `tokens`, the arguments of its added tokens.
    """
    _run_child({"parts": parts, "text": text})


def render(template: str, messages: Sequence[Mapping[str, str]], special: Mapping[str, object]) -> str:
    """Apply a chat template with the generation prompt. Raises ValueError with a clause that says what is wrong."""
    return str(_run_child({"template": template, "messages": messages, "special": special})["text"])


def _run_child(request: Mapping[str, object]) -> dict[str, object]:
    command, payload = [sys.executable, "-P", __file__], json.dumps(request, allow_nan=False).encode()
    try:
        done = subprocess.run(command, input=payload, capture_output=True, timeout=WALL_S, env=os.environ | ONE_THREAD)
        answer: dict[str, object] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise ValueError("does not terminate") from None
    except ValueError:  # no output: the child was killed or crashed
        raise ValueError(f"takes more than {CPU_S} s or {MEMORY_BYTES >> 30} GB, or crashes") from None
    if "error" in answer:
        raise ValueError(answer["error"])
    return answer


def _handle(request: Request) -> dict[str, object]:
    if "template" in request:
        return _render(request)
    from tokenizers import AddedToken, Tokenizer

    if "path" in request:
        tokenizer = Tokenizer.from_file(request["path"])
        for problem in _problems(tokenizer):
            return {"error": problem}
        return {}
    parts = dict(request["parts"])
    tokens = parts.pop("tokens")
    tokenizer = Tokenizer.from_str(json.dumps(EMPTY | parts, allow_nan=False))
    tokenizer.add_tokens([AddedToken(**token) for token in tokens])
    tokenizer.encode(request["text"])
    return {}


def _render(request: Request) -> dict[str, object]:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        [request["messages"]], chat_template=request["template"], add_generation_prompt=True, **request["special"]
    )
    text = str(rendered[0][0])
    return {"text": text} if len(text) <= MAX_OUTPUT else {"error": f"generates {len(text):,} characters"}


def _problems(tokenizer: Any) -> Iterator[str]:
    """Yield defects that no sample shows: long vocabulary entries, and decoders that could grow a text without
    limit."""
    longest = max(map(len, tokenizer.get_vocab()), default=0)
    if longest > MAX_ENTRY:
        yield f"has an entry of {longest:,} characters"
    if len(tokenizer.encode(SAMPLE).ids) > 10 * len(SAMPLE):
        yield "makes more than ten tokens from one character"
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
    steps = list(_steps(decoder))  # each step could double a text
    if len(steps) > MAX_DECODERS or len(json.dumps(decoder, allow_nan=False)) > MAX_ENTRY or any(map(_grows, steps)):
        yield "has an unsupported decoder, whose output could grow without limit"


def _steps(decoder: Request) -> Iterator[Mapping[str, object]]:
    if "decoders" not in decoder:
        yield decoder
    for step in decoder.get("decoders", ()):
        yield from _steps(step)


def _grows(step: Request) -> bool:
    pattern = step.get("pattern", {})
    return "Regex" in pattern or len(step.get("content", "")) > len(pattern.get("String", " "))


def _main() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    with suppress(OSError, ValueError):  # macOS has no memory limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    request = json.load(sys.stdin)
    try:
        answer = _handle(request)
    except MemoryError:
        answer = {"error": "needs too much memory"}
    except BaseException as error:  # a Rust panic is not an Exception
        lines = str(error).splitlines() or [type(error).__name__]
        what = "rejects this conversation" if "template" in request else "fails"
        answer = {"error": f"{what}: {lines[0][:200]}"}
    print(json.dumps(answer, allow_nan=False))


if __name__ == "__main__":
    _main()

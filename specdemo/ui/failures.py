"""Failed calls as one line in the log, where Gradio and the server print a traceback.

Anyone can send bad calls to a public page. The traceback is logged at level DEBUG.
"""

import logging
import traceback
from pathlib import Path
from typing import Any

import gradio as gr
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdemo.bench.report import visible

logger = logging.getLogger(__name__)

LONGEST = 300  # characters of a message
PACKAGE = Path(__file__).parents[1]


class Page(gr.Blocks):
    """Blocks that print no traceback of failed calls."""

    async def process_api(self, block_fn: Any, *args: Any, **settings: Any) -> dict[str, Any]:
        """Run a call. Raises gr.Error, which Gradio does not print."""
        try:
            answer: dict[str, Any] = await super().process_api(block_fn, *args, **settings)
        except Exception as error:
            if not isinstance(error, gr.Error) or error.print_exception:
                log_failure(f"call of {getattr(block_fn, 'name', block_fn)}", error)
            if isinstance(error, gr.Error):
                error.print_exception = False
                raise
            message = "the call failed; see the log of the server"
            raise gr.Error(message, visible=False, print_exception=False) from error
        return answer


def quiet(app: ASGIApp) -> ASGIApp:
    """Return the server app, without tracebacks of failed requests."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def note_start(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await app(scope, receive, note_start)
        except Exception as error:  # starlette raises it again after it has answered with status 500
            if scope["type"] != "http" or not started:
                raise
            log_failure(f"{scope['method']} {scope['path']}", error)

    return serve


def log_failure(what: str, error: Exception) -> None:
    """Log a failure in one line, with the place in the code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    own = (frame for frame in frames if PACKAGE in Path(frame.filename).parents and frame.filename != __file__)
    place = next(own, frames[0])
    line = " ".join(f"{what} failed: {type(error).__name__}: {error}".split())
    logger.warning("%s (%s:%s)", visible(line)[:LONGEST], Path(place.filename).name, place.lineno)
    logger.debug("its traceback", exc_info=error)

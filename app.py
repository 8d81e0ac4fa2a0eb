"""The page's entry point: `python app.py`, also on a Hugging Face Space."""

import argparse
import os
import sys
from importlib import import_module
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; see --help\n")


def port(text: str) -> int:
    if text.isdecimal() and 1 <= int(text) <= 65535:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not from 1 to 65535")


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(description="Plain and speculative decoding, side by side, in a web page.")
    parser.add_argument("--preset", default="embedded-draft", metavar="ID", help="the comparison that is selected")
    parser.add_argument("--host", default=os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1"))
    parser.add_argument("--port", type=port, default=os.environ.get("GRADIO_SERVER_PORT", "7860"))
    parser.add_argument(
        "--allow-any-model", action="store_true", help="accept any model id or path, not the list alone"
    )
    parser.add_argument(
        "--server",
        action="append",
        default=[],
        metavar="URL",
        help="a server that lanes may run on, as in SPECDEMO_SERVERS; repeatable",
    )
    return parser.parse_args(given)


def main() -> int:
    """0: served and closed; 2: bad input, one line."""
    chosen = arguments()
    from specdemo.ui import space

    if space.zero_gpu():
        import_module("spaces")  # has to come before torch
    from specdemo.servers.address import allow
    from specdemo.ui.page import serve

    try:
        allow(chosen.server)
        serve(chosen.preset, chosen.host, chosen.port, chosen.allow_any_model)
    except (ValueError, OSError) as error:
        message = str(error)
        if "empty port" in message:  # Gradio's words name settings of its own
            message = f"port {chosen.port} of {chosen.host} cannot be had; choose others with --port and --host"
        print(f"error: {message}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

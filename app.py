"""The page's entry point: `python app.py`, also on a Hugging Face Space."""

import argparse
import os
import sys
from importlib import import_module


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Plain and speculative decoding, side by side, in a web page.")
    parser.add_argument("--preset", default="embedded-draft", metavar="ID", help="the comparison that is selected")
    parser.add_argument("--host", default=os.environ.get("GRADIO_SERVER_NAME", "127.0.0.1"))
    parser.add_argument("--port", type=int, default=int(os.environ.get("GRADIO_SERVER_PORT", "7860")))
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
    from specdemo.engine.servers import allow
    from specdemo.ui.page import serve

    try:
        allow(chosen.server)
        serve(chosen.preset, chosen.host, chosen.port, chosen.allow_any_model)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

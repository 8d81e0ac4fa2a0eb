"""Where the page runs."""

import os


def public() -> bool:
    """Return whether strangers can reach this page, as on a Space."""
    return os.environ.get("SPECDEMO_PUBLIC") == "1" or bool(os.environ.get("SPACE_ID"))

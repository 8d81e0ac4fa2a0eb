"""Lazy imports of modules that need torch. A lock ensures that each is imported once: transformers' lazy modules break
when two threads import them at the same time, and a page has visitors while its engine is still being imported.
"""

import threading
from types import ModuleType

_lock = threading.Lock()


def live() -> ModuleType:
    """specdemo.ui.live, with the modules of all usable methods imported too."""
    with _lock:
        from specdemo.methods import method, usable
        from specdemo.ui import live

        for name in usable():
            method(name)
        return live

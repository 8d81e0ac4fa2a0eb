"""Lazy imports of modules that need torch. A lock ensures that each module is imported once: the lazy modules of
transformers break when two threads import them at the same time, and visitors arrive while the engine is still being
imported.
"""

import threading
from types import ModuleType

_lock = threading.Lock()


def live() -> ModuleType:
    """Return specdemo.ui.live, after the modules of all usable methods were imported too."""
    with _lock:
        from specdemo.methods import method, usable
        from specdemo.ui import live

        for name in usable():
            method(name)
        return live

"""Plain and speculative decoding of the same model, side by side, measured honestly.

The public API; everything is imported when it is first used, so `import specdemo` costs nothing.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specdemo.analysis.predict import predict
    from specdemo.core.protocol import Budget, GenerationConfig
    from specdemo.core.sampling import Sampling
    from specdemo.engine.loop import generate
    from specdemo.methods import load_drafter
    from specdemo.methods.pairs import load_target
    from specdemo.presets.pair import run

__version__ = "0.1.0"
if "OMP_WAIT_POLICY" not in os.environ:
    # Before torch is imported. Threads that wait for each other spin. With fewer rounds they lose less while another
    # program uses a core.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
__all__ = [
    "Budget",
    "GenerationConfig",
    "Sampling",
    "__version__",
    "generate",
    "load_drafter",
    "load_target",
    "predict",
    "run",
]

_HOMES = {
    "Budget": "specdemo.core.protocol",
    "GenerationConfig": "specdemo.core.protocol",
    "Sampling": "specdemo.core.sampling",
    "generate": "specdemo.engine.loop",
    "load_drafter": "specdemo.methods",
    "load_target": "specdemo.methods.pairs",
    "predict": "specdemo.analysis.predict",
    "run": "specdemo.presets.pair",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'specdemo' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

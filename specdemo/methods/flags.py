"""Flags of serving engines, as methods of other packages declare them in `Method.serves`; those of the methods here are
in servers/engines/.
"""

from collections.abc import Callable, Mapping
from typing import Any

Flags = list[str]
# the drafter (None: the target contains it), k, and all options of the method -> flags
EngineArgs = Callable[[str | None, int, Mapping[str, Any]], Flags]

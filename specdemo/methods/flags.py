"""Flags of serving engines, as methods of other packages declare them in `Method.serves`; those of the methods here are
in servers/engines/.
"""

from collections.abc import Callable, Mapping
from typing import Any

Flags = list[str]
MethodOptions = Mapping[str, Any]  # all options of a method: name -> value
# the drafter (None: the target contains it), k, options -> flags
EngineArgs = Callable[[str | None, int, MethodOptions], Flags]

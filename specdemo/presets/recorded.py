"""Recorded runs of presets, `presets/recorded/ID.json`: traces as `specdemo run ID --out` writes them, shown where
nothing has run yet or nothing can. Needs neither torch nor a model."""

from functools import lru_cache

from specdemo.core.trace import RunTrace, from_json
from specdemo.presets.files import FOLDER


def is_recorded(preset_id: str) -> bool:
    """Whether there is a recorded run of a preset."""
    return (FOLDER / "recorded" / f"{preset_id}.json").is_file()


@lru_cache
def recorded(preset_id: str) -> RunTrace | None:
    """The recorded run of a preset; None where there is none. Raises ValueError for a damaged file."""
    if not is_recorded(preset_id):
        return None
    path = FOLDER / "recorded" / f"{preset_id}.json"
    try:
        return from_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None

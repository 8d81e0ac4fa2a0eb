"""Reader of untrusted YAML files: excessive files are rejected with one line before any value is built."""

from pathlib import Path

import yaml

from specdemo.core.safe_io import read_text

YAML_BYTES = 1_000_000
YAML_VALUES = 2000
YAML_DEPTH = 16
NUMBER = 40  # characters of a value other than text; YAML takes very long to parse longer numbers


class _Bounded(yaml.SafeLoader):
    """YAML loader without aliases, with limits on the number of values, their depth, and the length of numbers."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values = self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._values, self._depth = self._values + 1, self._depth + 1
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not supported; repeat the value")
        if self._values > YAML_VALUES or self._depth > YAML_DEPTH:
            raise yaml.YAMLError(f"more than {YAML_VALUES} values, or deeper than {YAML_DEPTH}; make it smaller")
        node = super().compose_node(parent, index)
        if isinstance(node, yaml.ScalarNode) and not node.tag.endswith(":str") and len(node.value) > NUMBER:
            raise yaml.YAMLError(f"a number or date of {len(node.value):,} characters; make it shorter")
        self._depth -= 1
        return node


def read_yaml(path: Path) -> object:
    """Read a YAML file. Raises ValueError, one line with the file's name."""
    text, loader = read_text(path, YAML_BYTES), None
    try:
        loader = _Bounded(text)
        return loader.get_single_data()
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise ValueError(f"{path.name} is not YAML: {str(error).partition(chr(10))[0]}") from None
    finally:
        if loader is not None:
            loader.dispose()

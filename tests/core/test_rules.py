"""The registry of acceptance rules."""

import pytest

from specdemo.core.rules import accept_rule


def test_an_unknown_rule_is_one_line():
    with pytest.raises(ValueError, match="unknown acceptance rule 'tipical'; did you mean 'typical'\\?"):
        accept_rule("tipical")

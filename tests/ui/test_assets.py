"""Scripts as the page sends them."""

from specdemo.ui.assets import COMMENT, HERE

SCRIPT = """// One.
/**
 * Two. */
function f(x) {
  // three
  const url = "http://a"; // four
  /** @type {HTMLElement} */ (x).click();
  return x; /* five */
}
"""


def test_whole_lines_of_comments_and_indentation_are_removed():
    assert COMMENT.sub("", SCRIPT) == (
        'function f(x) {\nconst url = "http://a"; // four\n'
        "/** @type {HTMLElement} */ (x).click();\nreturn x; /* five */\n}\n"
    )


def test_no_template_literal_spans_lines():
    """Its indentation would be removed."""
    for path in HERE.glob("*.js"):
        for line in path.read_text(encoding="utf-8").splitlines():
            assert line.count("`") % 2 == 0, (path.name, line)

"""Results as self-contained HTML files: a chart, drawn by the script of the page, with its table and conditions."""

from contextlib import suppress
from html import escape
from pathlib import Path

from specdemo.bench.plot import chart
from specdemo.bench.report import bench_report
from specdemo.bench.result import Result
from specdemo.core.atomic_io import finite, json_text, write_text

UI = Path(__file__).parents[1] / "ui"  # scripts and style of the charts
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
:root {{ --body-text-color: #1f2733; --block-background-fill: #fff; --border-color-primary: #d9dfe7 }}
.dark {{ --body-text-color: #e6ebf2; --block-background-fill: #1b2430; --border-color-primary: #3a4657 }}
{style}
body {{ font: 1rem/1.5 system-ui, sans-serif; margin: 1.5rem }}
body {{ color: var(--body-text-color); background: var(--sd-card) }}
pre {{ overflow-x: auto }} h2 {{ font-size: 1rem }} .sd-figure {{ max-width: 75rem; height: 400px }}
</style>
</head>
<body>
<h1>{title}</h1>
{content}
<script>
if (matchMedia("(prefers-color-scheme: dark)").matches) document.body.classList.add("dark");
{script}
const options = {options};
if (options) plot(document.getElementById("chart"), options);
</script>
</body>
</html>
"""


def write_page(result: Result, out: Path) -> None:
    """Write a result with its chart, its table and its conditions. A suite without speed-ups has only its table."""
    facts = {**result.config, **result.environment}
    listed = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())
    content, options = f"<pre>{escape(bench_report(result))}</pre>\n<dl>\n{listed}\n</dl>", "null"
    with suppress(ValueError):
        drawn = chart(result)
        content = f'<h2>{escape(drawn["title"])}</h2>\n<div id="chart" class="sd-figure"></div>\n{content}'
        options = json_text(finite(drawn)).replace("<", "\\u003c")  # no text of a result can end the script
    script = "\n".join((UI / name).read_text(encoding="utf-8") for name in ("helpers.js", "chart.js"))
    style = (UI / "chart.css").read_text(encoding="utf-8")
    title = escape(f"specdemo bench {result.suite}")
    write_text(out, PAGE.format(title=title, style=style, content=content, script=script, options=options))

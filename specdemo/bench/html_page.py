"""Results as self-contained HTML files: charts, drawn by the script of the page, with tables and conditions."""

from collections.abc import Sequence
from contextlib import suppress
from html import escape
from pathlib import Path

from specdemo.bench.plot import Chart, chart
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
for (const [i, options] of {charts}.entries()) plot(document.getElementById(`chart-${{i}}`), options);
</script>
</body>
</html>
"""


def write_page(result: Result, out: Path) -> None:
    """Write a result with its chart, its table and its conditions. A suite without speed-ups has only its table."""
    facts = {**result.config, **result.environment}
    listed = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())
    drawn: list[Chart] = []
    with suppress(ValueError):
        drawn.append(chart(result))
    below = f"<pre>{escape(bench_report(result))}</pre>\n<dl>\n{listed}\n</dl>"
    write_charts(out, f"specdemo bench {result.suite}", drawn, below=below)


def write_charts(out: Path, title: str, charts: Sequence[Chart], above: str = "", below: str = "") -> None:
    """Write a page of charts between two parts of HTML."""
    figures = [
        f'<h2>{escape(drawn["title"])}</h2>\n<div id="chart-{i}" class="sd-figure"></div>'
        for i, drawn in enumerate(charts)
    ]
    script = "\n".join((UI / name).read_text(encoding="utf-8") for name in ("helpers.js", "chart.js"))
    style = (UI / "chart.css").read_text(encoding="utf-8")
    data = json_text(finite(charts)).replace("<", "\\u003c")  # no text of a result can end the script
    content = "\n".join([above, *figures, below])
    write_text(out, PAGE.format(title=escape(title), style=style, content=content, script=script, charts=data))

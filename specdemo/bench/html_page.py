"""Result as one self-contained HTML file: plot, table and conditions."""

from html import escape
from pathlib import Path

from specdemo.bench.plot import figure
from specdemo.bench.report import bench_report
from specdemo.bench.result import Result
from specdemo.core.atomic_io import write_text

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>specdemo bench {title}</title>
<style>body {{ font: 1rem/1.5 system-ui, sans-serif; margin: 1.5rem }} pre {{ overflow-x: auto }}</style>
</head>
<body>
<h1>specdemo bench {title}</h1>
{plot}
<pre>{table}</pre>
<dl>
{facts}
</dl>
</body>
</html>
"""


def write_page(result: Result, out: Path) -> None:
    """Write the page, including plotly.js."""
    facts = {**result.config, **result.environment}
    listed = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())
    page = PAGE.format(title=escape(result.suite), plot=_plot(result), table=escape(bench_report(result)), facts=listed)
    write_text(out, page)


def _plot(result: Result) -> str:
    try:
        drawn = figure(result)
    except ValueError:  # a suite without speed-ups has only its table
        return ""
    html: str = drawn.to_html(full_html=False, include_plotlyjs=True)
    return html

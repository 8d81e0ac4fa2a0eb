"""A result as one HTML file that needs nothing else: its plot, its table and what it was measured on."""

from html import escape
from importlib import import_module
from pathlib import Path

from specdemo.bench.report import bench_report
from specdemo.bench.result import Result

PLOT = "specdemo.bench.plot"

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
    """The page, with plotly.js inside."""
    figure = import_module(PLOT).figure(result)
    facts = {**result.config, **result.environment}
    listed = "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())
    plot = figure.to_html(full_html=False, include_plotlyjs=True)
    page = PAGE.format(title=escape(result.suite), plot=plot, table=escape(bench_report(result)), facts=listed)
    out.write_text(page, encoding="utf-8")

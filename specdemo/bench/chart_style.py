"""What every chart of the project shares. Colours are of middle lightness and backgrounds are clear, so that one figure
reads well on a light and on a dark page; no line is told apart by its colour alone."""

import plotly.graph_objects as go

FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif"]
GREY = "#7d8694"
GRID = "rgba(125,134,148,.22)"
LINES = (  # colour after Okabe and Ito, dash, marker; the first is plain decoding's
    (GREY, "dot", "circle"),
    ("#2f8fd0", "solid", "circle"),
    ("#d97f1e", "dash", "square"),
    ("#17a088", "dashdot", "diamond"),
    ("#a86fc4", "longdash", "triangle-up"),
    ("#c4a000", "longdashdot", "x"),
    ("#d4639a", "dash", "star"),
)


def layout(**more: object) -> go.Layout:
    """Clear backgrounds, system fonts, and what a chart adds."""
    common = {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"color": GREY, "family": ", ".join(FONTS), "size": 12},
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": GREY},
    }
    return go.Layout(common | more)


def axis(**more: object) -> dict[str, object]:
    """The layout of one axis as Plotly takes it, with `more` of its own settings."""
    return {"gridcolor": GRID, "zeroline": False, "rangemode": "tozero", **more}

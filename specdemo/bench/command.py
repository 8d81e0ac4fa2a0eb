"""Command `bench` with one subcommand per suite, whose help lists only the options of that suite."""

import sys
from collections.abc import Sequence
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from tqdm import tqdm
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command
from typer.models import OptionInfo

from specdemo.bench.base import Report, SoFar, Suite
from specdemo.bench.suites import known_suite, suite, suites, takes
from specdemo.core.outputs import check_output, check_output_folder
from specdemo.core.suggest import suggest

OUT = "--out"  # file of the results, or the folder of a suite that writes while it measures


class SuiteGroup(TyperGroup):
    """The suites as subcommands, read from the registry each time."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(suites())

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | None:
        return _subcommand(cmd_name) if cmd_name in suites() else None

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # The suite may come after its options.
        if args and args[0].startswith("-"):
            args = sorted(args, key=lambda arg: arg not in suites())
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not ctx.resilient_parsing:  # true during shell completion
            known_suite(args[0])
        return super().resolve_command(ctx, args)


bench = typer.Typer(
    cls=SuiteGroup,
    help="Run a benchmark suite: interleaved repeats, 95 % intervals. `bench SUITE --help` lists the suite's options.",
)


@bench.callback(invoke_without_command=True)
def _name_a_suite(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        raise ValueError(f"no suite given; {suggest('', suites())}")


def _subcommand(name: str) -> TyperCommand:
    cls = known_suite(name)

    def command(**given: Any) -> None:
        _run(name, **given)

    command.__signature__ = Signature(_parameters(cls))  # type: ignore[attr-defined]
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    meaning = " ".join((cls.__doc__ or "").split())
    app.command(name=name, help=meaning, short_help=meaning)(command)
    made = get_command(app)
    assert isinstance(made, TyperCommand)
    return made


def _parameters(cls: type[Suite]) -> list[Parameter]:
    options: dict[str, tuple[Any, OptionInfo]] = {}
    to = "Write the numbers (JSON) to this file."
    for name, option in cls.options().items():
        text = f"{option.help}{_default(cls.model_fields[name].default)}"
        if option.flag != OUT:
            options[name] = option.kind | None, typer.Option(option.flag, help=text, metavar=option.metavar)
        elif name == "folder":
            to = text
    options["out"] = Path | None, typer.Option(OUT, help=to)
    options["html"] = Path | None, typer.Option("--html", help="Write a page with the plot to this file.")
    options["force"] = bool, typer.Option("--force", help="Overwrite a file or folder that specdemo did not write.")
    options["as_json"] = bool, typer.Option("--json", help="Print the numbers as JSON.")
    options["markdown"] = bool, typer.Option("--markdown", help="Print the lanes as a Markdown table.")
    return [
        Parameter(name, Parameter.KEYWORD_ONLY, default=False if of is bool else None, annotation=Annotated[of, info])
        for name, (of, info) in options.items()
    ]


def _default(value: object) -> str:
    """Return a field's default as its option would be given, for the help."""
    if isinstance(value, range):
        value = f"{value[0]}-{value[-1]}"
    elif isinstance(value, Sequence) and not isinstance(value, str):
        value = ",".join(map(str, value))
    return "" if value in (None, False, "") else f"  [default: {value}]"


def _run(
    name: str, out: Path | None, html: Path | None, force: bool, as_json: bool, markdown: bool, **given: object
) -> None:
    if takes(name, "folder"):  # the suite writes while it measures
        given, out = {**given, "folder": out}, None
    chosen = suite(name, **{n: value for n, value in given.items() if value is not None})

    from specdemo.bench.report import bench_report
    from specdemo.bench.report import markdown as as_markdown
    from specdemo.bench.result import to_json, write_result
    from specdemo.engine.loop import never_cancelled

    for path in (out, html):
        if path is not None:
            check_output(path, force)
    if isinstance(folder := getattr(chosen, "folder", None), Path):
        check_output_folder(folder, force)
    with progress_bar(1.0, "{l_bar}{bar}| {elapsed}") as bar:
        result = chosen.run(reports_to(bar), never_cancelled)
    if out is not None:
        write_result(result, out)
    print(to_json(result) if as_json else as_markdown(result) if markdown else bench_report(result))
    if html is not None:
        from specdemo.bench.html_page import write_page

        write_page(result, html)


def progress_bar(total: float, form: str) -> "tqdm[NoReturn]":
    """Return a progress bar on stderr, which shows nothing where that is no terminal."""
    return tqdm(total=total, disable=None, leave=False, file=sys.stderr, bar_format=form)


def reports_to(bar: "tqdm[NoReturn]") -> Report:
    """Return a report of a share from 0 to 1 and what is done, shown by a bar with total 1."""

    def report(share: float, what: str, _so_far: SoFar | None = None, /) -> None:
        bar.set_description(what, refresh=False)
        bar.update(share - bar.n)

    return report

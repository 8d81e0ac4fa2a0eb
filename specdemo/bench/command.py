"""Commands made from declared settings, and `bench` with one subcommand per suite."""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, Signature, cleandoc, signature
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from tqdm import tqdm
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from specdemo.bench.base import Report, SoFar
from specdemo.bench.plot import write_page
from specdemo.bench.report import bench_report
from specdemo.bench.report import markdown as as_markdown
from specdemo.bench.result import to_json, write_result
from specdemo.bench.suites import known_suite, suite, suites, takes
from specdemo.core.atomic_io import check_output, check_output_folder
from specdemo.core.settings import Setting, declared_by, setting, settings
from specdemo.core.suggest import program, suggest

AS_JSON = setting(False, "Print JSON.", flag="--json")
FORCE = setting(False, "Overwrite a file or folder that specdemo did not write.")
More = Mapping[Any, Iterable[str]]  # classes, and the names of their settings


def add_command(
    app: typer.Typer, function: Callable[..., object], more: More, defaults: bool = True, **how: Any
) -> None:
    """Add a command whose options are the function's parameters, each declared by `setting`.

    more: settings that the function takes as `**options`, if they are given. defaults: name theirs in the help.
    """
    extra = [
        _option(name, declared.type | None, None, declared, _help(declared) if defaults else declared.help)
        for of, names in more.items()
        for name in names
        if (declared := settings(of)[name]).help
    ]
    own = [_parameter(p) for p in signature(function).parameters.values() if p.kind is not Parameter.VAR_KEYWORD]

    def command(**values: object) -> object:
        absent = {p.name for p in extra if values[p.name] is None}
        return function(**{name: value for name, value in values.items() if name not in absent})

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = Signature([*extra, *own])  # type: ignore[attr-defined]
    how = {"help": " ".join(cleandoc(function.__doc__ or "").split())} | how
    app.command(**how)(command)


def _parameter(parameter: Parameter) -> Parameter:
    if parameter.default is Parameter.empty:  # the context
        return parameter.replace(kind=Parameter.KEYWORD_ONLY)
    declared = declared_by(parameter.default)
    default = Parameter.empty if declared.default is ... else declared.default
    bounds = {} if declared.low is None else {"min": declared.low, "max": declared.high}
    return _option(parameter.name, parameter.annotation, default, declared, declared.help, **bounds)


def _option(name: str, kind: object, default: object, declared: Setting, help: str, **how: Any) -> Parameter:
    """Return a parameter with the texts that typer reads. A flag that is off has no opposite."""
    how |= {"help": help, "metavar": declared.metavar, **declared.command}
    flag = declared.flag or (f"--{name.replace('_', '-')}" if default is False else None)
    info = typer.Argument(**how) if declared.flag == "" else typer.Option(*filter(None, [flag]), **how)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info])


def _help(declared: Setting) -> str:
    """Return the help of a setting with its default as its option would be given."""
    value = declared.default
    if isinstance(value, range):
        value = f"{value[0]}-{value[-1]}"
    elif isinstance(value, Sequence) and not isinstance(value, str):
        value = ",".join(map(str, value))
    return declared.help if value in (None, False, "") else f"{declared.help}  [default: {value}]"


class SuiteGroup(TyperGroup):
    """The suites as subcommands, read from the registry each time."""

    def list_commands(self, ctx: object) -> list[str]:
        return list(suites())

    def get_command(self, ctx: object, cmd_name: str) -> TyperCommand | None:
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
    cls, own_target = known_suite(name), takes(name, "target")
    to = _help(settings(cls)["folder"]) if takes(name, "folder") else "Write the numbers (JSON) to this file."

    def command(
        out: Path | None = setting(None, to),
        html: Path | None = setting(None, "Write a page with the plot to this file."),
        force: bool = FORCE,
        as_json: bool = setting(False, "Print the numbers as JSON.", flag="--json"),
        markdown: bool = setting(False, "Print the lanes as a Markdown table."),
        target: str | None = setting(None, "Target, instead of a preset's.", command={"hidden": not own_target}),
        **options: object,
    ) -> None:
        if target and own_target:
            options["target"] = target
        elif target:
            tune = f"`{program()} tune {target}` finds what pays for any model"
            raise ValueError(f"bench {name} measures presets (--preset); {tune}")
        if takes(name, "folder"):  # the suite writes while it measures
            options, out = options | ({"folder": out} if out else {}), None
        measurement = suite(name, **options)

        for path in (out, html):
            check_output(path, force)
        if isinstance(folder := getattr(measurement, "folder", None), Path):
            check_output_folder(folder, force)
        with progress_bar(1.0, "{l_bar}{bar}| {elapsed}") as bar:
            result = measurement.run(reports_to(bar), lambda: False)
        if out is not None:
            write_result(result, out)
        print(to_json(result) if as_json else as_markdown(result) if markdown else bench_report(result))
        if html is not None:
            write_page(result, html)

    command.__doc__ = cls.__doc__
    names = [name for name in settings(cls) if name not in ("folder", "target")]
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    add_command(app, command, {cls: names}, name=name, short_help=" ".join((cls.__doc__ or "").split()))
    subcommand = get_command(app)
    assert isinstance(subcommand, TyperCommand)
    return subcommand


def progress_bar(total: float, form: str) -> "tqdm[NoReturn]":
    """Return a progress bar on stderr, which shows nothing where that is no terminal."""
    return tqdm(total=total, disable=None, leave=False, file=sys.stderr, bar_format=form)


def reports_to(bar: "tqdm[NoReturn]") -> Report:
    """Return a report of a share from 0 to 1 and what is done, shown by a bar with total 1."""

    def report(share: float, what: str, _so_far: SoFar | None = None, /) -> None:
        bar.set_description(what, refresh=False)
        bar.update(share - bar.n)

    return report

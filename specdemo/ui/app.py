"""The command `ui` and its options; app.py starts it too."""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from inspect import Parameter, Signature, signature
from typing import Annotated, Any

import typer

from specdemo.engine.comparison import Comparison, settings, type_of
from specdemo.presets.files import DEFAULT, require
from specdemo.presets.limits import public
from specdemo.servers.address import allow
from specdemo.ui import space

MACHINE = [name for name, setting in settings(Comparison).items() if setting.help and not setting.link]


def with_settings(chosen: Mapping[Any, Iterable[str]]) -> Callable[[Callable[..., object]], Any]:
    """Return a decorator that adds an option for every setting to a command, instead of `**given`.

    chosen: the names of the settings of each class.
    """
    keyword = Parameter.KEYWORD_ONLY
    named = [(of, name, settings(of)[name].help) for of, names in chosen.items() for name in names]
    options = [
        Parameter(name, keyword, default=None, annotation=Annotated[type_of(of, name) | None, typer.Option(help=words)])
        for of, name, words in named
    ]

    def add(command: Callable[..., object]) -> Any:
        first, *own, _ = signature(command).parameters.values()
        parameters = [first, *options, *(p.replace(kind=keyword) for p in own)]
        command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        return command

    return add


@with_settings({Comparison: MACHINE})
def ui(
    unparsed: typer.Context,
    preset: Annotated[str | None, typer.Option(metavar="ID", help="Preset selected at start.")] = None,
    target: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Compare this model: a GGUF file, folder or hub id.")
    ] = None,
    draft: Annotated[str | None, typer.Option(metavar="MODEL", help="Drafter of the target.")] = None,
    host: Annotated[str, typer.Option(envvar="GRADIO_SERVER_NAME")] = "127.0.0.1",
    port: Annotated[str, typer.Option(envvar="GRADIO_SERVER_PORT", metavar="PORT")] = "7860",
    allow_any_model: Annotated[
        bool, typer.Option("--allow-any-model", help="Accept any model id or path, not only listed ones.")
    ] = False,
    server: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Server that lanes may run on, as in SPECDEMO_SERVERS; repeatable."),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            envvar="SPECDEMO_ALLOW_HOST",
            help="Additional host name of the page; repeatable.",
        ),
    ] = None,
    behind_proxy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            envvar="SPECDEMO_BEHIND_PROXY",
            help="Reverse proxy, or network of proxies, whose X-Forwarded-For is trusted; repeatable.",
        ),
    ] = None,
    share: Annotated[
        bool,
        typer.Option(
            "--share", help="Also open a public link through Gradio's servers, which works until the page ends."
        ),
    ] = False,
    **given: Any,
) -> None:
    """Open the page in a browser. It shows plain and speculative decoding side by side."""
    if unparsed.args:
        raise ValueError(f"unrecognized arguments: {' '.join(unparsed.args)}; see --help")
    if not (port.isdecimal() and 1 <= int(port) <= 65535):
        raise ValueError(f"argument --port: {port!r} is not from 1 to 65535; see --help")
    require("page", "gradio")
    if space.zero_gpu():
        import_module("spaces")  # has to come before torch
    from specdemo.ui.page import serve

    allow(server or [])
    start = _start(preset, target, draft, {name: value for name, value in given.items() if value is not None})
    try:
        reach: dict[str, Any] = {"allow_hosts": allow_host or (), "proxies": behind_proxy or (), "share": share}
        serve(start, host, int(port), allow_any_model, **reach)
    except OSError as error:
        if "empty port" not in str(error):
            raise
        taken = f"port {port} of {host} is not available; choose another with --port or --host"
        raise ValueError(taken) from None  # Gradio's message names its own settings


def _start(chosen: str | None, target: str | None, draft: str | None, given: Mapping[str, object]) -> str:
    """Return the preset to start with. Raises ValueError for models that are unusable, and on a public page."""
    if target is None:
        if draft is not None or given:
            option = "draft" if draft is not None else next(iter(given)).replace("_", "-")
            raise ValueError(f"--{option} needs a target; add --target MODEL")
        return chosen or DEFAULT
    if public():
        raise ValueError("a public page offers only the models of its presets; remove --target")
    if chosen is not None:
        raise ValueError("--preset and --target exclude each other; give one of them")
    from specdemo.presets.pair import add_pair  # needs torch

    return add_pair(target, draft, **given).id

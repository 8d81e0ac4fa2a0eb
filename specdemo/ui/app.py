"""The command `ui` and its options; app.py starts it too."""

from importlib import import_module
from typing import Annotated

import typer

from specdemo.presets.files import DEFAULT, require
from specdemo.presets.limits import public
from specdemo.servers.address import allow, startable
from specdemo.servers.engines import engine_names, serving_engine
from specdemo.ui import space


def ui(
    context: typer.Context,
    preset: Annotated[str, typer.Option(metavar="ID", help="Preset selected at start.")] = DEFAULT,
    host: Annotated[str, typer.Option(envvar="GRADIO_SERVER_NAME")] = "127.0.0.1",
    port: Annotated[str, typer.Option(envvar="GRADIO_SERVER_PORT", metavar="PORT")] = "7860",
    allow_any_model: Annotated[
        bool, typer.Option("--allow-any-model", help="Accept any model id or path, not only listed ones.")
    ] = False,
    server: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="Server that lanes may run on, as in SPECDEMO_SERVERS; repeatable."),
    ] = None,
    engines: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=PATH]", help=f"Engine that lanes may start: {engine_names()}; repeatable."),
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
) -> None:
    """Open the page in a browser. It shows plain and speculative decoding side by side."""
    if context.args:
        raise ValueError(f"unrecognized arguments: {' '.join(context.args)}; see --help")
    if not (port.isdecimal() and 1 <= int(port) <= 65535):
        raise ValueError(f"argument --port: {port!r} is not from 1 to 65535; see --help")
    require("page", "gradio")
    if space.zero_gpu():
        import_module("spaces")  # has to come before torch
    from specdemo.ui.page import serve

    allow(server or [])
    for given in engines or []:
        _allow_engine(*given.split("=", 1))
    try:
        serve(preset, host, int(port), allow_any_model, allow_hosts=allow_host or (), proxies=behind_proxy or ())
    except OSError as error:
        if "empty port" not in str(error):
            raise
        taken = f"port {port} of {host} is not available; choose another with --port or --host"
        raise ValueError(taken) from None  # Gradio's message names its own settings


def _allow_engine(name: str, path: str | None = None) -> None:
    if public():
        raise ValueError("a public page does not start engines; remove --engines")
    startable[name] = serving_engine(name).find(path)

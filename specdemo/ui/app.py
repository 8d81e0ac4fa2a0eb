"""The command `ui` and its options; app.py starts it too."""

import gc
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import typer

from specdemo.core.deployment import public, zero_gpu
from specdemo.core.settings import setting, settings
from specdemo.engine.comparison import Comparison
from specdemo.models.ref import ModelRef
from specdemo.presets.files import DEFAULT, require
from specdemo.presets.pair import add_race
from specdemo.servers.address import allow

MACHINE = {Comparison: [name for name, declared in settings(Comparison).items() if not declared.link]}


def ui(
    unparsed: typer.Context,
    preset: str | None = setting(None, "Preset selected at start.", metavar="ID"),
    target: str | None = setting(None, "Compare this model: a GGUF file, folder or hub id.", metavar="MODEL"),
    draft: str | None = setting(None, "Drafter of the target.", metavar="MODEL"),
    host: str = setting("127.0.0.1", "", command={"envvar": "GRADIO_SERVER_NAME"}),
    port: str = setting("7860", "", metavar="PORT", command={"envvar": "GRADIO_SERVER_PORT"}),
    allow_any_model: bool = setting(False, "Accept any model id or path, not only listed ones."),
    server: list[str] | None = setting(
        None, "Server that lanes may run on, as in SPECDEMO_SERVERS; repeatable.", metavar="URL"
    ),
    allow_host: list[str] | None = setting(
        None, "Additional host name of the page; repeatable.", metavar="NAME", command={"envvar": "SPECDEMO_ALLOW_HOST"}
    ),
    behind_proxy: list[str] | None = setting(
        None,
        "Reverse proxy, or network of proxies, whose X-Forwarded-For is trusted; repeatable.",
        metavar="ADDRESS",
        command={"envvar": "SPECDEMO_BEHIND_PROXY"},
    ),
    share: bool = setting(False, "Also open a public link through Gradio's servers, which works until the page ends."),
    **given: Any,
) -> None:
    """Open the page in a browser. It shows plain and speculative decoding side by side."""
    if unparsed.args:
        raise ValueError(f"unrecognized arguments: {' '.join(unparsed.args)}; see --help")
    if not (port.isdecimal() and 1 <= int(port) <= 65535):
        raise ValueError(f"argument --port: {port!r} is not from 1 to 65535; see --help")
    require("page", "gradio")
    if zero_gpu():
        import_module("spaces")  # has to come before torch
    gc.disable()  # to collect among imported modules again and again takes a fifth of the start
    from specdemo.ui.page import serve  # imports torch

    gc.freeze()
    gc.enable()

    allow(server or [])
    start = _start(preset, target, draft, given)
    try:
        reach: dict[str, Any] = {"allow_hosts": allow_host or (), "proxies": behind_proxy or (), "share": share}
        serve(start, host, int(port), allow_any_model, **reach)
    except OSError as error:
        if "empty port" not in str(error):
            raise
        taken = f"port {port} of {host} is not available; choose another with --port or --host"
        raise ValueError(taken) from None  # Gradio's message names its own settings


def _start(preset_id: str | None, target: str | None, draft: str | None, given: Mapping[str, object]) -> str:
    """Return the preset to start with. Raises ValueError for models that are unusable, and on a public page."""
    if target is None:
        if draft is not None or given:
            option = "draft" if draft is not None else next(iter(given)).replace("_", "-")
            raise ValueError(f"--{option} needs a target; add --target MODEL")
        return preset_id or DEFAULT
    if public():
        raise ValueError("a public page offers only the models of its presets; remove --target")
    if preset_id is not None:
        raise ValueError("--preset and --target exclude each other; give one of them")

    return add_race(ModelRef(target), ModelRef(draft) if draft else None, **given).id

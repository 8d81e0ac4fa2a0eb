"""How vLLM, SGLang and llama.cpp are told to run a method: its class says (methods/flags.py)."""

from typing import get_args

from specdemo.core.suggest import suggest
from specdemo.methods import BASELINE
from specdemo.methods import method as class_of
from specdemo.methods.flags import Flags, NotServed, Options
from specdemo.servers.address import TITLES, Engine

ENGINES: tuple[Engine, ...] = get_args(Engine)


def known_engine(name: str) -> Engine:
    """The engine of that name. Raises ValueError for another."""
    for known in ENGINES:
        if name == known:
            return known
    raise ValueError(f"unknown engine {name!r}; {suggest(name, ENGINES)}")


def speculation_flags(engine: Engine, method: str, model: str | None, k: int, options: Options) -> Flags:
    """The arguments that make a server draft as a lane does; none for plain decoding.

    model: None where the target itself holds the heads. options: all of the method's, with their defaults.
    Raises NotServed.
    """
    if method == BASELINE:
        return []
    serves = class_of(method).serves
    if engine not in serves:
        raise NotServed(f"{TITLES[engine]} has no such method")
    return serves[engine](model, k, options)

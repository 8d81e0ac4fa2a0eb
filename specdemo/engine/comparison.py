"""Settings of a comparison and its lanes; every setting is declared here, once.

Presets, share links, the options of `specdemo run`, the page's controls and the overrides of its API are derived from
the fields (core/settings.py). Importing this needs no torch. Every rejection is a ValueError with one line.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field

from specdemo.core.generation import DTYPES, Sampling, Thinking, dtype_name
from specdemo.core.rules import DEFAULT_RULE, RULES, accept_rule, rules_help
from specdemo.core.settings import BaseOptions, Settings, changed_values, setting, to_values
from specdemo.core.suggest import DEVICES, EMPTY, counted, program, short_repr, suggest
from specdemo.core.trace import BASELINE_LANE
from specdemo.costs.lengths import DEFAULT_LENGTH, MAX_K
from specdemo.methods import (
    BASELINE,
    METHODS,
    MODEL_OPTIONS,
    check_model,
    facts_of,
    method,
    model_method,
    parse_options,
)
from specdemo.models.ref import ModelRef
from specdemo.servers.address import address, host

if TYPE_CHECKING:  # these import torch
    from specdemo.core.accept import AcceptRule
    from specdemo.core.protocol import Budget

MAX_LANES = 3  # without the baseline
MAX_NEW_TOKENS = 1024
MAX_PROMPT_CHARACTERS = 100_000  # characters
MAX_REPEATS = 20
MAX_GRAMMAR = 20_000  # characters
AUTO = "auto"  # k = 0 in words


def _printable(text: str, allowed: str = "\t\n\r") -> str:
    bad = next((c for c in text if (c < " " and c not in allowed) or "\x7f" <= c <= "\x9f"), None)
    if bad is not None:
        raise ValueError(f"must not contain the control character U+{ord(bad):04X}; remove it")
    return text


_label = partial(_printable, allowed="")


def _model(name: str) -> ModelRef:
    if name.startswith("-"):  # on the command line of a server it would be an option
        raise ValueError("must not begin with -; name a model or its folder")
    return ModelRef(_label(name))


def _non_empty(text: str) -> str:
    if not text.strip():
        raise ValueError(EMPTY)
    return text


def validate_method_name(name: str) -> str:
    """Return the name of a method. Raises ValueError if it is unknown."""
    if name not in METHODS:
        raise ValueError(f"unknown method {short_repr(name)}; {suggest(name[:60], METHODS)}")
    return name


def _device(name: str) -> str:
    if not re.fullmatch(r"auto|cpu|mps|(cuda|xpu)(:\d+)?", name):
        raise ValueError(f"must be {DEVICES}")
    return name


def _thinking(value: object) -> object:
    """Accept booleans, which YAML reads for `on` and `off`."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Server = Annotated[str, Field(max_length=300), AfterValidator(address)]
Name = Annotated[str, Field(max_length=80), AfterValidator(_label)]
Text = Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS), AfterValidator(_printable)]
Options = dict[str, int | float | bool | str]
Messages = tuple[Mapping[str, str], ...]  # each with role and content


if TYPE_CHECKING:
    RuleName = str
    Model = ModelRef
else:
    RuleName = Literal[tuple(RULES)]
    Model = Annotated[str, Field(min_length=1, max_length=300), AfterValidator(_model)]


class Lane(Settings):
    """One speculative lane.

    On a `server` (servers/lane.py) the target's name is `served_model`, and method, model, k and options describe what
    the server is meant to run; they are not checked.
    """

    method: Annotated[str, AfterValidator(validate_method_name)] = setting(
        ..., f"Drafting method; `{program()} methods` lists them."
    )
    model: Model | None = setting(None, "Draft model: embedded name, folder or hub id[@revision].")
    k: int = setting(
        0,
        "Draft length; 0: the best one for the measured costs of this target's passes.",
        0,
        MAX_K,
        1,
        label="Draft length k",
        words={"0": AUTO},
    )
    options: Options = setting({}, "Options of the method.")
    acceptance: RuleName = setting(
        DEFAULT_RULE,
        f"Acceptance rule: {rules_help()}.",
        label="Acceptance",
        words={name: entry.label(name) for name, entry in RULES.items()},
    )
    acceptance_options: Options = setting({}, "Options of the acceptance rule.")
    name: Name = setting("")
    server: Server | None = setting(None)
    served_model: Model | None = None

    @property
    def title(self) -> str:
        """Return the method in words: `Draft 0.5B`, `EAGLE`, `Adaptive lookup`; on a server also the draft length and
        the server."""
        drafter = model_method(self.method, self.options)
        size = f" {self.model.size}" if drafter == "draft_model" and self.model and self.model.size else ""
        words = f"Draft{size}" if size else facts_of(drafter).title
        if drafter != self.method:
            wrapper, wrapped = facts_of(self.method), facts_of(drafter)
            alone = drafter == BASELINE or not wrapper.short
            words = wrapper.title if alone else f"{wrapper.short} {wrapped.short or words}{size}"
        on_server = f"{f', k = {self.k}' if self.k else ''} on {host(self.server)}" if self.server else ""
        return words + on_server

    @property
    def differences(self) -> tuple[str, ...]:
        """Return what differs between lanes of one title, the most important first; empty texts for what is not set."""
        options = ", ".join(f"{name} = {value}" for name, value in self.options.items())
        rule = "" if self.acceptance == DEFAULT_RULE else RULES[self.acceptance].label(self.acceptance)
        return self.model.short_name if self.model else "", options, f"k = {self.k or AUTO}", rule

    @property
    def models(self) -> tuple[ModelRef, ...]:
        """Return all models that the lane names, including those in its options."""
        option_models = [
            name.strip() for option in MODEL_OPTIONS for name in str(self.options.get(option, "")).split(",")
        ]
        return tuple(ModelRef(name) for name in (self.model, *option_models) if name and name not in METHODS)

    @property
    def budget(self) -> "Budget":
        """Return the budget: depth k, and as many nodes as the method's tree has with these options. A length that is
        not chosen yet counts as DEFAULT_LENGTH."""
        from specdemo.core.protocol import Budget

        k = self.k or (DEFAULT_LENGTH if self.method != BASELINE else 0)
        return Budget(k, max(k, self.tree_nodes))

    @property
    def tree_nodes(self) -> int:
        """Return the nodes of the draft tree; 0: it drafts a chain, or a tree of k nodes."""
        return method(self.method).tree_nodes(self.parsed) or 0

    @property
    def chooses_nodes(self) -> bool:
        """Return whether the lane drafts a tree whose number of nodes is not set."""
        return method(self.method).fits_tree and self.tree_nodes > 0 and "nodes" not in self.options

    @cached_property
    def parsed(self) -> BaseOptions:
        """Return the `Options` of the method. Raises ValueError with one line if it rejects these or the model."""
        parsed = parse_options(self.method, self.options)
        check_model(self.method, to_values(parsed), self.model)
        if not RULES[self.acceptance].trees and method(self.method).tree_nodes(parsed) is not None:
            raise ValueError(
                f"acceptance rule {self.acceptance!r} verifies chains only and this lane drafts a tree; set its "
                "options to a chain or choose another method"
            )
        least = method(self.method).least_k(parsed)
        if self.k and self.k < least:
            raise ValueError(f"these options need a draft length of {least} or more, not {self.k}; increase k")
        self.accept_rule()
        return parsed

    def accept_rule(self) -> "AcceptRule":
        """Return the acceptance rule with its options. Raises ValueError with one line if it rejects them."""
        return accept_rule(self.acceptance, self.acceptance_options)

    def validated(self) -> Self:
        """Return this lane as validated by its method and rule, without options that are at their default."""
        rule = self.accept_rule()
        of_rule = changed_values(rule) if isinstance(rule, BaseOptions) else {}
        lane = self.model_copy(update={"options": changed_values(self.parsed), "acceptance_options": of_rule})
        vars(lane)["parsed"] = self.parsed
        return lane


class Comparison(Settings):
    """Settings of one comparison. Lane 0, plain decoding, is always present and not listed; it runs on `server`, or
    locally if None."""

    id: Name  # of its preset, and of its trace
    target: Model = setting(..., "Target model: embedded name, folder or hub id[@revision].")
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], BeforeValidator(dtype_name)] = setting(
        "auto", f"Data type: {DTYPES}.", link=False
    )
    device: Annotated[str, AfterValidator(_device)] = setting("auto", f"Device: {DEVICES}.", link=False)
    quantization: Literal["4bit", "8bit"] | None = setting(
        None, "Quantization of the target: 4bit or 8bit.", link=False
    )
    gpu_layers: int = setting(
        -1, "GGUF models: layers on the GPU; -1: all that fit.", -1, 1000, link=False, label="GPU layers"
    )
    threads: int = setting(0, "CPU threads; 0: the fastest number, measured.", 0, 1024, label="Threads", link=False)
    bit_exact: Literal["auto", "on", "off"] = setting(
        "auto",
        "One kernel for passes of every width: auto (on a CPU, where it hardly costs), on (a GPU too) or off.",
        link=False,
    )
    context: int = setting(
        0, "GGUF models: most tokens of a lane; 0: as the file states.", 0, 1 << 20, link=False, label="Context"
    )
    cache_type: Literal["auto", "f32", "f16", "q8_0"] = setting(
        "auto", "GGUF models: type of the KV cache: auto, f32, f16 or q8_0.", link=False, label="Cache type"
    )
    flash_attention: bool = setting(
        True,
        "GGUF models: flash attention; without it more texts differ at near-ties.",
        link=False,
        label="Flash attention",
    )
    lanes: list[Lane] = Field(min_length=1, max_length=MAX_LANES)
    prompt: Annotated[Text, AfterValidator(_non_empty)] = setting(..., "Text to continue.")
    chat: bool | None = setting(None, "Send the prompt as a chat message, or as plain text to continue.")
    system: Text = setting("", "System prompt of the chat.")
    thinking: Annotated[Thinking, BeforeValidator(_thinking)] = setting(
        "default",
        "Thinking of the chat template: default, on or off.",
        label="Thinking",
        info="of a chat; drafters may be trained in one mode",
        words={"default": "as the template", "on": "on", "off": "off"},
    )
    grammar: Annotated[Text, Field(max_length=MAX_GRAMMAR)] = setting(
        "",
        "JSON schema (begins with {) or regular expression that the output of every lane must match.",
        label="Grammar",
        info="JSON schema or regular expression for the output; empty: any text",
        brief=lambda grammar: "grammar" if grammar else "",
    )
    temperature: Annotated[float, AfterValidator(lambda t: Sampling(temperature=t).temperature)] = setting(
        0.0,
        "Sampling temperature; 0: greedy.",
        0.0,
        5.0,
        0.05,
        label="Temperature",
        brief=lambda t: f"temperature {t}" if t else "greedy",
    )
    top_p: float = setting(1.0, "Nucleus sampling; 1: off.", above=0.0, high=1.0, step=0.01, label="Top-p")
    top_k: int = setting(0, "Sample from the k most likely tokens; 0: off.", 0, 1000, 1, label="Top-k")
    min_p: float = setting(
        0.0,
        "Smallest probability relative to the most likely token; 0: off.",
        0.0,
        below=1.0,
        step=0.01,
        label="Min-p",
    )
    seed: int = setting(0, "Random seed.", 0, 2**31 - 1, label="Seed", info="the same in every lane")
    max_new_tokens: int = setting(
        128,
        "Maximum number of new tokens.",
        1,
        MAX_NEW_TOKENS,
        1,
        label="Max new tokens",
        info="per lane",
        brief=lambda n: counted(n, "token"),
    )
    schedule: Literal["race", "sequential"] = setting(
        "race",
        "Order of the lanes: race (step by step in turn) or sequential.",
        label="Schedule",
        info="each lane is timed on its own compute time",
        words={"race": "interleaved", "sequential": "sequential"},
        brief=lambda schedule: "" if schedule == "race" else "sequential",
    )
    repeats: int = setting(1, "Number of runs to pool.", 1, MAX_REPEATS, link=False)
    server: Server | None = setting(None, link=False)
    served_model: Model | None = setting(None, link=False)
    history: Messages = Field((), exclude=True)  # earlier messages of the chat, with the baseline's answers

    @cached_property
    def all_lanes(self) -> tuple[Lane, ...]:
        """Return all lanes with lane 0, whose k is 0."""
        plain = Lane(method=BASELINE, name=BASELINE_LANE, server=self.server, served_model=self.served_model)
        return plain.model_copy(update={"k": 0}), *self.lanes

    @cached_property
    def lane_names(self) -> tuple[str, ...]:
        """Return the names of `lane_names`, that of lane 0 included."""
        return lane_names(self.all_lanes)

    @property
    def all_remote(self) -> bool:
        """Return True if all lanes run on servers, so that no local model is needed."""
        return all(lane.server for lane in self.all_lanes)

    @property
    def sampling(self) -> Sampling:
        """Return the sampling settings."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    def changed(self, **changes: object) -> Self:
        """Return a copy with other values, as validated by its methods too. Raises ValueError with one line."""
        changed = super().changed(**changes)
        return changed.model_copy(update={"lanes": [lane.validated() for lane in changed.lanes]})


def lane_names(lanes: Sequence[Lane]) -> tuple[str, ...]:
    """Return a name for people for every lane: its own, or else its title. Lanes of one title add what tells them
    apart: drafter, options, draft length or acceptance rule."""
    names = [lane.name or lane.title for lane in lanes]
    for differences in zip(*(lane.differences for lane in lanes), strict=True):
        named = [*zip(names, differences, strict=True)]
        differs = [len({other for name, other in named if name == own}) > 1 for own in names]
        names = [f"{name}, {own}" if own and add else name for (name, own), add in zip(named, differs, strict=True)]
    return tuple(names)

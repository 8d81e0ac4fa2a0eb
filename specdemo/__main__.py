"""Command line: `python -m specdemo` or, installed, `specdemo`.

Exit codes: 0 success; 1 a lane failed; 2 bad input, with one line on stderr that names the fix; 130 and 143 ended by
Ctrl-C and SIGTERM. Commands that need torch import it themselves.
"""

import sys

INTERRUPTED = 130  # exit code after Ctrl-C, as in a shell

try:  # these imports take a second
    import shutil
    from collections import Counter
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import ExitStack, contextmanager, suppress
    from functools import partial
    from io import TextIOWrapper
    from pathlib import Path
    from typing import TYPE_CHECKING, Any, TypeVar

    import typer
    from typer.core import TyperCommand
    from typer.exceptions import TyperException

    from specdemo import __version__
    from specdemo.analysis.diagnose import diagnose
    from specdemo.analysis.observation import Observation
    from specdemo.analysis.predict import predict as prediction
    from specdemo.analysis.readers import read_output, read_output_file
    from specdemo.bench.check_server import LOSSLESS, ServerCheck, without_identical
    from specdemo.bench.command import AS_JSON, FORCE, More, add_command, bench, progress_bar, reports_to
    from specdemo.bench.doctor import check_drafters, check_machine, published
    from specdemo.bench.report import bench_report, race_report, table, texts, what_if_report, why_report
    from specdemo.bench.result import read_result, to_json, write_result
    from specdemo.bench.tune import Tune, best_rows
    from specdemo.core.atomic_io import check_output, json_text
    from specdemo.core.rules import RULES, rule_options
    from specdemo.core.safe_io import FILE_BYTES, is_out_of_memory, read_text
    from specdemo.core.settings import setting, settings
    from specdemo.core.signals import sigterm_as_exit
    from specdemo.core.suggest import DEVICES, program, suggest
    from specdemo.core.trace import RunTrace
    from specdemo.costs.profiles import write_profile
    from specdemo.costs.roofline import known_engine
    from specdemo.engine.comparison import Comparison, Lane
    from specdemo.engine.messages import Restarted, RunMessage, Started, StepRow
    from specdemo.methods import method, method_options, unusable, usable
    from specdemo.methods.facts import PREDICTED, method_of
    from specdemo.models.gguf_files import local_header
    from specdemo.models.local_models import in_words, local_models, model_rows
    from specdemo.models.ref import ModelRef
    from specdemo.presets.drafters import rows, unpublished
    from specdemo.presets.files import FOLDER, Preset, load_presets, load_trace, of_checkout, preset, save_trace
    from specdemo.presets.limits import LIMITS
    from specdemo.presets.pair import comparison
    from specdemo.presets.runnable import nearest_runnable, why_not
    from specdemo.servers.address import address, allow
    from specdemo.servers.engines import DEFAULT as DEFAULT_ENGINE
    from specdemo.servers.engines import engine_names, engines
    from specdemo.ui.app import MACHINE, ui
except KeyboardInterrupt:
    sys.exit(INTERRUPTED)

if TYPE_CHECKING:
    from specdemo.servers.process import Server

app = typer.Typer(
    add_completion=program() == "specdemo",  # shells complete program names, not `python -m`
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Plain and speculative decoding of the same model, side by side, measured honestly.",
)

CHECKOUT = (FOLDER.parent / "recipes").is_dir()
# parts of help texts that apply only to a checkout, which has the recipes of the embedded models
CODE_CORPUS = "; the recipes of code collect their own" if CHECKOUT else ""
CODE_TARGET = ", or code for code-draft" if CHECKOUT else ""
HIDDEN = {"hidden": not CHECKOUT}
Work = Callable[..., object]
GPUS = setting(1, "Number of GPUs per server.", 1, 1024)
COMMAND = setting(None, "Path of the engine's program, if it is not on PATH.")
OPTION = setting(
    None, "Method option, as listed by `methods`; repeatable. @PATH reads a file or folder.", metavar="NAME=VALUE"
)


def _argument(metavar: str | None, help: str, default: object = ..., **command: object) -> Any:
    """Declare a positional argument."""
    return setting(default, help, flag="", metavar=metavar, command={"show_default": False, **command})


def _preset_argument(default: object = ...) -> Any:
    help = f"Name of a preset; `{program()} presets` lists them."
    return _argument("PRESET", help, default, autocompletion=_complete)


def _complete(incomplete: str) -> list[str]:
    return [id for id in load_presets() if id.startswith(incomplete)]


def _command(more: More | None = None, **how: Any) -> Callable[[Work], Work]:
    """Return a decorator that makes a function a command."""

    def decorate(function: Work) -> Work:
        add_command(app, function, more or {}, **how)
        return function

    return decorate


def main(argv: Sequence[str] | None = None, prog: str = "specdemo") -> int:
    """Run a command and return the exit code. prog: the program name at the start of an error message."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, TextIOWrapper):  # replace characters that the terminal cannot encode
        sys.stdout.reconfigure(errors="replace")
    try:
        with sigterm_as_exit():
            code = app(args=arguments or ["--help"], prog_name=program(), standalone_mode=False)
    except (ValueError, OSError, TyperException) as error:
        message = error.format_message() if isinstance(error, TyperException) else str(error)
        print(f"{prog}:", " ".join(message.split()), file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print("specdemo: out of memory; choose smaller models or close other programs", file=sys.stderr)
        return 2
    except typer.Abort:
        code = INTERRUPTED
    if code == INTERRUPTED:
        print(f"{prog}: interrupted", file=sys.stderr)
    return code if isinstance(code, int) else 0


def _print_version(flag: bool) -> None:
    if flag:
        print(f"specdemo {__version__}")
        raise typer.Exit


@app.callback()
def _of_program(
    version: bool = typer.Option(False, "--version", help="Print the version.", is_eager=True, callback=_print_version),
) -> None:
    pass


_command(MACHINE, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}, defaults=False)(ui)


OF_RUN = {
    of: [name for name, declared in settings(of).items() if declared.type is not dict] for of in (Comparison, Lane)
}


@_command(OF_RUN, defaults=False)
def run(
    preset_id: str | None = _preset_argument(None),
    prompt_file: Path | None = setting(None, "Read the prompt from this UTF-8 file."),
    option: list[str] | None = OPTION,
    acceptance_option: list[str] | None = setting(
        None, "Option of the acceptance rule, as listed by `methods`; repeatable.", metavar="NAME=VALUE"
    ),
    server: list[str] | None = setting(
        None,
        "OpenAI-compatible server for a lane; repeatable, the baseline's first if every lane has one.",
        metavar="URL",
    ),
    served_model: str | None = setting(None, "Name of the target on the servers.", metavar="NAME"),
    engine: str | None = setting(None, f"Serving engine to start for the run: {engine_names()}.", metavar="NAME"),
    gpus: int = GPUS,
    command: str | None = COMMAND,
    out: Path | None = setting(None, "Write the trace (JSON) to this file."),
    force: bool = FORCE,
    **options: Any,
) -> int:
    """Race plain decoding against a preset's lanes. Prints tokens/s, speed-up and acceptance of every lane. Without a
    preset, --target names a model; it is raced with n-gram lookup and suffix decoding, or with its drafter --model."""
    changes = {**options, "prompt": _prompt(options.get("prompt"), prompt_file), "options": _options(option)}
    changes["acceptance_options"] = _options(acceptance_option, "--acceptance-option")
    preset = comparison(preset_id, {name: value for name, value in changes.items() if value is not None})
    if served_model is not None and not server:
        raise ValueError("--served-model needs a server; add --server URL")
    allow(server or [])
    preset = preset.on_servers(server or [], served_model)
    if not engine:
        preset.check_servers(server or [])

    check_output(out, force)
    if engine and server:
        raise ValueError("--engine and --server exclude each other; give one of them")
    with ExitStack() as running:
        if engine:
            preset, _ = running.enter_context(_started(preset, engine, command, gpus))
        trace = _race(preset)
    _show(trace)
    if out is not None:
        save_trace(trace, out)
    return int(any(lane.finish == "error" for lane in trace.lanes))


@_command()
def replay(trace: Path = _argument("TRACE", "A trace that `run --out` or the page wrote.")) -> None:
    """Print a stored run or result again. Reads traces, and results of `bench` and `tune`; needs no model."""
    try:
        _show(load_trace(trace))
    except ValueError as error:
        if not trace.is_file():
            raise
        try:
            print(bench_report(best_rows(read_result(trace))))
        except ValueError as other:
            raise ValueError(f"{trace}: {other}; {str(error).removeprefix(f'{trace}: ')}") from None


@_command({Tune: [name for name in settings(Tune) if name != "repeats"]})
def tune(
    target: str = _argument("MODEL", "Model: embedded name, folder, GGUF file or hub id."),
    out: Path | None = setting(None, "Write the numbers (JSON) to this file; `replay` shows them."),
    force: bool = FORCE,
    as_json: bool = AS_JSON,
    **options: object,
) -> None:
    """Find the speculation that pays for a model. Races drafting methods and draft lengths on this machine or on an
    engine's servers, on prompts of six kinds of work, and prints the best with the settings to copy. Ctrl-C prints what
    is known."""
    check_output(out, force)
    suite = Tune.build({"target": target, **options})
    with progress_bar(1.0, "{l_bar}{bar}| {elapsed}") as bar:
        result = suite.run(reports_to(bar), lambda: False)
    if out is not None:
        from specdemo.bench.candidates import shareable

        write_result(shareable(result, (suite.target, *suite.drafts)), out)
    print(to_json(result) if as_json else bench_report(best_rows(result)))


@_command({ServerCheck: [name for name in settings(ServerCheck) if name != "repeats"]})
def check_server(
    servers: list[str] = _argument(
        "[REFERENCE] SERVER",
        "Addresses: a server without speculation and the one to check; one alone is checked against --target.",
    ),
    as_json: bool = AS_JSON,
    **options: object,
) -> int:
    """Check whether a server with speculation is lossless. Exit code 1 if its greedy answers differ by more than
    rounding."""
    if len(servers) > 2:
        raise ValueError(f"check-server takes one or two addresses, not {len(servers)}")
    allow(servers)
    check = ServerCheck.build({"server": servers[-1], "reference": servers[0] if servers[1:] else None, **options})
    with progress_bar(1.0, "{l_bar}{bar}| {elapsed}") as bar:
        result = check.run(reports_to(bar), lambda: False)
    print(to_json(result) if as_json else bench_report(without_identical(result)))
    return int(any(row["output"] not in LOSSLESS for row in result.rows))


@_command()
def watch(
    server: str = _argument("URL", "Address of a vLLM, SGLang or llama.cpp server."),
    every: float = setting(5.0, "Time between readings.", 0.2, 3600, metavar="SECONDS"),
    plain: float | None = setting(
        None, "Speed of the server without speculation, at the same load.", 0.001, flag="--without", metavar="TOKENS/S"
    ),
    k: int | None = setting(None, "Draft length, if the metrics lack it.", 1, 1024),
    readings: int = setting(0, "Stop after so many readings; 0: at Ctrl-C.", 0),
    as_json: bool = AS_JSON,
) -> None:
    """Show what limits a running server. Reads its metrics every few seconds: acceptance, tokens/s and the diagnosis.
    Sends no request for text."""
    from specdemo.analysis.watch import Watch, show_live

    allow([server])
    show_live(Watch(address(server), plain, k), every, readings, as_json)


app.add_typer(bench, name="bench")


@_command()
def profile(
    device: str = setting("auto", f"Device: {DEVICES}."),
    name: str | None = setting(None, "Name of the profile; default: the device's name."),
    out: Path | None = setting(None, "Write the profile (JSON) to this file."),
    force: bool = FORCE,
    as_json: bool = AS_JSON,
) -> None:
    """Measure this machine for `predict`. Takes a few minutes; measures memory bandwidth, matrix products, kernel
    launches, and forward passes by number of tokens and batch size."""
    from specdemo.bench.device import measure_profile, profile_report

    check_output(out, force)
    with progress_bar(1.0, "{l_bar}{bar}| {elapsed}") as bar:
        measured = measure_profile(device, name, reports_to(bar))
    print(measured.model_dump_json(indent=1, exclude_none=True) if as_json else profile_report(measured))
    if out is not None:
        write_profile(measured, out)


@_command()
def predict(
    target: str = _argument("TARGET", "Folder, embedded model or hub id; only its config.json is read."),
    method: str = setting("", "Drafting method; default: that of --model, else eagle."),
    model: str | None = setting(None, "Drafter; default: a head of typical size for the target."),
    trace: Path | None = setting(
        None, "Recorded run; take acceptance, method and model from its first lane that drafts."
    ),
    acceptance: str | None = setting(
        None, "Acceptance rate per position if the positions before it are accepted: 0.8,0.75,0.7."
    ),
    device: str = setting(
        "h100-sxm", "Device profiles, comma-separated: names (h100-sxm,l4) or files of `profile --out`."
    ),
    dtype: str = setting("", "Data type of weights and KV cache; default: bfloat16, on a CPU float32."),
    quantization: str | None = setting(None, "Quantization of the target's matrices: 4bit or 8bit."),
    batch: str = setting("1", "Batch sizes, comma-separated: 1,8,32."),
    context: int = setting(1024, "Tokens in the KV cache."),
    nodes: int = setting(0, "Nodes of the draft tree; 0: chains."),
    engine: str = setting("recorded", "How passes run: recorded (CUDA graphs) or eager."),
    price: float | None = setting(None, "Hourly price of the machine, to compute the cost of tokens."),
    as_json: bool = AS_JSON,
) -> None:
    """Predict the speed-up on another machine. Reports every draft length and batch size, with an interval and the
    bottleneck; needs no torch."""
    rates = _numbers("acceptance", acceptance, float)
    drafted = partial(prediction, target, method=method, model=model, trace=trace, acceptance=rates, nodes=nodes)
    loaded = partial(drafted, dtype=dtype, quantization=quantization, context=context, engine=known_engine(engine))
    loads = [(name, rows) for name in device.split(",") for rows in _numbers("batch", batch, int)]
    cases = [loaded(device=name, batch=rows, price=price) for name, rows in loads]
    print(json_text([case.as_dict() for case in cases], indent=1) if as_json else what_if_report(cases))


@_command()
def why(
    file: str | None = _argument(
        "[FILE]", "Output of an engine: a log, JSON, or metrics; - reads standard input.", None
    ),
    baseline: str | None = setting(None, "Output of the same engine without speculation.", metavar="FILE"),
    k: int | None = setting(None, "Draft length.", 1, 1024),
    length: float | None = setting(None, "Mean accepted length, including the correction or bonus token."),
    without: float | None = setting(
        None,
        "Speed without speculation, at the same load and counted like the speed of the output.",
        0.001,
        metavar="TOKENS/S",
    ),
    speculative: float | None = setting(None, "Speed with speculation.", 0.001, flag="--with", metavar="TOKENS/S"),
    engine: str = setting("", "Engine whose flags are shown, such as vllm or llama-server."),
    method: str = setting("", "Drafting method, such as eagle, mtp or draft_model."),
    target: str = setting("", "Target model, a hub id."),
    drafter: str = setting("", "Drafter, a hub id."),
    batch: float | None = setting(None, "Number of requests at a time."),
    thinking: str = setting("", "Thinking mode of the requests: on or off."),
    moe: bool | None = setting(None, "The target is a mixture of experts.", flag="--moe/--dense"),
    as_json: bool = AS_JSON,
) -> None:
    """Explain why speculative decoding is slow. Reads the output of an engine or four numbers (--k, --length, --without
    and --with), and names the cause and the setting to change; needs no torch."""
    modes = {"on": True, "off": False}
    if thinking and thinking not in modes:
        raise ValueError(f"unknown thinking mode {thinking[:40]!r}; {suggest(thinking[:40], modes)}")
    _check_names(engine, method)
    if file is None and length is None:
        raise ValueError("no output given; name a file, or give --k, --length, --without and --with")
    if file == baseline == "-":
        raise ValueError("standard input can be read once; give one of the outputs as a file")
    options: dict[str, object] = {"engine": engine, "method": method, "target": target, "drafter": drafter}
    options |= {"k": k, "accepted_length": length, "tokens_per_s": speculative, "plain_tokens_per_s": without}
    options |= {"batch_size": batch, "thinking": modes.get(thinking), "moe": moe}
    observation = _read_output(file) if file else Observation(source="options of the command")
    if baseline:
        observation = observation.merged(_read_output(baseline))
    diagnosis = diagnose(observation.changed(**options))
    print(json_text(diagnosis.as_dict(), indent=1) if as_json else why_report(diagnosis))


def _check_names(engine: str, method: str) -> None:
    """Raise ValueError, one line, for an engine or a drafting method that a diagnosis does not know."""
    names = [reader.name for reader in engines()]
    if engine and engine not in names:
        raise ValueError(f"unknown engine {engine[:40]!r}; {suggest(engine[:40], names)}")
    if method and not method_of(method):
        raise ValueError(f"unknown drafting method {method[:40]!r}; {suggest(method[:40], PREDICTED)}")


def _read_output(path: str) -> Observation:
    """Read the output of an engine. Raises ValueError, one line."""
    if path != "-":
        return read_output_file(path)
    return read_output(sys.stdin.buffer.read(FILE_BYTES + 1).decode(errors="replace"))


class _Train(TyperCommand):
    """Command `train`, whose help ends with the recipes; they are imported only then."""

    def format_epilog(self, ctx: object, formatter: Any) -> None:
        from specdemo.methods.recipes import recipes

        with formatter.section("Recipes of heads"):
            formatter.write_dl(list(recipes().items()))
        if (shipped := of_checkout("recipes.train")) is not None:
            with formatter.section("Recipes of the embedded models"):
                formatter.write_dl([(name, f"{it.minutes:g} minutes on a CPU") for name, it in shipped.RECIPES.items()])


@_command(cls=_Train)
def train(
    recipe: str = _argument("RECIPE", "One of the recipes below."),
    corpus: Path | None = setting(None, f"Folder of *.txt files, documents separated by <|endoftext|>{CODE_CORPUS}."),
    out: Path | None = setting(None, "Folder of the trained model."),
    force: bool = FORCE,
    minutes: float | None = setting(None, "Training time in minutes."),
    device: str = setting("auto", f"Device: {DEVICES}."),
    threads: int | None = setting(None, "CPU threads; embedded models only.", 1, 1024, command=HIDDEN),
    target: str | None = setting(None, f"Target of the trained drafter; default: stories{CODE_TARGET}."),
    cache: Path | None = setting(None, "Folder to store the target's outputs in, shared by its drafters."),
    start: str | None = setting(None, "Trained head or model to continue from."),
    loss: str = setting(
        "cross-entropy", "Loss of a head: cross-entropy, argmax, tv, lk-alpha or lk-lambda.", metavar="NAME"
    ),
    weights: str = setting(
        "fixed", "Weights of a head's draft positions: fixed, those of the method, or dpace.", metavar="NAME"
    ),
    compile: bool = setting(
        False,
        "Run the target through torch.compile; stories-target only.",
        flag="--compile/--no-compile",
        command=HIDDEN,
    ),
    quantization: str | None = setting(None, "Quantization of the frozen target: 4bit or 8bit; heads only."),
) -> None:
    """Train a speculation head. The same command continues an interrupted run."""
    from specdemo.methods.recipes import HEAD_RECIPES, race_command, train_head_recipe
    from specdemo.training.losses import Objective

    objective = Objective(loss, weights)
    if recipe in HEAD_RECIPES:
        of, data = target or "stories", (corpus, cache)
        trained = train_head_recipe(recipe, out, minutes, of, *data, device, quantization, force, objective, start)
        print(f"{trained}\n{race_command(recipe, of, trained)}")
        return
    if objective != Objective():
        raise ValueError(f"--loss and --weights are for heads; {suggest(recipe, HEAD_RECIPES)}")
    shipped = of_checkout("recipes.train")
    if shipped is None:
        recipes = f"those of the embedded models need a checkout of specdemo; {suggest(recipe, HEAD_RECIPES)}"
        raise ValueError(f"unknown recipe {recipe!r}: {recipes}")
    print(shipped.train(recipe, corpus, out, minutes, device, threads, target, cache, start, compile, force))


@_command()
def presets(as_json: bool = AS_JSON) -> None:
    """List the comparisons that are ready to run."""
    listed = [
        {"id": p.id, "title": p.title, "embedded": p.embedded, "methods": p.methods} for p in load_presets().values()
    ]
    if as_json:
        print(json_text(listed, indent=1))
        return

    rows = [(p.id, "embedded" if p.embedded else str(p.group or "download"), p.title) for p in load_presets().values()]
    print(table(("preset", "models", "title"), rows))
    reasons = {id: why_not(preset) for id, preset in load_presets().items()}
    if any(reasons.values()):
        print("\nPresets that this machine cannot run, and the most similar one that it can:")
        rows = [(id, nearest_runnable(preset(id)).id, why) for id, why in reasons.items() if why]
        print(table(("preset", "nearest", "reason"), rows))


@_command({Comparison: ["target"], Lane: ["method", "model", "k"]}, defaults=False)
def serve_command(
    preset_id: str = _preset_argument(),
    engine: str = setting(DEFAULT_ENGINE, f"{engine_names()}.", flag="--for"),
    option: list[str] | None = OPTION,
    gpus: int = GPUS,
    **options: Any,
) -> None:
    """Print the commands that start servers. Prints one per lane of a preset; race them with `run --server`."""
    from specdemo.presets.serve import serve_commands

    changes = {name: value for name, value in {**options, "options": _options(option)}.items() if value is not None}
    print("\n".join(serve_commands(comparison(preset_id, changes), engine, gpus)))


@_command()
def serve(
    preset_id: str = _preset_argument(),
    engine: str = setting(DEFAULT_ENGINE, f"{engine_names()}."),
    gpus: int = GPUS,
    command: str | None = COMMAND,
) -> None:
    """Start servers on this machine. Starts one per lane of a preset; Ctrl-C stops them."""
    from specdemo.servers.process import watch

    with _started(preset(preset_id), engine, command, gpus) as (comparison, servers):
        server_options = " ".join(f"--server {lane.server}" for lane in comparison.all_lanes)
        print(f"{program()} run {preset_id} {server_options}", "Ctrl-C stops them.", sep="\n", flush=True)
        watch(servers)


@contextmanager
def _started(spec: Preset, engine: str, command: str | None, gpus: int) -> Iterator[tuple[Preset, "list[Server]"]]:
    """Start servers for a preset. While they load, their log is shown in one updated line."""
    from specdemo.presets.serve import serving

    with progress_bar(1.0, "{desc}") as bar:

        def report(what: str) -> None:
            bar.set_description_str(what[: shutil.get_terminal_size().columns - 1])

        with serving(spec, engine, report, command, gpus) as served:
            bar.clear()
            yield served


@_command()
def methods(as_json: bool = AS_JSON) -> None:
    """List the drafting methods and their options."""
    for reason in unusable().values():
        print(f"specdemo: {reason}", file=sys.stderr)
    if as_json:
        print(json_text([_method(name) for name in usable()], indent=1))
        return
    for name, cls in ((name, method(name)) for name in usable()):
        kind = "lossless" if cls.exact else "lossy"
        print(f"{name}: {cls.title} ({kind}{', needs --model' if cls.needs_model else ''})")
        print(f"    {cls.summary}")
        for option in method_options(name):
            default = str(option.default).lower() if option.type is bool else option.default
            print(f"    --option {option.name}={default}  {option.range}  {option.help}")
    for rule, entry in RULES.items():
        print(f"acceptance rule {entry.label(rule)}{', chains only' if not entry.trees else ''}")
        for option in rule_options(rule):
            print(f"    --acceptance-option {option.name}={option.default}  {option.range}  {option.help}")
    lossy = ", ".join(name for name, entry in RULES.items() if not entry.lossless)
    print(f"With a lossy rule (--acceptance {lossy}) every method is lossy.")


@_command()
def models(as_json: bool = AS_JSON) -> None:
    """List the models on this machine. Searches specdemo's downloads and the stores of LM Studio, Ollama, llama.cpp and
    Hugging Face, with size, quantisation, and the draft models that match each."""
    rows = model_rows(local_models())
    if as_json:
        print(json_text(rows, indent=1))
    elif not rows:
        print("no models in the stores of LM Studio, Ollama, llama.cpp and Hugging Face")
    else:
        print(table(("model", "store", "size", "weights", "drafts"), [tuple(map(str, row.values())) for row in rows]))
        print(f"\nWhy a model has no draft model: {program()} doctor MODEL")
        print(f"Race two of them: {program()} ui --target MODEL --draft DRAFT")


@_command()
def drafters(
    target: str = _argument("TARGET", "Hub id, GGUF model or embedded model."), as_json: bool = AS_JSON
) -> None:
    """List the drafters of a target. Shows published ones with size, format, licence, engines and acceptance, and those
    on this machine; for an unknown target, the rules for choosing one."""
    model = ModelRef(target)
    if model.is_gguf_file:
        local_header(model)  # raises ValueError for a file that does not exist
    if as_json:
        print(json_text(rows(model), indent=1))
    else:
        print(published(model))
        if words := in_words(unpublished(model)):
            print(f"On this machine: {words}")


@_command()
def doctor(
    target: str | None = _argument(None, "Target whose drafters to check; default: check the machine.", None),
    drafter: str | None = _argument(None, "Check only this drafter; exit code 2 if it does not fit.", None),
) -> int:
    """Check the installation, or a target's drafters. Without a target: versions, devices, and the cost of
    verification. With one: which drafters fit it, and why others do not."""
    if target is None:
        return check_machine()
    return check_drafters(ModelRef(target), ModelRef(drafter) if drafter else None)


def _prompt(text: str | None, file: Path | None) -> str | None:
    if file is None:
        return text
    if text is not None:
        raise ValueError("--prompt and --prompt-file exclude each other; give one of them")
    return read_text(file, 4 * LIMITS.prompt + 1, "name a text file with --prompt-file").removesuffix("\n")


Number = TypeVar("Number", int, float)


def _numbers(name: str, text: str | None, kind: Callable[[str], Number]) -> list[Number]:
    """Parse comma-separated numbers; an empty list if the option is not given."""
    try:
        return [kind(part) for part in text.split(",")] if text else []
    except ValueError:
        raise ValueError(f"--{name} takes comma-separated numbers, not {text!r:.60}") from None


def _options(pairs: list[str] | None, flag: str = "--option") -> dict[str, str] | None:
    if wrong := [pair for pair in pairs or () if "=" not in pair]:
        raise ValueError(f"{flag} takes name=value, not {wrong[0]!r}")
    values = dict(pair.split("=", 1) for pair in pairs or ())
    return {name: _texts(text[1:]) if text.startswith("@") else text for name, text in values.items()} or None


def _texts(path: str) -> str:
    """Return the text of a file, or of the files of a folder, without hidden ones and those that are no text. Raises
    ValueError, one line, for no text and for too much."""
    hint, contents, size = "name a text file or a folder after the @", list[str](), 0
    folder = bool(path) and Path(path).is_dir()
    for file in sorted(Path(path).rglob("[!.]*")) if folder else ():
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(path).parts):
            with suppress(ValueError):
                contents.append(read_text(file, FILE_BYTES))
                size += len(contents[-1])
        if size > FILE_BYTES:
            raise ValueError(f"the files of {path} have more than {FILE_BYTES:,} characters; name a smaller folder")
    text = "\n".join(contents) if folder else read_text(path, FILE_BYTES, hint)
    if not text.strip():
        raise ValueError(f"{path} has no text; {hint}")
    return text


def _race(spec: Comparison) -> RunTrace:
    from specdemo.engine.session import session

    shown: Counter[int] = Counter()
    tokens = spec.max_new_tokens * (len(spec.lanes) + 1)
    with progress_bar(tokens, "{l_bar}{bar}| {n:.0f}/{total:.0f} tokens {elapsed}") as bar:

        def show(message: RunMessage) -> None:
            if isinstance(message, Started):
                bar.set_description("decoding")
            elif isinstance(message, StepRow):
                shown[message.lane] += len(message.text)
                bar.update(shown.total() - bar.n)
            elif isinstance(message, Restarted):
                shown[message.lane] = 0

        return session().run(spec, progress=lambda _, what: bar.set_description(what), show=show)


def _show(trace: RunTrace) -> None:
    print(texts(trace), race_report(trace), sep="\n\n")


def _method(name: str) -> dict[str, object]:
    cls = method(name)
    facts = {word: getattr(cls, word) for word in ("title", "summary", "exact", "needs_model")}
    options = [option.facts() for option in method_options(name)]
    return {"name": name, **facts, "options": options}


if __name__ == "__main__":
    sys.exit(main())

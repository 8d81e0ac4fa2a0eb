"""llama.cpp's program `llama-server`: its command lines, and the kinds of speculation that the installed build has.

`--help` is quoted from common/arg.cpp of llama.cpp, build 11549. With `llama-server` on PATH, the tests run it too.
"""

import json
import shlex
import shutil
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

from specdemo.__main__ import main
from specdemo.core.trace import from_json, output_outcomes
from specdemo.models.load import load_model
from specdemo.presets.files import preset
from specdemo.presets.serve import Program, on_free_ports, serve_commands, served
from specdemo.servers.engines import ENGINES
from specdemo.servers.engines import llama_server as engine
from specdemo.servers.process import free_port, run_server

HELP = """--spec-type none,draft-simple,draft-eagle3,draft-mtp,ngram-simple,ngram-map-k,ngram-mod,ngram-cache
                                        comma-separated list of types of speculative decoding to use
--spec-draft-n-max N                    number of tokens to draft for speculative decoding (default: 3)
"""

real = pytest.mark.skipif(
    shutil.which("llama-server") is None or find_spec("gguf") is None,
    reason="there is no program llama-server on PATH, or no package gguf",
)
NGRAM = {
    **{
        kind: f"--spec-{kind}-size-n 3 --spec-{kind}-size-m 5"
        for kind in ("ngram-simple", "ngram-map-k", "ngram-map-k4v")
    },
    "ngram-mod": "--spec-ngram-mod-n-match 3 --spec-ngram-mod-n-min 1 --spec-ngram-mod-n-max 5",
    "ngram-cache": "",
}
FLOAT32 = {"LLAMA_ARG_CACHE_TYPE_K": "f32", "LLAMA_ARG_CACHE_TYPE_V": "f32", "LLAMA_ARG_FLASH_ATTN": "off"}


@pytest.fixture
def program(tmp_path):
    """Return a program that answers `--version` and `--help` like llama-server."""
    path = tmp_path / "llama-server"
    path.write_text(f"""#!/bin/sh
case "$1" in
  --version) echo "version: 11549 (0a1b2c3)" >&2 ;;
  --help) printf %s {shlex.quote(HELP)} ;;
esac
""")
    path.chmod(0o755)
    engine._probe.cache_clear()
    return str(path)


def lane(tmp_path, **changes):
    for name in ("model.gguf", "draft.gguf", "dspark.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    lane = {"method": "draft_model", "model": str(tmp_path / "draft.gguf"), "k": 5} | changes
    return preset("embedded-draft").with_changes(target=str(tmp_path / "model.gguf"), lanes=[lane])


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({}, "--spec-type draft-simple --spec-draft-model {}/draft.gguf --spec-draft-n-max 5"),
        ({"method": "eagle"}, "--spec-type draft-eagle3 --spec-draft-model {}/draft.gguf --spec-draft-n-max 5"),
        ({"method": "mtp"}, "--spec-type draft-mtp --spec-draft-model {}/draft.gguf --spec-draft-n-max 5"),
        ({"method": "dflash"}, "--spec-type draft-dflash --spec-draft-model {}/draft.gguf --spec-draft-n-max 5"),
        (
            {"options": {"p_min": 0.5}},
            "--spec-type draft-simple --spec-draft-model {}/draft.gguf --spec-draft-n-max 5 --spec-draft-p-min 0.5",
        ),
        (
            {"method": "gated", "options": {"drafter": "mtp"}, "k": 3},
            "--spec-type draft-mtp,ngram-mod --spec-draft-model {}/draft.gguf --spec-draft-n-max 3 "
            "--spec-ngram-mod-n-min 1",
        ),
        (
            {"method": "synthetic", "options": {"drafter": "draft_model", "length": 3.5}},
            "--spec-type draft-simple --spec-draft-model {}/draft.gguf --spec-draft-n-max 5 --spec-synth-len 3.5",
        ),
        (
            {"method": "synthetic", "model": None, "k": 3, "options": {"drafter": "ngram", "rates": "0.8,0.5"}},
            "--spec-type ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 3 "
            "--spec-synth-rates 0.8,0.4,0.2",
        ),
        (
            {"method": "ngram", "model": None},
            "--spec-type ngram-simple --spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 5",
        ),
        (
            {"model": "org/draft-GGUF:Q4_K_M"},
            "--spec-type draft-simple --spec-draft-hf org/draft-GGUF:Q4_K_M --spec-draft-n-max 5",
        ),
    ],
)
def test_commands(tmp_path, changes, flags):
    baseline, drafting = (line for line in serve_commands(lane(tmp_path, **changes), "llama-server") if line[0] == "l")
    assert baseline.startswith(f"llama-server -m {tmp_path}/model.gguf --alias ") and "--spec-type" not in baseline
    assert drafting.endswith(f"--host 127.0.0.1 --port 8001 {flags.format(tmp_path)}")


def test_repositories_are_named_and_other_models_are_not_served(tmp_path):
    chosen = lane(tmp_path, method="ngram", model=None).with_changes(target="org/model-GGUF:Q8_0")
    assert "llama-server -hf org/model-GGUF:Q8_0 --alias" in serve_commands(chosen, "llama-server")[2]
    comment = serve_commands(preset("embedded-draft"), "llama-server")[1]
    assert comment.endswith("llama-server runs GGUF files and repositories, and stories is none of them")
    absent = chosen.with_changes(target=str(tmp_path / "absent.gguf"))
    assert "is none of them" in serve_commands(absent, "llama-server")[1]


def test_a_setting_that_an_engine_lacks_is_refused(tmp_path):
    chosen = lane(tmp_path, options={"p_min": 0.5})
    assert "SGLang does not end drafts by probability; set p_min to 0" in "".join(serve_commands(chosen, "sglang"))
    chosen = lane(tmp_path, method="gated", model=None, options={"drafter": "lookahead"})
    assert "does not combine lookahead with a lookup" in "".join(serve_commands(chosen, "llama-server"))
    chosen = lane(tmp_path, method="synthetic", model=None)
    assert "accepts at random what a drafter drafts; add one of drafter=" in "".join(
        serve_commands(chosen, "llama-server")
    )


def test_a_build_without_a_kind_of_speculation_is_not_started(tmp_path, program):
    installed = Program.find("llama-server", program)
    assert installed.installed.version == "11549"
    installed.check([*served(on_free_ports(lane(tmp_path)), "llama-server")][1])
    with pytest.raises(ValueError, match="llama-server 11549 has no --spec-type draft-dflash; install a newer build"):
        installed.check([*served(on_free_ports(lane(tmp_path, method="dflash")), "llama-server")][1])
    both = lane(tmp_path, method="gated", options={"drafter": "mtp"})
    installed.check([*served(on_free_ports(both), "llama-server")][1])
    with pytest.raises(ValueError, match="has no --spec-type draft-dspark; install a newer build"):
        both = lane(tmp_path, method="gated", model=str(tmp_path / "dspark.gguf"), options={"drafter": "dflash"})
        installed.check([*served(on_free_ports(both), "llama-server")][1])
    assert ENGINES["llama-server"].probe(str(tmp_path / "absent")) is None


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return GGUF files of the embedded target and its draft model."""
    from tests.gguf_export import GGUFVocab, write_gguf

    folder = tmp_path_factory.mktemp("gguf")
    for name in ("stories", "stories-draft-wide"):
        loaded = load_model(name, "float32", "cpu", kernels="transformers")
        vocab = GGUFVocab.of(loaded.tokenizer, loaded.model.config.vocab_size)
        write_gguf(loaded.model, vocab, folder / f"{name}.gguf")
    return folder


@pytest.fixture
def float32(monkeypatch):
    for name, value in {**FLOAT32, "LLAMA_ARG_THREADS": "1"}.items():
        monkeypatch.setenv(name, value)


def run(tmp_path, name, *arguments):
    out = tmp_path / "trace.json"
    assert main(["run", name, "--max-new-tokens", "48", "--dtype", "float32", "--out", str(out), *arguments]) == 0
    return from_json(out.read_text(encoding="utf-8")).lanes


@real
@pytest.mark.parametrize("name", ["embedded-draft", "embedded-ngram"])
def test_a_lane_on_llama_server_is_coloured(name, files, tmp_path, float32):
    models = ["--target", str(files / "stories.gguf")]
    models += ["--model", str(files / "stories-draft-wide.gguf")] if name == "embedded-draft" else []
    plain, lane = run(tmp_path, name, "--engine", "llama-server", *models)
    assert plain.text == lane.text and plain.remote.endpoint == "/v1/completions" and plain.note is None
    assert lane.steps_known and lane.remote.counters["accepted"] > 0
    drafted = sum(len(event.drafted[0]) for event in lane.events)
    accepted = sum(len(event.path[0]) - 1 for event in lane.events)
    assert (drafted, accepted) == (lane.remote.counters["drafted"], lane.remote.counters["accepted"])
    if name == "embedded-draft":
        local = run(tmp_path, name)[1]
        assert lane.text == local.text
        steps = [[output_outcomes(event) for event in one.events[:-1]] for one in (lane, local)]
        assert steps[0] == steps[1]


@contextmanager
def llama_server(*flags):
    """Start a server and yield its address."""
    address = f"http://127.0.0.1:{free_port()}"
    own = ["--host", "127.0.0.1", "--port", address.rpartition(":")[2], "--no-cache-prompt", "--parallel", "1"]
    with run_server(["llama-server", *map(str, flags), *own], address, {}) as server:
        server.wait(lambda what: None)
        yield address


@real
@pytest.mark.parametrize("kind", NGRAM)
def test_every_kind_of_prompt_lookup_is_coloured(kind, files, tmp_path, float32):
    model = ["-m", files / "stories.gguf", "--alias", "stories"]
    with llama_server(*model) as plain, llama_server(*model, "--spec-type", kind, *NGRAM[kind].split()) as drafting:
        baseline, lane = run(tmp_path, "embedded-ngram", "--server", plain, "--server", drafting)
    assert lane.text == baseline.text and lane.steps_known
    drafted = sum(len(event.drafted[0]) for event in lane.events)
    accepted = sum(len(event.path[0]) - 1 for event in lane.events)
    assert (drafted, accepted) == (lane.remote.counters["drafted"], lane.remote.counters["accepted"]) and accepted > 0


@real
def test_a_llama_server_that_drafts_is_lossless(files, float32, capsys):
    model = ["-m", files / "stories.gguf"]
    draft = ["--spec-type", "draft-simple", "-md", files / "stories-draft-wide.gguf", "--spec-draft-n-max", "4"]
    with llama_server(*model) as plain, llama_server(*model, *draft) as drafting:
        command = ["check-server", plain, drafting, "--prompts", "8", "--new-tokens", "48", "--json"]
        assert main(command) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["output"] for row in result["rows"]] == ["identical"] * 8

"""Every command that writes, on a full disk; one line for a model that does not fit into the memory of its process;
memory after hundreds of runs, rejected calls and visitors, which must not grow."""

import gc
import json
import os
import secrets
import shutil
import struct
from pathlib import Path

import psutil
import pytest

from specdemo.__main__ import main
from specdemo.engine.comparison import Comparison, Lane
from specdemo.engine.session import Session
from specdemo.methods import load_drafter
from specdemo.models.load import load_target
from specdemo.models.packaged import embedded_folder
from specdemo.training.collect import Plan
from specdemo.training.shares import Shares
from tests import processes
from tests.hardening.public import visitors
from tests.models.tiny import build
from tests.processes import full_disk, served


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    build("llama").save_pretrained(folder)
    return folder


def refused(capsys, left, *arguments):
    """Return the line on stderr of a command on a disk with `left` bytes of free space."""
    with full_disk(left):
        assert main([str(argument) for argument in arguments]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("specdemo: cannot write ") and line.endswith("; free disk space or choose another path")
    return line


def test_training_keeps_what_it_has_at_every_stage(capsys, monkeypatch, tmp_path, target):
    plan = Plan(text_rows=8, sampled_rows=4, rows_per_shard=4, context=32, sample_length=16, taps=(-1,))
    monkeypatch.setattr("specdemo.methods.recipes.share_minutes", lambda *_: Shares(plan, 0.06))
    monkeypatch.setattr("specdemo.methods.recipes.remove_intermediate", lambda out: None)
    train = ("train", "medusa", "--target", target, "--out", tmp_path, "--minutes")
    cache = tmp_path / "cache"
    assert str(cache / "cache.json") in refused(capsys, 10, *train, 0.001)
    assert str(cache / "text-000.safetensors") in refused(capsys, 10_000, *train, 0.001)
    assert main([str(argument) for argument in (*train, 0.001)]) == 0
    saved = {path: path.read_bytes() for path in tmp_path.glob("*.*")}
    monkeypatch.setattr("specdemo.training.fit.FIRST_CHECKPOINT_SECONDS", 0.0)
    assert str(tmp_path / "checkpoint.pt") in refused(capsys, 10_000, *train, 5)
    # Training is complete, and only the head remains to be written.
    assert f"cannot write {tmp_path}:" in refused(capsys, 3_000, *train, 1e-6)
    assert {path: path.read_bytes() for path in tmp_path.glob("*.*")} == saved
    assert load_drafter("medusa", load_target(str(target)), str(tmp_path))


BEGIN = """
import resource, sys
import specdemo.engine.session, specdemo.presets.pair, transformers.models.llama.modeling_llama
from pathlib import Path
from specdemo.__main__ import main
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + int(sys.argv[1]),) * 2)
sys.exit(main(sys.argv[2:]))
"""
HERE = Path("/proc/self/statm").exists()
in_proc = pytest.mark.skipif(not HERE, reason="reads the size of its process from /proc")


def run_within(more, *arguments):
    done = processes.run("-W", "ignore", "-c", BEGIN, more, "run", "embedded-ngram", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("specdemo: ") and done.stderr.count("\n") == 1
    return done.stderr


@in_proc
def test_a_model_without_room_for_its_headers_is_one_line():
    assert "does not fit into the memory" in run_within(4_000_000)


@in_proc
def test_a_model_without_room_for_its_weights_is_one_line(tmp_path):
    stories, folder = embedded_folder() / "stories", tmp_path / "wide"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(stories / name, folder)
    config = json.loads((stories / "config.json").read_text())
    vocabulary, width = 2**18, 2**10
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": vocabulary, "hidden_size": width}))
    size = 2 * vocabulary * width  # 0.5 GB mapped, 1 GB in float32
    entry = {"dtype": "BF16", "shape": [vocabulary, width], "data_offsets": [0, size]}
    header = json.dumps({"model.embed_tokens.weight": entry}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)  # a sparse file, which takes no space on the disk
    assert "does not fit into the memory" in run_within(size + size // 2, "--target", str(folder), "--dtype", "float32")


RUNS, REFUSED, SETTLED = 200, 1_000, 20
LANES = (
    Lane(method="draft_model", model="stories-draft-wide", k=3),
    Lane(method="ngram", k=2),
    Lane(method="medusa", model="stories-medusa", k=3),
    Lane(method="online", model="stories-draft-deep", k=2, options={"every": 2}),
)


def resident():
    gc.collect()
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def spec(number):
    """Return a comparison with other lanes, another prompt and another length for each number."""
    prompt = "Once upon a time, " + "a dog saw a cat and " * (number % 13)
    lanes = [*LANES[number % 4 :][:2]]
    return Comparison(id="test", target="stories", prompt=prompt, lanes=lanes, max_new_tokens=4 + number % 9)


@in_proc
@pytest.mark.release
def test_runs_and_refused_calls_leave_memory_where_it_was():
    session = Session()
    wrong = (
        {"prompt": " "},
        {"prompt": "word " * 600},
        {"target": "storeys"},
        {"lanes": (Lane(method="ngram", options={"max_m": 2}),)},
        {"lanes": (Lane(method="online", model="stories-draft-deep", options={"lr": 99.0}),)},
    )
    seen = []
    for number in range(RUNS):
        session.run(spec(number))
        for call in range(REFUSED // RUNS):
            with pytest.raises(ValueError):
                session.run(spec(number).model_copy(update=wrong[call % len(wrong)]))
        seen.append(resident())
    settled, last = seen[SETTLED - 1], seen[-1]
    assert last < 1.05 * settled, f"{settled:.0f} MB after {SETTLED} runs, {last:.0f} MB after {RUNS}"


RECORDED = sorted(Path("presets/recorded").glob("*.json"))


def refused_call(caller):
    assert caller.call(caller.fn("race"), ["embeded-draft", None])[-2]["success"] is False


def visit_run(caller):
    fn = caller.after(caller.fn("click", "visit_run"))
    assert caller.call(fn, caller.values(fn, max_new_tokens=8))[-2]["success"]


def visit_opened(caller, trace):
    shown = caller.now(caller.fn("upload", "open-trace"), [caller.upload("t.json", trace)]).json()["data"][0]
    assert '"type":"end"' in shown


@in_proc
@pytest.mark.release
def test_memory_stays_where_it_was_after_the_first_visitors():
    trace = max(RECORDED, key=lambda path: path.stat().st_size).read_bytes()
    with served(SPECDEMO_PUBLIC="1", SPECDEMO_BEHIND_PROXY="127.0.0.1") as (server, page), visitors(page) as visit:
        caller, memory = visit(), psutil.Process(server.pid).memory_info

        def send_requests(refusals, runs, traces):
            for times, act in (
                (refusals, refused_call),
                (runs, visit_run),
                (traces, lambda caller: visit_opened(caller, trace)),
            ):
                for _ in range(times):
                    caller.session = secrets.token_hex(6)
                    # Few files per visitor.
                    caller.client.headers["X-Forwarded-For"] = f"8.8.8.{secrets.randbelow(250)}"
                    act(caller)
                print(times, act.__name__, memory().rss // 1_000_000, "MB", flush=True)

        send_requests(20, 20, 20)
        before = memory().rss
        send_requests(1000, 200, 100)
        assert memory().rss < 1.05 * before

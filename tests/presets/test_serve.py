"""Server command lines, parsed as a shell would parse them."""

import json
import shlex

import pytest

from specdemo.__main__ import main
from specdemo.methods import METHODS
from specdemo.presets.files import load_presets, preset
from specdemo.presets.serve import Program, serve_commands, served
from specdemo.servers.engines import serving_engine
from specdemo.servers.engines.base import Installed

BASE = preset("two-servers")
VLLM = {"draft_model", "pard", "ngram", "suffix", "medusa", "mtp", "eagle", "dflash", "gemma4_assistant", "adaptive"}
SGLANG = {"draft_model", "ngram", "mtp", "eagle", "dflash", "gemma4_assistant"}


def lane(**settings):
    return BASE.with_changes(lanes=[settings])


def command(engine, **settings):
    """Return the words of the lane's command line, or the line that says why the lane is not served."""
    lines = serve_commands(lane(**settings), engine)
    place = next(i for i, line in enumerate(lines) if line.startswith("# lane 1"))
    return lines[place] if "not served" in lines[place] else shlex.split(lines[place + 1])


def after(words, flag):
    return words[words.index(flag) + 1]


PARALLEL = {"parallel_drafting": True}


@pytest.mark.parametrize(
    ("method", "model", "k", "options", "config"),
    [
        ("draft_model", "Qwen/Qwen3-0.6B", 5, {}, {}),
        ("pard", "amd/PARD-Qwen3-0.6B", 12, {}, PARALLEL | {"method": "draft_model"}),
        ("ngram", None, 5, {"min_n": 2, "max_n": 5}, {"prompt_lookup_min": 2, "prompt_lookup_max": 5}),
        ("suffix", None, 8, {}, {}),
        ("mtp", "Qwen/Qwen3-8B", 1, {}, {"model": None}),  # in the target
        ("eagle", "a/Qwen3-8B_eagle3", 3, {}, {"method": "eagle3"}),
        ("eagle", "amazon/GPT-OSS-20B-P-EAGLE", 7, {}, PARALLEL | {"method": "eagle3"}),
        ("dflash", "z-lab/Qwen3-8B-DFlash-b16", 15, {}, {}),
        ("dflash", "UIUC-SSAIL/Qwen3-8B-XPress-b16", 15, {}, {"method": "xpress"}),
        ("dflash", "deepseek-ai/dspark_qwen3_8b_block7", 7, {}, {"method": "dspark"}),
        (
            *("adaptive", "a/Qwen3-8B_eagle3", 7, {"drafter": "eagle"}),
            {"method": "eagle3", "enable_adaptive_verification": True},
        ),
    ],
)
def test_vllm_settings_are_json(method, model, k, options, config):
    """config: what differs from the lane's own method, model and k."""
    words = command("vllm", method=method, model=model, k=k, options=options)
    assert words[:3] == ["vllm", "serve", "Qwen/Qwen3-8B"] and after(words, "--dtype") == "bfloat16"
    expected = {"method": method, "model": model, "num_speculative_tokens": k} | config
    expected = {name: value for name, value in expected.items() if value is not None}
    assert json.loads(after(words, "--speculative-config")) == expected


@pytest.mark.parametrize(
    ("settings", "flags"),
    [
        (
            {"method": "draft_model", "model": "Qwen/Qwen3-0.6B", "k": 4},
            {"algorithm": "STANDALONE", "draft-model-path": "Qwen/Qwen3-0.6B", "num-steps": "4", "eagle-topk": "1"},
        ),
        ({"method": "dflash", "model": "z-lab/Qwen3-8B-DFlash-b16", "k": 15}, {"num-draft-tokens": "16"}),
        (
            {"method": "dflash", "model": "deepseek-ai/dspark_qwen3_8b_block7", "k": 7},
            {"algorithm": "DSPARK", "draft-model-path": "deepseek-ai/dspark_qwen3_8b_block7", "dspark-block-size": "7"},
        ),
        ({"method": "mtp", "model": "Qwen/Qwen3-8B", "k": 3}, {"algorithm": "NEXTN", "num-draft-tokens": "4"}),
        (
            {"method": "eagle", "model": "a/eagle3", "k": 5, "options": {"top_k": 8, "nodes": 31}},
            {"algorithm": "EAGLE3", "num-steps": "5", "eagle-topk": "8", "num-draft-tokens": "32"},
        ),
    ],
)
def test_sglang_counts_the_root_as_a_token_to_verify(settings, flags):
    words = command("sglang", **settings)
    assert words[:5] == ["python", "-m", "sglang.launch_server", "--model-path", "Qwen/Qwen3-8B"]
    assert "--enable-metrics" in words  # required for the counters
    assert {name: after(words, f"--speculative-{name}") for name in flags} == flags


def test_a_corpus_is_a_file_of_sglang_and_of_no_other_engine(tmp_path, capsys):
    (tmp_path / "code.py").write_text("def f(): ...")
    given = ["serve-command", "two-servers", "--option", f"corpus=@{tmp_path}"]
    assert main(["serve-command", "two-servers", "--for", "sglang"]) == 0 and "corpus" not in capsys.readouterr().out
    given += ["--method", "ngram", "--k", "6"]
    assert main([*given, "--for", "sglang"]) == 0
    *_, note, drafting, _, _ = capsys.readouterr().out.splitlines()
    words = shlex.split(drafting)
    assert note == "# lane 1: ngram; first jq -Rs . FILE > corpus.jsonl"
    assert after(words, "--speculative-ngram-external-corpus-path") == "corpus.jsonl"
    # srt/arg_groups/speculative_hook.py: above 0, and at most the draft tokens without the root
    assert (
        0
        < int(after(words, "--speculative-ngram-external-sam-budget"))
        < int(after(words, "--speculative-num-draft-tokens"))
    )
    for engine in ("vllm", "llama-server"):
        refused = command(engine, method="ngram", options={"corpus": "def f(): ..."})
        assert refused.endswith("drafts from no corpus; leave the option out")


def test_llama_server_limits_the_drafter_beside_a_lookup_and_has_one_lookup():
    drafts = {"method": "gated", "model": "org/draft-GGUF:Q4_0", "k": 5}

    def line(**options):
        spec = lane(**drafts, options=options).changed(target="org/target-GGUF:Q4_0")
        return next(line for line in serve_commands(spec, "llama-server") if "ngram" in line)

    assert after(shlex.split(line()), "--spec-draft-n-max") == "5"
    assert after(shlex.split(line(length=2)), "--spec-draft-n-max") == "2"
    assert line(lookup="ngram").endswith("combines one lookup with drafters, ngram-mod; leave lookup at suffix")


def test_a_method_that_vllm_removed_names_the_last_version_with_it():
    lines = serve_commands(lane(method="medusa", model="some/heads"), "vllm")
    assert "# lane 1: medusa; needs vLLM before 0.33, which removed medusa" in lines
    (served_lane,) = [one for one in served(lane(method="medusa", model="some/heads"), "vllm") if "medusa" in one.name]
    Program(serving_engine("vllm"), 1, Installed("0.32.0", ["medusa"], 1)).check(served_lane)
    with pytest.raises(ValueError, match=r"vLLM 0\.33\.0 has no method 'medusa'; install vllm<0\.33; choose another"):
        Program(serving_engine("vllm"), 1, Installed("0.33.0", ["eagle"], 1)).check(served_lane)


def test_a_draft_is_verified_in_part_only_where_vllm_can():
    assert command("vllm", method="adaptive", options={"drafter": "ngram"}).endswith(
        "vLLM verifies drafts in part for draft_model, suffix, mtp, eagle, dflash, gemma4_assistant, not for ngram"
    )
    adaptive = lane(method="adaptive", options={"drafter": "suffix"})
    assert "# lane 1: adaptive; needs a GPU, and no --enforce-eager" in serve_commands(adaptive, "vllm")
    *_, drafting = served(adaptive, "vllm")
    Program(serving_engine("vllm"), 1, Installed("0.33.0", ["suffix"], 1)).check(drafting)
    with pytest.raises(ValueError, match="vLLM verifies drafts in part in CUDA graphs only, not on a CPU"):
        Program(serving_engine("vllm"), 1, Installed("0.33.0", ["suffix"], 0)).check(drafting)


def test_a_pinned_model_is_served_at_its_revision():
    pinned = lane(method="dflash", model="org/draft@v1", k=3).changed(target="org/target@v2")
    words = shlex.split(serve_commands(pinned, "vllm")[-3])
    assert words[:3] == ["vllm", "serve", "org/target"] and after(words, "--revision") == "v2"
    config = json.loads(after(words, "--speculative-config"))
    assert (config["model"], config["revision"]) == ("org/draft", "v1")
    words = shlex.split(serve_commands(pinned, "sglang")[-3])
    assert (after(words, "--model-path"), after(words, "--revision")) == ("org/target", "v2")
    assert after(words, "--speculative-draft-model-path") == "org/draft"
    assert after(words, "--speculative-draft-model-revision") == "v1"


def test_unsupported_server_feature_is_one_line():
    heads = "draft_model pard medusa mlp_speculator mtp eagle dflash gemma4_assistant"
    models = {name: {"model": "some/drafter"} for name in f"{heads} adaptive online cascade gated router".split()}
    for engine, able in (("vllm", VLLM), ("sglang", SGLANG)):
        commands = {name: command(engine, method=name, **models.get(name, {})) for name in METHODS if name != "none"}
        assert {name for name, words in commands.items() if isinstance(words, list)} == able
        refused = [line for line in commands.values() if isinstance(line, str)]
        assert all("does not support this method" in line or "no longer have it" in line for line in refused)


def test_every_line_has_its_own_port_and_the_last_one_races_them():
    lines = serve_commands(preset("embedded-three-lanes"), "vllm")
    ports = [after(shlex.split(line), "--port") for line in lines if line.startswith("vllm")]
    assert ports == ["8000", "8001", "8002"]
    assert lines[-1].count("--server http://127.0.0.1:800") == 3 and "--gpus N" in lines[0]
    spread = serve_commands(preset("embedded-three-lanes"), "vllm", gpus=2)
    assert sum("--tensor-parallel-size 2" in line for line in spread) == 3


def test_models_of_the_project_are_named_by_their_folder(capsys):
    assert main(["serve-command", "embedded-draft", "--for", "sglang"]) == 0
    _, option, *lines = capsys.readouterr().out.splitlines()
    assert option.startswith("# --enable-deterministic-inference makes a text independent of other requests")
    words = shlex.split(lines[3])
    assert (
        after(words, "--model-path").endswith("embedded/stories") and after(words, "--served-model-name") == "stories"
    )
    assert after(words, "--speculative-draft-model-path").endswith("embedded/stories-draft-wide")


def test_quantised_where_the_server_can():
    four = BASE.with_changes(quantization="4bit")
    assert "--quantization bitsandbytes" in serve_commands(four, "vllm")[3]
    assert "serve a checkpoint that is already quantised" in serve_commands(four, "sglang")[1]


def test_every_preset_has_lines():
    for chosen in load_presets().values():
        for engine in ("vllm", "sglang", "llama-server"):
            assert len(serve_commands(chosen, engine)) >= 3

"""Readers of engines' outputs: real samples (samples/README.md has their sources), and hostile input."""

import json
from pathlib import Path

import pytest

from specdemo.analysis.diagnose import diagnose
from specdemo.analysis.readers import READERS, read_output, read_output_file
from specdemo.bench.report import why_report

SAMPLES = Path(__file__).parent / "samples"
SMALL = 200_000
EXPECTED = {
    "vllm.log": {"engine": "vllm", "method": "mtp", "steps": 525, "accepted_length": 4.755, "tokens_per_s": 124.5},
    "vllm-0.9.log": {"batch_size": 483.0, "accepted_length": 2.398, "acceptance_rate": 0.4667},
    "bench-serve.json": {"k": 8, "accepted_length": 4.4, "steps": 104880, "tokens_per_s": 36.39, "batch_size": 59.04},
    "bench-serve.txt": {"random_prompts": True, "accepted_length": 4.4, "batch_size": 8.0, "steps": 104880},
    "vllm-cpu.log": {"method": "draft_model", "drafter": "m/noisy", "steps": 448, "accepted_length": 1.0112},
    "vllm-cpu.prom": {"k": 4, "steps": 2804, "accepted_length": 2.9194, "tokens_per_s": 15.585},
    "vllm-cpu-good.json": {"k": 4, "accepted_length": 2.9381, "steps": 98, "tokens_per_s": 94.45, "batch_size": 1.0},
    "vllm-cpu-random.txt": {"random_prompts": True, "accepted_length": 2.395, "steps": 81, "tokens_per_s": 68.54},
    "sglang.log": {"engine": "sglang", "accepted_length": 1.9925, "tokens_per_s": 177.65, "batch_size": 1.0},
    "sglang-server-info.json": {"method": "EAGLE3", "k": 3, "drafted_per_step": 3.0, "accepted_length": 2.05},
    "llamacpp-eagle3.log": {"method": "draft-eagle3", "k": 3, "steps": 88, "draft_token_ms": 1.257},
    "llamacpp-good.log": {
        "accepted_length": 3.159,
        "steps": 504,
        "acceptance_rate": 0.5574,
        "drafter": "stories-draft-wide.gguf",
    },
    "llamacpp-fast-k4.log": {"k": 4, "steps": 196, "draft_token_ms": 0.0812},
    "llamacpp-bad.log": {"accepted_length": 1.0, "acceptance_rate": 0.0},
    "llamacpp-ngram.log": {
        "method": "ngram-mod",
        "k": 48,
        "steps": 879,
        "accepted_length": 1.0228,
        "tokens_per_s": 100.0,
    },
    "llamacpp-combined.log": {"method": "draft-mtp and ngram-mod", "k": 15, "steps": 300, "draft_token_ms": 1.3058},
    "llamacpp-early.log": {"k": 64, "steps": 24, "acceptance_rate": 0.0635},
    "llamacpp-dead.log": {"k": 3, "steps": 899, "accepted_length": 1.0},
    "sglang-finish.log": {"k": 3, "steps": 120, "accepted_length": 2.4917, "tokens_per_s": 100.0},
    "llama-speculative.txt": {
        "k": 5,
        "steps": 147,
        "accepted_length": 4.578,
        "acceptance_rate": 0.7205,
        "tokens_per_s": 55.473,
        "draft_token_ms": 3.6,
    },
    "llamacpp-rates.log": {"tokens_per_s": 250.0},
    "vllm-ngram.prom": {"steps": 884, "accepted_length": 1.0181, "tokens_per_s": 100.0},
    "sglang-lines.log": {"k": None, "accepted_length": 2.9},
    "llamacpp-plain.log": {"tokens_per_s": 219.2, "engine": "llama-server"},
    "llamacpp-good.prom": {"k": 4, "accepted_length": 3.1935, "steps": 248, "tokens_per_s": 266.1},
    "lmstudio.log": {"engine": "lmstudio", "steps": 123, "acceptance_rate": 0.3577, "tokens_per_s": 17.93},
    "vllm-answer.json": {"engine": "vllm", "k": 3, "steps": 43, "accepted_length": 1.2326},
    "aiperf.jsonl": {"engine": "vllm", "k": 4, "steps": 16, "accepted_length": 3.25, "tokens_per_s": 18.0},
    "guidellm.json": {"k": 7, "steps": 12, "accepted_length": 6.583, "batch_size": 4.0},
    "vllm.prom": {"k": 2, "accepted_length": 2.1866, "batch_size": 8.0, "tokens_per_s": 50.0},
    "sglang.prom": {"accepted_length": 1.67, "tokens_per_s": 183.1, "batch_size": 3.0},
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_numbers_of_a_real_output_are_read(name):
    found = read_output_file(SAMPLES / name)
    for field, value in EXPECTED[name].items():
        expected = pytest.approx(value, rel=2e-3) if isinstance(value, float) else value
        assert getattr(found, field) == expected, field


@pytest.mark.parametrize(
    ("text", "engine"),
    [
        ("llamacpp:predicted_tokens_seconds 98.1\nllamacpp:requests_processing 0\n", "llama-server"),
        ('sglang:gen_throughput{tp_rank="0"} 98.1\nsglang:num_running_reqs 1.0\n', "sglang"),
    ],
)
def test_metrics_without_drafts_are_a_baseline(text, engine):
    found = read_output(text)
    assert (found.engine, found.tokens_per_s, found.accepted_length) == (engine, 98.1, None)
    drafting = read_output_file(SAMPLES / "llamacpp-good.prom").merged(found)
    assert diagnose(drafting).observation.speedup.value == pytest.approx(266.1 / 98.1, rel=1e-3)


def test_every_sample_has_a_source_and_a_reader():
    sources = (SAMPLES / "README.md").read_text(encoding="utf-8")
    names = {path.name for path in SAMPLES.iterdir()} - {"README.md"}
    assert all(name in sources or name.startswith(("llamacpp-", "vllm-cpu-")) for name in names)
    titles = {read_output_file(SAMPLES / name).source.split(",")[0] for name in names}
    assert {title.split(",")[0] for title in READERS} <= titles


def test_statistics_of_llamacpp_give_the_acceptance_by_position():
    found = read_output_file(SAMPLES / "llamacpp-fast-k4.log")
    assert found.by_position == pytest.approx((0.832, 0.51, 0.403, 0.306), rel=0.01)


def test_benchmark_without_a_successful_request_is_rejected():
    with pytest.raises(ValueError, match="^no request of this benchmark succeeded"):
        read_output('{"completed": 0, "failed": 2, "output_throughput": 0.0, "mean_tpot_ms": 0.0}')


def test_log_with_server_arguments_gives_the_draft_length():
    arguments = (
        "server_args=ServerArgs(model_path='org/m', speculative_algorithm='EAGLE3', speculative_num_steps=3, "
        "speculative_num_draft_tokens=4, speculative_draft_model_path='org/d', cpu_offload_gb=2)\n"
    )
    found = read_output(arguments + (SAMPLES / "sglang.log").read_text(encoding="utf-8"))
    assert (found.k, found.drafted_per_step, found.offloaded) == (3, 3.0, True)
    assert (found.target, found.drafter, found.method) == ("org/m", "org/d", "EAGLE3")


DEBUG = """\
0.01.0 D slot launch_slot_: id  0 | task 0 | launching slot : {"id":0,"params":{"n_predict":900,"n_keep":0}}
srv  params_from_: n_predict = 900 exceeds server configuration, setting to 512
curl localhost:8080/completion -d '{"prompt":"x","n_predict":900}'
"""


@pytest.mark.parametrize("name", [name for name in EXPECTED if name.startswith("llamacpp-") and name.endswith("log")])
def test_lines_about_n_predict_do_not_hide_a_log_of_llamacpp(name):
    text = (SAMPLES / name).read_text(encoding="utf-8")
    assert read_output(DEBUG + text) == read_output(text)


NGRAM = "spec common_specu: adding speculative implementation 'ngram-mod'\nspec common_specu: - n_match=24, n_max=64\n"
OLD_NGRAM = "common_speculative_impl_ngram_mod: - n_match=24, n_max=64, n_min=48\n"
OLD_MTP = "common_speculative_impl_draft_mtp: - n_max=3, n_min=0, p_min=0.00, n_embd=5120\n"
COMMAND = "llama-server --spec-type ngram-mod,draft-mtp --spec-draft-n-max 3 --spec-ngram-mod-n-max 64\n"
BOTH = "ngram-mod and draft-mtp"


@pytest.mark.parametrize(
    ("start", "sample", "method", "k"),
    [
        (OLD_NGRAM + OLD_MTP, "llamacpp-rates.log", BOTH, 64),
        (OLD_MTP + OLD_NGRAM, "llamacpp-rates.log", "draft-mtp and ngram-mod", 64),
        (COMMAND, "llamacpp-rates.log", BOTH, 64),
        (
            "spec common_specu: - n_match=24, n_max=64\n- n_max=3, n_min=0\n",
            "llamacpp-rates.log",
            "ngram-mod and draft model",
            64,
        ),
        (NGRAM, "llamacpp-rates.log", "ngram-mod", 64),
        (OLD_NGRAM + OLD_MTP, "llamacpp-dead.log", "draft-mtp", 3),  # only one of them drafted
        (OLD_NGRAM + OLD_MTP, "llamacpp-combined.log", "draft-mtp and ngram-mod", 64),
        ("- size_n=12, size_m=48, min_hits=1\n", "llamacpp-dead.log", "draft-mtp", 48),
        ("", "llamacpp-rates.log", "", None),
    ],
)
def test_the_draft_length_is_that_of_the_kinds_that_drafted(start, sample, method, k):
    found = read_output(start + (SAMPLES / sample).read_text(encoding="utf-8"))
    assert (found.method, found.k, found.k_inferred) == (method, k, None)


@pytest.mark.parametrize("name", ["llamacpp-ngram.log", "lmstudio.log"])
def test_a_draft_length_that_no_output_contains_is_called_inferred(name):
    found = diagnose(read_output_file(SAMPLES / name))
    k = found.observation.k
    assert found.observation.k_inferred and any(note.startswith(f"k = {k} is the mean length") for note in found.notes)
    assert f" k is {k} or more" in why_report(found) and "of at most" not in why_report(found)
    assert not diagnose(read_output_file(SAMPLES / name).changed(k=64)).observation.k_inferred


@pytest.mark.parametrize("start", [NGRAM, OLD_MTP, COMMAND, "srv load_model: loading draft model 'd.gguf'\n"])
def test_speculation_that_never_drafted_is_no_baseline(start):
    text = (SAMPLES / "llamacpp-rates.log").read_text(encoding="utf-8")
    found = diagnose(read_output(start + text).changed(plain_tokens_per_s=300.0))
    assert found.sentence.startswith("Slower (0.83x): speculation is on (") == ("loading" not in start)
    assert "never drafted in 998 steps" in found.sentence and len(found.recommendations) == 1
    assert "0 of 998" in why_report(found) and "plain decoding; use it" not in found.sentence


def vllm_line(clock, engine, speed, running=4):
    """Return a line about throughput as vLLM logs it. engine: what precedes the numbers."""
    load = f"Avg prompt throughput: 9.0 tokens/s, Avg generation throughput: {speed} tokens/s, Running: {running} reqs"
    return f"(APIServer pid=7) INFO 09-01 {clock} [loggers.py:259] {engine}: {load}, Waiting: 0 reqs\n"


def sglang_line(clock, engine, speed, running=4, length=2.5):
    load = f"#running-req: {running}, accept len: {length}, gen throughput (token/s): {speed}, #queue-req: 0"
    return f"[2026-08-13 {clock} {engine} TP0] Decode batch, {load}\n"


LINES = {"vllm": (vllm_line, "Engine 000", "Engine 001"), "sglang": (sglang_line, "DP0", "DP1")}
AT = [f"10:00:{second:02}" for second in range(0, 60, 10)]
LATER = [f"10:00:{second:02}" for second in range(1, 60, 10)]


@pytest.mark.parametrize("kind", LINES)
@pytest.mark.parametrize(
    ("first", "second", "speed"),
    [
        ([(at, 100.0) for at in AT], [(at, 80.0) for at in AT], 180.0),
        ([(at, 100.0) for at in AT], [(at, 80.0) for at in LATER], 180.0),
        ([(at, 100.0) for at in AT[:3]], [(at, 80.0) for at in AT[3:]], 90.0),  # they take turns
        ([(at, 100.0) for at in AT], [], 100.0),
        ([("23:59:55", 100.0), ("00:00:05", 100.0)], [("23:59:55", 80.0), ("00:00:05", 80.0)], 180.0),
        ([("", 100.0), ("", 100.0)], [("", 80.0), ("", 80.0)], 180.0),  # without times
    ],
)
def test_the_engines_of_a_server_are_added_at_each_moment(kind, first, second, speed):
    line, *names = LINES[kind]
    both = zip(names, (first, second), strict=True)
    lines = [(at, name, of_engine) for name, series in both for at, of_engine in series]
    lines.sort(key=lambda one: one[0] and (one[0] < "12", one[0]))  # from evening to morning
    found = read_output("".join(line(*one) for one in lines))
    # the first of three or more lines of SGLang has the time of the prefill in it and does not count
    assert found.tokens_per_s == pytest.approx(speed, rel=0.03)
    assert found.batch_size == 4.0 and found.notes == ()


def test_lines_of_several_intervals_are_averaged_before_they_are_added():
    """One engine logs twice as often as the other."""
    text = "".join(sglang_line(f"10:00:{s:02}", "DP0", 100.0) for s in range(0, 60, 2))
    found = read_output(text + "".join(sglang_line(f"10:00:{s:02}", "DP1", 80.0) for s in range(0, 60, 4)))
    assert found.tokens_per_s == pytest.approx(180.0, rel=0.03)


def test_lengths_of_engines_are_weighted_by_their_passes():
    text = sglang_line(AT[0], "DP0", 100.0, 6, 3.0) + sglang_line(AT[0], "DP1", 50.0, 2, 2.0)
    assert read_output(text).accepted_length == pytest.approx(2.75)
    states = [{"last_gen_throughput": 90.0, "avg_spec_accept_length": 3.0}, {"last_gen_throughput": 20.0}]
    states[1]["avg_spec_accept_length"] = 2.0
    found = read_output(json.dumps({"internal_states": states, "dp_size": 2, "speculative_num_steps": 3}))
    assert (found.tokens_per_s, found.accepted_length, found.notes) == (110.0, pytest.approx(2.75), ())


def test_aggregated_lines_are_a_run_and_a_baseline():
    text = vllm_line(AT[0], "2 Engines Aggregated", 160.0, 8)
    found = read_output(f"non-default args: {{'data_parallel_size': 2}}\n{text}")
    assert (found.engine, found.tokens_per_s, found.batch_size, found.notes) == ("vllm", 160.0, 4.0, ())


def test_gauges_of_engines_are_added_and_those_of_its_processes_are_not():
    name, values = "sglang:gen_throughput", {(0, 0): 100, (1, 0): 100, (0, 1): 80}
    text = "".join(f'{name}{{tp_rank="{tp}",dp_rank="{dp}"}} {value}\n' for (tp, dp), value in values.items())
    assert read_output(text + "sglang:spec_accept_length 2.5\n").tokens_per_s == 180.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("non-default args: {'data_parallel_size': 4}\n" + vllm_line(AT[0], "Engine 000", 9.0), "has 4 engines and"),
        ("server_args=ServerArgs(dp_size=2)\n" + sglang_line(AT[0], "", 9.0), "has 2 engines and the output tells 1"),
        ('{"internal_states": [{"last_gen_throughput": 9.0}], "dp_size": 2}', "has 2 engines and the output tells 1"),
        ("".join(vllm_line(at, "Engine 000", 9.0) * 2 for at in AT), "nothing tells them apart"),
    ],
)
def test_engines_that_cannot_be_told_apart_are_named(text, words):
    found = read_output(text)
    assert len(found.notes) == 1 and words in found.notes[0]
    assert found.notes[0] in diagnose(found).notes and found.notes[0] in diagnose(found.changed(k=3)).notes


@pytest.mark.parametrize(
    "text",
    [
        "with config: speculative_config=SpeculativeConfig(method='ngram')\n" + vllm_line(AT[0], "Engine 000", 9.0),
        "vllm:generation_tokens_total 900\nvllm:spec_decode_num_drafts_total 0\n",
    ],
)
def test_speculation_of_vllm_that_never_drafted_is_no_baseline(text):
    assert "peculation is on" in diagnose(read_output(text)).sentence


OLLAMA = '{"model":"m","done":true,"prompt_eval_duration":9,"eval_count":298,"eval_duration":4000000000}\n'
META = '{"meta_info": {"id": "a", "completion_tokens": 301, %s"e2e_latency": 3.0}}'
PROPOSED = '"spec_num_correct_drafts": 180, "spec_num_proposed_drafts": 360, "spec_verify_ct": 120, '


@pytest.mark.parametrize(
    ("text", "speed", "length"),
    [
        (OLLAMA, 74.5, None),
        ('{"model":"m","response":"x","done":false}\n' + OLLAMA, 74.5, None),  # its stream
        (META % "", 301 / 3, None),
        (META % PROPOSED, 301 / 3, 2.5),
        (META % '"spec_verify_ct": 150, ', 301 / 3, 2.0),
        ("[" + META % PROPOSED + ", " + META.replace('"a"', '"b"') % PROPOSED + "]", 301 / 3, 2.5),
        ("\n".join(f"data: {META % PROPOSED}".replace("301", n) for n in ("90", "200", "301")), 301 / 3, 2.5),
        (META.replace('"', "'") % "", 301 / 3, None),  # of a log
    ],
)
def test_answers_with_a_speed_are_a_run_or_a_baseline(text, speed, length):
    found = read_output(text)
    assert found.tokens_per_s == pytest.approx(speed)
    assert found.accepted_length == (length and pytest.approx(length))


def answer(tokens, **timings):
    timings |= {"predicted_n": tokens, "predicted_per_second": 40.0}
    return json.dumps({"usage": {"completion_tokens": tokens}, "timings": timings})


MLX, LLAMA = {"draft_kind": "mtp"}, {}


@pytest.mark.parametrize(
    ("kind", "tokens", "counts", "length", "rate", "note"),
    [
        (MLX, 2, (7, 6, 1), 1.0, 1 / 7, "Of 6 accepted draft tokens 1 are in the text"),
        (MLX, 111, (90, 81, 30), 110 / 30, 81 / 90, ""),  # the last step has no token of its own
        (MLX, 111, (120, 88, 30), 110 / 30, 81 / 120, "Of 88 accepted draft tokens 81 are in the text"),
        (LLAMA, 3, (48, 48, None), None, None, "Its text of 3 tokens cannot hold 48 accepted draft tokens"),
        (LLAMA, 1, (3, 3, None), None, None, "Its text of 1 tokens cannot hold 3 accepted draft tokens"),
        (LLAMA, 900, (90, 80, None), 899 / 819, 80 / 90, ""),
    ],
)
def test_draft_tokens_past_the_end_of_an_answer_do_not_count(kind, tokens, counts, length, rate, note):
    drafted, accepted, rounds = counts
    found = read_output(answer(tokens, draft_n=drafted, draft_n_accepted=accepted, draft_rounds=rounds, **kind))
    assert found.accepted_length == (length and pytest.approx(length, abs=1e-3))
    assert found.acceptance_rate == (pytest.approx(rate, abs=1e-3) if rate is not None else None)
    assert [text.startswith(note) for text in found.notes] == [True] * bool(note)


def test_the_metrics_of_short_answers_do_not_make_drafts_longer():
    """Ten answers of 20 tokens from two drafts of 15 each."""
    names = {"num_drafts": 20, "num_draft_tokens": 300, "num_accepted_tokens": 280}
    text = "".join(f"vllm:spec_decode_{name}_total {value}\n" for name, value in names.items())
    text += "vllm:generation_tokens_total 200\nvllm:time_to_first_token_seconds_count 10\n"
    found = read_output(text)
    assert (found.accepted_length, found.steps) == (9.5, 20)


def test_a_request_whose_speed_is_cut_off_counts_with_its_drafts():
    text = (SAMPLES / "llamacpp-rates.log").read_text(encoding="utf-8")
    line = "slot print_timing: id 0 | task 0 | draft acceptance = 0.7 (600 accepted / 860 generated), mean len = 3.00\n"
    found = read_output(line + text + line)
    assert (found.steps, found.accepted_length, found.notes) == (300 + 99 + 300, pytest.approx(1 + 1200 / 699), ())


def test_short_answers_of_a_log_do_not_make_its_drafts_longer():
    """Ten answers of 20 tokens from two drafts of 15 each, whose last accepted tokens are past the end."""
    line = "slot print_timing: id 0 | task 0 | "
    text = f"{line} eval time = 200.0 ms / 20 tokens (10.00 ms per token, 100.00 tokens per second)\n"
    text += f"{line}draft acceptance = 0.90 ( 28 accepted / 30 generated), mean len = 15.00\n"
    found = read_output(text * 10)
    assert (found.accepted_length, found.steps) == (pytest.approx(9.5), 20)
    assert found.notes == (
        "Of 280 accepted draft tokens 170 are in the text; the others are after the end of an answer and do not count.",
    )


SPECULATION = "non-default args: {'speculative_config': {'method': 'eagle3', %s}}\n"
ENGINE = "with config: model='org/m', speculative_config=SpeculativeConfig(method='eagle3'), kv_cache_dtype=%s,\n"


@pytest.mark.parametrize(
    ("sample", "first", "cache"),
    [
        ("llamacpp-dead.log", "llama-server -m t.gguf -md d.gguf -ctkd q4_0 -ctvd f16\n", "q4_0"),
        ("llamacpp-dead.log", "--cache-type-v-draft=q8_0\n", "q8_0"),
        ("llamacpp-dead.log", "--spec-draft-type-k bf16 -ctk q8_0\n", ""),
        ("llamacpp-dead.log", "size = 8 MiB, K (q8_0): 4 MiB\nloading draft model 'd.gguf'\nK (f16): 2 MiB\n", ""),
        ("llamacpp-dead.log", "loading draft model 'd.gguf'\nsize = 8 MiB, K (q5_1): 4 MiB, V (f16): 4 MiB\n", "q5_1"),
        ("vllm.log", SPECULATION % "'kv_cache_dtype': 'fp8_e4m3'", "fp8_e4m3"),
        ("vllm.log", ENGINE % "fp8", "fp8"),
        ("vllm.log", ENGINE % "fp8" + SPECULATION % "'kv_cache_dtype': 'auto'", ""),
        ("vllm.log", ENGINE % "auto", ""),
        ("sglang.log", "server_args=ServerArgs(kv_cache_dtype='fp8_e5m2', speculative_num_steps=3)\n", "fp8_e5m2"),
        ("sglang.log", "server_args=ServerArgs(kv_cache_dtype='auto', speculative_num_steps=3)\n", ""),
    ],
)
def test_the_type_of_the_drafters_cache_is_read(sample, first, cache):
    assert read_output(first + (SAMPLES / sample).read_text(encoding="utf-8")).draft_cache == cache


def test_verification_in_part_is_read_with_the_draft_length():
    options = SPECULATION % "'num_speculative_tokens': 7, 'enable_adaptive_verification': True"
    log = (SAMPLES / "vllm.log").read_text(encoding="utf-8")
    assert (read_output(options + log).verified_in_part, read_output(log).verified_in_part) == (True, None)
    command = '--speculative-config {"num_speculative_tokens": 8, "enable_adaptive_verification": true}\n'
    found = read_output(command + (SAMPLES / "bench-serve.txt").read_text(encoding="utf-8"))
    assert (found.verified_in_part, found.k) == (True, 8)


def test_partly_offloaded_layers_and_experts_are_seen():
    log = (SAMPLES / "llamacpp-eagle3.log").read_text(encoding="utf-8")
    found = read_output("load_tensors: offloaded 20/33 layers to GPU\nprint_info: n_expert         = 128\n" + log)
    assert found.offloaded is True and found.moe is True


@pytest.mark.parametrize(
    "hostile",
    [
        "",
        "{" * 100_000,
        "x" * 300_000,
        "SpecDecoding metrics: " + "9" * 10_000,
        "SpecDecoding metrics: Mean acceptance length: nan, Accepted: 1e999 tokens, Drafted: -4 tokens",
        '{"output_throughput": 1e308, "mean_tpot_ms": 1e-308, "spec_decode_acceptance_length": 1e308}',
        '{"usage": {"total_draft_tokens_count": 4, "accepted_draft_tokens_count": 9}}',
        "vllm:spec_decode_num_drafts_total nan\nvllm:spec_decode_num_draft_tokens_total 1e400",
        "draft acceptance = 1 ( 999999999999 accepted / 1 generated)\n eval time = 0 ms (, 0 tokens per second)",
    ],
)
def test_hostile_output_is_one_line_or_harmless(hostile):
    try:
        found = diagnose(read_output(hostile, SMALL))
    except ValueError as error:
        assert str(error) and "\n" not in str(error) and len(str(error)) < 1500
    else:
        assert isinstance(found.sentence, str) and found.as_dict()


def test_unreadable_files_give_one_line(tmp_path):
    (tmp_path / "big").write_bytes(b"x" * 20_000_000)
    for path in (tmp_path / "none", tmp_path, tmp_path / "big", "/dev/zero"):
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            read_output_file(path)

"""Loading by name, folder and object; every rejection is one line with the fix."""

import json
import re
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
    PreTrainedTokenizerFast,
)

from specdemo.core.protocol import Budget, GenerationConfig
from specdemo.engine.loop import generate
from specdemo.methods import load_drafter
from specdemo.models import auto_dtype, load, memory, sources
from specdemo.models.checkpoints import open_checkpoint, open_meta_checkpoint
from specdemo.models.cpu_plan import CpuSettings
from specdemo.models.devices import device_map_summary
from specdemo.models.errors import WrongHistory
from specdemo.models.load import LoadedModel, load_meta_target, load_model, load_target
from specdemo.models.memory import Precision, estimate_footprint
from specdemo.models.pass_cost import chain_rounding
from specdemo.models.ref import ModelRef
from specdemo.models.target import HFTarget
from tests.generation import output, rows_of
from tests.models.test_text import byte_level
from tests.models.tiny import SIZES, VOCABULARY, build, fresh, texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "tiny"
    build("llama").save_pretrained(path)
    byte_level().save_pretrained(path)
    return path


@pytest.fixture
def embedded(folder, monkeypatch):
    monkeypatch.setenv("SPECDEMO_MODELS", str(folder.parent))


def refused(name, **options):
    with pytest.raises(ValueError) as caught:
        load_model(name, **options)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_vision_language_model_loads(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    text = MuseGlimmerConfig().text_config.to_dict() | SIZES | {"layer_types": kinds, "sliding_window": 6}
    eyes = MuseGlimmerConfig().vision_config.to_dict() | sizes | {"layer_types": ["full_attention"]}
    torch.manual_seed(0)
    model = MuseGlimmerForConditionalGeneration(MuseGlimmerConfig(text_config=text, vision_config=eyes)).eval()
    model.save_pretrained(tmp_path)
    byte_level().save_pretrained(tmp_path)
    target, prompt = load_target(str(tmp_path)), texts(1, 9)
    assert target.capabilities.trees and load_meta_target(str(tmp_path)).num_layers == 3
    config = GenerationConfig(24, budget=Budget(4, 4), stop_token_ids=())
    expected = model.generate(prompt, max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert output(target, load_drafter("ngram", target), prompt, config) == expected[:, 9:].tolist()


def test_a_saved_folder_loads(folder):
    reports = []
    target = load_target(str(folder), progress=lambda share, what: reports.append((share, what)))
    assert isinstance(target, HFTarget) and isinstance(target.tokenizer, PreTrainedTokenizerFast)
    assert target.dtype == torch.float32 and target.device.type == "cpu"
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    prompt = texts(1, 9)
    torch.testing.assert_close(target.start(prompt).logits[0, 0], fresh(build("llama"), prompt[0].tolist()))
    shares = [share for share, _ in reports]
    assert shares == sorted(shares) and shares[-1] == 1.0


def test_embedded_models_have_short_names(folder, embedded):
    assert ModelRef("tiny").path == folder
    assert ModelRef("organisation/tiny").path is None
    assert load_target("tiny").name == "tiny"


def test_loaded_models_are_taken_as_they_are(folder):
    model = build("gpt2")
    assert load_target(model).model is model
    loaded = LoadedModel(model, byte_level(), "mine")
    target = load_target(loaded)
    assert target.model is model and target.tokenizer is loaded.tokenizer and target.name == "mine"


def test_a_folder_never_touches_the_network(folder, monkeypatch):
    def unreachable(*args, **kwargs):
        raise AssertionError("a folder needs no network")

    monkeypatch.setattr(sources, "snapshot_download", unreachable)
    monkeypatch.setattr(sources, "HfApi", unreachable)
    load_model(str(folder))


def test_a_folder_without_safetensors_is_refused(folder, tmp_path):
    shutil.copy(folder / "config.json", tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert "has no .safetensors weights; convert it with" in refused(str(tmp_path))


def test_non_models_are_rejected(folder, tmp_path):
    assert "has no config.json" in refused(str(tmp_path))
    with pytest.raises(ValueError, match="has no config.json"):
        load_meta_target(str(tmp_path))
    assert refused(str(tmp_path / "nothing")) == f"the folder {tmp_path / 'nothing'} does not exist"
    assert "the folder ./nothing does not exist" in refused("./nothing")
    assert "is a file; use the folder" in refused(str(folder / "config.json"))
    assert "neither a folder nor a Hugging Face id" in refused("a model")


@pytest.mark.parametrize("read", [load_model, load_meta_target, open_checkpoint, open_meta_checkpoint, load_target])
def test_a_gguf_file_or_a_folder_of_them_is_answered_with_what_works(folder, tmp_path, read):
    (tmp_path / "model-Q4_K_M.gguf").write_bytes(b"GGUF")
    (tmp_path / "config.json").write_text("{}")
    files = [] if read in (load_model, load_target) else [tmp_path / "model-Q4_K_M.gguf", tmp_path / "absent.GGUF"]
    for name in (tmp_path, *files):
        with pytest.raises(ValueError) as caught:
            read(str(name))
        line = str(caught.value)
        assert line.startswith(f"{name} ") and "GGUF, which can only decode" in line and "\n" not in line
        for way in ("pip install llama-cpp-python gguf", "--server", "safetensors"):
            assert way in line


def test_gguf_file_next_to_full_weights_is_ignored(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "both")
    (tmp_path / "both" / "model.gguf").write_bytes(b"GGUF")
    assert load_model(str(tmp_path / "both")).name


def test_code_in_a_repository_is_never_run(folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    config = json.loads((other / "config.json").read_text()) | {"model_type": "surprise"}
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (other / "config.json").write_text(json.dumps(config))
    (other / "evil.py").write_text("raise SystemExit('ran')")
    assert "which specdemo never runs" in refused(str(other))


def test_wrong_options_are_refused(folder):
    assert "unknown dtype 'bfloat'; did you mean 'bfloat16'?" in refused(str(folder), dtype="bfloat")
    assert "unknown quantization '5bit'" in refused(str(folder), quantization="5bit")
    assert "unknown device 'gpu7'" in refused(str(folder), device="gpu7")
    assert "this machine has no device 'cuda:99'" in refused(str(folder), device="cuda:99")


def test_quantization_names_missing_packages(folder, monkeypatch):
    monkeypatch.setattr(memory, "find_spec", lambda name: None)
    assert "pip install bitsandbytes" in refused(str(folder), quantization="4bit")


def test_a_model_that_does_not_fit_is_refused_before_loading(folder, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda where: [1000])
    line = refused(str(folder))
    assert "in float32, this machine has 0.0 MB free on cpu; choose quantization 4bit or a smaller model" in line


@pytest.mark.parametrize("tied", [True, False])
def test_shards_tied_tables_and_padding_rows(tmp_path, tied):
    config = build("llama").config.to_dict() | {"vocab_size": VOCABULARY + 3, "tie_word_embeddings": tied}
    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig.from_dict(config)).eval()
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    target = load_target(str(tmp_path))
    assert target.vocab_size == VOCABULARY + 3 and target.tokenizer is None
    assert (target.lm_head.weight is target.embed.weight) == tied
    prompt = texts(1, 9)
    torch.testing.assert_close(target.start(prompt).logits[0, 0], fresh(model, prompt[0].tolist()))


def edited(folder, tmp_path, change):
    """Return a copy of the folder with changed tensors."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    tensors = load_file(other / "model.safetensors")
    change(tensors)
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    return str(other)


def test_tensors_that_are_missing_are_named(folder, tmp_path):
    path = edited(folder, tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert re.search(r"lacks 1 tensors \(model\.layers\.1\.mlp\.up_proj\.weight is the first\)", refused(path))


def test_nan_weights_are_reported(folder, tmp_path):
    path = edited(folder, tmp_path, lambda tensors: tensors["model.layers.2.mlp.down_proj.weight"].fill_(float("nan")))
    assert "has NaN or infinity in model.layers.2.mlp.down_proj.weight; fetch it again" in refused(path)


def test_a_shard_cut_short_is_named(folder, tmp_path):
    path = edited(folder, tmp_path, lambda tensors: None)
    shard = tmp_path / "other" / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    assert f"{shard} is damaged or cut short; delete it and fetch it again" == refused(path)


def test_one_thread_at_a_time_builds_a_model(folder, monkeypatch):
    inside, overlapped = threading.Barrier(2), []
    from_pretrained = load.AutoModelForCausalLM.from_pretrained

    def watched(*args, **kwargs):
        with suppress(threading.BrokenBarrierError):  # no other thread arrived
            inside.wait(timeout=0.5)
            overlapped.append(True)
        return from_pretrained(*args, **kwargs)

    monkeypatch.setattr(load.AutoModelForCausalLM, "from_pretrained", watched)
    with ThreadPoolExecutor(2) as threads:
        loaded = list(threads.map(load_model, [str(folder)] * 2))
    assert not overlapped and all(isinstance(one, LoadedModel) for one in loaded)


def test_chain_rounding_is_that_of_the_precision():
    tokens = torch.arange(1, 40)[None]
    noise = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = LlamaForCausalLM.from_pretrained(ModelRef("stories-draft-deep").path, dtype=dtype)
        noise[dtype] = chain_rounding(HFTarget(model), tokens)
        assert chain_rounding(HFTarget(model), tokens[:, :2]) == 0.0  # no pass of two tokens fits after the first
    assert 0.0 < noise[torch.float32] < 1e-4 and noise[torch.bfloat16] < 0.5


def test_pickles_with_code_are_rejected(tmp_path):
    torch.save({"a": test_pickles_with_code_are_rejected}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="medusa_lm_head.pt is damaged or not plain weights"):
        open_checkpoint(str(tmp_path))


def test_keys_and_values_are_counted_from_the_config(folder):
    found = estimate_footprint(folder, Precision(torch.float32))
    assert found.weights == 4 * sum(p.numel() for p in build("llama").parameters())
    target = load_target(str(folder))
    target.start(texts(1, 9), reserve=11)
    assert found.per_token == target.history_bytes // 20


def test_placement_is_reported(folder):
    model = build("llama")
    assert device_map_summary(model) == ""
    parts = {
        "model.embed_tokens": 0,
        "model.layers.0": 0,
        "model.layers.1": 0,
        "model.layers.2": "cpu",
        "lm_head": "cpu",
    }
    model.hf_device_map = parts
    assert device_map_summary(model) == "cuda:0: embed_tokens, layers 0-1; cpu: lm_head, layers 2"


def test_layers_that_lie_elsewhere_make_no_difference(folder, tmp_path):
    """Simulates accelerate's offloading on a small device: one layer and lm_head stay on the disk."""
    places = {f"model.layers.{i}": "disk" if i == 1 else "cpu" for i in range(3)}
    places |= {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    spread = LlamaForCausalLM.from_pretrained(folder, device_map=places, offload_folder=tmp_path)
    assert (
        device_map_summary(spread) == "cpu: embed_tokens, norm, rotary_emb, layers 0, layers 2; disk: lm_head, layers 1"
    )
    prompt, config = texts(1, 12), GenerationConfig(20, budget=Budget(4, 4))
    outputs = []
    for model in (load_target(str(folder)).model, spread):
        target = HFTarget(model)
        outputs.append(output(target, load_drafter("layer_skip", target, exit_layer=2), prompt, config))
    assert outputs[0] == outputs[1]


@pytest.fixture(scope="module")
def wider(tmp_path_factory):
    """Save a model whose sizes are multiples of 4-bit blocks, and return its folder."""
    path = tmp_path_factory.mktemp("wider")
    torch.manual_seed(5)
    sizes = build("llama").config.to_dict() | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    model = LlamaForCausalLM(LlamaConfig.from_dict(sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.3)
    model.save_pretrained(path)
    return str(path)


def test_unsupported_4_bit_widths_are_rejected(monkeypatch):
    def unsupported(self, x):  # as bitsandbytes does on CPUs with AVX-512
        raise AssertionError(f"width {x.shape[-1]} is not a multiple of the block size\nin the kernel")

    monkeypatch.setattr("bitsandbytes.nn.Linear4bit.forward", unsupported)
    reason = "width 256 is not a multiple of the block size"
    line = f"stories does not run in 4 bit on this CPU ({reason}); choose 8bit or no quantization"
    assert refused("stories", quantization="4bit") == line


@pytest.mark.parametrize("quantization", ["4bit", "8bit"])
def test_quantised_target_matches_its_own_plain_lane(wider, quantization):
    target = load_target(wider, quantization=quantization)
    body = target.model.model.layers[0].mlp.up_proj
    assert body.weight.dtype == {"4bit": torch.uint8, "8bit": torch.int8}[quantization]
    for table in (target.lm_head, target.embed):  # shared with heads
        assert table.weight.dtype == torch.float32
    counted = estimate_footprint(Path(wider), Precision(torch.float32, {"4bit": 4, "8bit": 8}[quantization])).weights
    full_size = estimate_footprint(Path(wider), Precision(torch.float32)).weights
    assert counted < 0.6 * full_size
    config = GenerationConfig(40, budget=Budget(4, 4))
    outputs = []
    for method, model in (("none", None), ("ngram", None), ("draft_model", wider)):
        events = list(generate(target, load_drafter(method, target, model), texts(1, 12), config))
        outputs.append(rows_of(events))
    assert outputs[1] == outputs[0] and outputs[2] == outputs[0]
    assert len(events) < 40  # drafts from the full weights are accepted


def test_weights_are_read_straight_to_a_device_with_its_own_memory(monkeypatch):
    def device_map(device, spread=False):
        return load._placement_kwargs(torch.device(device), Precision(torch.float16), spread).get("device_map")

    assert device_map("cuda") == {"": torch.device("cuda", 0)}
    assert device_map("cuda:1") == {"": torch.device("cuda", 1)}
    assert device_map("cuda", spread=True) == "auto"
    assert device_map("cpu") is device_map("mps") is None
    monkeypatch.setenv("SPACES_ZERO_GPU", "1")
    assert device_map("cuda") is None  # the GPU is attached later


PLAIN_ONLY = {("plain", 1): 1.0, ("plain", 5): 4.0}
BOTH = PLAIN_ONLY | {("packed", 1): 1.2, ("packed", 4): 1.0, ("packed", 5): 1.1}
HALF = {("plain", 1): 0.5, ("plain", 5): 3.0, ("packed", 4): 1.2}  # of a processor that emulates bfloat16


@pytest.mark.parametrize(
    ("seconds", "stored", "bit_exact", "expected"),
    [
        ((BOTH, HALF), "bfloat16", "auto", "bfloat16"),  # plain decoding decides, although five tokens cost more
        ((BOTH, HALF), "bfloat16", "on", "float32"),  # bit_exact needs packed products
        ((HALF, PLAIN_ONLY), "bfloat16", "auto", "float32"),
        ((BOTH, HALF), "float32", "auto", "float32"),
    ],
)
def test_auto_is_the_dtype_whose_plain_decoding_is_faster(
    folder, tmp_path, monkeypatch, seconds, stored, bit_exact, expected
):
    times = dict(zip(auto_dtype.DTYPES, seconds, strict=True))
    monkeypatch.setattr(auto_dtype, "layout_seconds", lambda linears, *runs: times[linears[0].weight.dtype])
    monkeypatch.setattr(auto_dtype, "LEAST_SIZE", 1)
    monkeypatch.setattr(auto_dtype, "SAMPLE_BYTES", 0)
    copied = shutil.copytree(folder, tmp_path / "model")
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "dtype": stored}))
    loaded = load_model(str(copied), device="cpu", cpu=CpuSettings(bit_exact=bit_exact))
    assert loaded.model.dtype == getattr(torch, expected)
    why = [note for note in loaded.notes if note.startswith("dtype auto is ")]
    assert len(why) == (stored == "bfloat16") and all(note.startswith(f"dtype auto is {expected}: ") for note in why)
    assert load_target(str(copied), "float32", "cpu").dtype == torch.float32


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_auto_is_float32_where_bfloat16_does_not_continue_a_text(folder, monkeypatch, dtype):
    checked = []

    def check(name, model, tokenizer):
        checked.append(model.dtype)
        if model.dtype == torch.bfloat16:
            raise WrongHistory("no")
        return ""

    monkeypatch.setattr(load, "_check_history", check)
    monkeypatch.setattr(load, "is_measured", lambda *given: True)
    monkeypatch.setattr(load, "faster_precision", lambda *given, **more: (Precision(torch.bfloat16), "faster"))
    if dtype != "auto":
        with pytest.raises(WrongHistory):
            load_model(str(folder), dtype, "cpu")
        return
    loaded = load_model(str(folder), dtype, "cpu")
    assert loaded.model.dtype == torch.float32 and checked == [torch.bfloat16, torch.float32]
    assert "dtype auto is float32: in bfloat16 the model does not continue a stored text here" in loaded.notes


def test_auto_compares_plain_products_where_bit_exact_finds_no_packed_ones(folder, monkeypatch):
    times = dict(zip(auto_dtype.DTYPES, (PLAIN_ONLY, HALF), strict=True))
    monkeypatch.setattr(auto_dtype, "layout_seconds", lambda linears, *runs: times[linears[0].weight.dtype])
    monkeypatch.setattr(auto_dtype, "LEAST_SIZE", 1)
    precision, sentence = auto_dtype.faster_precision(Path(folder), Precision(torch.float32), padded=True)
    assert precision.dtype == torch.bfloat16
    assert "about 0.5 of the time in float32, for 5 tokens 0.8" in sentence


def test_a_large_head_is_measured_in_part_only(tmp_path, monkeypatch):
    monkeypatch.setattr(auto_dtype, "SAMPLE_BYTES", 4 * 128 * 128)
    monkeypatch.setattr(auto_dtype, "MATRIX_BYTES", 128 * 128)
    names = ["lm_head.weight", "model.layers.0.up.weight", "model.layers.1.up.weight"]
    save_file({name: torch.zeros(1000, 64) for name in names}, tmp_path / "model.safetensors")
    assert [tuple(matrix.shape) for matrix in auto_dtype._sample(tmp_path)] == [(64, 64)] * 3


@pytest.mark.parametrize("config", [{"torch_dtype": "bfloat16", "text_config": {"vocab_size": 9}},
                                    {"dtype": "float32", "text_config": {"dtype": "torch.bfloat16"}}])  # fmt: skip
def test_the_stored_dtype_may_be_stated_for_all_parts_of_a_model(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert auto_dtype.stored_dtype(tmp_path) == torch.bfloat16


def test_auto_is_bfloat16_where_float32_does_not_fit(folder, tmp_path, monkeypatch):
    copied = shutil.copytree(folder, tmp_path / "model")
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    monkeypatch.setattr(load, "free_bytes", lambda device: [1])
    target = load_target(str(copied), device="cpu")
    assert target.dtype == torch.bfloat16
    assert "dtype auto is bfloat16: in float32 the model does not fit into the free memory" in target.notes

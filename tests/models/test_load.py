"""Loading by name, folder and object; every refusal is one line that names the cure."""

import json
import re
import shutil
from types import SimpleNamespace

import huggingface_hub.errors
import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from specdemo.models import load
from specdemo.models.load import LoadedModel, load_model, load_target, resolve, rounding_noise, weight_bytes
from specdemo.models.target import HFTarget
from tests.models.test_text import byte_level
from tests.models.tiny import build, fresh, texts


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
    assert resolve("tiny") == str(folder)
    assert resolve("organisation/tiny") == "organisation/tiny"
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

    monkeypatch.setattr(load, "snapshot_download", unreachable)
    monkeypatch.setattr(load, "HfApi", unreachable)
    load_model(str(folder))


def test_weights_are_counted_from_their_headers(folder):
    numbers = sum(p.numel() for p in build("llama").parameters())
    assert weight_bytes(str(folder), 32) == 4 * numbers
    assert weight_bytes(str(folder), 4) == numbers // 2


def test_a_folder_without_safetensors_is_refused(folder, tmp_path):
    shutil.copy(folder / "config.json", tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert "holds no .safetensors weights; convert it with" in refused(str(tmp_path))


def test_what_is_no_model_is_refused(folder, tmp_path):
    assert "has no config.json" in refused(str(tmp_path))
    assert refused(str(tmp_path / "nothing")) == f"there is no folder {tmp_path / 'nothing'}"
    assert "there is no folder ./nothing" in refused("./nothing")
    assert "is a file; give the folder" in refused(str(folder / "config.json"))
    assert "neither a folder nor a Hugging Face id" in refused("a model")


def test_code_in_a_repository_is_never_run(folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    config = json.loads((other / "config.json").read_text()) | {"model_type": "surprise"}
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (other / "config.json").write_text(json.dumps(config))
    (other / "evil.py").write_text("raise SystemExit('ran')")
    assert "never run here" in refused(str(other))


def test_damaged_files_are_one_line(folder, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (other / "config.json").write_text("{")
    assert "cannot be loaded" in refused(str(other))
    shutil.copy(folder / "config.json", other)
    (other / "model.safetensors").write_bytes(b"\x08")
    assert "model.safetensors is damaged" in refused(str(other))


def test_wrong_options_are_refused(folder):
    assert "unknown dtype 'bfloat'; did you mean 'bfloat16'?" in refused(str(folder), dtype="bfloat")
    assert "unknown quantization '5bit'" in refused(str(folder), quantization="5bit")
    assert "unknown device 'gpu7'" in refused(str(folder), device="gpu7")
    assert "there is no device 'cuda:99' here" in refused(str(folder), device="cuda:99")


def test_quantization_says_what_it_lacks(folder, monkeypatch):
    monkeypatch.setattr(load, "find_spec", lambda name: None)
    assert "pip install bitsandbytes" in refused(str(folder), quantization="4bit")
    monkeypatch.setattr(load, "find_spec", lambda name: object())
    assert "needs a CUDA GPU" in refused(str(folder), quantization="4bit", device="cpu")


def test_a_model_that_does_not_fit_is_refused_before_loading(folder, monkeypatch):
    monkeypatch.setattr(load, "free_bytes", lambda where: [1000])
    line = refused(str(folder))
    assert re.search(r"needs 0\.0 GB in float32, 0\.0 GB are free on cpu; choose a smaller model", line)


def test_half_precision_on_a_cpu_has_to_earn_its_place(folder, monkeypatch):
    monkeypatch.setattr(load, "verify_cost", lambda target: (1.0, 1.53))
    line = refused(str(folder), dtype="bfloat16")
    assert "checking 5 tokens takes 1.53 times as long as one (limit 1.2)" in line and "float32" in line
    monkeypatch.setattr(load, "verify_cost", lambda target: (1.0, 1.1))
    assert load_model(str(folder), dtype="bfloat16").model.dtype == torch.bfloat16


def test_the_cost_of_verifying_is_measured():
    one, five = load.verify_cost(HFTarget(build("llama")), repeats=2)
    assert 0.1 < five / one < 50.0


def offline(monkeypatch, value):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", value)


def test_an_unknown_name_is_answered_with_the_likeliest(embedded, monkeypatch):
    offline(monkeypatch, True)
    assert refused("tinny") == "'tinny' is not here and huggingface.co cannot be reached; did you mean 'tiny'?"


class Hub:
    """A hub with one repository; counts what is asked of it."""

    def __init__(self, files, folder):
        self.files, self.folder, self.patterns, self.numbers = files, folder, None, 1000

    def model_info(self, repository):
        if repository != "org/tiny":
            response = SimpleNamespace(headers={}, status_code=404, request=None)
            raise huggingface_hub.errors.RepositoryNotFoundError("404 Client Error.\nmore", response=response)
        files = [SimpleNamespace(rfilename=f) for f in self.files]
        return SimpleNamespace(siblings=files, safetensors=SimpleNamespace(total=self.numbers))

    def download(self, repository, allow_patterns, local_files_only, tqdm_class):
        self.patterns = allow_patterns
        bar = tqdm_class(desc="bytes", total=0, initial=0, unit="B", unit_scale=True, name="download")
        bar.total = 4
        bar.update(1)
        bar.update(3)
        bar.close()
        return str(self.folder)


def hub(monkeypatch, folder, files):
    made = Hub(files, folder)
    offline(monkeypatch, False)
    monkeypatch.setattr(load, "HfApi", lambda: made)
    monkeypatch.setattr(load, "snapshot_download", made.download)
    return made


def test_an_id_is_downloaded_without_code_or_pickles(folder, monkeypatch):
    made = hub(monkeypatch, folder, ["config.json", "model.safetensors", "pytorch_model.bin", "model.py"])
    shares = []
    assert load_model("org/tiny", progress=lambda share, what: shares.append(share)).name == "org/tiny"
    assert shares == sorted(shares) and 0.6 in shares and len(set(shares)) > 4
    assert not any(pattern.endswith((".py", ".bin", ".pt", "*")) for pattern in made.patterns)


def test_an_id_without_safetensors_is_refused_before_the_download(folder, monkeypatch):
    made = hub(monkeypatch, folder, ["config.json", "pytorch_model.bin"])
    assert refused("org/tiny") == "org/tiny holds no .safetensors weights; choose a model that does"
    assert made.patterns is None


def test_an_id_that_does_not_fit_is_not_downloaded(folder, monkeypatch):
    made = hub(monkeypatch, folder, ["config.json", "model.safetensors"])
    made.numbers = 10**15
    assert re.match(
        r"org/tiny needs 4400000\.0 GB in float32, .* are free on cpu; choose a smaller", refused("org/tiny")
    )
    assert made.patterns is None


def test_an_id_nobody_knows(folder, embedded, monkeypatch):
    hub(monkeypatch, folder, [])
    assert refused("org/tine").startswith("unknown model 'org/tine'")


def test_rounding_noise_is_that_of_the_precision():
    tokens = torch.arange(1, 40)[None]
    noise = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = LlamaForCausalLM.from_pretrained(resolve("stories-draft-deep"), dtype=dtype)
        noise[dtype] = rounding_noise(HFTarget(model), tokens)
        assert rounding_noise(HFTarget(model), tokens[:, :3]) == 0.0
    assert 0.0 < noise[torch.float32] < 1e-4 and noise[torch.bfloat16] < 0.5

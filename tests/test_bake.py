"""How an image gets its weights (deploy/bake.py), and what the program makes of an image."""

import hashlib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from qwen_chat import weights
from qwen_chat.config import Model

BAKE = Path(__file__).resolve().parent.parent / "deploy" / "bake.py"
GGUF = b"GGUF" + bytes(1000)
SHA256 = hashlib.sha256(GGUF).hexdigest()


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """An image being built: an empty context, no cache, and endpoints that nobody serves."""
    for name in ("MODEL_REPO", "MODEL_FILE", "MODEL_REVISION", "MODEL_SHA256", "QUANT", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CONFIG", str(tmp_path / "config.yaml"))
    (tmp_path / "config.yaml").write_text("server: {language: zh}\n")
    (tmp_path / "context").mkdir()
    monkeypatch.setattr(weights, "ROOT", tmp_path / "app")


@pytest.fixture
def bake(tmp_path, monkeypatch):
    def bake(**arguments):
        for name, value in arguments.items():
            monkeypatch.setenv(name, value)
        runpy.run_path(str(BAKE))["main"](tmp_path / "context", tmp_path / "app")
        return sorted(file.name for file in (tmp_path / "app" / "models").iterdir())

    return bake


@pytest.fixture
def give(tmp_path):
    def give(name: str, content: bytes = GGUF, folder: str = "context") -> Path:
        file = tmp_path / folder / name
        file.write_bytes(content)
        return file

    return give


def test_a_file_in_the_context_wins_and_stands_for_the_default_model(bake, give):
    give("mine.gguf")
    assert bake() == ["mine.gguf"]
    found = weights.find(Model(endpoints=[], fallbacks=[]))
    assert (found.path, found.name, found.fallback) == (weights.ROOT / "models" / "mine.gguf", "mine", None)
    assert found.path.stat().st_mtime == 0  # the same layer each time


@pytest.mark.parametrize("model", [
    {"repo_id": "someone/else"},
    {"filename": "another.gguf"},
    {"revision": "main"},
    {"sha256": None},
])
def test_it_does_not_stand_for_a_model_that_the_config_names(bake, give, model):
    give("mine.gguf")
    bake()
    with pytest.raises(weights.WeightsError):
        weights.find(Model(endpoints=[], fallbacks=[], **model))


def test_it_stands_for_the_model_of_the_config_it_was_built_with(bake, give, tmp_path):
    (tmp_path / "config.yaml").write_text("model: {filename: another.gguf, sha256: null}\n")
    give("mine.gguf")
    bake()
    assert weights.find(Model(filename="another.gguf", sha256=None, endpoints=[], fallbacks=[])).name == "mine"


def test_a_file_mounted_into_the_image_goes_before_the_one_built_in(bake, give):
    give("a.gguf")
    bake()
    give("b.gguf", folder="app/models")
    assert weights.find(Model()).name == "b"
    give("b.gguf", b"<html>", folder="app/models")
    with pytest.raises(weights.WeightsError, match="b.gguf: not a GGUF file"):
        weights.find(Model())


def test_of_several_files_the_named_one_counts(bake, give):
    give("a.gguf")
    give("b.gguf")
    with pytest.raises(SystemExit, match="models/ has a.gguf, b.gguf; leave one"):
        bake()
    assert bake(MODEL_FILE="b.gguf") == ["b.gguf"]


def test_a_file_of_the_wanted_name_must_have_the_checksum(bake, give):
    give("qwen2.5-0.5b-instruct-q4_k_m.gguf")
    with pytest.raises(SystemExit, match=f"has the sha256 {SHA256}"):
        bake()
    assert bake(MODEL_SHA256=SHA256) == ["qwen2.5-0.5b-instruct-q4_k_m.gguf"]


def test_a_given_checksum_counts_for_a_file_of_any_name(bake, give):
    give("mine.gguf")
    with pytest.raises(SystemExit, match="is expected"):
        bake(MODEL_SHA256="0" * 64)


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n"])
def test_a_file_that_is_no_model_ends_the_build(bake, give, content):
    give("mine.gguf", content)
    with pytest.raises(SystemExit, match="not a GGUF file"):
        bake()


def test_weights_that_cannot_be_had_end_the_build(bake, tmp_path):
    with pytest.raises(SystemExit, match="127.0.0.1:9 cannot be reached") as ended:
        bake(MODEL_REPO="someone/tiny", MODEL_FILE="tiny.gguf")
    assert not (tmp_path / "app").exists()
    said = str(ended.value)
    assert "tiny.gguf is not under models/ beside the Dockerfile" in said
    assert "put it into models/ beside the Dockerfile." in said
    assert str(weights.ROOT) not in said and "model." not in said.replace("models/", "")  # no key helps here


def test_the_arguments_name_another_model(bake, monkeypatch, give, tmp_path):
    asked = []
    monkeypatch.setattr(weights, "find", lambda model: asked.append(model) or weights.Weights(give("x.gguf", folder="."), "x", None))
    assert bake(MODEL_REPO="someone/tiny", MODEL_FILE="tiny.gguf") == ["tiny.gguf"]
    assert weights.identity(asked[0]) == ["someone/tiny", "tiny.gguf", "main", None]
    assert (asked[0].endpoints, asked[0].fallbacks) == (["http://127.0.0.1:9"], [])
    assert weights.identity(asked[0]) in json.loads((tmp_path / "app" / "image.json").read_text())["stands_for"]


def test_an_argument_that_is_wrong_ends_the_build(bake):
    with pytest.raises(SystemExit, match="filename"):
        bake(MODEL_FILE="tiny.bin")


@pytest.fixture
def asked(monkeypatch, give):
    """The models that the hub is asked for; each is given."""
    models = []
    monkeypatch.setattr(weights, "find", lambda model: models.append(model) or weights.Weights(give("x.gguf", folder="."), "x", None))
    return models


@pytest.mark.parametrize("quant", ["cpu", "Q3_K_S"])
def test_a_quantisation_of_the_default_model_starts_from_the_unquantised_file(bake, asked, tmp_path, quant):
    assert bake(QUANT=quant) == ["qwen2.5-0.5b-instruct-fp16.gguf"]
    model = asked[0]
    assert (model.repo_id, model.revision, model.sha256) == (Model().repo_id, Model().revision, None)
    image = json.loads((tmp_path / "app" / "image.json").read_text())
    assert image["stands_for"] == [weights.identity(Model())] * 2


@pytest.mark.parametrize("arguments, file", [
    ({"QUANT": "none"}, Model().filename),
    ({"QUANT": ""}, Model().filename),
    ({"QUANT": "cpu", "MODEL_FILE": "tiny.gguf"}, "tiny.gguf"),
])
def test_what_is_said_about_the_weights_counts_for_a_quantisation_too(bake, asked, arguments, file):
    assert bake(**arguments) == [file]
    assert asked[0].filename == file


def test_a_model_that_the_config_names_is_quantised_itself(bake, asked, tmp_path):
    (tmp_path / "config.yaml").write_text("model: {filename: another.gguf, sha256: null}\n")
    assert bake(QUANT="cpu") == ["another.gguf"]


def test_the_image_has_the_quantised_file_alone(bake, small_model, tmp_path, monkeypatch):
    (tmp_path / "context" / "small.gguf").symlink_to(small_model)
    bake(QUANT="Q8_0")
    (tmp_path / "app").rename(tmp_path / "source")
    runpy.run_path(str(BAKE))["quantize"]("q8_0", tmp_path / "source", tmp_path / "app")
    assert [file.name for file in (tmp_path / "app" / "models").iterdir()] == ["small-Q8_0.gguf"]
    assert weights.find(Model()).name == "small-Q8_0"


def test_quantising_to_none_leaves_the_file_as_it_is(bake, give, tmp_path):
    give("mine.gguf")
    bake()
    (tmp_path / "app").rename(tmp_path / "source")
    runpy.run_path(str(BAKE))["quantize"]("none", tmp_path / "source", tmp_path / "app")
    assert (tmp_path / "app" / "models" / "mine.gguf").read_bytes() == GGUF
    assert weights.find(Model()).name == "mine"


def test_an_unknown_quantisation_ends_the_build(bake, give, tmp_path):
    give("mine.gguf")
    bake()
    with pytest.raises(SystemExit, match="QUANT: type 'Q4_KM' found; did you mean Q4_K_M"):
        runpy.run_path(str(BAKE))["quantize"]("Q4_KM", tmp_path / "app", tmp_path / "out")


DOCKERFILE = (BAKE.parent.parent / "Dockerfile").read_text()


PICKED = re.findall(r"python modules\.py /(\S+) (.*?)(?: \\|$)", DOCKERFILE, re.M)


@pytest.fixture(params=PICKED, ids=lambda stage: stage[0])
def stage(request, tmp_path):
    """The code of a stage that handles weights, as the Dockerfile picks it, and the modules that it is picked for."""
    folder, modules = tmp_path / request.param[0], request.param[1].split()
    subprocess.run([sys.executable, BAKE.parent / "modules.py", folder, *modules], cwd=BAKE.parent.parent, check=True)
    return folder, modules


def test_a_stage_that_handles_weights_has_the_code_it_needs(stage):
    """All that its modules import, within functions too, is there, and the text that quantising needs."""
    folder, modules = stage
    there = {f"qwen_chat.{file.stem}" for file in (folder / "qwen_chat").glob("*.py")}
    assert there > set(modules)
    subprocess.run([sys.executable, "-c", f"import {', '.join(there)}"], cwd=folder, check=True)
    for file in (folder / "qwen_chat").glob("*.py"):
        wanted = re.findall(r"^\s*from \.(\w+) import", file.read_text(), re.M)
        assert {f"qwen_chat.{name}" for name in wanted} <= there, file
    assert (folder / "qwen_chat" / "calibration.yaml").exists()


def test_a_stage_that_handles_weights_has_nothing_of_the_page(stage):
    """An edit of the page would fetch or quantise again."""
    there = {file.name for file in (stage[0] / "qwen_chat").iterdir()}
    assert not there & {"ui.py", "texts.py", "panel.py", "api.py", "page.js", "page.css"}


def test_only_the_picked_code_reaches_the_stages_that_handle_weights():
    for name in ("weights", "weights-quantized"):
        stage = DOCKERFILE.split(f" AS {name}\n")[1].split("\nFROM ")[0]
        assert "COPY --from=code /" in stage and not re.search(r"^COPY .*\bqwen_chat", stage, re.M)

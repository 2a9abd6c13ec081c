"""The quantiser: the mix for CPUs, the importance matrix, and everything that can go wrong. On the real small model."""

import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from qwen_chat import __main__ as tools
from qwen_chat import interrupt, quantize, samples, weights
from qwen_chat.config import Config, Model, Runtime
from qwen_chat.gguf import Gguf
from qwen_chat.model import ModelError
from qwen_chat.offline import FTYPES, TYPES, Activations, Scorer, tensor_types, quantize as llama_quantize

ROOT = Path(__file__).resolve().parent.parent
TEXT = "The tide turns twice a day. 潮水一天涨落两次。\n- first item\n- second item\nprint('hello')\n"


@pytest.fixture(scope="module")
def calibration(tmp_path_factory) -> Path:
    """A short text, so that the tests are quick."""
    file = tmp_path_factory.mktemp("text") / "calibration.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def made(small_model, calibration, tmp_path_factory):
    """The small model in the mix for CPUs."""
    target = tmp_path_factory.mktemp("made") / "small-cpu.gguf"
    assert quantize.make(str(small_model), "cpu", target, Config(), calibration, force=False) == target
    return target


def command(*arguments, python=(), **options) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, *python, "-m", "qwen_chat", "quantize", *map(str, arguments)], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


# What is made


def test_the_mix_loads_and_answers(made, small_model):
    assert made.stat().st_size < small_model.stat().st_size
    assert [file.name for file in made.parent.iterdir()] == [made.name]
    model = Scorer(made, Runtime())
    *_, logits = model.score(model.tokenize("The capital of France is"))
    assert model.piece(int(logits[-1].argmax())) == b" Paris"
    model.close()


def test_each_tensor_has_the_type_that_the_mix_gives_its_role(made):
    rules = quantize.cpu_mix(tensor_types(made))
    found = {name: kind for name, kind in tensor_types(made).items() if kind != "F32"}  # norms and biases stay
    assert len(found) == 30 * 7 + 1
    for name, kind in found.items():
        assert kind == next(kind for pattern, kind in rules.items() if re.search(pattern, name)), name


def test_the_mix_names_types_that_there_are():
    assert {quantize.CPU_BASE, *quantize.CPU_MIX.values()} <= set(TYPES)
    assert quantize.CPU_BASE in FTYPES


@pytest.mark.parametrize("kind", sorted(FTYPES.keys() - {"Q1_0"}))  # whose blocks of 128 do not fit rows of 576
def test_every_type_is_one_that_llama_cpp_makes(small_model, tmp_path, kind):
    """As it would be made, without computing it; with importance for all weights, as the smallest types want."""
    ones = {name: np.ones(1536 if "ffn_down" in name else 576, np.float32) for name in tensor_types(small_model) if name.endswith("weight")}
    assert llama_quantize(small_model, tmp_path / "x.gguf", kind, {}, ones, 1, True, lambda level, line: None)


def test_a_plain_type_is_what_llama_cpp_makes_of_it(small_model, tmp_path):
    target = quantize.make(str(small_model), "Q4_0", tmp_path / "x.gguf", Config(), None, force=False)
    assert tensor_types(target)["blk.3.ffn_up.weight"] == "Q4_0" and tensor_types(target)["token_embd.weight"] == "Q8_0"


def test_the_embedding_is_only_finer_where_the_output_has_a_matrix_of_its_own():
    both = quantize.cpu_mix({"token_embd.weight": "F16", "output.weight": "F16"})
    tied = quantize.cpu_mix({"token_embd.weight": "F16"})
    assert both == {**quantize.CPU_MIX, ".": quantize.CPU_BASE} and set(both) - set(tied) == {quantize.EMBEDDING}


# Importance


def test_every_quantised_weight_has_its_importance(small_model, calibration):
    found = quantize.importance(small_model, Runtime(), calibration)
    weighed = {name for name, kind in tensor_types(small_model).items() if kind != "F32"}
    assert set(found) == weighed
    assert all(values.min() >= 0 and np.isfinite(values).all() and values.any() for values in found.values())
    assert found["blk.0.ffn_down.weight"].shape == (1536,) and found["blk.0.attn_q.weight"].shape == (576,)


def tensor(file: Path, name: str, kind: np.dtype) -> np.ndarray:
    """The content of a file from the first byte of a tensor on."""
    gguf = Gguf(file)
    start = gguf.call("get_data_offset") + gguf.call("get_tensor_offset", gguf.call("find_tensor", name.encode()))
    gguf.close()
    return np.memmap(file, kind, "r", start, ((file.stat().st_size - start) // kind.itemsize,))


def test_the_importance_is_the_mean_square_of_what_a_weight_meets(small_model, calibration):
    """For the first layer it follows from the embedding alone: its rows, normed (RMSNorm, epsilon 1e-5, times a weight)."""
    found = quantize.importance(small_model, Runtime(), calibration)
    model = Scorer(small_model, Runtime())
    texts = samples.windows(calibration, model, 512)
    model.close()
    blocks = tensor(small_model, "token_embd.weight", np.dtype([("scale", "<f2"), ("values", "i1", 32)]))[: 49152 * 18].reshape(49152, 18)  # Q8_0
    chosen = blocks[np.concatenate(texts)]
    rows = (chosen["scale"].astype(np.float32)[..., None] * chosen["values"]).reshape(-1, 576)
    scale = tensor(small_model, "blk.0.attn_norm.weight", np.dtype("<f4"))[:576]
    normed = rows / np.sqrt((rows**2).mean(axis=1, keepdims=True) + 1e-5) * scale
    expected = (normed**2).mean(axis=0)
    for name in ("attn_q", "attn_k", "attn_v"):
        np.testing.assert_allclose(found[f"blk.0.{name}.weight"], expected, rtol=1e-3)


def test_what_cannot_be_watched_is_said():
    with pytest.raises(ModelError, match="nothing was seen"):
        Activations().means()


# What people ask for


@pytest.mark.parametrize("kind, name", [("q4_k_m", "Q4_K_M"), ("CPU", "cpu"), ("iq4_nl", "IQ4_NL"), ("Q4_K", "Q4_K"), ("f16", "F16")])
def test_types_are_named_in_any_case(kind, name):
    assert quantize.named(kind) == name


@pytest.mark.parametrize("file, kind, name", [
    ("qwen2.5-0.5b-instruct-fp16.gguf", "cpu", "qwen2.5-0.5b-instruct-cpu.gguf"),
    ("qwen2.5-0.5b-instruct-q4_k_m.gguf", "Q3_K_S", "qwen2.5-0.5b-instruct-Q3_K_S.gguf"),
    ("SmolLM2-135M-Instruct.Q4_1.gguf", "IQ4_NL", "SmolLM2-135M-Instruct-IQ4_NL.gguf"),
    ("mine.gguf", "cpu", "mine-cpu.gguf"),
])
def test_the_name_says_the_type(file, kind, name):
    assert quantize.name_for(Path(file), kind) == name


def test_a_file_of_the_hub_is_asked_for_with_what_is_known_of_it(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(weights, "find", lambda model: asked.append(model) or weights.Weights(tmp_path / "x", "x", None))
    for source in (quantize.OFFICIAL, "someone/tiny:tiny.gguf", f"{Model().repo_id}:{Model().filename}"):
        quantize.find(source, Model())
    assert [weights.identity(model) for model in asked] == [
        [Model().repo_id, "qwen2.5-0.5b-instruct-fp16.gguf", Model().revision, None],
        ["someone/tiny", "tiny.gguf", "main", None],
        weights.identity(Model()),
    ]
    assert not any(model.fallbacks for model in asked)


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs the tool as it is typed; gives its status and what it says on standard error."""
    monkeypatch.setenv("CONFIG", str(tmp_path / "config.yaml"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "config.yaml").write_text("{}")

    def run(*arguments) -> SimpleNamespace:
        status = tools.main(["quantize", *map(str, arguments)])
        return SimpleNamespace(status=status, error=capsys.readouterr().err)

    return run


def test_a_wrong_type_is_explained(run, small_model):
    result = run(small_model, "Q4_KM")
    assert result.status == 1 and "type 'Q4_KM' found; did you mean Q4_K_M? allowed: cpu, BF16, " in result.error
    assert "type 'nonsense' found; allowed: cpu" in run(small_model, "nonsense").error


def test_a_wrong_source_is_explained(run, small_model, tmp_path):
    (tmp_path / "small-model.gguf").symlink_to(small_model)
    assert f"no such file; did you mean {tmp_path / 'small-model.gguf'}?" in run(tmp_path / "smal-model.gguf").error
    assert "a folder; give a .gguf file, or one of the hub as owner/name:file.gguf" in run(tmp_path).error
    (tmp_path / "page.gguf").write_text("<html>")
    assert "page.gguf: not a GGUF file" in run(tmp_path / "page.gguf").error


def test_a_type_that_does_not_fit_the_model_is_explained(run, small_model, tmp_path):
    result = run(small_model, "Q1_0", "--no-importance", "--output", tmp_path / "x.gguf")
    assert result.status == 1 and "llama.cpp cannot quantise this file: " in result.error and "q1_0" in result.error
    assert list(tmp_path.glob("x.gguf*")) == []


def test_a_hub_that_cannot_be_reached_is_said(run, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for arguments in ([], ["cpu"], [quantize.OFFICIAL, "Q8_0"]):
        result = run(*arguments)
        assert result.status == 3 and "qwen2.5-0.5b-instruct-fp16.gguf" in result.error
        assert "127.0.0.1:9 cannot be reached" in result.error


def test_an_existing_file_is_left_alone_unless_forced(run, small_model, tmp_path):
    target = tmp_path / "there.gguf"
    target.write_text("mine")
    assert "there.gguf is there already; --force replaces it" in run(small_model, "Q8_0", "--output", target).error
    assert target.read_text() == "mine"
    assert run(small_model, "Q8_0", "--output", target, "--force").status == 0
    assert tensor_types(target)["blk.0.attn_q.weight"] == "Q8_0"


def test_the_source_is_never_replaced(run, small_model, tmp_path):
    link = tmp_path / "link.gguf"
    link.symlink_to(small_model)
    assert "is the source itself" in run(small_model, "Q8_0", "--output", link, "--force").error
    assert link.is_symlink()


def test_a_quantised_source_is_warned_of(run, small_model, tmp_path):
    assert "is quantised already (Q4_1, Q8_0)" in run(small_model, "Q8_0", "--output", tmp_path / "x.gguf").error


@pytest.mark.parametrize("output, complaint", [
    ("no/such/folder.gguf", "No such file or directory"),
    ("file/below.gguf", "Not a directory"),
    ("name.bin", "must end in .gguf"),
])
def test_a_place_that_cannot_be_written_is_explained(run, small_model, tmp_path, output, complaint):
    (tmp_path / "file").write_text("")
    assert complaint in run(small_model, "Q8_0", "--output", tmp_path / output).error


def test_a_full_disk_is_told_before_anything_is_computed(run, small_model, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(quantize.shutil, "disk_usage", lambda path: usage._replace(free=10_000_000))
    result = run(small_model, "Q8_0", "--output", tmp_path / "x.gguf")
    assert re.search(r"the disk is full: 14\d MB are needed in .*, 10 MB are free", result.error)
    assert list(tmp_path.glob("x.gguf*")) == []


def test_a_text_that_cannot_be_used_is_explained(run, small_model, tmp_path):
    for name, content, complaint in (("a.txt", b"\xff", "not a text in UTF-8"), ("b.txt", b"", "there is no text in it"),
                                     ("c.yaml", b"a: 1", "a list is expected"), ("d.yaml", b"[", "not YAML")):
        (tmp_path / name).write_bytes(content)
        assert complaint in run(small_model, "--output", tmp_path / "x.gguf", "--calibration", tmp_path / name).error
    assert "No such file" in run(small_model, "--output", tmp_path / "x.gguf", "--calibration", tmp_path / "none.txt").error
    assert list(tmp_path.glob("x.gguf*")) == []


def test_a_disk_that_fills_up_leaves_nothing_behind(small_model, tmp_path):
    """A limit on the size of files stands for it."""
    limited = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000_000, 20_000_000))
    process = command(small_model, "Q8_0", "--output", tmp_path / "x.gguf", preexec_fn=limited)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 1 and f"{tmp_path} cannot take the file" in error and "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_nothing_behind(small_model, tmp_path, stop):
    process = command(small_model, "IQ4_NL", "--no-importance", "--output", tmp_path / "x.gguf")
    part = tmp_path / "x.gguf.part"
    while not (part.exists() and part.stat().st_size > 1_000_000):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    children = psutil.Process(process.pid).children()
    process.send_signal(stop)
    _, error = process.communicate(timeout=120)
    assert process.returncode == interrupt.STATUS and "Interrupted." in error and "Traceback" not in error
    assert list(tmp_path.iterdir()) == []
    assert children and psutil.wait_procs(children, timeout=60)[1] == []


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_counts_while_importance_is_measured(small_model, tmp_path, stop):
    process = command(small_model, "--output", tmp_path / "x.gguf", python=["-u"])
    while not process.stdout.readline().startswith("Measuring"):
        assert process.poll() is None, process.communicate()
    process.send_signal(stop)
    said, error = process.communicate(timeout=120)
    assert process.returncode == interrupt.STATUS and "Traceback" not in error and "Quantising" not in said
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_answers_nothing_is_not_kept(run, small_model, tmp_path, monkeypatch):
    monkeypatch.setattr(Scorer, "is_end", lambda self, token: True)
    result = run(small_model, "Q8_0", "--output", tmp_path / "x.gguf")
    assert result.status == 1 and "answers nothing" in result.error
    assert list(tmp_path.glob("x.gguf*")) == []

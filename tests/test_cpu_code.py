"""llama.cpp's code for the processor: it is tried before it is trusted, and what is wrong is told in a sentence."""

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qwen_chat import cpu_check, cpu_code, folders
from qwen_chat.cpu_code import CpuCode, CpuCodeError

ROOT = Path(__file__).resolve().parent.parent
HERE = cpu_code.use()  # what computes in this process
TRAPS = 'kill -ILL $$'
RIGHT = 'echo "{\\"off_by\\": 0.01}"'


@pytest.fixture
def checked_by(tmp_path, monkeypatch):
    """Has a shell script stand for the child that checks: `checked_by("kill -ILL $$")`; its `tries` are counted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def use(script: str) -> "Tries":
        file = tmp_path / "python"
        file.write_text(f'#!/bin/sh\necho >> {tmp_path}/tries\n{script}\n')
        file.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(file))
        return Tries(tmp_path / "tries")

    return use


class Tries:
    def __init__(self, file: Path):
        self._file = file

    @property
    def count(self) -> int:
        return len(self._file.read_text().splitlines()) if self._file.exists() else 0


def test_the_code_of_this_machine_computes_rightly():
    for extra_buffers in {HERE.extra_buffers, False}:
        assert cpu_code.check(CpuCode(HERE.name, HERE.library, extra_buffers)) == ""


def test_right_code_is_well_within_the_bound_and_any_wrong_matrix_beyond_it():
    model = cpu_check.TinyModel()
    tokens = list(range(0, 240, 6))
    right = model.logits(tokens)
    for name, weight in list(model.weights.items()):
        if weight.ndim == 2:
            model.weights[name] = weight[:, ::-1]
            assert off_by(model.logits(tokens), right) > 2 * cpu_code.LARGEST_ERROR, name
            model.weights[name] = weight
    done = subprocess.run([sys.executable, "-m", "qwen_chat.cpu_check", HERE.library, str(int(HERE.extra_buffers))], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert 0.001 < json.loads(done.stdout)["off_by"] < cpu_code.LARGEST_ERROR / 3


def off_by(found: np.ndarray, right: np.ndarray) -> float:
    return float(np.sqrt(np.square(found - right).mean() / np.square(right).mean()))


@pytest.mark.parametrize("script, fault", [
    (TRAPS, "ends with Illegal instruction (SIGILL)"),
    ("kill -SEGV $$", "ends with Segmentation fault (SIGSEGV)"),
    ('echo "{\\"off_by\\": 0.7}"', "computes nonsense (off by 0.7 of 1)"),
    ('echo "{\\"off_by\\": NaN}"', "computes nonsense (off by nan of 1)"),
    (RIGHT, ""),
    ("kill -KILL $$", None),  # by the system, for want of memory
    ("exit 1", None),
    ("echo hello", None),
])
def test_what_a_check_finds(checked_by, script, fault):
    checked_by(script)
    assert cpu_code.check(CpuCode("native", "")) == fault


def test_a_check_that_hangs_or_cannot_be_started_finds_nothing(checked_by, monkeypatch):
    checked_by("exec sleep 60")
    monkeypatch.setattr(cpu_code, "CHECK_SECONDS", 0.01)
    assert cpu_code.check(CpuCode("native", "")) is None
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert cpu_code.check(CpuCode("native", "")) is None


@pytest.fixture
def native(monkeypatch):
    monkeypatch.setattr(cpu_code, "_variant_files", list)


def test_where_nothing_computes_a_sentence_says_what_and_how_to_mend_it(checked_by, native):
    tries = checked_by(TRAPS)
    with pytest.raises(CpuCodeError) as error:
        cpu_code.choose()
    told = str(error.value)
    assert told.startswith("llama.cpp computes with none of its code on this processor: native code ends with Illegal instruction (SIGILL); "
                           "native code without repacked weights ends with Illegal instruction")
    assert f'CMAKE_ARGS="{cpu_code.BUILD}" {sys.executable} -m pip install ' in told and "llama-cpp-python==0.3." in told
    assert tries.count == 2


def test_where_only_repacked_weights_are_the_fault_it_goes_without(checked_by, native):
    checked_by(f'[ "$4" = 0 ] && {RIGHT} && exit; {TRAPS}')
    code = cpu_code.choose()
    assert (code.name, code.extra_buffers) == ("native", False)
    assert "native code ends with Illegal instruction" in code.complaint and "CMAKE_ARGS=" in code.complaint


def test_what_was_found_is_kept_for_this_library_and_this_processor(checked_by, native, monkeypatch):
    tries = checked_by(RIGHT)
    assert cpu_code.choose() == cpu_code.choose() == CpuCode("native", "")
    assert tries.count == 1
    monkeypatch.setattr(cpu_code.hardware, "cpu_model", lambda: "another processor")
    cpu_code.choose()
    assert tries.count == 2
    (folders.cache() / "cpu-code.json").write_text("no JSON")
    cpu_code.choose()
    assert tries.count == 3


def test_what_could_not_be_tried_is_trusted_but_not_kept(checked_by, native):
    tries = checked_by("exit 1")
    assert cpu_code.choose() == cpu_code.choose() == CpuCode("native", "")
    assert tries.count == 2


def test_where_nothing_can_be_kept_it_is_tried_each_time(checked_by, native, tmp_path):
    tries = checked_by(RIGHT)
    (tmp_path / "cache").write_text("in the way")
    assert cpu_code.choose() == cpu_code.choose() == CpuCode("native", "")
    assert tries.count == 2


@pytest.fixture
def three_variants(tmp_path, monkeypatch):
    """Libraries that say how well they suit: new (not at all), zen4 (best), haswell."""
    if not (compiler := shutil.which("cc")):
        pytest.skip("no C compiler")
    files = []
    for name, score in {"haswell": 7, "zen4": 90, "new": 0}.items():
        files.append(tmp_path / f"libggml-cpu-{name}.so")
        source = f"int ggml_backend_score(void) {{ return {score}; }}"
        subprocess.run([compiler, "-shared", "-x", "c", "-", "-o", str(files[-1])], input=source, text=True, check=True)
    (tmp_path / "libggml-cpu-broken.so").write_text("no library")
    monkeypatch.setattr(cpu_code, "_variant_files", lambda: [*files, tmp_path / "libggml-cpu-broken.so"])


def test_of_variants_the_fastest_is_chosen_and_where_it_fails_the_next_one(three_variants, checked_by):
    checked_by(RIGHT)
    assert cpu_code.choose().name == "zen4"
    assert (cpu_code.choose("haswell").name, cpu_code.choose(excluded=["zen4"]).name) == ("haswell", "haswell")
    checked_by(f'case "$3" in *zen4.so) {TRAPS};; esac; {RIGHT}')
    shutil.rmtree(folders.cache())
    code = cpu_code.choose()
    assert (code.name, code.extra_buffers) == ("haswell", True)
    assert "zen4 code ends with Illegal instruction" in code.complaint and "haswell code is used instead" in code.complaint


@pytest.mark.parametrize("wanted, excluded, told", [
    ("zen5", [], "runtime.cpu_code: 'zen5' found; on this processor there is: zen4, haswell"),
    ("new", [], "runtime.cpu_code: 'new' found; on this processor there is: zen4, haswell"),
    ("auto", ["zen4", "haswell"], "runtime.cpu_code_exclude: ['zen4', 'haswell'] found; on this processor there is: zen4, haswell"),
])
def test_a_variant_that_is_not_there_is_named(three_variants, wanted, excluded, told):
    with pytest.raises(CpuCodeError, match=told.replace("[", r"\[").replace("]", r"\]")):
        cpu_code.choose(wanted, excluded)


def test_no_variant_for_the_processor(three_variants, monkeypatch):
    monkeypatch.setattr(cpu_code, "_score", lambda file: 0)
    with pytest.raises(CpuCodeError, match="llama.cpp has no code for this processor, .*; there is code for: haswell, zen4, new, broken"):
        cpu_code.choose()


def test_code_that_was_not_made_for_this_processor_is_told(monkeypatch):
    monkeypatch.setattr(cpu_code.hardware, "cpu_features", lambda: ["avx", "avx2", "fma", "amx_int8"])
    monkeypatch.setattr(cpu_code, "features", lambda code: ["avx"])
    assert "it makes no use of avx2, fma, which" in cpu_code.not_native(CpuCode("native", ""))
    assert cpu_code.not_native(CpuCode("x64", "libggml-cpu-x64.so")) == ""  # a variant that was chosen
    monkeypatch.setattr(cpu_code, "features", lambda code: ["avx", "avx2", "fma"])  # AMX is left out on purpose
    assert cpu_code.not_native(CpuCode("native", "")) == ""


@pytest.mark.skipif(not (platform.machine() == "x86_64" and shutil.which("qemu-x86_64")), reason="qemu-user is not installed, or this is no x86-64")
def test_code_that_is_newer_than_the_processor_really_traps(checked_by, native):
    python = sys.executable
    if "avx2" not in cpu_code.features(CpuCode("native", "")):
        pytest.skip("llama.cpp was not compiled for this processor")
    checked_by(f'shift 2; exec qemu-x86_64 -cpu Nehalem {python} -m qwen_chat.cpu_check "$@"')
    with pytest.raises(CpuCodeError, match="native code ends with Illegal instruction"):
        cpu_code.choose()


def program(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess:
    """Runs the program where a check has found that no code computes, as it is kept in the cache folder."""
    verdicts = {f"{name} {extra}": "ends with Illegal instruction (SIGILL)" for extra in (0, 1)
                for name in ([cpu_code.variant_name(file) for file in cpu_code.variants()] or ["native"])}
    folder = tmp_path / "qwen-chat"
    folder.mkdir()
    (folder / "cpu-code.json").write_text(json.dumps({"key": cpu_code._fingerprint(), "verdicts": verdicts}))
    (tmp_path / "config.yaml").write_text('model: {path: "/nowhere.gguf"}\nserver: {host: 127.0.0.1, port: 17869}\n')
    environ = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CONFIG": str(tmp_path / "config.yaml")}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=240)


def test_the_program_ends_with_the_sentence_and_a_status_of_its_own(tmp_path):
    done = program(tmp_path, "app.py")
    assert done.returncode == 5 and "Traceback" not in done.stderr, done.stderr
    assert "llama.cpp computes with none of its code on this processor: " in done.stderr


def test_info_says_that_nothing_computes_and_everything_else(tmp_path):
    done = program(tmp_path, "-m", "qwen_chat", "info")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "computes         no" in done.stdout and "llama.cpp computes with none of its code" in done.stdout
    assert "cores " in done.stdout

"""python -m qwen_chat info, as it is run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qwen_chat import hardware, info, weights
from qwen_chat.config import SMOLLM2, Config, Model

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def told(tmp_path):
    """Runs it with a config.yaml of these sections: `told({"runtime": ...}, "--json")`."""
    def run(sections: dict, *options: str, status: int = 0) -> str:
        (tmp_path / "config.yaml").write_text(json.dumps(sections))
        environ = {**os.environ, "CONFIG": str(tmp_path / "config.yaml"), "XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hub")}
        done = subprocess.run([sys.executable, "-m", "qwen_chat", "info", *options], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=120)
        assert done.returncode == status and "Traceback" not in done.stderr, done.stderr
        return done.stdout + done.stderr

    return run


def test_it_tells_what_the_settings_come_to(told, small_model):
    text = told({"profile": "n100", "model": {"path": str(small_model)}, "runtime": {"n_threads_batch": 3}})
    cores = hardware.cores()
    for words in (f"cores            {cores.count}: {cores.because}", f"auto -> {cores.count}, because {cores.because}", "n_threads_batch  3", "profile          n100, config.yaml names it",
                  "runtime.n_ctx: 2048 -> 1024", "n_ctx 1024, n_batch 128, ", f"98 MB, {small_model}", "about ", "KV cache 53 MB", "llama-cpp-python 0.3.", "computes         yes, with the "):
        assert words in text, text


def test_the_same_for_programs(told, small_model):
    facts = json.loads(told({"profile": "none", "model": {"path": str(small_model)}, "runtime": {"n_threads": 5, "parallel": 1}}, "--json"))
    assert facts["config"]["threads"] == {"n_threads": 5, "n_threads_batch": 5} and facts["config"]["in_force"] is None
    assert facts["weights"]["bytes"] == small_model.stat().st_size
    needs = facts["needs"]
    assert not needs["refusal"] and not needs["short"] and needs["least"] == sum(needs[part] for part in ("program", "weights", "repacked", "vocabulary", "kv", "compute")) - needs["droppable"]
    assert facts["memory"]["available"] > 0 and facts["cores"]["count"] >= 1 and facts["cpu_code"]["computes"]
    assert facts["cpu_code"]["name"] and not facts["cpu_code"]["fault"], facts["cpu_code"]


def test_it_works_without_weights_and_fetches_none(told, tmp_path):
    sections = {"model": {"filename": "nowhere.gguf", "fallbacks": []}}
    assert "weights          nowhere.gguf is not here yet, the start would fetch it" in told(sections)
    facts = json.loads(told(sections, "--json"))
    assert facts["needs"] is None and facts["weights"]["path"] is None
    assert not list(tmp_path.rglob("*.gguf"))


def test_a_path_that_is_wrong_is_told_and_the_rest_too(told):
    text = told({"model": {"path": "/nowhere/x.gguf"}})
    assert "model.path: /nowhere/x.gguf: cannot be read" in text and "processor" in text


def test_a_faulty_file_ends_it_with_status_2(told):
    assert "profile: 'n10' found; did you mean n100?" in told({"profile": "n10"}, status=2)


def test_it_says_what_would_fit_where_memory_is_short(monkeypatch, small_model):
    monkeypatch.setattr(hardware, "usable_memory", lambda: hardware.Memory(512 * 2**20, 200_000_000, 0, True))
    monkeypatch.setattr(hardware, "held_by_process", lambda: 60_000_000)  # this one holds what other tests left
    config = Config.model_validate({"model": {"path": str(small_model)}})
    text = info.text(info.gather(config))
    assert "200 MB of 537 MB available, by the limit of its container (cgroup)" in text
    assert "Not enough memory: about " in text
    off = Config.model_validate({"model": {"path": str(small_model)}, "runtime": {"memory_check": False}})
    assert re.search(r"which is \d+ MB more than there is: it starts, but answers may be slow", info.text(info.gather(off)))
    monkeypatch.setattr(hardware, "usable_memory", lambda: hardware.Memory(10**9, 200_000_000, 10**9, False))
    text = info.text(info.gather(config))
    assert "more than there is: it starts, but" in text and "1,000 MB of swap" in text


def test_the_file_at_hand_is_the_one_that_would_be_used(tmp_path, monkeypatch, small_model):
    monkeypatch.setattr(weights, "ROOT", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = Model(filename="x.gguf", fallbacks=[SMOLLM2])
    assert weights.at_hand(model) is None

    def put(path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"GGUF and more")
        return path

    fallback = put(weights._target(SMOLLM2))
    found = weights.at_hand(model)
    assert (found.path, found.name) == (fallback, SMOLLM2.name) and "stands in" in found.fallback
    for path in (weights._target(model), tmp_path / "models" / "x.gguf"):
        put(path)
        assert weights.at_hand(model) == weights.Weights(path, "x", None)
    (tmp_path / "models" / "x.gguf").write_text("no model")
    assert weights.at_hand(model).path == weights._target(model)
    assert (tmp_path / "models" / "x.gguf").exists()  # nothing is removed

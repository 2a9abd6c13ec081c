"""The exit statuses, by which whatever starts the program knows whether another start may help."""

import re
from pathlib import Path

import pytest
from browser import PATIENCE, Program

ROOT = Path(__file__).resolve().parent.parent
UNIT = (ROOT / "deploy" / "qwen-chat.service").read_text()
NOWHERE = {"repo_id": "someone/tiny", "filename": "tiny.gguf", "sha256": None, "fallbacks": []}


@pytest.fixture
def status(tmp_path):
    """The status that the program ends with by itself, under `sections` of config.yaml, and what it says."""

    programs = []

    def ends(**sections) -> tuple[int, str]:
        programs.append(Program(tmp_path, **sections))
        return programs[-1].process.wait(PATIENCE), programs[-1].log

    yield ends
    for program in programs:
        program.end()


def test_weights_that_cannot_be_had_now_are_a_3(status):
    ended, said = status(model={**NOWHERE, "endpoints": ["http://127.0.0.1:9"]})
    assert ended == 3 and "127.0.0.1:9 cannot be reached" in said and "Traceback" not in said


@pytest.mark.parametrize("content, words", [
    (None, "No such file"),
    (b"<html>", "not a GGUF file"),
    (b"GGUF" + bytes(1000), "llama.cpp cannot load"),
])
def test_weights_that_are_here_and_cannot_be_used_are_a_4(status, tmp_path, content, words):
    file = tmp_path / "mine.gguf"
    if content:
        file.write_bytes(content)
    ended, said = status(model={"path": str(file)})
    assert ended == 4 and words in said and "Traceback" not in said


def test_a_model_without_a_chat_template_is_a_4(status, tmp_path, small_model):
    bare = tmp_path / "bare.gguf"
    bare.write_bytes(small_model.read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.chat_nothing!"))
    ended, said = status(model={"path": str(bare)})
    assert ended == 4 and "no chat template" in said and "Traceback" not in said


def test_a_system_prompt_that_leaves_no_room_is_a_2(status, small_model):
    ended, said = status(model={"path": str(small_model)}, runtime={"n_ctx": 512}, generation={"max_tokens": 256},
                         chat={"system_prompt": "word " * 600})
    assert ended == 2 and "Traceback" not in said
    assert re.search(r"chat.system_prompt: 60\d tokens found; allowed: at most 4\d\d, .* window of 512 tokens", said), said


def test_systemd_starts_again_only_what_that_may_mend():
    lasting = re.search(r"^RestartPreventExitStatus=(.*)$", UNIT, re.M)[1].split()
    assert "Restart=on-failure\n" in UNIT and not {"1", "3"} & set(lasting)
    table = re.search(r"^STATUSES = \{(.*)\}$", (ROOT / "app.py").read_text(), re.M)[1]
    assert set(re.findall(r"(\d+):", table)) - {"3"} <= set(lasting)

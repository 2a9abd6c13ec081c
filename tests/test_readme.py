"""What the two READMEs promise is what is there."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from qwen_chat.config import Config

ROOT = Path(__file__).resolve().parent.parent
READMES = ["README.md", "README.zh-CN.md"]


def text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def commands(name: str) -> list[str]:
    return [line for block in re.findall(r"```sh\n(.*?)```", text(name), re.S) for line in block.splitlines() if "venv" in line]


def keys(section: type[BaseModel]) -> list[str]:
    found = []
    for name, info in section.model_fields.items():
        inner = info.annotation
        found += keys(inner) if isinstance(inner, type) and issubclass(inner, BaseModel) else [name]
    return found


def test_both_languages_give_the_same_commands():
    assert commands(READMES[0]) == commands(READMES[1])
    assert commands(READMES[0])[0].endswith("app.py") and commands(READMES[0])[1].endswith("-m pytest")


@pytest.mark.parametrize("name", READMES)
def test_every_setting_is_in_the_table(name):
    table = "\n".join(line for line in text(name).splitlines() if line.startswith("| `"))
    missing = [key for key in keys(Config) if not re.search(rf"\b{key}\b", table)]
    assert missing == []


@pytest.mark.parametrize("name", READMES)
def test_every_file_it_names_is_there(name):
    named = re.findall(r"\]\(([^)#:]+)\)", text(name)) + re.findall(r"`((?:qwen_chat|deploy|tests)/[\w./-]+)`", text(name))
    missing = [path for path in named if not (ROOT / path).exists()]
    assert missing == []


def test_ci_runs_the_readmes_test_command():
    script = text(".ci/run")
    assert "grep --max-count=1 'python -m pytest' README.md" in script
    first = next(line for line in text("README.md").splitlines() if "python -m pytest" in line)
    assert first == commands("README.md")[1]

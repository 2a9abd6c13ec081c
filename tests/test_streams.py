"""Closed, full and narrow standard streams, missing folders: the program starts or says why not, without a traceback."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from browser import ROOT, Program, until

from qwen_chat import folders

NARROW = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
posix = pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
full = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")


def shell(command: str, cwd=ROOT, **environ) -> subprocess.CompletedProcess:
    """Runs a line of shell in which `python` is this Python."""
    line = f'python() {{ "{sys.executable}" "$@"; }}; {command}'
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", line], cwd=cwd, env=variables, capture_output=True, text=True, timeout=120
    )


SAFE = "import os, subprocess, sys; from qwen_chat import streams; streams.make_safe();"
WRITES = f"{SAFE} print('out'); print('err', file=sys.stderr); print('模型', '\\udcff')"


@posix
@pytest.mark.parametrize(
    "redirection",
    [
        ">&-",
        "2>&-",
        ">&- 2>&- <&-",
        pytest.param(">/dev/full", marks=full),
        pytest.param("2>/dev/full", marks=full),
        "| true",
    ],
)
def test_what_is_printed_ends_nothing(redirection):
    done = shell(f'python -c "{WRITES}" {redirection}')
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@posix
def test_characters_that_the_encoding_lacks_are_escapes():
    done = shell(f'python -c "{WRITES}"', **NARROW)
    assert (done.returncode, done.stdout) == (0, "out\n\\u6a21\\u578b \\udcff\n"), done.stderr


@posix
def test_no_file_takes_the_place_of_a_closed_stream(tmp_path):
    code = f"{SAFE} f = open('kept', 'w'); os.write(1, b'printed by a library'); assert f.fileno() > 2"
    done = shell(f'python -c "{code}" >&- 2>&-', cwd=tmp_path)
    assert done.returncode == 0 and (tmp_path / "kept").read_text() == ""


@posix
def test_a_child_has_the_streams_that_were_closed():
    code = f"{SAFE} sys.exit(subprocess.call([sys.executable, '-c', 'import os; os.fstat(1)']))"
    assert shell(f'python -c "{code}" >&-').returncode == 0


# The tools


@pytest.fixture
def odd_config(tmp_path):
    """A configuration whose path and model have names that ASCII lacks."""
    folder = tmp_path / "配置"
    folder.mkdir()
    (folder / "模型.gguf").write_bytes(b"GGUF")
    file = folder / "config.yaml"
    file.write_text(f"profile: none\nmodel: {{path: {folder / '模型.gguf'}}}\n", encoding="utf-8")
    return {"CONFIG": str(file)}


@posix
def test_a_tool_in_a_narrow_encoding(odd_config):
    done = shell("python -m qwen_chat info", **NARROW, **odd_config)
    assert done.returncode == 0 and "\\u6a21\\u578b.gguf" in done.stdout and "Traceback" not in done.stderr, done.stderr
    done = shell("python -m qwen_chat info", **odd_config, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert "this name cannot be written in this system's encoding, ascii" in done.stdout or "\\u6a21" not in done.stdout


@posix
@pytest.mark.parametrize(
    "command, status, said",
    [
        pytest.param(
            "python -m qwen_chat info >/dev/full",
            1,
            "The output cannot be written: No space left on device.\n",
            marks=full,
        ),
        pytest.param(
            "python -m qwen_chat --help >/dev/full",
            1,
            "The output cannot be written: No space left on device.\n",
            marks=full,
        ),
        ("python -m qwen_chat info >&-", 0, ""),
        ("python -m qwen_chat info | true", 0, ""),
        ("python -m qwen_chat info 2>&- >&- <&-", 0, ""),
        pytest.param("python -m qwen_chat nosuch 2>/dev/full", 2, "", marks=full),
        pytest.param("python -m qwen_chat.health >/dev/full", 1, "", marks=full),
        ("python -m qwen_chat.health >&- 2>&-", 1, ""),
    ],
)
def test_a_tool_whose_output_goes_nowhere(command, status, said):
    done = shell(command, PORT="1")
    assert (done.returncode, done.stderr) == (status, said)


# Folders


@pytest.mark.parametrize(
    "variables, place",
    [
        ({"XDG_CACHE_HOME": "/somewhere", "HOME": "/home/me"}, "/somewhere/qwen-chat"),
        ({"XDG_CACHE_HOME": "", "HOME": "/home/me"}, "/home/me/.cache/qwen-chat"),
    ],
)
def test_the_cache_folder(monkeypatch, variables, place):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert folders.cache() == Path(place)


def test_the_cache_folder_of_a_user_without_a_home(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it is for a number that no user has
    assert folders.cache() == ROOT / ".cache" / "qwen-chat"


@pytest.fixture
def no_temporary_folder(monkeypatch, tmp_path):
    """A machine whose usual folders cannot be written, as in a read-only container."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(folders, "SHARED_MEMORY", tmp_path / "shm")
    return tmp_path


def test_without_a_temporary_folder_the_cache_serves(no_temporary_folder):
    assert folders.make_sure() is None
    with tempfile.NamedTemporaryFile() as file:
        assert Path(file.name).is_relative_to(no_temporary_folder / "cache")


def test_then_shared_memory_and_then_it_is_said(no_temporary_folder):
    (no_temporary_folder / "cache").touch()
    assert folders.make_sure() is None and tempfile.gettempdir() == str(no_temporary_folder / "shm")
    tempfile.tempdir = None
    (no_temporary_folder / "shm").rmdir()
    (no_temporary_folder / "shm").touch()
    assert "TMPDIR" in folders.make_sure()


def test_a_current_folder_that_was_removed(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    folders.make_sure()
    assert Path.cwd() == ROOT


# The whole program


@posix
def test_the_program_in_bad_surroundings(small_model, tmp_path, monkeypatch):
    """No home, no cache, no temporary folder of the environment's, a narrow encoding and a model with a name that it
    lacks: it answers all the same, and ends with 0."""
    model = tmp_path / "小.gguf"
    model.symlink_to(small_model)
    for name, value in {
        **NARROW,
        "HOME": "/nonexistent",
        "XDG_CACHE_HOME": "/proc/none",
        "TMPDIR": "/nonexistent",
    }.items():
        monkeypatch.setenv(name, value)
    program = Program(tmp_path, model={"path": str(model)}, runtime={"n_ctx": 1024, "parallel": 1, "cache_mb": 0})
    try:
        program.until_up()
        until(lambda: "the page is at" in program.log)
        assert "\\u5c0f is ready" in program.log and "Traceback" not in program.log
    finally:
        assert program.end() == 0, program.log

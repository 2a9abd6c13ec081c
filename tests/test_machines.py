"""The tool that tries the program on other machines: what it computes and prints, and one real run on this one."""

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import machines
import pytest

TOOL = Path(machines.__file__)


def told(*tokens, margin=2.0, shift=0.0):
    """What a machine tells of an answer of these tokens."""
    top = [[[token, -0.1 + shift], [99, -0.1 - margin + shift]] for token in tokens]
    told = {"started": True, "python": "3.12.1", "compiler": "GCC 14.2", "code": "zen4"}
    return {**told, "tokens": list(tokens), "top": top}


# Comparing


@pytest.mark.parametrize("there, fine, words", [
    (told(1, 2, 3), True, "yes, within 0"),
    (told(1, 2, 3, shift=0.04), True, "yes, within 0.04"),
    (told(1, 2, 3, shift=0.7), False, "no: log-probabilities are 0.7 apart"),
    (told(1, 2, 3, shift=math.nan), False, "no: log-probabilities are nan apart"),
    (told(1, 2), False, "no: 2 tokens"),
    (told(1, 5, 3), False, "up to 1; then the two likeliest are 2 apart here, 2 there"),
    (told(5, 2, 3, margin=0.1), False, "up to 0; then the two likeliest are 2 apart here, 0.1 there"),
])
def test_answers_are_compared_token_by_token(there, fine, words):
    assert machines.compare(told(1, 2, 3), there) == (fine, words)


def test_another_order_of_two_close_tokens_is_rounding():
    fine, words = machines.compare(told(1, 2, 3, margin=0.01), told(1, 7, 4, margin=0.02))
    assert fine and words == "up to 1; then the two likeliest are 0.01 apart here, 0.02 there"


# The table


def cells(result, failure="", code=""):
    return machines.row(machines.Machine("Pi", []), code, result, failure, told(1, 2))


def test_a_row_for_each_way_to_end():
    zen4 = "/lib/libggml-cpu-zen4.so"
    assert cells(told(1, 2), code=zen4) == (True, ["Pi", "3.12.1", "GCC 14.2", "zen4", "yes", "yes", "yes, within 0"])
    dead = {"python": "3.12.1", "compiler": "GCC 12.2"}
    assert cells(dead, "Illegal instruction", zen4)[1][3:] == ["zen4", "no: Illegal instruction", "", ""]
    assert cells(dead | {"started": True}, "Killed", zen4)[1][3:] == ["zen4", "yes", "no: Killed", ""]
    assert cells({}, "no such program") == (False, ["Pi", "", "", "", "no: no such program", "", ""])


def test_code_that_was_not_what_was_asked_for_does_not_pass():
    fine, row = cells(told(1, 2), code="/lib/libggml-cpu-haswell.so")
    assert not fine and row[-1] == "no: zen4 was loaded"


def test_a_line_stays_one_row_of_the_table():
    assert machines.line(["a|b", 3]) == "| a\\|b | 3 |"


# Machines


def test_a_process_that_dies_says_of_what():
    def run(program, seconds=60):
        return machines.run(machines.Machine("", [sys.executable, "-c", program]), seconds)

    assert run("print('[]')") == ([], "")
    dies = f"import os; print('[1]', flush=True); os.kill(os.getpid(), {signal.SIGILL:d})"
    assert run(dies) == ([1], signal.strsignal(signal.SIGILL))
    assert run("raise SystemExit('No such model')") == (None, "No such model")
    assert run("import time; time.sleep(60)", 0.1) == (None, "not within 0.00166667 minutes")
    assert machines.run(machines.Machine("", ["/nonexistent"]), 60) == (None, os.strerror(2))


@pytest.mark.parametrize("comments, name", [
    (b"\0GCC: (Debian 12.2.0-14+deb12u1) 12.2.0\0", "GCC 12.2"),
    (b"\0GCC: (Debian 12.2.0-14) 12.2.0\0Debian clang version 14.0.6\0", "clang 14.0"),
    (b"\0GCC: (GNU) 8.5.0 20210514\0GCC: (Ubuntu 13.3.0-6ubuntu2) 13.3.0\0", "GCC 13.3, GCC 8.5"),
    (b"nothing", "?"),
])
def test_the_compiler_is_read_from_the_library(tmp_path, comments, name):
    library = tmp_path / "libggml-cpu.so"
    library.write_bytes(b"\x7fELF" + comments)
    assert machines.compiler(library) == name


def test_the_folder_is_searched_for_machines(tmp_path, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    loaders = [f"{each}/usr/lib/{each}-linux-gnu/ld-linux-{each}.so.1" for each in ("x86_64", "aarch64")]
    for name in ("python3.9/bin/python", "python3.10/bin/python", *loaders, "compilers/libggml-cpu-clang.so"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    this, *others = machines.machines(tmp_path)
    assert machines.machines(None) == [this] == [machines.Machine("this processor", [sys.executable])]
    here = [each for each in others if each.name == "this processor"]
    assert [Path(each.python[0]).parts[-3] for each in here[:2]] == ["python3.9", "python3.10"]
    assert [each.codes for each in here[2:]] == [None, [str(tmp_path / "compilers/libggml-cpu-clang.so")]]
    emulated = {each.name.split()[0]: each for each in others if each.name.endswith("emulated")}
    assert emulated.keys() == {*machines.EMULATED["x86_64"], *machines.EMULATED["aarch64"]}
    assert "qemu-aarch64 -cpu cortex-a72" in " ".join(emulated["cortex-a72"].python)
    assert [name for name, each in emulated.items() if each.codes != [""]] == ["max"]


# Really


def test_this_machine_answers_as_itself(small_model):
    command = [sys.executable, TOOL, "--model", small_model, "--tokens", "3"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    text, _, columns, _, *rows = done.stdout.splitlines()
    assert text.startswith("The text goes on, here: '") and columns == machines.line(machines.COLUMNS)
    assert rows and all("| yes | yes | yes, within " in row for row in rows)

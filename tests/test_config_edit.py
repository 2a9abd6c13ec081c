"""Values are changed in the text of a config.yaml, and nothing else."""

import os
import stat
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_chat import config_edit
from qwen_chat.config import load
from qwen_chat.config_edit import EditError, edited, place, write

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = (ROOT / "config.yaml").read_bytes().decode("utf-8")
THREADS, KV, UBATCH = ("runtime", "n_threads"), ("runtime", "kv_type"), ("runtime", "n_ubatch")


def test_the_shipped_file_changes_in_the_values_alone():
    result = edited(SHIPPED, {THREADS: 3, UBATCH: 64, KV: "q8_0", ("runtime", "flash_attn"): False, ("model", "path"): "models/my file, 2.gguf"})
    pairs = [(old, new) for old, new in zip(SHIPPED.splitlines(), result.splitlines()) if old != new]
    assert pairs == [
        ("  path: null", "  path: 'models/my file, 2.gguf'"),
        ("  n_ubatch: 128", "  n_ubatch: 64"), ("  n_threads: auto", "  n_threads: 3"),
        ("  flash_attn: true", "  flash_attn: false"), ("  kv_type: f16", "  kv_type: q8_0"),
    ]
    assert len(result.splitlines()) == len(SHIPPED.splitlines())
    assert edited(edited(SHIPPED, {THREADS: 3}), {THREADS: "auto"}) == SHIPPED


@pytest.mark.parametrize(
    "text, values, expected",
    [
        ("runtime:\n  n_threads: auto   # mine\n", {THREADS: 3}, "runtime:\n  n_threads: 3   # mine\n"),
        ("runtime:\r\n  n_threads: auto # mine\r\n", {THREADS: 3, UBATCH: 64}, "runtime:\r\n  n_threads: 3 # mine\r\n  n_ubatch: 64\r\n"),
        ("runtime:\n  n_threads: auto", {THREADS: 12}, "runtime:\n  n_threads: 12"),
        ("runtime:\n  n_ctx: 512", {THREADS: 12}, "runtime:\n  n_ctx: 512\n  n_threads: 12"),
        ("\ufeffruntime:\n  n_threads: 1\n", {THREADS: 2}, "\ufeffruntime:\n  n_threads: 2\n"),
        ("runtime: {n_threads: 1, kv_type: 'f16'}  # all\n", {THREADS: 2, KV: "q8_0"}, "runtime: {n_threads: 2, kv_type: q8_0}  # all\n"),
        ("runtime: {}\n", {THREADS: 2, KV: "q8_0"}, "runtime: {n_threads: 2, kv_type: q8_0}\n"),
        ("runtime: {n_ctx: 512,\n  seed: 1}\nserver: {}\n", {THREADS: 2}, "runtime: {n_ctx: 512,\n  seed: 1, n_threads: 2}\nserver: {}\n"),
        ("{runtime: {n_ctx: 512}}\n", {THREADS: 2}, "{runtime: {n_ctx: 512, n_threads: 2}}\n"),
        ("{server: {}}\n", {THREADS: 2}, "{server: {}, runtime: {n_threads: 2}}\n"),
        ("server: {}\n", {THREADS: 2, KV: "q8_0"}, "server: {}\nruntime:\n  n_threads: 2\n  kv_type: q8_0\n"),
        ("server: {}", {THREADS: 2}, "server: {}\nruntime:\n  n_threads: 2"),
        ("runtime:\n     n_ctx: 512 # a\n\n# the page\nserver: {}\n", {THREADS: 2}, "runtime:\n     n_ctx: 512 # a\n     n_threads: 2\n\n# the page\nserver: {}\n"),
        ("runtime:\n  n_ctx: 512\n  # why so\n\n  # seed: 5\nserver: {}\n", {THREADS: 2}, "runtime:\n  n_ctx: 512\n  n_threads: 2\n  # why so\n\n  # seed: 5\nserver: {}\n"),
        ("runtime:\n  'n_threads':    \"auto\"\n", {THREADS: 2}, "runtime:\n  'n_threads':    2\n"),
        ("runtime:\n  ? n_threads\n  : 1\n", {THREADS: 2}, "runtime:\n  ? n_threads\n  : 2\n"),
        ("runtime:\n  n_threads: !!int '4'\n", {THREADS: 2}, "runtime:\n  n_threads: 2\n"),
        ("runtime: {n_threads: 1}\nprofiles:\n  small: {runtime: {n_threads: 4}}\n", {THREADS: 2}, "runtime: {n_threads: 2}\nprofiles:\n  small: {runtime: {n_threads: 4}}\n"),
        ("profiles:\n  n_threads:\n    runtime:\n      n_threads: 4\nruntime:\n  n_threads: 1\n", {THREADS: 2}, "profiles:\n  n_threads:\n    runtime:\n      n_threads: 4\nruntime:\n  n_threads: 2\n"),
        ("chat:\n  examples:\n    - 'n_threads: 1'\n    - |\n      runtime:\n        n_threads: 9\nruntime:\n  n_threads: 1\n", {THREADS: 2}, "chat:\n  examples:\n    - 'n_threads: 1'\n    - |\n      runtime:\n        n_threads: 9\nruntime:\n  n_threads: 2\n"),
        ("server: {}\nchat:\n  system_prompt: |\n    Be brief.\n# the end\n", {THREADS: 2}, "server: {}\nchat:\n  system_prompt: |\n    Be brief.\nruntime:\n  n_threads: 2\n# the end\n"),
        ("---\nserver: {}\n...\n", {THREADS: 2}, "---\nserver: {}\nruntime:\n  n_threads: 2\n...\n"),
    ],
)
def test_odd_files_change_in_the_values_alone(text, values, expected):
    assert edited(text, values) == expected


@pytest.mark.parametrize(
    "text",
    [
        "runtime:\n  n_threads: &count 1\n  n_threads_batch: *count\n",  # the anchor would be lost
        "runtime:\n  n_threads_batch: &count 1\n  n_threads: *count\n",  # the value stands elsewhere
        "profiles:\n  a: {runtime: &r {n_threads: 1}}\nruntime: *r\n",  # another would change with it
        "runtime: 5\n",
        "runtime:\n",
        "[]\n",
        "runtime: {n_ctx: 512\n",
    ],
)
def test_what_cannot_be_changed_alone_is_refused(text):
    with pytest.raises(EditError, match="runtime.n_threads cannot be changed without changing more; it stays"):
        edited(text, {THREADS: 2})


def test_a_key_that_comes_by_a_merge_is_overridden():
    text = "base: &base {n_threads: 1}\nruntime:\n  <<: *base\n  n_ctx: 512\n"
    assert yaml.safe_load(edited(text, {THREADS: 2}))["runtime"] == {"n_threads": 2, "n_ctx": 512}


NAMES = st.sampled_from(["runtime", "n_threads", "kv_type", "n_ctx", "server", "用户"])
PLAIN = st.integers(-5, 5) | st.booleans() | st.text("ab #:\n\r'\"{}é", max_size=6)
TREES = st.dictionaries(NAMES, PLAIN | st.dictionaries(NAMES, PLAIN | st.lists(PLAIN, max_size=2), max_size=3), min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(TREES, st.sampled_from([True, False, None]), st.integers(1, 9))
def test_any_file_says_the_same_but_for_the_value_or_is_refused(tree, flow, value):
    text = yaml.safe_dump(tree, default_flow_style=flow, allow_unicode=True)
    try:
        result = edited(text, {THREADS: value})
    except EditError:
        runtime = tree.get("runtime", {})
        assert not isinstance(runtime, dict) or isinstance(runtime.get("n_threads"), list)
        return
    expected = {**tree, "runtime": {**tree.get("runtime", {}), "n_threads": value}}
    assert yaml.safe_load(result) == expected


def test_a_value_goes_into_the_profile_that_is_named_where_that_sets_it_too():
    text = "profile: n100\nprofiles:\n  n100: {runtime: {n_threads: 4}}\n  pi: {runtime: {kv_type: q8_0}}\nruntime: {n_threads: 1}\n"
    assert place(text, THREADS) == ("profiles", "n100", "runtime", "n_threads")
    assert place(text, KV) == KV
    assert place(text.replace("n100\n", "auto\n", 1), THREADS) == THREADS
    assert place("profiles: 5\nprofile: x\n", THREADS) == THREADS
    assert place("runtime: {}\n", THREADS) == THREADS
    key = place(text, THREADS)
    assert edited(text, {key: 2}) == text.replace("n_threads: 4", "n_threads: 2")


# The file itself


def test_a_file_is_replaced_with_its_rights_and_a_link_stays_a_link(tmp_path):
    real, link = tmp_path / "real.yaml", tmp_path / "config.yaml"
    real.write_bytes(SHIPPED.replace("\n", "\r\n").encode())
    real.chmod(0o640)
    link.symlink_to(real)
    assert write(link, {THREADS: 3}) == [THREADS]
    assert link.is_symlink() and stat.S_IMODE(real.stat().st_mode) == 0o640
    assert real.read_bytes() == SHIPPED.replace("\n", "\r\n").replace("n_threads: auto", "n_threads: 3").encode()
    assert load(link, {}).runtime.n_threads == 3 and sorted(file.name for file in tmp_path.iterdir()) == ["config.yaml", "real.yaml"]


@pytest.mark.parametrize(
    "content, values, words",
    [
        (b"runtime: {n_ctx: 512\n", {THREADS: 2}, "not valid YAML any more"),
        (b"\xff\xfe", {THREADS: 2}, "not UTF-8 text"),
        (b"server: {}\n", {("runtime", "n_ctx"): 5}, "would not be a valid configuration .runtime.n_ctx: 5 found"),
        (b"server: {prot: 1}\n", {THREADS: 2}, "server.prot: no such key"),
        (b"runtime:\n  n_threads: &c 1\n  n_threads_batch: *c\n", {THREADS: 2}, "cannot be changed without changing more"),
    ],
)
def test_a_file_that_cannot_be_changed_stays_as_it_is(content, values, words, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    with pytest.raises(EditError, match=words):
        write(file, values)
    assert file.read_bytes() == content and len(list(tmp_path.iterdir())) == 1


def test_a_file_that_cannot_be_written_stays_as_it_is(tmp_path, monkeypatch):
    with pytest.raises(EditError, match="none.yaml cannot be written: No such file"):
        write(tmp_path / "none.yaml", {THREADS: 2})
    file = tmp_path / "config.yaml"
    file.write_text("server: {}\n")

    def busy(*_):
        raise OSError(16, os.strerror(16))  # what a file mounted into a container answers

    monkeypatch.setattr(config_edit.os, "replace", busy)
    with pytest.raises(EditError, match="cannot be written: .*busy; it stays as it is"):
        write(file, {THREADS: 2})
    assert file.read_text() == "server: {}\n" and len(list(tmp_path.iterdir())) == 1

import random
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_chat import config
from qwen_chat.config import Config, ConfigError

ROOT = Path(__file__).resolve().parent.parent


def faults(text: str, tmp_path, environ={}) -> list[str]:
    file = tmp_path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        config.load(file, environ)
    return error.value.faults


def test_the_shipped_file_says_what_the_schema_has_as_defaults():
    assert config.load(ROOT / "config.yaml", {}) == Config()


def test_the_shipped_file_names_every_key():
    shipped = yaml.safe_load((ROOT / "config.yaml").read_text(encoding="utf-8"))
    assert shipped == Config().model_dump()


def test_a_file_may_leave_keys_out(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("runtime:\n  n_ctx: 1024\n")
    loaded = config.load(environ={"CONFIG": str(file)})
    assert loaded.runtime.n_ctx == 1024 and loaded.server.port == 7860


@pytest.mark.parametrize(
    "text, expected",
    [
        ("runtime:\n  n_ctx: 12\n", "config.yaml: runtime.n_ctx: 12 found; allowed: a whole number from 256 to 1048576"),
        ("runtime:\n  n_ctx: '2048'\n", "config.yaml: runtime.n_ctx: '2048' found; allowed: a whole number from 256"),
        ("runtime:\n  seed: true\n", "runtime.seed: true found; allowed: a whole number"),
        ("runtime:\n  n_threads: fast\n", "runtime.n_threads: 'fast' found; allowed: auto or a whole number from 1 to 1024"),
        ("runtime:\n  kv_type: q4_0\n", "runtime.kv_type: 'q4_0' found; allowed: f16, q8_0"),
        ("runtime:\n  n_thread: 4\n", "runtime.n_thread: no such key; did you mean n_threads?"),
        ("generation:\n  n_ctx: 512\n", "generation.n_ctx: no such key; did you mean runtime.n_ctx?"),
        ("generation:\n  temperature: .nan\n", "generation.temperature: nan found; allowed: a number from 0 to 2"),
        ("generation:\n  top_p: 0\n", "generation.top_p: 0 found; allowed: a number above 0, at most 1"),
        ("generation:\n  stop: [x, '']\n", "generation.stop[1]: '' found; allowed: text that is not empty"),
        ("modle: {}\n", "modle: no such key; did you mean model?"),
        ("model:\n  sha256: ABC\n", "model.sha256: 'ABC' found; allowed: 64 hexadecimal digits"),
        ("model:\n  endpoints: [ftp://x]\n", "model.endpoints[0]: 'ftp://x' found; allowed: an address that starts with https://"),
        ("model:\n  fallbacks: [{name: x}]\n", "model.fallbacks[0].sha256: missing; needed: 64 hexadecimal digits"),
        ("server: 5\n", "server: 5 found; allowed: the keys host, port"),
        ("runtime:\n", "runtime: nothing found; allowed: the keys n_ctx"),
        ("chat: {history: {max_turns: -1}}\n", "chat.history.max_turns: -1 found; allowed: a whole number from 0"),
        ("chat: {long_input: cut}\n", "chat.long_input: 'cut' found; allowed: condense, refuse"),
        ("chat: {history: {overflow: condence}}\n", "chat.history.overflow: 'condence' found; allowed: drop, condense"),
        ("generation: {max_tokens: 1500}\n", "generation.max_tokens: 1500 found; allowed: at most half of runtime.n_ctx (2048)"),
        ("runtime: {n_batch: 4}\n", "runtime.n_ubatch: 128 found; allowed: at most runtime.n_batch (4)"),
        ("1: 2\n", "the key 1: 1 found; allowed: the keys model, runtime"),
        ("", "the file is empty; allowed: the sections model, runtime"),
        ("- a\n", "a list found; allowed: the sections model, runtime"),
        ("runtime: {n_ctx: 512\n", "line 2, column 1: not valid YAML"),
        ("runtime:\n\tn_ctx: 5\n", "line 2, column 1: not valid YAML"),
        ("runtime:\n  n_ctx: 512\n  n_ctx: 1024\n", "line 3, column 3: not valid YAML: the key 'n_ctx' stands twice, first in line 2"),
        ("x: !!python/object:os.system y\n", "line 1, column 4: not valid YAML"),
    ],
)
def test_a_fault_is_told_in_one_clear_line(text, expected, tmp_path):
    lines = faults(text, tmp_path)
    assert any(expected in line for line in lines), lines
    assert all(line.startswith("config.yaml: ") and "\n" not in line for line in lines)


def test_all_faults_are_told_at_once(tmp_path):
    lines = faults("runtime: {n_threads: 0, kv_type: x}\nserver: {port: 0, hots: y}\ngeneration: {max_tokens: 9999}\n", tmp_path)
    for key in ("runtime.n_threads", "runtime.kv_type", "server.port", "server.hots", "generation.max_tokens"):
        assert any(f" {key}: " in line for line in lines), (key, lines)


def test_a_missing_file_and_one_that_is_not_text(tmp_path):
    with pytest.raises(ConfigError, match="nowhere.yaml: no such file; CONFIG names"):
        config.load(tmp_path / "nowhere.yaml", {})
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        config.load(tmp_path / "binary.yaml", {})
    with pytest.raises(ConfigError, match="cannot be read"):
        config.load(tmp_path, {})


def test_hosting_variables_are_honoured(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("server: {port: 1234}\n")
    loaded = config.load(file, {"PORT": "8080", "HF_ENDPOINT": "https://mirror.example/"})
    assert loaded.server.port == 8080 and loaded.model.endpoints == ["https://mirror.example"]
    assert "PORT (environment): 'http' found" in faults("server: {}\n", tmp_path, {"PORT": "http"})[0]
    assert "HF_ENDPOINT (environment)" in faults("server: {}\n", tmp_path, {"HF_ENDPOINT": "mirror"})[0]


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
KEYS = st.sampled_from(["model", "runtime", "generation", "chat", "server", "n_ctx", "stop", "history", "fallbacks", "port"]) | st.text(max_size=8)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_whatever_a_file_holds_it_is_taken_or_refused_in_whole_lines(tmp_path_factory, content):
    file = tmp_path_factory.mktemp("config") / "config.yaml"
    file.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
    try:
        config.load(file, {})
    except ConfigError as error:
        assert error.faults and all(line.startswith("config.yaml: ") for line in error.faults)


def spoiled(seed: int) -> str:
    """The shipped file with a few characters changed, doubled or lost."""
    chance = random.Random(seed)
    text = list((ROOT / "config.yaml").read_text(encoding="utf-8"))
    for _ in range(chance.randint(1, 12)):
        at = chance.randrange(len(text))
        text[at] = chance.choice(["", text[at] * 2, "\t", ":", "[", "{", "'", "-", "\x00", "é", "9"])
    return "".join(text)


def test_fifty_spoiled_files_never_end_in_a_traceback(tmp_path):
    for seed in range(50):
        file = tmp_path / "config.yaml"
        file.write_text(spoiled(seed), encoding="utf-8")
        try:
            config.load(file, {})
        except ConfigError as error:
            assert all(line.startswith("config.yaml: ") and len(line) < 400 for line in error.faults)


def test_a_program_started_with_a_bad_file_ends_with_status_2_and_no_traceback(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("runtime: {n_ctx: 1}\nserver: {prot: 80}\n")
    done = subprocess.run(
        [sys.executable, "-c", "from qwen_chat.config import load_or_exit; load_or_exit()"],
        cwd=ROOT, env={"CONFIG": str(file), "PATH": ""}, capture_output=True, text=True,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert len(done.stderr.splitlines()) == 2 and "did you mean port?" in done.stderr


@pytest.mark.parametrize(
    "server",
    [
        "{api_key: hunter2}",
        "{api_key: [hunter2, 5]}",
        "{api_key: {hunter2: x}}",
        "{api_key: [hunter2, '']}",
        "{api_key: *hunter2}",
        "{api_key: [!hunter2 x]}",
        "{auth: hunter2}",
        "{auth: [hunter2]}",
        "{auth: [[ann, hunter2]]}",
        "{auth: [{user: ann, passwrd: hunter2}]}",
        "{auth: [{user: ann, password: [hunter2]}]}",
    ],
)
def test_a_secret_is_not_repeated_when_it_stands_in_a_wrong_place(server, tmp_path):
    lines = faults(f"server: {server}\n", tmp_path)
    assert lines and "hunter2" not in "".join(lines)


def test_secrets_are_not_shown_with_the_configuration(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("server: {api_key: [hunter2], auth: [{user: ann, password: hunter2}]}\n")
    loaded = config.load(file, {})
    assert loaded.server.api_keys() == ["hunter2"] and "hunter2" not in repr(loaded) + str(loaded.model_dump())


def test_keys_may_stand_in_a_file(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("# one\nfirst\n\n second \n")
    file = tmp_path / "config.yaml"
    file.write_text(f"server: {{api_key: [zero], api_key_file: {keys}}}\n")
    assert config.load(file, {}).server.api_keys() == ["zero", "first", "second"]
    for content, words in [(b"", "no key in it"), (b"# none\n", "no key in it"), (b"\xff", "not UTF-8"), (None, "No such file")]:
        keys.unlink(missing_ok=True)
        if content is not None:
            keys.write_bytes(content)
        lines = faults(f"server: {{api_key_file: {keys}}}\n", tmp_path)
        assert len(lines) == 1 and "server.api_key_file: " in lines[0] and words in lines[0]

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_chat import config, preferences
from qwen_chat.config import PROFILES, Config, ConfigError
from qwen_chat.profiles import flat

ROOT = Path(__file__).resolve().parent.parent


def faults(text: str, tmp_path, environ={}) -> list[str]:
    file = tmp_path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as error:
        config.load(file, environ)
    return error.value.faults


def no_profile():
    return None


def test_the_shipped_file_says_what_the_schema_has_as_defaults():
    assert config.load(ROOT / "config.yaml", {}, no_profile) == Config()


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
        ("1: 2\n", "the key 1: 1 found; allowed: the keys profile, model, runtime"),
        ("", "the file is empty; allowed: the sections profile, model, runtime"),
        ("- a\n", "a list found; allowed: the sections profile, model, runtime"),
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


@pytest.mark.parametrize("server", ["{api_key: 735521}", "{auth: [{user: ann, password: 735521}]}"])
def test_a_secret_without_the_quotes_it_needs_is_told_to_be_a_number(server, tmp_path):
    (line,) = faults(f"server: {server}\n", tmp_path)
    assert "a number (or true, false) without quotes around it found" in line and "735521" not in line


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


# Profiles

A_PI = ("raspberry-pi-4", "it is a Raspberry Pi 4")


def on_a_pi(text: str, tmp_path) -> Config:
    """What a file comes to on a Raspberry Pi 4."""
    (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
    return config.load(tmp_path / "config.yaml", {}, lambda: A_PI)


def changed(loaded: Config) -> dict:
    """What is not as shipped."""
    default = flat(Config().model_dump())
    return {key: value for key, value in flat(loaded.model_dump()).items() if value != default[key]}


def test_auto_takes_the_profile_that_fits_and_says_so(tmp_path):
    loaded = on_a_pi((ROOT / "config.yaml").read_text(encoding="utf-8"), tmp_path)
    assert changed(loaded) == flat(PROFILES["raspberry-pi-4"].named())
    assert (loaded.in_force.name, loaded.in_force.why) == A_PI
    assert loaded.in_force.changes["runtime.n_ctx"] == (2048, 1024)
    assert "profile raspberry-pi-4 (it is a Raspberry Pi 4): runtime.n_ctx 2048 -> 1024, " in str(loaded.in_force)


def test_what_a_person_set_stays_under_a_profile_that_only_fits(tmp_path):
    loaded = on_a_pi("runtime: {n_ctx: 4096, n_threads: 3}\nserver: {queue_size: 1}\n", tmp_path)
    assert (loaded.runtime.n_ctx, loaded.runtime.n_threads, loaded.server.queue_size, loaded.runtime.n_batch) == (4096, 3, 1, 64)
    assert "runtime.n_ctx" not in loaded.in_force.changes


@pytest.mark.parametrize(("text", "n_ctx", "n_batch", "n_ubatch"), [
    ("generation: {max_tokens: 1024}\n", 2048, 64, 64),  # the profile's n_ctx 1024 has no room for it
    ("generation: {max_tokens: 500}\n", 1024, 64, 64),
    ("runtime: {n_ubatch: 100}\n", 1024, 128, 100),
    ("runtime: {n_batch: 32, n_ubatch: 32}\n", 1024, 32, 32),
])
def test_a_profile_that_only_fits_never_makes_a_good_file_a_bad_one(text, n_ctx, n_batch, n_ubatch, tmp_path):
    loaded = on_a_pi(text, tmp_path)
    assert (loaded.runtime.n_ctx, loaded.runtime.n_batch, loaded.runtime.n_ubatch) == (n_ctx, n_batch, n_ubatch)


@pytest.mark.parametrize("name", PROFILES)
def test_each_shipped_profile_can_be_named_and_changes_what_it_names(name, tmp_path):
    (tmp_path / "config.yaml").write_text(f"profile: {name}\n")
    loaded = config.load(tmp_path / "config.yaml", {}, lambda: A_PI)
    assert changed(loaded) == {"profile": name, **flat(PROFILES[name].named())}
    assert set(loaded.in_force.changes) == set(flat(PROFILES[name].named()))


def test_a_profile_that_is_named_goes_before_what_the_file_says_and_tells(tmp_path):
    loaded = on_a_pi("profile: n100\nruntime: {n_ctx: 4096}\n", tmp_path)
    assert loaded.runtime.n_ctx == 1024 and loaded.in_force.changes["runtime.n_ctx"] == (4096, 1024)


@pytest.mark.parametrize(("text", "found"), [("profile: none\n", A_PI), ("profile: auto\n", None), ("profile: auto\n", ("abacus", "it has beads"))])
def test_no_profile_leaves_the_settings_as_they_stand(text, found, tmp_path):
    (tmp_path / "config.yaml").write_text(text + "runtime: {n_ctx: 512}\ngeneration: {max_tokens: 200}\n")
    loaded = config.load(tmp_path / "config.yaml", {}, lambda: found)
    assert loaded.in_force is None and loaded.runtime.n_ctx == 512 and loaded.runtime.n_batch == 128


def test_profiles_of_ones_own_stand_beside_the_shipped_ones(tmp_path):
    loaded = on_a_pi("profile: mine\nprofiles: {mine: {chat: {history: {max_turns: 3}}, runtime: {seed: 7}}}\n", tmp_path)
    assert (loaded.runtime.seed, loaded.chat.history.max_turns) == (7, 3)
    assert loaded.in_force.changes == {"chat.history.max_turns": (0, 3), "runtime.seed": (-1, 7)}
    assert set(loaded.profiles) == {*PROFILES, "mine"}
    assert on_a_pi("profiles: {raspberry-pi-4: {}}\n", tmp_path).in_force.changes == {}
    assert on_a_pi("profiles: {raspberry-pi-4: {runtime: {n_ctx: 512}, generation: {max_tokens: 99}}}\n", tmp_path).runtime.n_batch == 128


@pytest.mark.parametrize(("text", "expected"), [
    ("profile: n10\n", "config.yaml: profile: 'n10' found; did you mean n100? allowed: auto, none, raspberry-pi-4, "),
    ("profile: [n100]\n", "profile: a list found; allowed: text that is not empty"),
    ("profiles: {n100: {runtime: {n_ctx: 12}}}\n", "profiles.n100.runtime.n_ctx: 12 found; allowed: a whole number from 256 to 1048576"),
    ("profiles: {n100: {runtime: {n_thread: 4}}}\n", "profiles.n100.runtime.n_thread: no such key; did you mean n_threads?"),
    ("profiles: {n100: {n_ctx: 512}}\n", "profiles.n100.n_ctx: no such key; did you mean runtime.n_ctx? allowed: runtime, generation, chat, server"),
    ("profiles: {n100: {model: {path: x}}}\n", "profiles.n100.model: no such key; allowed: runtime, generation, chat, server"),
    ("profiles: {n100: 5}\n", "profiles.n100: 5 found; allowed: the keys runtime, generation, chat, server, indented below"),
    ("profiles:\n", "profiles: nothing found; allowed: a section"),
    ("profiles: &a {n100: {chat: *a}}\n", "not valid YAML: found unconstructable recursive node"),
    ("profiles: {auto: {}}\n", "profiles.auto: no name for a profile"),
    ("profiles: {n100: {server: {port: 80}}}\n", "profiles.n100.server.port: 80 found; allowed: only server.port, outside the profiles"),
    ("profiles: {n100: {runtime: {n_ctx: 512}, generation: {max_tokens: 400}}}\n", "profiles.n100.generation.max_tokens: 400 found; allowed: at most half of runtime.n_ctx (512), so that a question fits beside its answer; profiles.n100.runtime.n_ctx is 512"),
    ("profile: n100\ngeneration: {max_tokens: 1024}\n", "generation.max_tokens: 1024 found; allowed: at most half of runtime.n_ctx (1024), so that a question fits beside its answer; profiles.n100.runtime.n_ctx is 1024"),
    ("profile: mine\nprofiles: {mine: {runtime: {n_batch: 64}}}\n", "runtime.n_ubatch: 128 found; allowed: at most runtime.n_batch (64); profiles.mine.runtime.n_batch is 64"),
])
def test_a_fault_in_a_profile_is_told_as_any_other(text, expected, tmp_path):
    lines = faults(text, tmp_path)
    assert len(lines) == 1 and expected in lines[0], lines


def test_a_profile_that_is_named_may_mend_what_contradicts_itself_without_it(tmp_path):
    assert on_a_pi("profile: tiny\nruntime: {n_ctx: 600}\n", tmp_path).generation.max_tokens == 256
    assert "at most half of runtime.n_ctx (600)" in faults("runtime: {n_ctx: 600}\n", tmp_path)[0]


def test_secrets_in_and_below_a_profile_are_not_told(tmp_path):
    text = "profile: mine\nserver: {api_key: [hunter2], auth: [{user: ann, password: hunter2}]}\nprofiles: {mine: {server: {api_key: [hunter3], auth: [{user: bob, password: hunter3}]}}}\n"
    loaded = on_a_pi(text, tmp_path)
    assert loaded.server.api_keys() == ["hunter3"]
    told = str(loaded.in_force) + repr(loaded) + json.dumps(loaded.in_force.changes, default=str)
    assert "server.api_key" in told and "hunter" not in told
    assert "hunter" not in "".join(faults("profiles: {mine: {server: {api_key: hunter2}}}\n", tmp_path))


@pytest.mark.parametrize("text", ["profile: tiny\n", "profile: none\nruntime: {n_ctx: 512}\ngeneration: {max_tokens: 256}\n"])
def test_what_a_tab_sets_is_checked_against_what_is_in_force(text, tmp_path):
    loaded = on_a_pi(text, tmp_path)
    assert preferences.applied(loaded, {"max_tokens": 200}).generation.max_tokens == 200
    with pytest.raises(ConfigError, match=r"generation.max_tokens: 300 found; allowed: at most half of runtime.n_ctx \(512\)"):
        preferences.applied(loaded, {"max_tokens": 300})


def test_a_colon_of_a_chinese_keyboard_is_named(tmp_path):
    said = faults("runtime:\n  n_ctx：1024\n  parallel: 1\n", tmp_path)
    assert said == ["config.yaml: line 2: n_ctx： found, with a full-width colon; allowed: n_ctx: with a plain colon and a space"]


def test_yaml_may_share_settings_by_a_merge_key(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text("profile: b\nprofiles:\n  a: &a {runtime: {n_ctx: 1024}}\n  b:\n    <<: *a\n    generation: {max_tokens: 100}\n")
    read = config.load(file, {})
    assert (read.runtime.n_ctx, read.generation.max_tokens) == (1024, 100)

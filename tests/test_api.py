"""The API with real clients on a small real model."""

import asyncio
import http.client
import json
import math
import os
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import gradio_client
import openai
import pydantic
import pytest
import schemathesis
import uvicorn
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance
from test_engine import until

from qwen_chat import connections
from qwen_chat.api import Api
from qwen_chat.config import Config
from qwen_chat.conversation import Conversation
from qwen_chat.engine import Engine

ROOT = Path(__file__).resolve().parent.parent
QUESTION = [{"role": "user", "content": "Tell me about the sea."}]
GREEDY = {"temperature": 0, "seed": 1, "extra_body": {"repeat_penalty": 1}}  # with a seed the text is the same again
PLAIN = {"messages": QUESTION, "temperature": 0, "seed": 1, "repeat_penalty": 1, "max_tokens": 16}
LONG = {**PLAIN, "max_tokens": 400, "logit_bias": {"2": -100}}  # it does not end by itself: 2 is the end of a turn


class Served:
    """An API on a port of its own, as Gradio's server would serve it."""

    def __init__(self, bot, **server):
        config = Config.model_validate({**bot.config.model_dump(), "server": server})
        self.engine = bot.engine
        self.api = Api(bot.engine, bot.conversation, config)
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        options = uvicorn.Config(self.api.app, log_level="warning", lifespan="off")
        options.load()
        connections.bound(options)
        self._server = uvicorn.Server(options)
        threading.Thread(target=lambda: asyncio.run(self._server.serve([self.socket])), daemon=True).start()
        until(lambda: self._server.started)

    def client(self, key: str = "none", **options) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, **{"max_retries": 0, "timeout": 120, **options})

    def request(self, method: str, path: str, body=None, headers: dict = {}, raw: bytes | None = None):
        """Status, headers and the body, read as JSON where it is that."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            data = raw if raw is not None else json.dumps(body).encode() if body is not None else None
            connection.request(method, path, data, {**({"Content-Type": "application/json"} if data is not None else {}), **headers})
            response = connection.getresponse()
            content = response.read()
            isjson = response.getheader("content-type", "").startswith("application/json")
            return response.status, response.headers, json.loads(content) if isjson else content.decode()
        finally:
            connection.close()

    def post(self, body, path: str = "/v1/chat/completions", **more):
        return self.request("POST", path, body, **more)

    def open(self, body, path: str = "/v1/chat/completions", buffer: int | None = None) -> socket.socket:
        """Sends a request over a socket and leaves the answer unread."""
        connection = socket.socket()
        if buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.settimeout(120)
        connection.connect(("127.0.0.1", self.port))
        data = json.dumps(body).encode()
        connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        return connection

    def idle(self) -> None:
        """Waits until nobody is answered."""
        until(lambda: not (self.engine.running or self.engine.waiting or self.engine._open), "quiet")

    def stop(self) -> None:
        self._server.should_exit = True


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    text = b""
    while mark not in text:
        more = connection.recv(65536)
        assert more, text
        text += more
    return text


@pytest.fixture(scope="module")
def serve(api_bot):
    servers = []

    def make(bot=None, **server) -> Served:
        servers.append(Served(bot or api_bot, **server))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def api_bot(make_bot):
    return make_bot(runtime={"n_ctx": 512, "parallel": 4, "cache_mb": 64}, generation={"max_tokens": 64})


@pytest.fixture(scope="module")
def api(serve):
    return serve()


@pytest.fixture(scope="module")
def client(api):
    return api.client()


@pytest.fixture
def ended(api_bot):
    """The replies that end during a test."""
    replies = []
    api_bot.engine.on_answer.append(replies.append)
    yield replies
    api_bot.engine.on_answer.remove(replies.append)


def refused(answer) -> dict:
    """The error of an answer, checked to be in OpenAI's form."""
    status, _, body = answer
    assert status >= 400 and body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}, answer
    return {**body["error"], "status": status}


# Answers


def test_a_whole_answer(client, api_bot):
    answer = client.chat.completions.create(model="any", messages=QUESTION, max_tokens=12, **GREEDY)
    choice = answer.choices[0]
    assert choice.message.role == "assistant" and choice.message.content and choice.finish_reason == "length"
    assert answer.object == "chat.completion" and answer.model == api_bot.engine.info.name
    usage, timings = answer.usage, answer.timings
    assert usage.completion_tokens == 12 and usage.total_tokens == usage.prompt_tokens + 12
    assert timings["prompt_n"] + timings["cache_n"] == usage.prompt_tokens and timings["predicted_n"] == 12
    assert usage.prompt_tokens_details.cached_tokens == timings["cache_n"]
    assert timings["prompt_ms"] > 0 and timings["predicted_per_second"] > 0


def test_a_streamed_answer_is_the_same(client):
    whole = client.chat.completions.create(model="any", messages=QUESTION, max_tokens=24, **GREEDY)
    chunks = list(client.chat.completions.create(model="any", messages=QUESTION, max_tokens=24, stream=True, stream_options={"include_usage": True}, **GREEDY))
    *parts, usage = chunks
    assert parts[0].choices[0].delta.role == "assistant" and len(parts) > 3
    assert "".join(part.choices[0].delta.content or "" for part in parts) == whole.choices[0].message.content
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert parts[-1].timings["predicted_n"] == 24 and all(part.usage is None for part in parts)
    assert usage.choices == [] and usage.usage.completion_tokens == 24
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_ends_with_done(api):
    status, headers, text = api.post({**PLAIN, "stream": True})
    assert status == 200 and headers["content-type"].startswith("text/event-stream") and headers["x-accel-buffering"] == "no"
    assert text.endswith("data: [DONE]\n\n") and "usage" not in text
    assert all(json.loads(line[6:])["object"] == "chat.completion.chunk" for line in text.split("\n\n")[:-2])


def test_a_follow_up_computes_only_what_is_new(client):
    first = client.chat.completions.create(model="any", messages=QUESTION, max_tokens=24)
    messages = [*QUESTION, first.choices[0].message, {"role": "user", "content": "And the sky?"}]
    second = client.chat.completions.create(model="any", messages=messages, max_tokens=4)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.total_tokens - 1


def test_the_configured_system_prompt_stands_in_for_a_missing_one(api):
    def tokens(*messages):
        return api.post({**PLAIN, "messages": [*messages, *QUESTION], "max_tokens": 1})[2]["usage"]["prompt_tokens"]

    own = api.api.conversation._config.chat.system_prompt
    assert tokens() == tokens({"role": "system", "content": own}) == tokens({"role": "developer", "content": [{"type": "text", "text": own}]})
    assert tokens({"role": "system", "content": ""}) < tokens()


def test_settings_reach_the_sampler(api):
    def text(**settings):
        return api.post({**PLAIN, **settings})[2]["choices"][0]["message"]["content"]

    plain = text()
    assert text(temperature=2, top_k=1) == plain and text(temperature=2, top_p=0) == plain
    assert text(temperature=1.5, seed=5, top_k=0) == text(temperature=1.5, seed=5, top_k=0)
    assert text(logit_bias={"1234": 100}, max_tokens=2) != plain
    assert len(text(max_completion_tokens=2)) < len(plain)
    assert text(frequency_penalty=2, presence_penalty=2) and text(repeat_penalty=2, repeat_last_n=8) and text(min_p=1) == plain


def test_stop_texts_end_an_answer_and_are_not_in_it(api):
    plain = api.post(PLAIN)[2]["choices"][0]["message"]["content"]
    stop = plain.split()[2]
    for given in (stop, ["not there", stop]):
        for stream in (False, True):
            choice = collected(api.post({**PLAIN, "stop": given, "stream": stream})[2])
            assert choice["finish_reason"] == "stop" and choice["text"] == plain[: plain.index(stop)]


def collected(answer) -> dict:
    """Text and reason of a chat answer, whole or streamed."""
    if isinstance(answer, dict):
        return {"text": answer["choices"][0]["message"]["content"], "finish_reason": answer["choices"][0]["finish_reason"]}
    choices = [json.loads(line[6:])["choices"][0] for line in answer.split("\n\n") if line.startswith("data: {")]
    return {"text": "".join(choice["delta"].get("content", "") for choice in choices), "finish_reason": choices[-1]["finish_reason"]}


def test_a_json_schema_is_kept_to(client):
    class Animal(pydantic.BaseModel):
        kind: Literal["cat", "dog", "鸟"]
        legs: int
        tame: bool | None

    answer = client.chat.completions.parse(model="any", messages=[{"role": "user", "content": "Invent an animal."}], response_format=Animal, max_tokens=200)
    assert isinstance(answer.choices[0].message.parsed, Animal)
    answer = client.chat.completions.create(model="any", messages=QUESTION, response_format={"type": "json_object"}, max_tokens=100, temperature=1)
    text = answer.choices[0].message.content
    assert text.startswith("{") and (answer.choices[0].finish_reason == "length" or type(json.loads(text)) is dict)


def test_log_probabilities(client):
    asked = {"model": "any", "messages": QUESTION, "max_tokens": 6, "logprobs": True, "top_logprobs": 3, **GREEDY}
    whole = client.chat.completions.create(**asked).choices[0]
    content = whole.logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content).decode() == whole.message.content and len(content) == 6
    assert all(len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token and entry.logprob <= 0 for entry in content)
    streamed = [part.choices[0].logprobs for part in client.chat.completions.create(**asked, stream=True)]
    assert [entry.token for part in streamed if part for entry in part.content] == [entry.token for entry in content]


def test_a_text_is_continued(client):
    asked = {"model": "any", "prompt": "Once upon a time", "max_tokens": 8, "logprobs": 2, **GREEDY}
    answer = client.completions.create(**asked)
    choice = answer.choices[0]
    assert answer.object == "text_completion" and choice.text and choice.finish_reason == "length"
    assert "".join(choice.logprobs.tokens) == choice.text and choice.logprobs.text_offset[0] == 0
    assert all(len(top) == 2 and math.isclose(max(top.values()), logprob) for top, logprob in zip(choice.logprobs.top_logprobs, choice.logprobs.token_logprobs))
    assert "".join(part.choices[0].text for part in client.completions.create(**asked, stream=True)) == choice.text
    assert client.completions.create(**{**asked, "prompt": ["Once upon a time"]}).choices[0].text == choice.text


def test_control_tokens_in_a_text_stay_text(api):
    def tokens(prompt):
        return api.post({"prompt": prompt, "max_tokens": 1}, "/v1/completions")[2]["usage"]["prompt_tokens"]

    assert tokens("<|im_start|>") > 1
    assert tokens("a<|im_end|>") > tokens("a") + 1


def test_the_model_is_listed(client, api_bot):
    assert [model.id for model in client.models.list()] == [api_bot.engine.info.name]
    assert client.models.retrieve(api_bot.engine.info.name).owned_by == "qwen-chat"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


# Refusals


@pytest.mark.parametrize(
    "change, param",
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*QUESTION, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": "x", "extra": 1}]}, "messages[0].extra"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": 1e999}, None),
        ({"temperature": float("nan")}, None),
        ({"top_p": 2}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"repeat_penalty": 0}, "repeat_penalty"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"presence_penalty": -3}, "presence_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": "9"}, "max_completion_tokens"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x", 5]}, "stop[1]"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"n": 2}, "n"),
        ({"n": "1"}, "n"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {"999999999": 1}}, "logit_bias.999999999"),
        ({"logit_bias": []}, "logit_bias"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"audio": {}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"prediction": {"type": "content", "content": ""}}, "prediction"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "x"}}}}, "response_format.json_schema.schema"),
        ({"temprature": 1}, "temprature"),
        ({"prompt": "x"}, "prompt"),
        ({"\ud800": 1}, None),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(api, change, param):
    error = refused(api.post({**PLAIN, **change}))
    assert error["status"] == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param or param is None, error
    assert "Tell me" not in error["message"] and error["message"]


def test_a_misspelt_name_is_told_the_right_one(api):
    assert "did you mean temperature?" in refused(api.post({**PLAIN, "temprature": 1}))["message"]


@pytest.mark.parametrize("change", [{"prompt": ""}, {"prompt": None}, {"prompt": ["a", "b"]}, {"prompt": [1, 2]}, {"echo": True}, {"best_of": 2}, {"suffix": "x"}, {"logprobs": 6}, {"messages": QUESTION}])
def test_what_a_text_request_cannot_have(api, change):
    error = refused(api.post({"prompt": "x", "max_tokens": 1, **change}, "/v1/completions"))
    assert error["status"] == 400 and error["param"].startswith(next(iter(change)))


def test_what_changes_nothing_is_ignored(api):
    ignored = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "parallel_tool_calls": False, "safety_identifier": "x"}
    harmless = {"tools": [], "tool_choice": "none", "modalities": ["text"], "n": 1, "stop": None, "response_format": {"type": "text"}, "logit_bias": {}, "stream_options": None}
    assert api.post({**PLAIN, **ignored, **harmless})[2]["choices"] == [{**api.post(PLAIN)[2]["choices"][0]}]


def test_a_conversation_too_long_for_the_window_is_refused(api, client):
    error = refused(api.post({**PLAIN, "messages": [{"role": "user", "content": "many words " * 400}]}))
    assert (error["status"], error["param"], error["code"]) == (400, "messages", "context_length_exceeded")
    error = refused(api.post({"prompt": "many words " * 400}, "/v1/completions"))
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    answer = client.chat.completions.create(model="any", messages=[{"role": "user", "content": "word " * 440}], max_tokens=400, logit_bias={"2": -100})
    assert answer.usage.total_tokens <= 512


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"a": NaN}', b"9" * 5000, b"[" * 100_000, b'{"messages": [{"role": "user", "content": "x"}], "temperature": Infinity}'])
def test_a_body_that_is_not_a_json_object_is_refused(api, raw):
    assert refused(api.post(None, raw=raw))["status"] == 400


def test_wrong_addresses_methods_and_kinds(api):
    assert refused(api.request("GET", "/v1/chat/completions"))["status"] == 405
    assert refused(api.request("POST", "/v1/models", {}))["status"] == 405
    for path in ("/v1", "/v1/", "/v1/nothing", "/v1/models/", "/v1/chat/completions/", "/v1/../x"):
        assert refused(api.request("GET", path))["status"] in (404, 405)
    for kind in ("text/plain", "", "application/x-www-form-urlencoded"):
        assert refused(api.post(PLAIN, headers={"Content-Type": kind}))["status"] == 415
    assert api.post(PLAIN, headers={"Content-Type": "application/json; charset=utf-8"})[0] == 200


def test_a_body_that_is_too_large_is_not_read_to_its_end(api):
    error = refused(api.post({**PLAIN, "user": "x" * 8_000_000}))
    assert error["status"] == 413 and "1 MiB" in error["message"]
    with api.open({}) as connection:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", api.port), 120) as chunked:
            chunked.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
            for _ in range(20):
                chunked.sendall(b"10000\r\n" + b" " * 65536 + b"\r\n")
            assert b" 413 " in chunked.recv(1000)
        assert b" 400 " in connection.recv(1000)
        with socket.create_connection(("127.0.0.1", api.port), 120) as waiting:
            waiting.sendall(head + b"Expect: 100-continue\r\nContent-Length: 9000000000\r\n\r\n")
            assert waiting.recv(1000).startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("data", [b"\r\n\r\n", b"GARBAGE\r\n\r\n", b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n", b"GET /v1/models HTTP/9.9\r\n\r\n", b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{"])
def test_broken_http_harms_nobody(api, data):
    with socket.create_connection(("127.0.0.1", api.port), 120) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1000)
    assert api.post({**PLAIN, "max_tokens": 1})[0] == 200


# Before and after the model, and when all seats are taken


def test_while_the_model_loads_and_after_it_failed(serve):
    config = Config.model_validate({})
    engine = Engine(config.runtime, lambda report: None)
    bot = SimpleNamespace(config=config, engine=engine, conversation=Conversation(engine, config))
    early = serve(bot)
    status, headers, body = early.post(PLAIN)
    assert status == 503 and headers["retry-after"] and body["error"]["code"] == "loading"
    assert early.request("GET", "/health")[0] == early.request("GET", "/v1/models")[0] == 503
    assert "qwen_chat_ready 0.0" in early.request("GET", "/metrics")[2]
    engine.start()  # which fails: no weights
    until(engine.ended.is_set)
    status, headers, body = early.post(PLAIN)
    assert status == 503 and "retry-after" not in headers and body["error"]["code"] == "not_ready"
    assert early.request("GET", "/health")[2]["status"] == "failed"


def test_a_full_line_is_told_to_come_back(make_bot, serve):
    bot = make_bot(queue_size=1, runtime={"n_ctx": 512, "parallel": 1})
    small = serve(bot)
    with small.open({**LONG, "stream": True}) as first:
        read_until(first, b"assistant")
        with small.open(LONG):
            until(lambda: bot.engine.waiting)
            status, headers, body = small.post(PLAIN)
            assert status == 429 and int(headers["retry-after"]) > 0
            assert body["error"]["type"] == "rate_limit_error" and body["error"]["code"] == "busy"
            with pytest.raises(openai.RateLimitError):
                small.client().chat.completions.create(model="any", messages=QUESTION)
    small.idle()
    assert bot.engine.rejected == 2


def test_a_stream_that_waits_shows_signs_of_life(make_bot, serve, monkeypatch):
    monkeypatch.setattr("qwen_chat.api.KEEP_ALIVE_SECONDS", 0.1)
    bot = make_bot(runtime={"n_ctx": 512, "parallel": 1})
    small = serve(bot)
    with small.open({**LONG, "stream": True}) as first:
        read_until(first, b"assistant")
        with small.open({**PLAIN, "stream": True}) as second:
            text = read_until(second, b": still waiting")
            assert b"data:" not in text and b" 200 " in text
    small.idle()


def test_an_error_in_a_stream_comes_as_data_and_ends_it(make_bot, serve, monkeypatch):
    bot = make_bot(runtime={"n_ctx": 512, "parallel": 1})
    small = serve(bot)

    def fail(*_):
        raise RuntimeError("no more")

    monkeypatch.setattr(bot.engine.model, "sample", fail)
    status, _, text = small.post({**PLAIN, "stream": True})
    assert status == 200 and "no more" in json.loads(text[6:])["error"]["message"] and "[DONE]" not in text
    error = refused(small.post(PLAIN))
    assert error["status"] == 500 and error["type"] == "server_error"


# Clients that leave, are slow, or are many


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_stops_its_answer(api, ended, stream):
    chance = random.Random(stream)
    for round in range(8):
        connection = api.open({**LONG, "stream": stream})
        if stream and round % 2:
            connection.recv(chance.randint(1, 2000))
        time.sleep(chance.random() * 0.3)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", round % 2, 0))  # a reset, every other time
        connection.close()
    api.idle()
    assert {reply.stats.finish_reason for reply in ended} == {"cancelled"} and len(ended) == 8
    assert all(reply.stats.answer_tokens < 390 for reply in ended)


def test_a_client_that_leaves_the_line_is_dropped(make_bot, serve):
    bot = make_bot(runtime={"n_ctx": 512, "parallel": 1})
    small = serve(bot)
    with small.open({**LONG, "stream": True}) as first:
        read_until(first, b"assistant")
        waiting = [small.open({**PLAIN, "stream": bool(number % 2)}) for number in range(4)]
        until(lambda: bot.engine.waiting == 4)
        for connection in waiting:
            connection.close()
        until(lambda: bot.engine.waiting == 0)
        assert bot.engine.running == 1
    small.idle()


def test_a_client_that_reads_nothing_costs_its_answer_alone(api, ended):
    with api.open({**LONG, "stream": True}, buffer=1024) as connection:
        until(lambda: len(ended) == 1)
        assert ended[0].stats.finish_reason in ("stop", "length")
        read_until(connection, b"[DONE]")


def test_fifty_clients_at_once_are_answered_or_sent_away(api, ended):
    statuses, lock = [], threading.Lock()
    rejected = api.engine.rejected

    def ask(number: int):
        answer = api.post({**PLAIN, "messages": [{"role": "user", "content": f"Number {number}."}], "max_tokens": 8, "stream": bool(number % 2)})
        with lock:
            statuses.append(answer[0])

    threads = [threading.Thread(target=ask, args=[number]) for number in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    api.idle()
    answered, busy = statuses.count(200), statuses.count(429)
    assert answered + busy == 50 and answered >= 10  # one person alone may fill half of the line
    assert api.engine.rejected - rejected == busy and len(ended) == answered


# Keys


def test_keys_guard_all_but_health(serve, tmp_path, caplog, capfd):
    file = tmp_path / "keys"
    file.write_text("# for the shop\nkey-in-file\n\n", encoding="utf-8")
    guarded = serve(api_key=["first-key", "钥匙"], api_key_file=str(file))
    for path in ("/v1/models", "/v1/openapi.json", "/metrics", "/v1/nothing", "/v1"):
        for headers in ({}, {"Authorization": "Bearer wrong-key"}, {"Authorization": "first-key"}, {"Authorization": "Basic first-key"}, {"Authorization": "Bearer "}, {"Authorization": "Bearer first-keyx"}):
            answer = guarded.request("GET", path, headers=headers)
            error = refused(answer)
            assert error["status"] == 401 and answer[1]["www-authenticate"] == "Bearer" and "key" in error["message"]
            assert "first-key" not in str(answer[2]) and "wrong-key" not in str(answer[2])
    for key in ("first-key", "key-in-file", "钥匙".encode().decode("latin-1")):
        assert guarded.request("GET", "/metrics", headers={"Authorization": f"Bearer {key}"})[0] == 200
    assert guarded.request("GET", "/health")[0] == 200
    assert guarded.client("first-key").chat.completions.create(model="any", messages=QUESTION, max_tokens=1)
    with pytest.raises(openai.AuthenticationError):
        guarded.client("other").models.list()
    assert guarded.post({**PLAIN, "user": "x" * 3_000_000}, headers={"Authorization": "Bearer wrong-key"})[0] == 401
    told = caplog.text + "".join(capfd.readouterr())
    assert not any(key in told for key in ("first-key", "key-in-file", "wrong-key"))


def test_with_a_login_and_no_key_the_api_is_closed(serve):
    login = {"user": "ann", "password": "secret-word"}
    closed = serve(auth=[login])
    for path in ("/v1/models", "/metrics"):
        error = refused(closed.request("GET", path, headers={"Authorization": "Bearer secret-word"}))
        assert error["status"] == 403 and "server.api_key" in error["message"]
    assert closed.request("GET", "/health")[0] == 200
    assert serve(auth=[login], api_key=["k"]).request("GET", "/v1/models", headers={"Authorization": "Bearer k"})[0] == 200


def test_other_sites_are_let_in_only_where_the_config_says_so(api, serve):
    def allowed(server, origin, method="POST"):
        ask = {"Origin": origin, "Host": "chat.example.com", "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        return server.request(method, "/v1/chat/completions", PLAIN if method == "POST" else None, headers=ask)[1].get("access-control-allow-origin")

    assert allowed(api, "https://evil.example") is None and allowed(api, "https://evil.example", "OPTIONS") is None
    shared = serve(cors_origins=["https://good.example"], api_key=["k"])
    assert allowed(shared, "https://good.example", "OPTIONS") == allowed(shared, "https://good.example") == "https://good.example"
    assert allowed(shared, "https://evil.example") is None


def test_nothing_that_is_asked_or_answered_is_logged(api, caplog):
    caplog.set_level("DEBUG")
    answer = api.post({**PLAIN, "messages": [{"role": "user", "content": "Say aardvark."}]})[2]["choices"][0]["message"]["content"]
    api.post({**PLAIN, "messages": [{"role": "aardvark", "content": "aardvark"}]})
    api.post({"prompt": "aardvark " * 600}, "/v1/completions")
    assert "aardvark" not in caplog.text and answer not in caplog.text


# Beside the page, in the program itself


@pytest.fixture(scope="module")
def program(small_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("program")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    sections = {
        "profile": "none",
        "model": {"path": str(small_model)},
        "runtime": {"n_ctx": 512},
        "generation": {"max_tokens": 16},
        "server": {"host": "127.0.0.1", "port": port, "auth": [{"user": "ann", "password": "secret-word"}], "api_key": ["secret-key"], "log_level": "debug"},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(sections), encoding="utf-8")
    environ = {**os.environ, "CONFIG": str(folder / "config.yaml")}
    environ.pop("PORT", None)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "app.py"], cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT)

    def get(path: str, **headers) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        response.text = response.read().decode()
        return response

    def up() -> bool:
        assert process.poll() is None, (folder / "log").read_text()
        try:
            return get("/health").status == 200
        except ConnectionError:
            return False

    until(up, "the program")
    yield SimpleNamespace(url=f"http://127.0.0.1:{port}", get=get, log=folder / "log")
    process.terminate()
    assert process.wait(60) == 0


def test_the_page_asks_for_a_login_and_the_api_for_a_key(program):
    assert program.get("/gradio_api/info").status == 401 and program.get("/gradio_api/info", Authorization="Bearer secret-key").status == 401
    assert program.get("/v1/models").status == 401 and program.get("/v1/models", Authorization="Bearer secret-word").status == 401
    client = openai.OpenAI(base_url=f"{program.url}/v1", api_key="secret-key", max_retries=0)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(model="any", messages=QUESTION, stream=True, extra_headers={"Accept-Encoding": "br"}))
    assert text
    page = gradio_client.Client(program.url, auth=("ann", "secret-word"), verbose=False)
    assert page.predict("Tell me about the sea.", api_name="/chat")
    figures = program.get("/metrics", Authorization="Bearer secret-key").text
    assert sum(float(line.split()[1]) for line in figures.splitlines() if line.startswith("qwen_chat_answers_total")) == 2


def test_the_pages_open_cors_rules_do_not_hold_for_the_api(program):
    for path in ("/v1/models", "/metrics", "/health"):
        answer = program.get(path, Origin="https://evil.example", Host="chat.example.com", Authorization="Bearer secret-key")
        assert answer.status == 200 and answer.getheader("access-control-allow-origin") is None


def test_the_program_logs_no_secret_and_no_text(program):
    log = program.log.read_text()
    assert "answer: " in log and not any(word in log for word in ("secret-word", "secret-key", "about the sea"))


# The published document


FORMS = [("/v1/chat/completions", "POST"), ("/v1/completions", "POST")]


@pytest.mark.parametrize(
    "path, method, mode",
    [(*form, mode) for form in FORMS for mode in schemathesis.GenerationMode]
    + [(path, "GET", schemathesis.GenerationMode.POSITIVE) for path in ("/v1/models", "/health")],
)
def test_the_published_document_is_kept(published, path, method, mode):
    operation = published[path][method]

    @settings(max_examples=30, deadline=None, derandomize=True, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def check(case):
        if isinstance(case.body, dict):  # short answers
            for name in ("max_tokens", "max_completion_tokens"):
                if type(case.body.get(name)) is int and 4 < case.body[name] <= 2**31:
                    case.body[name] = 4
        response = case.call_and_validate(excluded_checks=[positive_data_acceptance])
        if mode.is_positive and response.status_code != 200:  # for what a schema cannot say
            error = response.json()["error"]
            assert error["code"] in ("context_length_exceeded", "unsupported_schema") or error["param"].startswith(("stream_options", "top_logprobs", "logit_bias.")), error

    check()


@pytest.fixture(scope="module")
def published(serve, make_bot):
    small = serve(make_bot(runtime={"n_ctx": 256, "parallel": 1}, generation={"max_tokens": 4}))
    return schemathesis.openapi.from_url(f"http://127.0.0.1:{small.port}/v1/openapi.json")

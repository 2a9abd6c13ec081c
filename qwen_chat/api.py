"""What programs ask for over HTTP: OpenAI's API under /v1, /health and /metrics.

It is an application of its own, which gets its requests before the page does: the page's login, its
compression and its open CORS rules do not concern it. Both share the engine, its queue and its cache.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from . import __version__, json_grammar, openai_form
from .conversation import Prompt, TooLong, flatten
from .engine import Busy, EngineError, Reply
from .gate import CLIENT, RETRY_BUSY, AsciiJSON, Guard, Linger, PageGate, read_body, refusal
from .metrics import Metrics
from .openai_form import ApiError, ChatRequest, Form, TextRequest
from .sampling import GREATEST_SEED, Sampling
from .shapes import ChatShape, Shape, TextShape

KEEP_ALIVE_SECONDS = 10  # between two signs of life of a stream that waits
RETRY_LOADING = 5  # seconds; also while the program ends, for it may be started anew
LEAST_TOKENS = 2  # of a message: what begins it, and its text
SLICE = 4000  # characters that are split into tokens at once, of a text that is probably too long
SLACK = 4  # tokens that a slice may have more by itself than within its text; 1.4 were seen
WORDY = 8  # characters a token, more than texts have
SETTINGS = ("temperature", "top_p", "top_k", "min_p", "repeat_penalty", "repeat_last_n", "frequency_penalty", "presence_penalty")


def beside_the_page(engine, conversation, config) -> dict:
    """For the page's `launch(app_kwargs=...)`: serves the API at the page's address and port."""
    api = Api(engine, conversation, config).app

    @asynccontextmanager
    async def lifespan(page: Starlette):
        bounded = Linger(PageGate(page.middleware_stack, config.server.max_body_mb))
        page.middleware_stack = _Fork(api, bounded, config.server.language)
        yield

    return {"lifespan": lifespan}


# A picture in an answer or in pasted text is asked for by its address, which could carry away what was said.
OWN_MEDIA = "img-src 'self' data: blob:; media-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; object-src 'none'; frame-src 'none'"

# At the head of the page, before Gradio reads the browser's language; what it adds by `launch(head=...)` comes too late
SPEAKS = "<script>for (const [key, value] of [['language', '{0}'], ['languages', ['{0}']]]) Object.defineProperty(navigator, key, {{value}});</script>"


class _Fork:
    """The API where its paths are asked for, else the page, which may load nothing from other hosts.

    A `language` other than "auto" is made the browser's own on the page, so that Gradio's words follow it too.
    """

    def __init__(self, api: ASGIApp, page: ASGIApp, language: str = "auto"):
        self.api, self.page = api, page
        self.first = SPEAKS.format({"zh": "zh-CN"}.get(language, language)).encode() if language != "auto" else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        ours = scope["type"] == "http" and (path in ("/v1", "/metrics", "/health") or path.startswith("/v1/"))
        if ours:
            return await self.api(scope, receive, send)

        if self.first and b"text/html" in dict(scope["headers"] if scope["type"] == "http" else []).get(b"accept", b""):
            scope = {**scope, "headers": [(name, value) for name, value in scope["headers"] if name != b"accept-encoding"]}
        await self.page(scope, receive, self._changed(send))

    def _changed(self, send: Send) -> Send:
        """Adds the policy to whatever the page sends, and the language to its HTML."""
        start = None

        async def changed(message):
            nonlocal start
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["content-security-policy"] = OWN_MEDIA
                if self.first and headers.get("content-type", "").startswith("text/html"):
                    start = message
                    return
            elif start:
                body = message.get("body", b"").replace(b"<head>", b"<head>" + self.first, 1)
                headers, start, begin = MutableHeaders(scope=start), None, start
                if "content-length" in headers:
                    headers["content-length"] = str(len(body))
                await send(begin)
                message = {**message, "body": body}
            await send(message)

        return changed


class Api:
    """The API on an engine; `app` is its ASGI application."""

    def __init__(self, engine, conversation, config):
        self.engine = engine
        self.conversation = conversation
        self.metrics = Metrics(engine)
        self._sampling = Sampling.from_config(config)
        self._longest = config.generation.max_tokens
        self._most_mb = config.server.max_body_mb
        self._started = int(time.time())
        server = config.server
        guard = Middleware(Guard, keys=server.api_keys(), closed=bool(server.auth))
        cors = Middleware(CORSMiddleware, allow_origins=server.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"])
        self.app = Starlette(
            routes=[
                Route("/health", self.health),
                Route("/metrics", self.figures),
                Route("/v1/openapi.json", self.document),
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.models),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/completions", self.complete, methods=["POST"]),
            ],
            middleware=[Middleware(Linger), *([cors] if server.cors_origins else []), guard],
            exception_handlers={ApiError: _error, HTTPException: _http_error, EOFError: _gone, Exception: _broken},
        )
        self.app.router.redirect_slashes = False

    async def health(self, request: Request) -> Response:
        """200 when a question would be answered, 503 while it would not."""
        engine, state = self.engine, self.engine.state
        if state.phase == "ready":
            return JSONResponse({"status": "ok", "model": engine.info.name, "version": __version__})
        if state.phase in ("failed", "closed"):
            return JSONResponse({"status": "failed", "error": str(engine.error or "closed"), "version": __version__}, 503)
        return JSONResponse({"status": "loading", "phase": state.phase, "fraction": state.fraction, "version": __version__}, 503)

    async def figures(self, request: Request) -> Response:
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def document(self, request: Request) -> Response:
        return JSONResponse(openai_form.document(__version__))

    async def models(self, request: Request) -> Response:
        self._check_ready()
        info, wanted = self.engine.info, request.path_params.get("name")
        model = {"id": info.name, "object": "model", "created": self._started, "owned_by": "qwen-chat"}
        if wanted is None:
            return JSONResponse({"object": "list", "data": [model]})
        if wanted != info.name:
            raise ApiError(404, f"there is no model of that name; {info.name} is the only one", "model", "model_not_found")
        return JSONResponse(model)

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, ChatRequest, ChatShape)

    async def complete(self, request: Request) -> Response:
        return await self._answer(request, TextRequest, TextShape)

    async def _answer(self, request: Request, kind: type, shape: type[Shape]) -> Response:
        self._check_ready()
        body = await self._body(request)
        form, asked = await asyncio.to_thread(self._read, kind, body, request.scope[CLIENT])  # it may take long
        reply = self._ask(**asked)
        answer = shape(reply, self.engine)
        if form.stream:
            return _EventStream(reply, _events(reply, answer, form.wants_usage))
        return await _whole(request, reply, answer)

    def _read(self, kind: type, body: bytes, client: Hashable) -> tuple[Form, dict]:
        """A request, and what the engine is asked for it."""
        form = openai_form.read(kind, body, self.engine.n_ctx // LEAST_TOKENS)
        seeded = form.seed is not None and form.seed >= 0  # then a text is always split into the same tokens
        sampling, prompt = self._settings(form), self._prompt(form, None if seeded else client)
        return form, {
            "tokens": prompt.tokens,
            "sampling": sampling,
            "max_tokens": min(form.longest or self._longest, prompt.max_tokens),
            "stop": prompt.stop if form.stops is None else form.stops,
            "follow": prompt.follow,
            "client": client,
            "on_end": lambda reply: self.conversation.remember(reply, prompt),
        }

    def _prompt(self, form: ChatRequest | TextRequest, client: Hashable) -> Prompt:
        try:
            if isinstance(form, TextRequest):
                self._check_length([form.text])
                return self.conversation.plain(form.text)
            messages = flatten([message.plain() for message in form.messages])
            self._check_length([message["content"] for message in messages])
            return self.conversation.whole(messages, client=client)
        except TooLong as error:
            words = f"{error.size} tokens, and the window holds {error.limit} beside an answer; shorten it"
            raise ApiError(400, f"{form.subject}: {words}", form.subject, "context_length_exceeded")
        except ValueError as error:
            raise ApiError(400, f"{form.subject}: {error}", form.subject, "invalid_value")

    def _check_length(self, texts: list[str]) -> None:
        """Raises TooLong for what is far too long, with an estimate, after no more work than for what just fits:
        splitting 1 MB into tokens keeps a core busy for seconds, which those who are answered would lack."""
        n_ctx, length = self.engine.n_ctx, sum(map(len, texts))
        if length <= WORDY * n_ctx:
            return
        tokens = least = seen = 0
        for text, start in ((text, start) for text in texts for start in range(0, len(text), SLICE)):
            part = text[start : start + SLICE]
            count, seen = self.conversation.count(part), seen + len(part)
            tokens, least = tokens + count, least + count - (SLACK if start else 0)
            if least > n_ctx:
                raise TooLong(tokens * length // seen, n_ctx - 1)

    def _ask(self, **what) -> Reply:
        try:
            return self.engine.stream(**what)
        except Busy as error:
            raise ApiError(429, str(error), code="busy", headers={"Retry-After": str(RETRY_BUSY)})
        except EngineError:  # it was ready a moment ago
            raise self._ended()

    def _check_ready(self) -> None:
        state = self.engine.state
        if state.phase in ("failed", "closed"):
            raise self._ended()
        if state.phase != "ready":
            raise ApiError(503, "the model is not loaded yet; try again in a moment", code="loading", headers={"Retry-After": str(RETRY_LOADING)})

    def _ended(self) -> ApiError:
        if self.engine.error:
            return ApiError(503, f"the engine has ended: {self.engine.error}", code="not_ready")
        return _shutting_down()

    async def _body(self, request: Request) -> bytes:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # also keeps pages of other sites from sending one unasked
            raise ApiError(415, "the request must be JSON, with the header Content-Type: application/json")
        return await read_body(request.scope, request.receive, self._most_mb)

    def _settings(self, form) -> Sampling:
        given = {name: getattr(form, name) for name in SETTINGS if getattr(form, name) is not None}
        if form.seed is not None:
            given["seed"] = form.seed if form.seed < 0 else form.seed % (GREATEST_SEED + 1)
        grammar = _grammar(getattr(form, "response_format", None))
        if grammar:
            self.engine.model.first_bytes  # found here for the first time, not on the thread that answers everybody
        return replace(
            self._sampling, **given, logit_bias=self._biases(form.logit_bias or {}),
            grammar=grammar, top_logprobs=form.alternatives,
        )

    def _biases(self, given: dict[str, float]) -> tuple[tuple[int, float], ...]:
        n_vocab = self.engine.model.n_vocab
        for token in given:
            if int(token) >= n_vocab:
                raise ApiError(400, f"logit_bias.{token}: the model's tokens are numbered 0 to {n_vocab - 1}", f"logit_bias.{token}", "invalid_value")
        return tuple((int(token), float(bias)) for token, bias in given.items())


def _grammar(wanted) -> str:
    if wanted is None or wanted.type == "text":
        return ""
    if wanted.type == "json_object":
        return json_grammar.any_object()
    try:
        return json_grammar.from_schema(wanted.json_schema.schema_)
    except json_grammar.SchemaError as error:
        param = "response_format.json_schema.schema"
        raise ApiError(400, f"{param}: {error}", param, "unsupported_schema")


def _shutting_down() -> ApiError:
    """A client that waits for its answer is cut off by nothing else."""
    words, later = "the answer was cut off, or not begun: the program ends", {"Retry-After": str(RETRY_LOADING)}
    return ApiError(503, words, code="shutting_down", headers=later)


async def _whole(request: Request, reply: Reply, answer: Shape) -> Response:
    watch = asyncio.ensure_future(_cancel_when_gone(request, reply))
    try:
        async for _ in reply:
            pass
    except EngineError as error:
        raise ApiError(500, str(error), code="engine_error")
    finally:
        watch.cancel()
    if reply.stats.finish_reason == "cancelled":
        raise _shutting_down()
    return await asyncio.to_thread(lambda: AsciiJSON(answer.whole()))  # log-probabilities can be many


async def _cancel_when_gone(request: Request, reply: Reply) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    reply.cancel()


async def _events(reply: Reply, answer: Shape, usage: bool) -> AsyncIterator[str]:
    """Server-sent events of an answer on its way."""
    empty = {"usage": None} if usage else {}
    try:
        async with aclosing(_patiently(reply)) as pieces:
            async for text in pieces:
                yield await _made(reply, lambda: {**answer.chunk(text), **empty}) if text else ": still waiting\n\n"
    except EngineError as error:
        yield _event(ApiError(500, str(error), code="engine_error").body)
        return
    if reply.stats.finish_reason == "cancelled":
        yield _event(_shutting_down().body)
        return
    yield await _made(reply, lambda: {**answer.last_chunk(), **empty})
    if usage:
        yield _event(answer.usage_chunk())
    yield "data: [DONE]\n\n"


async def _patiently(reply: Reply) -> AsyncIterator[str]:
    """The pieces of a reply; "" now and then while none comes."""
    source = aiter(reply)
    while True:
        step = asyncio.ensure_future(anext(source, None))
        try:
            while not (await asyncio.wait({step}, timeout=KEEP_ALIVE_SECONDS))[0]:
                yield ""
            text = step.result()
        finally:
            step.cancel()
        if text is None:
            return
        yield text


class _EventStream(StreamingResponse):
    """Cancels the reply when the response ends, however it does."""

    media_type = "text/event-stream"

    def __init__(self, reply: Reply, events: AsyncIterator[str]):
        super().__init__(events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._reply.cancel()
            await self.body_iterator.aclose()


def _event(content: dict) -> str:
    return f"data: {json.dumps(content, separators=(',', ':'), ensure_ascii=False)}\n\n"


async def _made(reply: Reply, content: Callable[[], dict]) -> str:
    """The event of a chunk. Log-probabilities may be those of a whole answer, if its client was slow; then others go on."""
    if not reply.logprobs:
        return _event(content())
    return await asyncio.to_thread(lambda: f"data: {AsciiJSON(content()).body.decode()}\n\n")


async def _error(request: Request, error: ApiError) -> Response:
    return refusal(error)


async def _http_error(request: Request, error: HTTPException) -> Response:
    words = {404: "there is nothing at this address", 405: "this address does not take that method"}
    return refusal(ApiError(error.status_code, words.get(error.status_code, error.detail), headers=error.headers))


async def _gone(request: Request, error: EOFError) -> Response:
    return Response(status_code=400)  # nobody reads it


async def _broken(request: Request, error: Exception) -> Response:
    return refusal(ApiError(500, "this request failed; the log says why"))

"""The gate before the API and the page: who may come in, with how much, and how those are sent away who may not."""

import asyncio
import hmac
import ipaddress
import json
import time
from collections import Counter
from collections.abc import Hashable

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .openai_form import TOO_MANY_VALUES, ApiError, few_values

BODY_SECONDS = 30  # for the whole of a request's body to come in
LINGER_SECONDS, LINGER_BYTES = 5, 64 * 2**20  # how long and how much of a refused body is still read, to be dropped
OPEN = "/health"  # asked without a key, by a container's health check
MOST_OPEN = 100  # requests of one client at once, each of which may hold a body and an answer
RETRY_BUSY = 2  # seconds
CLIENT = "qwen_chat.client"  # the key of a request's scope under which the Guard says who asks
PAGE_MB = 8  # the least that the page may send at once: a chat of many rounds, some with a long text
CALLS = ("queue", "call", "run", "api", "cancel", "reset")  # what the page and gradio_client post to


class AsciiJSON(JSONResponse):
    """A text may hold half a character, which UTF-8 cannot say."""

    encoder = json.JSONEncoder(separators=(",", ":"))

    def render(self, content) -> bytes:
        return "".join(self.encoder.iterencode(content)).encode()  # it lets other threads run meanwhile; dumps does not


def refusal(error: ApiError) -> Response:
    """An error as an answer."""
    return AsciiJSON(error.body, error.status, error.headers)


def network(scope: Scope) -> str:
    """The address that a request comes from; of IPv6 its /64, which is what one household or host has.

    uvicorn has read X-Forwarded-For by then, where a proxy on this machine (FORWARDED_ALLOW_IPS) has set it.
    """
    host = (scope.get("client") or ("",))[0]
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host[:100]
    if address.version == 6 and not address.ipv4_mapped:
        return str(ipaddress.ip_network((int(address), 64), strict=False))
    return str(getattr(address, "ipv4_mapped", None) or address)


class Guard:
    """Asks for a key, if there are any; without one nobody comes in where the page asks for a login.

    Says in scope[CLIENT] who it is: ("key", its number), or ("address", network) where there are no keys. Of each only
    so many requests are open at once.
    """

    def __init__(self, app: ASGIApp, keys: list[str], closed: bool):
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._closed = closed and not keys
        self._open: Counter[Hashable] = Counter()  # by client

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] == OPEN:
            return await self._app(scope, receive, send)
        try:
            client = scope[CLIENT] = self._client(scope)
        except ApiError as error:
            return await refusal(error)(scope, receive, send)
        self._open[client] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]

    def _client(self, scope: Scope) -> Hashable:
        """Who asks. Raises ApiError where they may not."""
        if self._closed:
            words = "the API is closed: the page asks for a login (server.auth), and no server.api_key is set"
            raise ApiError(403, words, code="closed")
        client = ("key", self._number(dict(scope["headers"]))) if self._keys else ("address", network(scope))
        if self._open[client] >= MOST_OPEN:
            words, later = f"{MOST_OPEN} requests of yours are open; try again when one has ended", {"Retry-After": str(RETRY_BUSY)}
            raise ApiError(429, words, code="busy", headers=later)
        return client

    def _number(self, headers: dict[bytes, bytes]) -> int:
        """Which of the keys was given."""
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        given = given.strip() if scheme.lower() == b"bearer" else b""
        matches = [hmac.compare_digest(given, key) for key in self._keys]  # all of them, so that the time tells nothing
        if any(matches):
            return matches.index(True)
        words = "that key is not valid" if given else "a key is needed, in the header Authorization: Bearer ..."
        raise ApiError(401, words, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


async def read_body(scope: Scope, receive: Receive, most_mb: int) -> bytes:
    """The body of a request, of which no more than `most_mb` MiB is kept.

    Raises ApiError, and EOFError when the client is gone.
    """
    length = Headers(scope=scope).get("content-length", "")
    if length.isdigit() and int(length[:20]) > most_mb * 2**20:
        raise _too_large(most_mb)
    try:
        return await asyncio.wait_for(_collected(receive, most_mb), BODY_SECONDS)
    except asyncio.TimeoutError:
        raise ApiError(408, f"the request's body did not come within {BODY_SECONDS} seconds")


async def _collected(receive: Receive, most_mb: int) -> bytes:
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            raise EOFError
        body += message.get("body", b"")
        more = message.get("more_body", False)
        if len(body) > most_mb * 2**20:
            raise _too_large(most_mb)
    return bytes(body)


def _too_large(most_mb: int) -> ApiError:
    words = f"the request's body is larger than {most_mb} MiB (server.max_body_mb)"
    return ApiError(413, words, code="request_too_large")


class PageGate:
    """Bounds what the page is sent. Of Gradio's addresses that take something only those are open which the page uses:
    nothing is uploaded to it."""

    def __init__(self, app: ASGIApp, max_body_mb: int):
        self._app = app
        self._most_mb = max(PAGE_MB, max_body_mb)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return await self._app(scope, receive, send)
        try:
            body = await self._body(scope, receive)
        except ApiError as error:
            return await refusal(error)(scope, receive, send)
        except EOFError:
            return
        await self._app(scope, _again(body, receive), send)

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        _, ours, call = scope["path"].partition("/gradio_api/")
        if ours and call.partition("/")[0] not in CALLS:
            raise ApiError(404, "there is nothing at this address")
        body = await read_body(scope, receive, self._most_mb)
        if not few_values(body):
            raise ApiError(413, f"the request's body has too many values: {TOO_MANY_VALUES}", code="too_many_values")
        return body


def _again(body: bytes, receive: Receive) -> Receive:
    """A `receive` that begins with a body that was read already."""
    first = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return first.pop() if first else await receive()

    return again


class Linger:
    """Reads on, and drops, what is still coming of a request that is answered already.

    A connection that is closed on unread data is reset, and the client never sees the answer.
    """

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        unread = scope["type"] == "http" and scope["method"] == "POST"

        async def receive_and_note():
            nonlocal unread
            message = await receive()
            unread = unread and message["type"] == "http.request" and message.get("more_body", False)
            return message

        async def send_and_linger(message):
            if unread and message["type"] == "http.response.body" and not message.get("more_body"):
                await send({**message, "more_body": True})
                await drop()
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        async def drop():
            left, end = LINGER_BYTES, time.monotonic() + LINGER_SECONDS
            while unread and left > 0 and (seconds := end - time.monotonic()) > 0:
                try:
                    left -= len((await asyncio.wait_for(receive_and_note(), seconds)).get("body", b""))
                except asyncio.TimeoutError:
                    return

        await self._app(scope, receive_and_note, send_and_linger)

"""The gate before the API: who may come in, and how those are sent away who may not."""

import asyncio
import hmac
import json
import time

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .openai_form import ApiError

LINGER_SECONDS, LINGER_BYTES = 5, 64 * 2**20  # how long and how much of a refused body is still read, to be dropped
OPEN = "/health"  # asked without a key, by a container's health check


class AsciiJSON(JSONResponse):
    """A text may hold half a character, which UTF-8 cannot say."""

    def render(self, content) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode()


def refusal(error: ApiError) -> Response:
    """An error as an answer."""
    return AsciiJSON(error.body, error.status, error.headers)


class Guard:
    """Asks for a key, if there are any; without one nobody comes in where the page asks for a login."""

    def __init__(self, app: ASGIApp, keys: list[str], closed: bool):
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._closed = closed and not keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._fault(dict(scope["headers"])) if scope["type"] == "http" and scope["path"] != OPEN else None
        await (refusal(error) if error else self._app)(scope, receive, send)

    def _fault(self, headers: dict[bytes, bytes]) -> ApiError | None:
        if self._closed:
            return ApiError(403, "the API is closed: the page asks for a login (server.auth), and no server.api_key is set", code="closed")
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        given = given.strip() if scheme.lower() == b"bearer" else b""
        matches = [hmac.compare_digest(given, key) for key in self._keys]  # all of them, so that the time tells nothing
        if not self._keys or any(matches):
            return None
        words = "that key is not valid" if given else "a key is needed, in the header Authorization: Bearer ..."
        return ApiError(401, words, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


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

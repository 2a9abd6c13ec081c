"""The chat page: a gr.ChatInterface with an event wiring of its own.

The chat lives in the browser. What starts an answer puts the question into the chat there and then
(page.js); one event carries the chat to the server, and the answer comes back through it.
"""

import asyncio
import html
import json
import logging
import os
import re
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

from . import proxies

# config.yaml alone says how the page is served
for name in [name for name in os.environ if name.startswith("GRADIO_")]:
    del os.environ[name]
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read while gradio is imported, and so are proxies and certificates
proxies.leave_out_unusable()
proxies.keep_in()

import gradio as gr  # noqa: E402
import uvicorn  # noqa: E402
from gradio import http_server, networking  # noqa: E402
from gradio.utils import cancel_tasks  # noqa: E402

from . import __version__, address, connections, texts, view  # noqa: E402
from .config import ConfigError  # noqa: E402
from .panel import Panel  # noqa: E402
from .performance import Performance  # noqa: E402

log = logging.getLogger(__name__)

HERE = Path(__file__).parent
SCRIPTS = ("page.js", "keep.js", "page_text.js")
UPDATE_SECONDS = 0.05  # between two updates of a growing answer, at first
SETTLED_SECONDS = 1.5  # then half as many do: each costs the browser 10 to 20 ms, maybe on the cores that compute
LONG_CHAT = 40  # messages; beyond them the updates cost twice as much
STATUS_SECONDS = 0.25  # between two looks at what an answer waits for
AS_SENT = {"preprocess": False, "postprocess": False}  # else Gradio looks through all messages at every update
IDLE_SECONDS = 0.02  # between two looks into Gradio's queue; its own 0.001 keeps a core busy
MOST_SAMPLED, MOST_LENGTH = 24_000, 10**9  # characters that are counted of an unsent text, and that it may have
LONGEST_SAMPLE = 6 * MOST_SAMPLED + 100  # as JSON, where one character takes six at most
MANY = 200  # more open pages than one machine serves: the engine's queue is the one that counts

BROWSER, NUMBER = "qwen-chat-browser", re.compile("[0-9a-f]{32}")  # a cookie of page.js, and what it holds

FONTS = ["system-ui", "-apple-system", "Segoe UI", "PingFang SC", "Microsoft YaHei", "Noto Sans CJK SC", "Noto Sans SC", "sans-serif"]
MONO = ["ui-monospace", "Consolas", "Menlo", "DejaVu Sans Mono", "Noto Sans Mono CJK SC", "monospace"]
LATEX = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": "\\[", "right": "\\]", "display": True},
    {"left": "\\(", "right": "\\)", "display": False},
    {"left": "$", "right": "$", "display": False},
]


def answer(text: str, figures: str = "", more: str = "", dropped: int = 0, line: str = "") -> dict:
    """A message of the assistant; `figures` are shown under it and are not part of it, and so is a button
    named `more`, with which it goes on. `line` stands in the chat after the first `dropped` rounds, until there
    is another answer."""
    message = _message("assistant", text, {"log": f"{figures}\n{dropped}\n{line}" if line else figures})
    return {**message, "options": [{"label": more, "value": "continue"}]} if more else message


def status(text: str) -> dict:
    """What is shown until there is an answer. It goes away by itself."""
    return _message("assistant", f'<span class="status">{html.escape(text)}</span>', {"id": "status"})


def notice(text: str) -> dict:
    """What is shown where no answer could be given. The model sees neither it nor the message it stands below."""
    return _message("assistant", text, {"id": "notice"})


def _message(role: str, text: str, metadata: dict | None = None) -> dict:
    # The text in a part of its own: a bare string would lose its indentation on the way.
    return {"role": role, "content": [{"type": "text", "text": text}], "metadata": metadata, "options": None}


def turns(chat: list[dict]) -> list[dict]:
    """What of the chat the model is to read: roles and plain texts, without statuses, notices and what those refused."""
    read = []
    for message in chat:
        kind = _kind(message)
        if kind == "notice" and read and read[-1]["role"] == "user":
            read.pop()
        if kind not in ("status", "notice"):
            read.append({"role": message["role"], "content": _text(message)})
    return read


def _text(message: dict) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def client_of(request: gr.Request) -> tuple[str, str]:
    """Who asks: the person who has logged in, else the browser (page.js gives it a number, so that a reload finds what
    is cached of its conversations), else the tab."""
    if request.username:
        return "login", request.username
    browser = request.cookies.get(BROWSER, "")
    return ("browser", browser) if NUMBER.fullmatch(browser) else ("tab", request.session_hash)


async def settling(engine) -> AsyncIterator:
    """The engine's states until it is ready or has failed."""
    while (state := engine.state).phase not in ("ready", "failed", "closed"):
        yield state
        await asyncio.sleep(STATUS_SECONDS)


async def pieces(reply, history: list[dict]) -> AsyncIterator[str]:
    """The text of a reply as it comes, in few enough pieces for a browser; "" now and then while there is none yet."""
    pause = UPDATE_SECONDS * (2 if len(history) > LONG_CHAT else 1)
    source = aiter(reply)
    begun = asyncio.get_running_loop().time()
    first = asyncio.ensure_future(anext(source, ""))
    try:
        while not (await asyncio.wait({first}, timeout=STATUS_SECONDS))[0]:
            yield ""
        yield first.result()
    finally:
        first.cancel()
    async for text in source:
        yield text
        settled = asyncio.get_running_loop().time() - begun > SETTLED_SECONDS
        await asyncio.sleep(pause * (2 if settled else 1))


class ChatPage(gr.ChatInterface):
    """The page around `respond(message, history, settings, request, begun)`, an async generator of the answer so far."""

    def __init__(self, respond: Callable, typed: Callable, measure: Callable, engine, config):
        self.engine = engine
        self.settings = config
        self.performance = Performance(engine)
        self.typed = typed if config.chat.type_ahead else None
        self.measure = measure
        self._answering: set[str] = set()  # sessions; one answer at a time for each
        self.word = gr.I18n(**{name: texts.plain(table) for name, table in texts.BROWSER.items()})
        self.panel = Panel(config, self.word)
        super().__init__(
            respond,
            title="Qwen Chat · 极速对话",
            chatbot=gr.Chatbot(
                elem_id="chat",
                show_label=False,
                scale=1,
                height=None,
                editable="user",
                autoscroll=False,  # it lets go of text that comes in large pieces; page.js does not
                buttons=["copy", "copy_all"],
                latex_delimiters=LATEX,
                group_consecutive_messages=False,
                placeholder=self.word("hello"),
            ),
            textbox=gr.Textbox(elem_id="box", label=self.word("placeholder"), placeholder=self.word("placeholder"), show_label=False, scale=7, max_lines=12, autofocus=True, submit_btn=True, stop_btn=True),
            examples=list(config.chat.examples),
            cache_examples=False,
            concurrency_limit=None,
            api_name="chat",
            analytics_enabled=False,
        )
        self.queue(max_size=None, default_concurrency_limit=None, api_open=False)
        self._queue.sleep_when_free = IDLE_SECONDS
        self._queue.progress_update_sleep_when_free = 1  # no event here reports progress that way

    def launch(self, **options):
        """Serves the page. Nothing of it comes from another host. Raises AddressError."""
        server = self.settings.server
        launched = super().launch(
            server_name=server.host,
            server_port=server.port,
            share=False,  # below
            root_path=server.root_path or None,
            auth=[(login.user, login.password.get_secret_value()) for login in server.auth] or None,
            theme=_theme(),
            css=(HERE / "page.css").read_text(encoding="utf-8"),
            head=self._scripts(),
            i18n=self.word,
            footer_links=[],
            run_history=False,
            enable_monitoring=False,
            ssr_mode=False,
            max_threads=MANY,
            quiet=True,
            **options,
        )
        connections.bound(self.server.config)
        if server.share:
            self._share()
        return launched

    def _share(self) -> None:
        """Opens Gradio's tunnel, so that the page has a public address, which is logged; where that fails, why."""
        try:
            with proxies.let_out():
                here = self.server_name, self.server_port
                self.share_url = networking.setup_tunnel(*here, self.share_token, None, None)
            log.info("the page is also at %s", self.share_url)
        except Exception as error:  # whatever Gradio and its program for tunnels raise
            reason = proxies.without_logins(str(error.__cause__ or error))
            log.warning("server.share: there is no public address: %s", reason)

    def words(self, request: gr.Request) -> texts.Words:
        """The words in the language of the one who asks."""
        return texts.preferred(self.settings.server.language, request.headers.get("accept-language"))

    def _scripts(self) -> str:
        """What the page does by itself, and the words and settings it needs for that."""
        given = {
            "words": {name: texts.plain(table) for name, table in (("en", texts.EN), ("zh", texts.ZH))},
            "presets": texts.PRESETS,
            "settings": list(self.panel.defaults.values()),
        }
        data = json.dumps(given, ensure_ascii=False).replace("<", "\\u003c")
        scripts = "\n".join((HERE / name).read_text(encoding="utf-8") for name in SCRIPTS)
        return f"<script>const CHAT = {data};\n{scripts}</script>"

    # Layout

    def _render_header(self):
        with gr.Sidebar(open=False, width=300, elem_id="side"):
            gr.HTML('<div id="kept"></div>')
            self.panel.render()
        gr.Markdown(f"# {self.title}", elem_id="title")
        self.banner = gr.HTML(elem_id="banner")

    def _render_chatbot_area(self, *parts):
        with gr.Tabs(elem_id="tabs", overflow_behavior="wrap"):
            with gr.Tab(self.word("chat_tab"), elem_id="chat-tab", scale=1, render_children=True) as self.chat_tab:
                super()._render_chatbot_area(*parts)
                self._render_text_row()
            with gr.Tab(self.word("view_tab"), elem_id="view-tab") as self.view_tab:
                self.view = gr.HTML(elem_id="view")  # on the page, only what has changed is renewed

    def _render_footer(self):
        self.about = gr.HTML(elem_id="about")
        self.typing = gr.Button(elem_id="typed", visible="hidden")
        self.refreshing = gr.Button(elem_id="refresh", visible="hidden")
        self.turning = gr.Button(elem_id="turn", visible="hidden")

    def _render_text_row(self):
        """Below the box: a button that adds a file's text to it, and how large the text in it is (page_text.js)."""
        with gr.Row(elem_id="below"):
            gr.HTML('<button type="button">＋</button><input type="file" multiple hidden><span role="alert"></span>', elem_id="attach")
            self.size = gr.HTML(elem_id="size")
        self.sizing = gr.Button(elem_id="sized", visible="hidden")

    # Events

    def _sized(self, sample: str, request: gr.Request) -> str:
        """How large the text in the box is, from samples of it; neither logged nor kept."""
        try:
            text = self.words(request).size(self.measure(*_sample(sample)))
            return f"<output>{html.escape(text)}</output>"
        except Exception:
            log.debug("a text was not counted")
            return ""

    def _setup_events(self):
        chat, box = self.chatbot, self.textbox
        asked = {"fn": self._answer, "inputs": [chat, *self.panel.inputs], **self._streamed(chat)}
        answers = [
            box.submit(None, [box, chat], [box, chat], js="chatPage.send").then(**asked),
            chat.retry(None, [chat], [box, chat], js="chatPage.retry").then(**asked),
            self._put(chat.example_select, self._example).then(**asked),
            self._put(chat.edit, self._edited).then(**asked),
            self._put(chat.option_select, self._as_it_is).then(**{**asked, "fn": self._go_on}),
        ]
        for event in answers:
            for done in (event.then, event.failure):
                done(None, [chat], [box, chat], js="chatPage.end")
        chat.undo(None, [box, chat], [box, chat], js="chatPage.undo")
        box.stop(None, cancels=answers, api_visibility="private")
        for other in (chat.clear, self.turning.click):  # an empty chat, or another one, takes the place of this
            other(None, [chat], [box, chat], js="chatPage.turn")
            other(None, cancels=answers, api_visibility="private")
        self.panel.wire(self)

        announced = self.load(self._announce, None, [self.banner, self.about], **self._quiet())
        self.load(None, None, [box, chat], js="chatPage.restore")
        if self.typed:
            self.typing.click(self._typed, [box, chat, *self.panel.inputs], None, queue=False, trigger_mode="always_last", **self._quiet(), **AS_SENT)
        self.sizing.click(self._sized, [box], [self.size], js="chatText.sample", queue=False, trigger_mode="always_last", **self._quiet())
        self.view_tab.select(None, js="chatPage.watch", api_visibility="private")
        self.chat_tab.select(None, js="chatPage.rest", api_visibility="private")
        self.refreshing.click(self._refresh, None, [self.view], queue=False, **self._quiet())
        self._of_a_page = [event["id"] for event in (*answers, announced, self._setup_api())]
        self.unload(self._leave)

    def _put(self, event: Callable, fn: Callable):
        """For what the browser cannot put into the chat by itself: `fn` returns the chat that is to be answered."""
        event(None, None, [self.textbox], js="chatPage.begin")
        put = event(fn, [self.chatbot], [self.chatbot], queue=False, **self._quiet(), **AS_SENT)
        return put.then(None, [self.chatbot], None, js="chatPage.drawn")

    def _streamed(self, chat) -> dict:
        return {"outputs": [chat], **self._quiet(), **AS_SENT}

    def _quiet(self) -> dict:
        return {"show_progress": "hidden", "concurrency_limit": None, "api_visibility": "private"}

    def _setup_api(self):
        """The endpoint /chat for gradio_client: it keeps a chat of its own for each session."""
        return self.fake_api_btn.click(
            self._api_wrapper(_parameters, self._answer_client),
            [self.textbox, self.chatbot_state, *self.panel.inputs],
            [self.api_response, self.chatbot_state],
            api_name=self.api_name,
            concurrency_limit=None,
            postprocess=False,
        )

    async def _answer(self, request: gr.Request, chat: list[dict], *values):
        """Answers the last message of the chat, and yields the chat as it grows."""
        async with aclosing(self._growing(request, chat, values)) as chats:
            async for grown in chats:
                yield grown

    async def _go_on(self, request: gr.Request, chat: list[dict], *values):
        """Goes on with an answer that was cut off."""
        async with aclosing(self._growing(request, chat[:-1], values, _text(chat[-1]))) as chats:
            async for grown in chats:
                yield grown

    async def _growing(self, request: gr.Request, chat: list[dict], values: tuple, begun: str = ""):
        session = request.session_hash
        if not chat or chat[-1]["role"] != "user" or session in self._answering:
            yield gr.skip()
            return
        self._answering.add(session)
        try:
            async with aclosing(self._replies(_text(chat[-1]), chat[:-1], values, request, begun)) as replies:
                async for messages in replies:
                    yield chat + messages
        finally:
            self._answering.discard(session)

    async def _replies(self, message: str, chat: list[dict], values: tuple, request: gr.Request, begun: str = ""):
        """What `respond` yields, as messages."""
        try:
            settings = self.panel.config(values)
        except ConfigError as error:
            yield [notice(self.words(request)("setting", faults="; ".join(error.faults)))]
            return
        async with aclosing(self.fn(message, turns(chat), settings, request, begun)) as replies:
            async for reply in replies:
                messages = _messages(reply)
                yield [answer(begun), *messages] if begun and _kind(messages[0]) else messages

    def _example(self, example: gr.SelectData, chat: list[dict]):
        return [_message("user", example.value["text"])]

    def _edited(self, edit: gr.EditData, chat: list[dict]):
        if not edit.value.strip():
            return [*chat[: edit.index], _message("user", edit.previous_value), *chat[edit.index + 1 :]]
        return chat[: edit.index] + [_message("user", edit.value)]

    def _as_it_is(self, chat: list[dict]):
        return chat

    async def _answer_client(self, message: str, chat: list[dict], *rest):
        *values, request = rest
        chat = [*chat, _message("user", message)]
        async with aclosing(self._replies(message, chat[:-1], tuple(values), request)) as replies:
            async for messages in replies:
                yield "\n\n".join(map(_plain, messages)), chat + messages

    async def _announce(self, request: gr.Request):
        """Says above the chat what the model is doing until it is ready, and below it what it is."""
        words, engine = self.words(request), self.engine
        async for state in settling(engine):
            yield _banner("loading", words.state(state), state.fraction), ""
        if engine.state.phase != "ready":
            yield _banner("failed", str(engine.error or words("closed"))), ""
            return
        name, reason = engine.info.name, engine.info.fallback
        banner = _banner("fallback", words.fallback(name, reason)) if reason else ""
        profile = self.settings.in_force.name if self.settings.in_force else None
        yield banner, html.escape(words.about(__version__, name, profile))

    def _typed(self, request: gr.Request, text: str, chat: list[dict], *values):
        """What is being typed may be computed ahead; it is not logged, not kept and not waited for."""
        try:
            self.typed(text, turns(chat), self.panel.config(values), request)
        except Exception:
            log.debug("nothing was computed ahead")

    async def _refresh(self, request: gr.Request):
        return view.render(self.performance.snapshot(), self.words(request))

    async def _leave(self, request: gr.Request):
        """A closed page stops its answer, and what was computed ahead for it."""
        self.engine.forget(request.session_hash)
        await cancel_tasks({f"{request.session_hash}_{event}" for event in self._of_a_page})


class _Server(http_server.Server):
    """Gradio's web server, on sockets that are open already."""

    def __init__(self, config: uvicorn.Config, sockets: list):
        super().__init__(config)
        self.sockets = sockets

    def run(self, sockets=None):
        super().run(self.sockets)


def _start_server(app, server_name: str, server_port: int, **_) -> tuple[str, int, str, _Server]:
    """In place of Gradio's function of this name, which listens on one address, and knows IPv6 only in brackets.
    Raises AddressError."""
    sockets = address.sockets(server_name, server_port)
    server = _Server(uvicorn.Config(app, log_level="warning"), sockets)
    server.run_in_thread()
    return address.within(server_name)[0], server_port, address.own_url(sockets[0]), server


http_server.start_server = _start_server


def _parameters(
    message: str, history: list, system_prompt: str, temperature: float, top_p: float, repeat_penalty: float,
    max_tokens: int, max_turns: int, seed: int, request: gr.Request,
):
    """The parameters of /chat, under the names of preferences.KEYS."""


def _sample(sent: str) -> tuple[list[str], int]:
    """Samples of a text and its length, as page_text.js sends them. Raises ValueError where there are more."""
    if len(sent) > LONGEST_SAMPLE:
        raise ValueError("too long")
    given = json.loads(sent)
    samples, length = given["samples"], given["length"]
    if type(length) is not int or not 0 <= length <= MOST_LENGTH or sum(map(len, samples)) > MOST_SAMPLED:
        raise ValueError("out of range")
    return samples, length


def _kind(message: dict) -> str | None:
    """"status" or "notice"; None for a question or an answer."""
    return (message.get("metadata") or {}).get("id")


def _plain(message: dict) -> str:
    """A message's text, for programs."""
    text = _text(message)
    return html.unescape(re.sub("<[^>]*>", "", text)) if _kind(message) == "status" else text


def _messages(reply: str | dict | list) -> list[dict]:
    replies = reply if isinstance(reply, list) else [reply]
    return [answer(message) if isinstance(message, str) else message for message in replies]


def _banner(kind: str, text: str, fraction: float | None = None) -> str:
    bar = "" if fraction is None else f'<progress max="1" value="{fraction:.3f}"></progress>'
    return f'<div class="{kind}" role="status">{html.escape(text)}{bar}</div>'


def _theme() -> gr.themes.Default:
    return gr.themes.Default(primary_hue="indigo", font=FONTS, font_mono=MONO)

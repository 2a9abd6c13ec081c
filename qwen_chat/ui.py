"""The chat page: a gr.ChatInterface with an event wiring of its own.

The chat lives in the browser. What starts an answer puts the question into the chat there and then
(page.js); one event carries the chat to the server, and the answer comes back through it.
"""

import asyncio
import html
import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # read while gradio is imported

import gradio as gr  # noqa: E402
from gradio.utils import cancel_tasks  # noqa: E402

from . import __version__, texts  # noqa: E402

log = logging.getLogger(__name__)

HERE = Path(__file__).parent
UPDATE_SECONDS = 0.05  # between two updates of a growing answer
LONG_CHAT = 40  # messages; beyond them the updates cost twice as much, and come half as often
STATUS_SECONDS = 0.25  # between two looks at what an answer waits for
IDLE_SECONDS = 0.02  # between two looks into Gradio's queue; its own 0.001 keeps a core busy
MANY = 200  # more open pages than one machine serves: the engine's queue is the one that counts

FONTS = ["system-ui", "-apple-system", "Segoe UI", "PingFang SC", "Microsoft YaHei", "Noto Sans CJK SC", "Noto Sans SC", "sans-serif"]
MONO = ["ui-monospace", "Consolas", "Menlo", "DejaVu Sans Mono", "Noto Sans Mono CJK SC", "monospace"]
LATEX = [
    {"left": "$$", "right": "$$", "display": True},
    {"left": "\\[", "right": "\\]", "display": True},
    {"left": "\\(", "right": "\\)", "display": False},
    {"left": "$", "right": "$", "display": False},
]


def answer(text: str, figures: str = "") -> dict:
    """A message of the assistant; `figures` are shown under it and are not part of it."""
    return _message("assistant", text, {"log": figures})


def status(text: str) -> dict:
    """What is shown until there is an answer. It goes away by itself."""
    return _message("assistant", text, {"id": "status"})


def notice(text: str) -> dict:
    """What is shown where no answer could be given. The model sees neither it nor the message it stands below."""
    return _message("assistant", text, {"id": "notice"})


def _message(role: str, text: str, metadata: dict | None = None) -> dict:
    # The text in a part of its own: a bare string would lose its indentation on the way.
    return {"role": role, "content": [{"type": "text", "text": text}], "metadata": metadata}


def turns(chat: list[dict]) -> list[dict]:
    """What of the chat the model is to read: roles and plain texts, without statuses, notices and what those refused."""
    read = []
    for message in chat:
        kind = (message.get("metadata") or {}).get("id")
        if kind == "notice" and read and read[-1]["role"] == "user":
            read.pop()
        if kind not in ("status", "notice"):
            read.append({"role": message["role"], "content": _text(message)})
    return read


def _text(message: dict) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


async def settling(engine) -> AsyncIterator:
    """The engine's states until it is ready or has failed."""
    while (state := engine.state).phase not in ("ready", "failed", "closed"):
        yield state
        await asyncio.sleep(STATUS_SECONDS)


async def pieces(reply, history: list[dict]) -> AsyncIterator[str]:
    """The text of a reply as it comes, in few enough pieces for a browser; "" now and then while there is none yet."""
    pause = UPDATE_SECONDS * (2 if len(history) > LONG_CHAT else 1)
    source = aiter(reply)
    first = asyncio.ensure_future(anext(source, ""))
    try:
        while not (await asyncio.wait({first}, timeout=STATUS_SECONDS))[0]:
            yield ""
        yield first.result()
    finally:
        first.cancel()
    async for text in source:
        yield text
        await asyncio.sleep(pause)


class ChatPage(gr.ChatInterface):
    """The page around `respond(message, history, request)`, an async generator of the answer so far."""

    def __init__(self, respond: Callable, typed: Callable, engine, config):
        self.engine = engine
        self.settings = config
        self.typed = typed if config.chat.type_ahead else None
        self._answering: set[str] = set()  # sessions; one answer at a time for each
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
            ),
            textbox=gr.Textbox(elem_id="box", show_label=False, scale=7, max_lines=12, autofocus=True, submit_btn=True, stop_btn=True),
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
        """Serves the page. Nothing of it comes from another host."""
        server = self.settings.server
        return super().launch(
            server_name=server.host,
            server_port=server.port,
            share=server.share,
            root_path=server.root_path or None,
            auth=[(login.user, login.password.get_secret_value()) for login in server.auth] or None,
            theme=_theme(),
            css=(HERE / "page.css").read_text(encoding="utf-8"),
            head=f"<script>{(HERE / 'page.js').read_text(encoding='utf-8')}</script>",
            footer_links=[],
            run_history=False,
            enable_monitoring=False,
            ssr_mode=False,
            max_threads=MANY,
            quiet=True,
            **options,
        )

    def words(self, request: gr.Request) -> texts.Words:
        """The words in the language of the one who asks."""
        return texts.preferred(self.settings.server.language, request.headers.get("accept-language"))

    # Layout

    def _render_header(self):
        gr.Markdown(f"# {self.title}", elem_id="title")
        self.banner = gr.HTML(elem_id="banner")

    def _render_footer(self):
        self.about = gr.HTML(elem_id="about")
        self.typing = gr.Button(elem_id="typed", visible="hidden")

    # Events

    def _setup_events(self):
        chat, box = self.chatbot, self.textbox
        begin = {"fn": None, "outputs": [box], "js": "chatPage.begin"}
        asked = {"fn": self._answer, "inputs": [chat]}
        answers = [
            box.submit(None, [box, chat], [box, chat], js="chatPage.send").then(**asked, **self._streamed(chat)),
            chat.retry(None, [chat], [box, chat], js="chatPage.retry").then(**asked, **self._streamed(chat)),
        ]
        chat.example_select(**begin)
        answers.append(chat.example_select(self._answer_example, None, **self._streamed(chat)))
        chat.edit(**begin)
        answers.append(chat.edit(self._answer_edited, [chat], **self._streamed(chat)))
        for event in answers:
            for done in (event.then, event.failure):
                done(None, [chat], [box, chat], js="chatPage.end")
        chat.undo(None, [box, chat], [box, chat], js="chatPage.undo")
        box.stop(None, cancels=answers, api_visibility="private")
        chat.clear(None, js="chatPage.clear", api_visibility="private")
        chat.clear(None, cancels=answers, api_visibility="private")
        chat.change(None, [chat], None, js="chatPage.changed")

        announced = self.load(self._announce, None, [self.banner, self.about, box, chat], **self._quiet())
        if self.typed:
            self.typing.click(self._typed, [box, chat], None, queue=False, trigger_mode="always_last", **self._quiet())
        self._of_a_page = [event["id"] for event in (*answers, announced, self._setup_api())]
        self.unload(self._leave)

    def _streamed(self, chat) -> dict:
        return {"outputs": [chat], "concurrency_limit": None, "show_progress": "minimal", "api_visibility": "private"}

    def _quiet(self) -> dict:
        return {"show_progress": "hidden", "concurrency_limit": None, "api_visibility": "private"}

    def _setup_api(self):
        """The endpoint /chat for gradio_client: it keeps a chat of its own for each session."""
        return self.fake_api_btn.click(
            self._api_wrapper(self.fn, self._answer_client),
            [self.textbox, self.chatbot_state],
            [self.api_response, self.chatbot_state],
            api_name=self.api_name,
            concurrency_limit=None,
            postprocess=False,
        )

    async def _answer(self, chat: list[dict], request: gr.Request):
        """Answers the last message of the chat, and yields the chat as it grows."""
        session = request.session_hash
        if not chat or chat[-1]["role"] != "user" or session in self._answering:
            yield gr.skip()
            return
        self._answering.add(session)
        try:
            async with aclosing(self.fn(_text(chat[-1]), turns(chat[:-1]), request)) as replies:
                async for reply in replies:
                    yield chat + _messages(reply)
        finally:
            self._answering.discard(session)

    async def _answer_example(self, example: gr.SelectData, request: gr.Request):
        chat = [_message("user", example.value["text"])]
        yield chat
        async with aclosing(self._answer(chat, request)) as chats:
            async for chat in chats:
                yield chat

    async def _answer_edited(self, chat: list[dict], edit: gr.EditData, request: gr.Request):
        chat = chat[: edit.index] + [_message("user", edit.value)]
        yield chat
        async with aclosing(self._answer(chat, request)) as chats:
            async for chat in chats:
                yield chat

    async def _answer_client(self, message: str, chat: list[dict], request: gr.Request):
        chat = [*chat, _message("user", message)]
        async with aclosing(self.fn(message, turns(chat[:-1]), request)) as replies:
            async for reply in replies:
                messages = _messages(reply)
                yield "\n\n".join(map(_text, messages)), chat + messages

    async def _announce(self, request: gr.Request):
        """Fills in the page's words, and says above the chat what the model is doing until it is ready."""
        words, engine = self.words(request), self.engine
        message = words("placeholder")
        labels = gr.update(label=message, placeholder=message), gr.update(placeholder=words("hello"))
        async for state in settling(engine):
            yield _banner("loading", words.state(state), state.fraction), "", *labels
            labels = gr.skip(), gr.skip()
        if engine.state.phase != "ready":
            yield _banner("failed", str(engine.error or words("closed"))), "", *labels
            return
        name, reason = engine.info.name, engine.info.fallback
        banner = _banner("fallback", words("fallback", model=name, reason=reason)) if reason else ""
        profile = self.settings.in_force.name if self.settings.in_force else None
        yield banner, html.escape(words.about(__version__, name, profile)), *labels

    def _typed(self, text: str, chat: list[dict], request: gr.Request):
        """What is being typed may be computed ahead; it is not logged, not kept and not waited for."""
        try:
            self.typed(text, turns(chat), request)
        except Exception:
            log.debug("nothing was computed ahead")

    async def _leave(self, request: gr.Request):
        """A closed page stops its answer, and what was computed ahead for it."""
        self.engine.forget(request.session_hash)
        await cancel_tasks({f"{request.session_hash}_{event}" for event in self._of_a_page})


def _messages(reply: str | dict | list) -> list[dict]:
    replies = reply if isinstance(reply, list) else [reply]
    return [answer(message) if isinstance(message, str) else message for message in replies]


def _banner(kind: str, text: str, fraction: float | None = None) -> str:
    bar = "" if fraction is None else f'<progress max="1" value="{fraction:.3f}"></progress>'
    return f'<div class="{kind}" role="status">{html.escape(text)}{bar}</div>'


def _theme() -> gr.themes.Default:
    return gr.themes.Default(primary_hue="indigo", font=FONTS, font_mono=MONO)

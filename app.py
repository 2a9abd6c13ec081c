"""The program on one page: settings -> engine -> respond() -> chat page -> web server."""

import asyncio
import logging
import signal
import sys
from contextlib import aclosing
from functools import partial

from qwen_chat import folders, interrupt, streams

SIGNALS = *interrupt.SIGNALS, *([signal.SIGQUIT] if hasattr(signal, "SIGQUIT") else [])
if __name__ == "__main__":  # until main() and after; process 1 of a container has no default for them
    interrupt.end_at_once(SIGNALS, 0, "app: ended by {name} while starting or closing\n")
    streams.make_safe()
    if refusal := folders.make_sure():
        print(refusal, file=sys.stderr)
        sys.exit(2)

from qwen_chat import weights
from qwen_chat.address import AddressError, url, why_not
from qwen_chat.condense import Condenser, patiently
from qwen_chat.config import load_or_exit
from qwen_chat.conversation import Conversation, SystemPromptTooLong, TooLong
from qwen_chat.cpu_code import CpuCodeError
from qwen_chat.engine import Busy, Engine, EngineError
from qwen_chat.hardware import surroundings
from qwen_chat.memory import NotEnoughMemory
from qwen_chat.model import ModelError
from qwen_chat.sampling import Sampling

# How the program ends: 0 when it is told to, 1 when the engine breaks, and these, of which the first that fits counts.
# Faults of config.yaml are a 2 as well. Only after a 3 another start may find what this one did not.
STATUSES = {2: (NotEnoughMemory, SystemPromptTooLong), 4: (weights.UnusableWeights, ModelError), 3: weights.WeightsError, 5: CpuCodeError}

config = load_or_exit()
engine = Engine(config.runtime, partial(weights.find, config.model), config.server.queue_size, lambda: conversation.opening())
conversation = Conversation(engine, config)
condenser = Condenser(engine, conversation, config)

if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for name in ("app", "qwen_chat", "llama.cpp"):  # others, at debug, would log addresses and what people write
        logging.getLogger(name).setLevel(config.server.log_level.upper())
    if config.in_force:
        logging.getLogger("app").info("%s", config.in_force)
    if refusal := why_not(config.server.host, config.server.port):
        print(refusal, file=sys.stderr)
        sys.exit(2)
    engine.start()  # the model loads while the page's library is imported

from qwen_chat import api, ui  # noqa: E402  # before gradio, whose import it prepares

import gradio as gr  # noqa: E402

log = logging.getLogger("app")


async def respond(message: str, history: list[dict], settings, request: gr.Request, begun: str = ""):
    """Streams the answer to `message`, or the rest of one that has `begun`, and at its end the figures; whatever
    fails becomes a message. `settings` are config.yaml's with what this tab sets otherwise."""
    words = demo.words(request)
    reply, answer = None, begun
    try:
        async for state in ui.settling(engine):
            yield ui.status(words.state(state))
        await engine.wait_ready()
        messages, session = [*history, {"role": "user", "content": message}], request.session_hash
        client = ui.client_of(request)
        talk, short = conversation.under(settings), condenser.under(settings)
        if talk.longest() < 1:
            raise EngineError(words("system_too_long"))
        fitted = short.on(messages, session, client)
        async with aclosing(fitted.parts()) as parts:
            async for part in parts:
                yield ui.status(words("condensing", number=part.number, count=part.count))
        messages = fitted.messages
        prompt = await asyncio.to_thread(talk.prompt, messages, begun=begun, client=client)
        ask = partial(
            engine.stream, prompt.tokens, Sampling.from_config(settings), prompt.max_tokens, prompt.stop, owner=session,
            client=client, trimmed=prompt.trimmed, follow=prompt.follow, told=not fitted.waited,
            on_end=lambda reply: short.after(reply, prompt, messages, session),
        )
        reply = await patiently(ask) if fitted.waited else ask()
        async for text in ui.pieces(reply, history):
            answer += text
            if answer:
                yield answer
            elif waiting := words.waiting(reply):
                yield ui.status(waiting)
        more = words("continue") if reply.stats.finish_reason == "length" else ""
        figures = words.figures(reply.stats, engine.info.n_ctx, fitted.result)
        yield ui.answer(answer, figures, more, prompt.dropped, words.out_of_view(prompt))
        if not answer:
            yield ui.notice(words("empty"))
    except Exception as error:
        notice = ui.notice(_apology(error, words, begun))
        yield [ui.answer(answer), notice] if answer else notice
    finally:
        if reply:
            reply.cancel()  # Stop, a closed page, or nothing left to cancel


def _apology(error: Exception, words, begun: str) -> str:
    """What is said in place of an answer, or of its rest."""
    if isinstance(error, Busy):
        return words("busy_own" if error.own_share else "busy")
    if isinstance(error, TooLong) and begun:
        return words("no_room")
    if isinstance(error, TooLong):
        return words("too_long", size=f"{error.size:,}", limit=f"{error.limit:,}", excess=f"{error.size - error.limit:,}")
    if isinstance(error, EngineError):
        return words("failed", reason=error)
    log.error("an answer failed", exc_info=error)
    return words("broken")


def typed(message: str, history: list[dict], settings, request: gr.Request) -> None:
    """Computes ahead what is being typed, so that only its last few tokens are left when it is sent."""
    if engine.state.phase == "ready" and conversation.size(message) < engine.n_ctx:
        client, messages = ui.client_of(request), [*history, {"role": "user", "content": message}]
        prompt = conversation.under(settings).prompt(condenser.under(settings).shown(messages, client), client=client)
        engine.warm(request.session_hash, prompt.tokens, prompt.trimmed, client)


demo = ui.ChatPage(respond, typed, condenser.measure, engine, config)


def main() -> int:
    """Serves the page until a signal or a failed engine ends it; returns the exit status."""
    engine.start()
    if not engine.ended.is_set():
        try:
            demo.launch(app_kwargs=api.beside_the_page(engine, conversation, config), prevent_thread_lock=True)
        except AddressError as error:  # free a moment ago
            print(error, file=sys.stderr)
            engine.close()
            return 2
    with interrupt.Signals(SIGNALS) as signals:
        if demo.is_running:
            inside = "container" in surroundings()
            outside = " in the container; outside, the port it is published at counts" if inside else ""
            log.info("the page is at %s%s", url(config.server.host, config.server.port), outside)
        while not ((number := signals.wait(0.2)) or engine.ended.is_set()):
            pass
        if number:
            log.info("ended by %s", signal.Signals(number).name)
        if engine.error:
            print(engine.error, file=sys.stderr)
            signals.wait(2 if demo.is_running else 0)  # so that open pages can say it
    engine.close()  # first, so that answers on their way end
    demo.close(verbose=False)
    return next((status for status, errors in STATUSES.items() if isinstance(engine.error, errors)), 1) if engine.error else 0


if __name__ == "__main__":
    sys.exit(main())

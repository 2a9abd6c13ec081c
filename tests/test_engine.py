"""The engine on a real model."""

import asyncio
import logging
import random
import threading
import time
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from qwen_chat import weights
from qwen_chat.config import Config, Runtime
from qwen_chat.engine import Busy, Engine, EngineError
from qwen_chat.model import NO_CELLS
from qwen_chat.sampling import Sampling

GREEDY = Sampling(temperature=0, repeat_penalty=1)
REPEATABLE = Sampling(temperature=0, repeat_penalty=1, seed=1)  # computed the same way each time, to the last bit
LIMIT = 60  # seconds after which something that hangs fails the test


def user(text):
    return {"role": "user", "content": text}


def ask(bot, messages, sampling=GREEDY, max_tokens=24, owner="me", **options):
    """Starts an answer; `messages` may be one question."""
    messages = [user(messages)] if isinstance(messages, str) else messages
    prompt = bot.conversation.prompt(messages, max_tokens, client=owner)
    return bot.engine.stream(
        prompt.tokens, sampling, prompt.max_tokens, owner=owner, client=owner, trimmed=prompt.trimmed,
        follow=prompt.follow, on_end=lambda reply: bot.conversation.remember(reply, prompt), **options,
    )


def until(condition, what="it"):
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, f"{what} did not come about"
        time.sleep(0.005)


def quiet(bot):
    """Waits until the engine has nothing to do and checks that nothing is left over."""
    engine = bot.engine
    until(lambda: engine.idle, "quiet")
    for sequence in [*engine.cache.slots, engine.cache.opening]:
        first, last = engine.model.seq_range(sequence.id)
        assert not sequence.busy or sequence.pinned
        assert (first, last) == ((0, len(sequence) - 1) if len(sequence) else (-1, -1))


def test_an_answer_comes_in_pieces_with_its_figures(bot):
    reply = ask(bot, "Tell me about the sea.")
    pieces = list(reply)
    stats = reply.stats
    assert len(pieces) > 1 and "".join(pieces) == reply.text
    assert stats.answer_tokens == len(reply.tokens) <= 24
    assert stats.prompt_tokens > stats.cached_tokens > 0
    assert stats.first_token_ms > 0 and stats.tokens_per_second > 0 and stats.finish_reason in ("stop", "length")


def test_it_can_be_read_by_an_event_loop_too(bot):
    async def read():
        return [text async for text in ask(bot, "Tell me about the sea.", REPEATABLE)]

    quiet(bot)
    text = "".join(asyncio.run(read()))
    quiet(bot)
    assert text == "".join(ask(bot, "Tell me about the sea.", REPEATABLE))


def test_a_follow_up_reuses_the_whole_history(bot):
    messages = []
    for question in ("Tell me about the sea.", "And the sky?", "And fire?", "And stone?"):
        messages.append(user(question))
        reply = ask(bot, messages)
        messages.append({"role": "assistant", "content": "".join(reply)})
        if len(messages) > 2:
            assert reply.stats.cached_tokens >= history
        history = reply.stats.prompt_tokens + reply.stats.answer_tokens - 1
        quiet(bot)


def test_what_surely_follows_an_answer_is_computed_ahead(bot):
    messages = [user("Name a colour of the rainbow, one word.")]
    reply = ask(bot, messages)
    messages += [{"role": "assistant", "content": "".join(reply)}, user("Another.")]
    quiet(bot)
    prompt = bot.conversation.prompt(messages)
    again = ask(bot, messages)
    "".join(again)
    own = len(bot.engine.model.tokenize("Another.")) + len(bot.conversation.prompt([user("x")]).tokens) - len(bot.conversation.opening()) - 1
    assert len(prompt.tokens) - again.stats.cached_tokens <= own


def test_a_kept_cache_answers_as_computing_all_anew_does(bot):
    messages = []
    for question in ("List three animals.", "Which is the largest?", "Where does it live?"):
        messages.append(user(question))
        prompt = bot.conversation.prompt(messages, client="me").tokens
        reply = ask(bot, messages)
        text = "".join(reply)
        assert_greedy(bot, prompt, reply.tokens)
        "".join(ask(bot, messages, max_tokens=1))  # computes again what the check has cleared
        messages.append({"role": "assistant", "content": text})


def test_a_seed_gives_the_same_text_again_whatever_is_cached(make_bot):
    single = make_bot(runtime={"n_ctx": 512, "parallel": 1})
    history = [user("Hi"), {"role": "assistant", "content": "Hello! " * 20}, user("Invent a name.")]

    def texts(seed):
        settings = Sampling(temperature=1.5, seed=seed)
        first = "".join(ask(single, history, settings))
        "".join(ask(single, history, Sampling()))
        return first, "".join(ask(single, history, settings))

    results = [texts(seed) for seed in (1, 2, 3)]
    assert all(first == again for first, again in results)
    assert len(set(results)) > 1


def test_the_repeat_penalty_is_the_same_with_the_shortened_candidate_list(bot, monkeypatch):
    from qwen_chat import sampling

    settings = Sampling(temperature=1.0, top_k=20, repeat_penalty=1.5, seed=7)
    short = "".join(ask(bot, "Sing a song.", settings, 40))
    whole = lambda each, n_vocab: [sampling.llama_cpp.llama_sampler_init_penalties(n_vocab, each.repeat_last_n, each.repeat_penalty, 0.0, 0.0)]
    monkeypatch.setattr(sampling, "_penalties", whole)
    assert "".join(ask(bot, "Sing a song.", settings, 40)) == short


def test_max_tokens_and_stop_strings_end_an_answer(bot):
    quiet(bot)
    whole = ask(bot, "Count from one to twenty.", REPEATABLE, max_tokens=40)
    text = "".join(whole)
    quiet(bot)
    assert whole.stats.finish_reason == "length" and whole.stats.answer_tokens == 40
    stop = text[len(text) // 2 :][:6]
    stopped = ask(bot, "Count from one to twenty.", REPEATABLE, max_tokens=40, stop=[stop])
    assert "".join(stopped) == text[: text.index(stop)] and stopped.stats.finish_reason == "stop"


def test_the_window_ends_an_answer(make_bot):
    small = make_bot(runtime={"n_ctx": 256, "parallel": 1}, generation={"max_tokens": 128})
    prompt = small.conversation.prompt([user("word " * 100)])
    reply = small.engine.stream(prompt.tokens, Sampling(temperature=2, top_p=1, top_k=0), 10_000)
    "".join(reply)
    assert reply.stats.finish_reason in ("length", "stop")
    assert reply.stats.prompt_tokens + reply.stats.answer_tokens <= 256
    quiet(small)


def test_cancelling_ends_an_answer_and_frees_its_sequence(bot):
    reply = ask(bot, "Write a long story.", max_tokens=400 - 100)
    until(lambda: reply.text)
    reply.cancel()
    until(lambda: reply.ended)
    assert reply.stats.finish_reason == "cancelled"
    quiet(bot)


def test_leaving_the_loop_cancels(bot):
    reply = ask(bot, "Write a long story.", max_tokens=300)
    for _ in reply:
        break
    until(lambda: reply.ended)
    assert reply.stats.finish_reason == "cancelled"


def assert_greedy(bot, prompt, tokens):
    """Every token is the likeliest, or as good as, where all before it is computed anew by itself. How steps are
    batched shows in the last bits, so that of two equals either may be taken."""
    quiet(bot)
    model, slot = bot.engine.model, bot.engine.cache.slots[0]
    bot.engine.cache._clear(slot)
    part, position = list(prompt), 0
    for token in tokens:
        assert model.decode([(slot.id, position, part, True)]) == 0
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(model._context, len(part) - 1), (model.n_vocab,))
        assert logits.max() - logits[token] < 0.5
        part, position = [token], position + len(part)
    model.seq_rm(slot.id, 0, -1)


def test_a_prompt_being_read_is_dropped_at_once_and_others_are_not_harmed(bot):
    question = [user("Count from one to ten.")]
    steady = ask(bot, question, max_tokens=30, owner="steady")
    for number in range(6):
        long = ask(bot, f"{number} " + "many words " * 150, owner="long")
        until(lambda: long.read or long.ended)
        long.cancel()
        until(lambda: long.ended)
        assert long.stats.finish_reason == "cancelled" and long.stats.answer_tokens == 0
    "".join(steady)
    assert steady.stats.finish_reason in ("stop", "length")
    assert_greedy(bot, bot.conversation.prompt(question).tokens, steady.tokens)


def test_the_abort_flag_ends_a_decode_that_is_going_on(make_bot):
    alone = make_bot(runtime={"n_ctx": 512, "parallel": 1, "n_batch": 512, "n_ubatch": 512})
    model = alone.engine.model
    tokens = model.tokenize("word " * 400)
    statuses = []
    thread = threading.Thread(target=lambda: statuses.append(model.decode([(0, 0, tokens, True)])))
    thread.start()
    while thread.is_alive():
        model.abort()
        time.sleep(0.001)
    assert statuses == [2]
    model.seq_rm(0, 0, -1)


def test_two_answers_flow_together_and_a_third_waits_its_turn(bot):
    first, second = (ask(bot, f"Count to {n}.", max_tokens=48, owner=n) for n in (20, 30))
    until(lambda: bot.engine.running == 2)
    third = ask(bot, "Count to 40.", max_tokens=8, owner=3)
    fourth = ask(bot, "Count to 50.", max_tokens=8, owner=4)
    assert third.place >= fourth.place - 1 and fourth.place <= 2
    texts = ["".join(reply) for reply in (first, second, third, fourth)]
    assert all(texts) and third.place == fourth.place == 0
    quiet(bot)


def test_more_than_may_wait_are_told_that_it_is_busy(make_bot):
    single = make_bot(queue_size=1, runtime={"n_ctx": 512, "parallel": 1})
    running = ask(single, "Write a long story.", max_tokens=200)
    waiting = ask(single, "Hello.", max_tokens=4)
    with pytest.raises(Busy, match=r"running or waiting \(2\)"):
        ask(single, "Hello.")
    running.cancel()
    assert "".join(waiting)
    assert "".join(ask(single, "Hello.", max_tokens=4))


def test_a_waiting_request_can_be_cancelled(make_bot):
    single = make_bot(queue_size=4, runtime={"n_ctx": 512, "parallel": 1})
    running = ask(single, "Write a long story.", max_tokens=200)
    waiting = ask(single, "Hello.")
    waiting.cancel()
    until(lambda: waiting.ended)
    assert waiting.stats.finish_reason == "cancelled" and not running.ended
    running.cancel()


def test_many_conversations_taking_turns_are_parked_and_come_back(bot):
    talks = {owner: [user(f"Talk about the number {owner}.")] for owner in range(5)}
    for _ in range(3):
        for owner, messages in talks.items():
            reply = ask(bot, messages, owner=owner, max_tokens=12)
            text = "".join(reply)
            if len(messages) > 1:
                assert reply.stats.cached_tokens > len(bot.conversation.prompt(messages[:-1]).tokens) - 8
            messages += [{"role": "assistant", "content": text}, user("Go on.")]
    assert 0 < bot.engine.cache.parked_bytes <= 64 * 2**20


def test_dropped_turns_are_not_computed_again(bot):
    messages = []
    for number in range(40):  # more than enough, however short the answers are
        messages.append(user(f"Say something about topic {number}, please, and be brief."))
        prompt = bot.conversation.prompt(messages, 24)
        reply = ask(bot, messages)
        messages.append({"role": "assistant", "content": "".join(reply)})
        if number > 0:
            assert reply.stats.prompt_tokens - reply.stats.cached_tokens < 40
        quiet(bot)
        if prompt.dropped >= 3:
            break
    else:
        pytest.fail("nothing had to be dropped")


def test_moved_keys_are_what_the_rotation_says(bot):
    """A cached run moved down gives, to rounding, the logits of the same keys computed at that place: with one
    token before it, whose weight hardly changes, against computing all anew."""
    engine = bot.engine
    quiet(bot)
    model, seq = engine.model, engine.cache.slots[0].id
    engine.cache._clear(engine.cache.slots[0])
    tokens = model.tokenize("The quick brown fox jumps over the lazy dog and runs away into the dark forest")

    def logits():
        pointer = llama_cpp.llama_get_logits_ith(model._context, 0)
        return np.ctypeslib.as_array(pointer, (model.n_vocab,)).copy()

    def after(first_position):
        model.decode([(seq, first_position, tokens[:-1], False)])
        if first_position:
            model.seq_add(seq, first_position, -1, -first_position)
        model.decode([(seq, len(tokens) - 1, tokens[-1:], True)])
        result = logits()
        model.seq_rm(seq, 0, -1)
        return result

    plain, moved = after(0), after(100)
    assert np.argmax(plain) == np.argmax(moved)
    assert np.corrcoef(plain, moved)[0, 1] > 0.999


def test_what_is_typed_ahead_is_computed_before_it_is_sent(bot):
    text = "Please explain in simple words why the sky is blue in the day and red in the evening."
    quiet(bot)
    for end in (20, 45, len(text)):
        bot.engine.warm("typist", bot.conversation.prompt([user(text[:end])]).tokens)
    until(lambda: not bot.engine._warm)
    reply = ask(bot, text, owner="typist", max_tokens=4)
    "".join(reply)
    assert reply.stats.prompt_tokens - reply.stats.cached_tokens <= 6


def test_typing_ahead_takes_nothing_from_answers_and_is_dropped_when_the_message_is_sent(bot):
    quiet(bot)
    running = ask(bot, "Count from one to twenty.", max_tokens=40)
    until(lambda: running.text)
    bot.engine.warm("typist", bot.conversation.prompt([user("some text " * 30)]).tokens)
    assert "typist" in bot.engine._warm
    reply = ask(bot, "some text " * 30, owner="typist", max_tokens=4)
    assert "typist" not in bot.engine._warm
    assert "".join(reply) is not None
    quiet(bot)


def test_a_stale_text_typed_ahead_never_shortens_a_conversation(bot):
    messages = [user("Hi")]
    reply = ask(bot, messages)
    messages.append({"role": "assistant", "content": "".join(reply)})
    quiet(bot)
    held = [len(slot) for slot in bot.engine.cache.slots]
    bot.engine.warm("me", bot.conversation.prompt([user("H")]).tokens[:-4])
    quiet(bot)
    assert max(len(slot) for slot in bot.engine.cache.slots) >= max(held)


def test_an_error_in_one_request_ends_that_request_alone(bot, monkeypatch):
    steady = ask(bot, "Count from one to ten.", max_tokens=30, owner="steady")
    until(lambda: steady.text)
    with monkeypatch.context() as patch:
        patch.setattr("qwen_chat.model.Sampler", lambda *_: 1 / 0)
        failing = ask(bot, "Hello.", owner="failing")
        with pytest.raises(EngineError, match="division by zero"):
            "".join(failing)
    assert failing.stats.finish_reason == "error"
    assert "".join(steady) is not None and steady.stats.finish_reason in ("stop", "length")
    quiet(bot)


@pytest.mark.parametrize("prompt, words", [([], "empty prompt"), ([1] * 600, "600 tokens, the window holds 512")])
def test_a_prompt_that_cannot_be_answered_is_refused(bot, prompt, words):
    with pytest.raises(EngineError, match=words):
        "".join(bot.engine.stream(prompt))


def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on(bot, monkeypatch):
    quiet(bot)
    decode, failures = bot.engine.model.decode, iter([-3])
    monkeypatch.setattr(bot.engine.model, "decode", lambda parts: next(failures, None) or decode(parts))
    with pytest.raises(EngineError, match="status -3"):
        "".join(ask(bot, "Hello."))
    assert "".join(ask(bot, "Hello.", max_tokens=4))
    quiet(bot)


def test_when_cells_run_out_idle_conversations_are_parked_then_requests_wait(bot, monkeypatch):
    quiet(bot)
    "".join(ask(bot, "Remember me.", owner="idle"))
    quiet(bot)
    decode = bot.engine.model.decode
    monkeypatch.setattr(bot.engine.model, "decode", lambda parts: NO_CELLS if len(parts) > 1 else decode(parts))
    replies = [ask(bot, f"Count to {n}.", max_tokens=12, owner=n) for n in (5, 6)]
    assert all("".join(reply) for reply in replies)
    assert {reply.stats.finish_reason for reply in replies} <= {"stop", "length"}
    quiet(bot)


def test_a_dead_decode_thread_tells_every_waiter_and_is_seen_from_outside(make_bot, monkeypatch):
    broken = make_bot(runtime={"n_ctx": 512, "parallel": 1})
    running = ask(broken, "Write a long story.", max_tokens=200)
    waiting = ask(broken, "Hello.")
    until(lambda: running.text)
    monkeypatch.setattr(broken.engine.model, "decode", lambda parts: 1 / 0)
    for reply in (running, waiting):
        with pytest.raises(EngineError, match="the engine has ended: division by zero"):
            list(reply)
    assert broken.engine.ended.wait(LIMIT) and broken.engine.state.phase == "failed"
    with pytest.raises(EngineError, match="has ended"):
        broken.engine.stream([1, 2, 3])


def test_closing_ends_answers_and_the_thread(make_bot):
    closing = make_bot(runtime={"n_ctx": 512, "parallel": 1})
    reply = ask(closing, "Write a long story.", max_tokens=200)
    until(lambda: reply.text)
    closing.engine.close()
    assert closing.engine.ended.is_set() and reply.ended and reply.stats.finish_reason == "cancelled"
    assert closing.engine.state.phase == "closed"


def test_a_question_asked_while_the_model_loads_waits_and_is_answered(make_bot):
    bot = make_bot(ready=False, runtime={"n_ctx": 512})
    reply = bot.engine.stream([1, 2, 3, 4], GREEDY, 4)
    assert "".join(reply) is not None and reply.stats.answer_tokens > 0


def engine_on(path: Path, **runtime):
    found = weights.Weights(path, path.stem, None)
    engine = Engine(Runtime(**runtime), lambda report: found)
    engine.start()
    engine.ended.wait(LIMIT)
    return engine


def test_files_that_are_no_chat_model_end_the_engine_with_a_clear_sentence(tmp_path, small_model):
    text = tmp_path / "text.gguf"
    text.write_text("hello")
    assert str(engine_on(text).error) == "text.gguf: not a GGUF file"
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(small_model.read_bytes()[:5_000_000])
    assert "cut.gguf: llama.cpp cannot load this file (" in str(engine_on(cut).error)
    bare = tmp_path / "bare.gguf"
    bare.write_bytes(small_model.read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.chat_nothing!"))
    assert "bare.gguf: the file has no chat template" in str(engine_on(bare).error)
    assert "Traceback" not in str(engine_on(bare).error)


def test_a_window_above_the_models_own_is_lowered_with_a_warning(make_bot, caplog):
    with caplog.at_level(logging.WARNING):
        bot = make_bot(runtime={"n_ctx": 100_000, "parallel": 1})
    trained = bot.engine.model.n_ctx_train
    assert bot.engine.n_ctx == bot.engine.info.n_ctx == trained < 100_000
    assert any(f"runtime.n_ctx is 100000, but" in record.getMessage() for record in caplog.records)


def test_what_people_write_is_never_logged(bot, caplog):
    with caplog.at_level(logging.DEBUG):
        text = "".join(ask(bot, "The secret word is xylophone. Repeat it."))
        bot.engine.warm("me", bot.conversation.prompt([user("xylophone again")]).tokens)
        quiet(bot)
    assert any("answer: " in record.getMessage() and " first token " in record.getMessage() for record in caplog.records)
    assert "xylophone" not in caplog.text and (not text.strip() or text not in caplog.text)


@pytest.mark.parametrize("runtime", [{"kv_type": "q8_0"}, {"flash_attn": False}, {"use_mmap": False}, {"n_batch": 4, "n_ubatch": 4}, {"parallel": 8, "n_batch": 4, "n_ubatch": 4}, {"n_threads": 1, "n_threads_batch": 2}])
def test_every_runtime_setting_answers(make_bot, runtime):
    bot = make_bot(runtime={"n_ctx": 512, "parallel": 1, **runtime})
    messages = [user("List three animals.")]
    first = "".join(ask(bot, messages, max_tokens=8))
    reply = ask(bot, [*messages, {"role": "assistant", "content": first}, user("More.")], max_tokens=4)
    assert first and "".join(reply) is not None and reply.stats.cached_tokens > 20
    quiet(bot)
    bot.engine.close()

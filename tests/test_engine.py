"""The engine on a real model."""

import asyncio
import logging
import threading
import time
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

from qwen_chat import weights
from qwen_chat.config import Runtime
from qwen_chat.engine import MOST_WARM, Busy, Engine, EngineError, Reply
from qwen_chat.kvcache import token_array
from qwen_chat.model import ABORTED, NO_CELLS
from qwen_chat.sampling import Sampling

GREEDY = Sampling(temperature=0, repeat_penalty=1)
REPEATABLE = Sampling(temperature=0, repeat_penalty=1, seed=1)  # computed the same way each time, to the last bit
LIMIT = 60  # seconds after which something that hangs fails the test


def user(text):
    return {"role": "user", "content": text}


def ask(bot, messages, sampling=GREEDY, max_tokens=24, owner="me", client=None, **options):
    """Starts an answer, for `owner` where no other client is named; `messages` may be one question."""
    messages, client = [user(messages)] if isinstance(messages, str) else messages, owner if client is None else client
    prompt = bot.conversation.prompt(messages, max_tokens, client=client)
    return bot.engine.stream(
        prompt.tokens, sampling, prompt.max_tokens, owner=owner, client=client, trimmed=prompt.trimmed,
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
    assert statuses == [ABORTED]
    model.forget_abort()
    model.seq_rm(0, 0, -1)


def spy(bot, monkeypatch, before=lambda parts: None):
    """Records the steps that are computed, each with its status; `before` is called ahead of each."""
    steps, decode = [], bot.engine.model.decode

    def watched(parts):
        before(parts)
        status = decode(parts)
        steps.append((parts, status))
        return status

    monkeypatch.setattr(bot.engine.model, "decode", watched)
    return steps


def test_a_prompt_that_is_cancelled_when_its_step_has_just_begun_is_not_computed(bot, monkeypatch):
    quiet(bot)
    asked = threading.Event()
    steps = spy(bot, monkeypatch, lambda parts: asked.wait(LIMIT) and reply.cancel())
    reply = ask(bot, "many words " * 60, owner="gone")
    asked.set()
    until(lambda: reply.ended)
    assert reply.stats.finish_reason == "cancelled"
    quiet(bot)
    assert [status for _, status in steps] == [ABORTED]
    assert "".join(ask(bot, "Hello.", max_tokens=4)) and steps[-1][1] == 0  # no abort is left over


def test_cancelling_an_answer_that_flows_aborts_no_step_of_others(bot, monkeypatch):
    quiet(bot)
    first = ask(bot, "Count to 20.", max_tokens=40, owner=1)
    until(lambda: first.text)
    steps = spy(bot, monkeypatch, lambda parts: first.cancel())
    second = ask(bot, "Count to 30.", max_tokens=4, owner=2)
    assert "".join(second)
    quiet(bot)
    assert first.stats.finish_reason == "cancelled" and {status for _, status in steps} == {0}


def test_while_answers_flow_prompts_are_read_in_small_chunks_and_nobody_is_passed_over(make_bot, monkeypatch):
    bot = make_bot(runtime={"n_ctx": 256, "parallel": 7})
    engine, asked = bot.engine, threading.Event()
    monkeypatch.setattr(engine, "_chunk", lambda seconds: 4)
    steps = spy(bot, monkeypatch, lambda parts: asked.wait(LIMIT) if len(parts) == 1 and flowing.text else None)
    flowing = ask(bot, "Count from one to a hundred.", max_tokens=150, owner="flowing")
    until(lambda: flowing.text)
    readers = [ask(bot, f"{number} " + "word " * (10 + 2 * number), max_tokens=1, owner=number) for number in range(6)]
    asked.set()
    for reply in readers:
        "".join(reply)
    flowing.cancel()
    mixed = [[(seq, len(tokens)) for seq, _, tokens, _ in parts] for parts, _ in steps if len(parts) > 1]
    assert mixed and all(sum(count for _, count in parts[1:]) <= 4 for parts in mixed)
    crowded = [{seq for seq, _ in parts[1:]} for parts in mixed[:6]]
    assert all(len(one | next_one) == 6 for one, next_one in zip(crowded, crowded[1:]))
    quiet(bot)


def test_an_answer_alone_is_read_in_whole_batches(bot, monkeypatch):
    quiet(bot)
    monkeypatch.setattr(bot.engine, "_chunk", lambda seconds: 4)
    steps = spy(bot, monkeypatch)
    reply = ask(bot, "some words " * 60, max_tokens=1, owner="alone")
    "".join(reply)
    missing = reply.stats.prompt_tokens - reply.stats.cached_tokens
    assert len(steps[0][0][0][2]) == min(bot.engine.model.n_batch, missing)


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


def test_the_line_is_shared_between_people_and_busy_says_whose_limit_was_met(make_bot):
    single = make_bot(queue_size=8, runtime={"n_ctx": 512, "parallel": 1})
    ended = []

    def put(client, number=0, most=2):
        reply = single.engine.stream(
            single.conversation.prompt([user(f"{client} {number}")]).tokens, GREEDY, most, client=client,
            on_end=lambda reply: ended.append((client, number)),
        )
        return reply

    first = put("greedy", most=200)
    until(lambda: first.text)
    greedy = [put("greedy", number) for number in range(1, 5)]
    with pytest.raises(Busy, match="your requests") as own:
        put("greedy")
    assert own.value.own_share and single.engine.rejected == 1
    others = [put(name) for name in ("a", "b", "c")]
    assert [reply.place for reply in [*others, *greedy]] == [1, 2, 3, 4, 5, 6, 7]
    put("d")
    with pytest.raises(Busy, match=r"running or waiting \(9\)") as whole:
        put("e")
    assert not whole.value.own_share and single.engine.rejected == 2
    with pytest.raises(Busy):
        single.engine.stream([1, 2, 3], told=False)
    assert single.engine.rejected == 2  # nobody was told
    first.cancel()
    until(lambda: single.engine.idle)
    assert ended == [("greedy", 0), *((name, 0) for name in "abcd"), *(("greedy", number) for number in range(1, 5))]
    assert not single.engine._line._people and not single.engine._open


def test_what_one_person_asked_is_not_found_in_the_cache_by_another(bot):
    quiet(bot)
    prompt = bot.conversation.prompt([user("My name is Rumpelstiltskin, do not tell anybody.")]).tokens
    cached = []
    for client in ("one", "two", "one", "two"):
        reply = bot.engine.stream(prompt, GREEDY, 4, client=client)
        "".join(reply)
        cached.append(reply.stats.cached_tokens)
    assert cached == [len(bot.conversation.opening())] * 2 + [len(prompt) - 1] * 2


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


def plain(bot, text, **options):
    """A request of a program: no conversation of ours goes on from it."""
    prompt = bot.conversation.prompt([user(text)])
    return bot.engine.stream(prompt.tokens, GREEDY, 3, follow=prompt.follow, **options)


def test_a_thousand_answers_to_programs_leave_no_more_ahead_than_there_are_sequences(make_bot, monkeypatch):
    bot = make_bot(queue_size=4, runtime={"n_ctx": 256, "parallel": 2})
    engine, found = bot.engine, []
    engine.on_answer.append(lambda reply: found.append(len(engine._warm)))
    replies = [plain(bot, f"Number {number}.") for number in range(4)]
    for number in range(36):  # so that somebody always waits, and nothing is computed ahead
        "".join(replies.pop(0))
        replies.append(plain(bot, f"Number {number + 4}."))
    for reply in replies:
        "".join(reply)
    assert len(found) == 40 and 0 < max(found) <= 2
    quiet(bot)


def test_what_follows_is_not_computed_where_what_stands_before_is_gone(bot, monkeypatch):
    quiet(bot)
    engine, cache = bot.engine, bot.engine.cache
    holding = threading.Event()
    engine.on_answer.append(lambda reply: holding.wait(LIMIT))
    for owner, parked in ((None, False), (None, True), ("page", True), ("page", False)):
        holding.clear()
        reply = plain(bot, f"Tell me about {owner}, {parked}. " * 4, owner=owner)
        until(lambda: engine._warm)
        slot = max(cache.slots, key=lambda slot: slot.last_used)
        tokens = slot.tokens[:]
        (cache._vacate if parked else cache._clear)(slot)
        steps = spy(bot, monkeypatch)
        holding.set()
        "".join(reply)
        quiet(bot)
        computed = sum(len(chunk) for parts, _ in steps for _, _, chunk, _ in parts)
        assert computed == (0 if not (owner and parked) else computed) and computed < len(tokens) // 2
        assert bool(computed) == bool(owner and parked)
        monkeypatch.undo()
    engine.on_answer.pop()


def test_ahead_of_everybody_no_more_is_kept_than_a_number(bot):
    quiet(bot)
    running = ask(bot, "Count from one to a hundred.", max_tokens=200, owner="busy")
    until(lambda: running.text)
    for number in range(MOST_WARM + 10):
        bot.engine.warm(number, [1, 2, 3])
    assert list(bot.engine._warm) == list(range(10, MOST_WARM + 10))
    running.cancel()
    quiet(bot)


def test_for_a_page_that_was_closed_while_it_was_answered_nothing_is_computed_ahead(bot):
    quiet(bot)
    left = []
    prompt = bot.conversation.prompt([user("Tell me a story.")])

    def ahead(reply):
        bot.engine.warm("page", prompt.tokens)
        left.append("page" in bot.engine._warm)

    reply = bot.engine.stream(prompt.tokens, GREEDY, 200, owner="page", on_end=ahead)
    other = bot.engine.stream(prompt.tokens, GREEDY, 200, owner="another page")
    until(lambda: reply.text and other.text)
    bot.engine.forget("page")
    assert [task.owner_left for task in bot.engine._open.values()] == [True, False]
    reply.cancel()
    until(lambda: reply.ended)
    assert left == [True] and "page" not in bot.engine._warm and not other.stats.finish_reason
    other.cancel()
    quiet(bot)


def test_whom_a_reply_tells_of_its_pieces_changes_under_its_lock_alone(bot):
    """The decode thread looks whether there is a listener and calls it: none may go in between."""
    changed = []

    class Watched(Reply):
        def __setattr__(self, name, value):
            if name == "_on_change" and "_changed" in vars(self) and hasattr(self, "_on_change"):
                changed.append(self._changed._is_owned())
            super().__setattr__(name, value)

    async def read(reply):
        return [text async for text in reply]

    reply = Watched(bot.engine, 3)
    reply.put("some text")
    reply.end()
    assert asyncio.run(read(reply)) == ["some text"] and changed == [True, True]


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


def test_a_prompt_as_long_as_the_window_leaves_no_room_for_an_answer(bot):
    with pytest.raises(EngineError, match=f"the prompt has {bot.engine.n_ctx} tokens, the window holds {bot.engine.n_ctx}"):
        "".join(bot.engine.stream([5] * bot.engine.n_ctx, GREEDY, 4))


def test_after_a_stop_string_nothing_is_computed_ahead(bot, monkeypatch):
    """The next prompt does not have the text that was cut off."""
    quiet(bot)
    ahead = []
    monkeypatch.setattr(bot.engine, "_put_ahead", lambda key, what: ahead.append(key))
    prompt = bot.conversation.prompt([user("Tell me a story.")], client="me")
    for stop, asked in (("e", 0), ("", 1)):
        "".join(bot.engine.stream(prompt.tokens, GREEDY, 12, [stop] if stop else [], owner="me", client="me", follow=prompt.follow))
        quiet(bot)
        assert len(ahead) == asked, stop


@pytest.mark.parametrize("failure", [-3, NO_CELLS])
def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on(bot, monkeypatch, failure):
    quiet(bot)
    decode, failures = bot.engine.model.decode, iter([failure])
    monkeypatch.setattr(bot.engine.model, "decode", lambda parts: next(failures, None) or decode(parts))
    with pytest.raises(EngineError, match=f"status {failure}"):
        "".join(ask(bot, "Hello."))
    assert "".join(ask(bot, "Hello.", max_tokens=4))
    quiet(bot)


def test_the_cells_suffice_when_every_sequence_is_full_however_they_are_scattered(make_bot):
    """So llama.cpp never lacks cells: it fills single holes too, of computed and of restored tokens."""
    bot = make_bot(runtime={"n_ctx": 256, "parallel": 3})
    model, cache, full = bot.engine.model, bot.engine.cache, bot.engine.n_ctx - 1  # an answer ends before its last cell
    quiet(bot)
    words = model.tokenize("word " * 300)[:full]

    def compute(*slots):
        for at in range(0, full, 3):
            assert model.decode([(slot.id, at, words[at : at + 3], False) for slot in slots]) == 0
        for slot in slots:
            slot.tokens = token_array(words)

    compute(*cache.slots)  # a few cells each in turn, beside the opening
    saved = model.save(1)
    for slot in cache.slots[:2]:
        cache._clear(slot)
    assert model.decode([(0, 0, words[: full // 2], False)]) == 0
    assert model.decode([(0, full // 2, words[full // 2 :], False)]) == 0
    assert model.restore(1, saved)
    for slot in cache.slots[:2]:
        slot.tokens = token_array(words)
    assert cache.used_cells == 3 * full + len(cache.opening)
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
    assert any("runtime.n_ctx is 100000, but" in record.getMessage() for record in caplog.records)


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

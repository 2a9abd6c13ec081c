"""Long text: how it is split and framed, and how a small real model condenses it."""

import asyncio
import time
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_chat import condense
from qwen_chat.condense import Condenser, frame, quotes, split
from qwen_chat.config import Config
from qwen_chat.conversation import TooLong
from qwen_chat.engine import Busy
from qwen_chat.performance import Performance
from qwen_chat.sampling import Sampling

LIMIT = 120  # seconds after which something that hangs fails the test
STORY = "\n\n".join(f"Chapter {n}. The ship of captain Number{n} sailed from harbour {n}. " + "The sea was calm and the crew sang old songs. " * 6 for n in range(12))
QUESTION = "Where did the ship of captain Number7 sail from?"


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


def words(text: str) -> int:
    """A stand-in for a tokenizer that is quick: a token for each four letters, for each other character one."""
    return sum(1 if not char.isascii() else 0 for char in text) + -(-sum(char.isascii() for char in text) // 4)


PIECES = st.sampled_from(["a", "word ", "A sentence. ", "Really?\n", "\n\n", "    code()\n", "句子。", "没有标点的长句子", "“好！”", "🙂", "e\u0301", "\t", "```\n", "x" * 90])


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES | st.text(max_size=30), max_size=60).map("".join), st.integers(8, 60))
def test_parts_joined_are_the_text_and_every_part_fits(text, most):
    parts = split(text, most, words)
    assert "".join(parts) == text
    assert all(part and words(part) <= most for part in parts)


@settings(max_examples=200, deadline=None)
@given(st.lists(PIECES | st.text(max_size=30), max_size=40).map("".join), st.integers(4, 40))
def test_head_body_and_tail_joined_are_the_message(text, most):
    head, body, tail = frame(text, most, words)
    assert head + body + tail == text
    assert words(head) <= most and words(tail) <= most


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("One two three. " * 40, ". "),
        ("第一句话。第二句话！" * 30, ("。", "！")),
        ("def f():\n    return 1\n" * 30, "\n"),
        ("A paragraph of some words.\nIts second line.\n\n" * 12, "\n\n"),
        ("no end " * 60, " "),
    ],
)
def test_parts_end_at_the_best_boundary_there_is(text, ends):
    parts = split(text, 40, words)
    assert len(parts) > 2 and all(part.endswith(ends) for part in parts[:-1])


@pytest.mark.parametrize("text", ["x" * 5000, "字" * 2000, "🙂" * 500])
def test_text_without_any_boundary_is_split_all_the_same(bot, text):
    parts = split(text, 60, bot.conversation.count)
    assert "".join(parts) == text and all(bot.conversation.count(part) <= 60 for part in parts)
    assert len(parts) <= 3 * bot.conversation.count(text) / 60 + 1  # not crumbs


def test_real_tokens_of_every_part_fit_too(bot):
    text = STORY + "\n\n" + "这是一个很长的故事，讲的是一条船。" * 40 + "\n\n" + "if x:\n    pass\n" * 50
    parts = split(text, 100, bot.conversation.count)
    assert "".join(parts) == text and max(map(bot.conversation.count, parts)) <= 100


@pytest.mark.parametrize(
    ("text", "head", "tail"),
    [
        (f"Summarise this:\n\n{STORY}", "Summarise this:\n\n", ""),
        (f"{STORY}\n\nWho sailed?", "", "Who sailed?"),
        ("请总结：" + "船开走了。" * 300 + "结束。", "请总结：", "结束。"),
        ("notes.md\n```\n" + "line of notes\n" * 300 + "```\nWhat is this?", "notes.md\n", "What is this?"),
        ("```\n" + "line\n" * 300 + "```", "", ""),
        ("x" * 3000, "", ""),
    ],
)
def test_what_stands_around_a_long_text_is_kept_word_for_word(text, head, tail):
    found = frame(text, 20, words)
    assert found[0].startswith(head) and (found[2] == tail or not tail)
    assert "".join(found) == text


def test_sentences_that_fit_the_request_are_quoted_in_their_order():
    assert "Number7 sailed from harbour 7" in quotes(STORY, QUESTION, 60, words)
    text = "大桥很长。" * 30 + "钢梁在6号墩合龙。" + "江水很宽。" * 30
    assert quotes(text, "大桥的钢梁在哪里合龙？", 60, words) == "钢梁在6号墩合龙。"
    assert quotes(STORY, "Hello", 60, words) == quotes("", QUESTION, 60, words) == quotes(STORY, QUESTION, 2, words) == ""


# With the model


def condenser(bot) -> Condenser:
    return Condenser(bot.engine, bot.conversation, bot.config)


def until(condition):
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)


def quiet(bot):
    until(lambda: bot.engine.idle)
    assert not any(slot.busy for slot in bot.engine.cache.slots)


async def fitted(condenser, messages, client="me"):
    """The messages that fit, and the progress on the way."""
    condensing = condenser.on(messages, client=client)
    progress = [(part.number, part.count) async for part in condensing.parts()]
    return condensing, progress


def stream(bot, messages, **options):
    prompt = bot.conversation.prompt(messages, client="me")
    return bot.engine.stream(
        prompt.tokens, Sampling(temperature=0), 12, client="me", trimmed=prompt.trimmed, follow=prompt.follow,
        on_end=lambda reply: bot.conversation.remember(reply, prompt), **options,
    )


def test_a_long_message_is_condensed_with_progress_and_then_fits(bot):
    condensing, progress = asyncio.run(fitted(condenser(bot), [user(f"{STORY}\n\n{QUESTION}")]))
    counts = [count for _, count in progress]
    first = progress[: counts[0]]
    assert first == [(number, counts[0]) for number in range(1, counts[0] + 1)] and counts[0] > 3
    text = condensing.messages[-1]["content"]
    assert text.endswith(QUESTION) and "Number7 sailed from harbour 7" in text
    result = condensing.result
    assert result.text == text and result.parts == len(progress)
    assert result.before == pytest.approx(bot.conversation.count(STORY), rel=0.1) and result.after == bot.conversation.count(text)
    prompt = bot.conversation.prompt(condensing.messages)
    assert prompt.max_tokens == 64 and len(prompt.tokens) + 64 <= bot.engine.n_ctx


def test_summaries_that_are_too_long_together_are_condensed_again(make_bot):
    bot = make_bot(runtime={"n_ctx": 256, "parallel": 1}, generation={"max_tokens": 64})
    condensing, progress = asyncio.run(fitted(condenser(bot), [user(f"{STORY[: len(STORY) // 2]}\n\n{QUESTION}")]))
    assert len({count for _, count in progress}) > 1
    assert bot.conversation.prompt(condensing.messages).max_tokens >= 32


def test_what_fits_is_left_alone(bot):
    messages = [user("Hi"), answer("Hello"), user("word " * 200)]
    condensing, progress = asyncio.run(fitted(condenser(bot), messages))
    assert progress == [] and condensing.messages == messages and condensing.result is None


def test_a_message_is_condensed_once_and_later_turns_find_the_same_prompt(bot):
    long, person = user(f"{STORY}\n\n{QUESTION}"), condenser(bot)
    first, _ = asyncio.run(fitted(person, [long]))
    reply = stream(bot, first.messages, owner="me")
    said = "".join(reply)
    before = bot.conversation.prompt(first.messages, client="me").tokens
    quiet(bot)
    second, progress = asyncio.run(fitted(person, [long, answer(said), user("Thank you")]))
    assert progress == []
    assert bot.conversation.prompt(second.messages, client="me").tokens[: len(before)] == before
    again = stream(bot, second.messages, owner="me")
    list(again)
    assert again.stats.cached_tokens >= len(before) + reply.stats.answer_tokens - 1


def test_another_question_about_the_same_text_asks_the_model_nothing_again(bot):
    person = condenser(bot)
    asyncio.run(fitted(person, [user(f"{STORY}\n\n{QUESTION}")]))
    asked = []
    person._answer = lambda *given: asked.append(given)
    condensing, progress = asyncio.run(fitted(person, [user(f"{STORY}\n\nWhere is captain Number3 from?")]))
    assert progress and not asked and "harbour 3" in condensing.messages[-1]["content"]


def test_of_several_unanswered_messages_the_longest_is_condensed(bot):
    messages = [user(STORY), answer(""), user(QUESTION)]
    condensing, progress = asyncio.run(fitted(condenser(bot), messages))
    assert progress and condensing.messages[2] == user(QUESTION) and len(condensing.messages[0]["content"]) < len(STORY) / 2
    bot.conversation.prompt(condensing.messages)


def test_short_lines_alone_are_a_text_not_a_request(bot):
    plan = condense.Plan(bot.conversation, 64, "A line.\n\nAnother line.")
    assert plan.body == "A line.\n\nAnother line."


def test_stop_ends_the_running_summary_and_nothing_goes_on(bot):
    ended = []
    bot.engine.on_answer.append(ended.append)

    async def stopped(after):
        """Stops in the middle of a summary: `after` so many have ended."""
        condensing = condenser(bot).on([user(STORY + f"\n\nStop {after}.")])

        async def run():
            async with aclosing(condensing.parts()) as parts:
                async for _ in parts:
                    pass

        task = asyncio.create_task(run())
        while len(ended) < after or not bot.engine.running:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    try:
        for after in (0, 2):
            ended.clear()
            asyncio.run(stopped(after))
            quiet(bot)
            assert len(ended) == after + 1 and ended[-1].stats.finish_reason == "cancelled"
    finally:
        bot.engine.on_answer.remove(ended.append)


def test_a_conversation_in_the_cache_is_not_spoiled_and_nothing_of_the_summaries_stays(make_bot):
    bot = make_bot(runtime={"n_ctx": 512, "parallel": 1, "cache_mb": 64}, generation={"max_tokens": 64})
    messages = [user("Tell me about the sea. " * 10)]
    mine = stream(bot, messages, owner="me")
    messages += [answer("".join(mine)), user("And the sky?")]
    quiet(bot)
    performance = Performance(bot.engine)
    asyncio.run(fitted(condenser(bot), [user(STORY)]))
    quiet(bot)
    assert performance.snapshot().answers_total == 0  # a summary is nobody's answer
    assert len(bot.engine.cache.parked) == 1 and not any(map(len, bot.engine.cache.slots))  # mine, and nothing else
    again = stream(bot, messages, owner="me")
    list(again)
    assert again.stats.cached_tokens >= mine.stats.prompt_tokens + mine.stats.answer_tokens - 1


def test_others_are_answered_in_between(make_bot):
    bot = make_bot(runtime={"n_ctx": 512, "parallel": 1}, generation={"max_tokens": 64})
    order = []
    bot.engine.on_answer.append(lambda reply: order.append(reply.stats.prompt_tokens))

    async def both():
        async with aclosing(condenser(bot).on([user(STORY)]).parts()) as parts:
            await anext(parts)
            rest = asyncio.create_task(anext(parts))  # the first summary is on its way
            while not bot.engine.running:
                await asyncio.sleep(0.001)
            other = stream(bot, [user("Hi")], owner="other")
            await rest
            async for _ in parts:
                pass
            assert other.ended and other.text

    asyncio.run(both())
    assert len(order) > 3 and min(order[:3]) == min(order)  # the short prompt of the other was among the first


def test_a_full_line_is_waited_for(bot, monkeypatch):
    monkeypatch.setattr(condense, "BUSY_PAUSE", 0)
    person, tries, ask = condenser(bot), [], bot.engine.stream

    def full(tokens, *given, **options):
        tries.append(len(tokens))
        if len(tries) < 20:
            raise Busy("full")
        return ask(tokens, *given, **options)

    monkeypatch.setattr(bot.engine, "stream", full)
    condensing, progress = asyncio.run(fitted(person, [user(STORY)]))
    assert progress and condensing.waited
    assert set(tries[:20]) == {tries[0]} and len(tries) > 21  # the same summary was asked for again, then the next


def test_with_refuse_it_is_refused_as_before(make_bot):
    bot = make_bot(runtime={"n_ctx": 256}, generation={"max_tokens": 64}, chat={"long_input": "refuse"})
    with pytest.raises(TooLong) as refused:
        asyncio.run(fitted(condenser(bot), [user(STORY)]))
    assert refused.value.size == bot.conversation.count(STORY) > refused.value.limit == bot.conversation.longest()
    assert asyncio.run(fitted(condenser(bot), [user("word " * 100)]))[1] == []


def test_more_text_than_anybody_waits_for_is_refused(bot, monkeypatch):
    monkeypatch.setattr(condense, "MOST_TOKENS", 500)
    with pytest.raises(TooLong) as refused:
        asyncio.run(fitted(condenser(bot), [user(STORY)]))
    assert refused.value.size > refused.value.limit == 500


@pytest.mark.parametrize(
    ("long_input", "length", "fate"),
    [("condense", 10, "fits"), ("condense", 1000, "condensed"), ("condense", 10**7, "refused"), ("refuse", 10, "fits"), ("refuse", 1000, "refused")],
)
def test_the_size_of_an_unsent_text_and_what_becomes_of_it(bot, long_input, length, fate):
    config = bot.config.model_copy(update={"chat": bot.config.chat.model_copy(update={"long_input": long_input})})
    size = Condenser(bot.engine, bot.conversation, config).measure(["word " * min(length, 100)], 5 * length)
    assert size.fate == fate and size.window == bot.engine.n_ctx
    assert size.tokens == pytest.approx(length, rel=0.1) and (size.tokens > size.limit) == (fate != "fits")


def test_the_size_of_a_long_text_is_estimated(bot):
    text = "".join(f"{n} is a number, {n + 1} another one. " for n in range(3000))
    assert bot.conversation.size(text) == pytest.approx(bot.conversation.count(text), rel=0.1)
    assert bot.conversation.size(text[:5000]) == bot.conversation.count(text[:5000])


# Nothing of one person's reaches another


SHORT = "\n\n".join(STORY.split("\n\n")[:5])  # in few parts


@pytest.fixture(scope="module")
def small_bot(make_bot):
    return make_bot(runtime={"n_ctx": 384, "parallel": 1}, generation={"max_tokens": 64})


@pytest.fixture
def small(small_bot, monkeypatch):
    """An engine that is soon done with a long message."""
    monkeypatch.setattr(condense, "SUMMARY", (6, 12))
    return small_bot


def with_answers_of(bot, max_tokens):
    """Settings of a tab, in which a message may be longer where its answer is shorter."""
    return Config.model_validate({**bot.config.model_dump(), "generation": {"max_tokens": max_tokens}})


def asked_of(engine, monkeypatch):
    """What is asked of the engine from now on: tokens, and who asks."""
    asked, ask = [], engine.stream

    def stream(tokens, *given, **options):
        asked.append((list(tokens), options.get("client")))
        return ask(tokens, *given, **options)

    monkeypatch.setattr(engine, "stream", stream)
    return asked


def test_what_another_sent_before_is_condensed_anew(small, monkeypatch):
    person, asked = condenser(small), asked_of(small.engine, monkeypatch)
    message = [user(f"{SHORT}\n\n{QUESTION}")]
    texts = []
    for client in ("me", "you", None):
        condensing, progress = asyncio.run(fitted(person, message, client))
        assert progress and person.shown(message, client) == (condensing.messages if client else message)
        texts.append(condensing.messages[-1]["content"])
    assert len(set(texts)) == 1  # greedy, of the same text
    prompts = [[tokens for tokens, by in asked if by == client] for client in ("me", "you", None)]
    assert prompts[0] == prompts[1] == prompts[2] != []
    assert person.shown(message, "stranger") == message


def test_nothing_that_fits_is_replaced(small):
    person = condenser(small)
    limits = [small.conversation.under(with_answers_of(small, most)).longest() for most in (16, 64)]
    middle = "word " * ((limits[0] + limits[1]) // 2)
    message = [user(middle)]
    condensing, progress = asyncio.run(fitted(person, message))
    assert progress and condensing.messages != message
    assert person.shown(message, "me") == condensing.messages
    roomy = person.under(with_answers_of(small, 16))  # another tab of the same person
    condensing, progress = asyncio.run(fitted(roomy, message))
    assert not progress and condensing.messages == message == roomy.shown(message, "me") and condensing.result is None


def test_a_message_that_fits_without_what_stood_beside_it_is_not_replaced(small):
    person, half = condenser(small), small.conversation.longest() * 2 // 3
    together = [user("word " * half), user("more " * (half // 2))]
    condensing, progress = asyncio.run(fitted(person, together))
    assert progress and condensing.messages[0] != together[0]
    assert person.shown(together, "me") == condensing.messages
    for alone in (together[:1], [*together[:1], user("And?")]):
        assert person.shown(alone, "me") == alone
        condensing, progress = asyncio.run(fitted(person, alone))
        assert not progress and condensing.messages == alone and condensing.result is None


def test_what_was_condensed_stays_in_its_conversation_and_its_budget(small, monkeypatch):
    person, long = condenser(small), user(f"{SHORT}\n\n{QUESTION}")
    condensing, _ = asyncio.run(fitted(person, [long]))
    made = condensing.result
    answered = [long, answer("Harbour 7."), user("Thank you")]
    elsewhere = [user("Hi"), answer("Hello"), long]
    assert person.shown(answered, "me")[0]["content"] == made.text
    assert person.shown(elsewhere, "me") == elsewhere
    tight = person.under(with_answers_of(small, 32))
    assert tight.shown([long], "me") == [long]  # it waits for an answer, and has another budget now
    assert tight.shown(answered, "me")[0]["content"] == made.text  # it was read like this
    asked = asked_of(small.engine, monkeypatch)
    again, progress = asyncio.run(fitted(tight, [long]))
    assert progress and again.result.budget == tight.budget != made.budget
    asked.clear()
    asyncio.run(fitted(person, elsewhere))
    assert not asked  # the parts are those of before, for the same person


def test_a_summary_belongs_to_the_system_prompt_it_was_asked_for_with(small, monkeypatch):
    person, asked = condenser(small), asked_of(small.engine, monkeypatch)
    for prompt in ("Speak like a sailor.", "Speak like a teacher."):
        other = Config.model_validate({**small.config.model_dump(), "chat": {"system_prompt": prompt}})
        asyncio.run(fitted(person.under(other), [user(f"{SHORT}\n\n{QUESTION}")]))
    prompts = [tuple(tokens) for tokens, _ in asked]
    assert len(prompts) > 2 and len(set(prompts)) == len(prompts)
    assert len({len(each) for each in prompts[::len(prompts) // 2]}) == 1  # the same parts


def test_a_note_is_found_by_the_one_it_was_written_for(bot):
    person = condenser(bot)
    person._notes.put("me", b"place", "A note.")
    found = [person.note_of(*each) for each in (("me", b"place"), ("you", b"place"), (None, b"place"), ("me", b"other"))]
    assert found == ["A note.", "", "", ""]


def test_a_text_of_a_token_for_each_character_is_found_too_long(bot):
    person, longest = condenser(bot), bot.conversation.longest()
    digits = "7" * longest
    assert bot.conversation.count(digits) == longest
    assert person.too_long([user(digits)]) is None and person.too_long([user(digits + "7")]) == 0


def test_one_who_has_been_condensed_for_waits_in_line_and_others_do_not(small):
    short, long = [user("Hi")], [user(f"{SHORT}\n\n{QUESTION}")]
    person = condenser(small)
    assert [asyncio.run(fitted(person, each))[0].waited for each in (short, long, long)] == [False, True, False]


# Notes of earlier turns


@pytest.fixture(scope="module")
def noting(make_bot):
    bot = make_bot(
        runtime={"n_ctx": 384, "parallel": 1}, generation={"max_tokens": 64}, chat={"history": {"overflow": "condense"}}
    )
    return bot, condenser(bot)


def turn(noting, messages, number, wait=True):
    """One more turn; returns its prompt and its reply."""
    bot, person = noting
    messages.append(user(f"Number {number}: say a few words about the colour of stone {number} in the river."))
    person.on(messages, "me", "me")
    shown = person.shown(messages, "me")
    prompt = bot.conversation.prompt(shown, client="me")
    reply = bot.engine.stream(
        prompt.tokens, Sampling(temperature=0), 24, owner="me", client="me", trimmed=prompt.trimmed,
        follow=prompt.follow, on_end=lambda reply: person.after(reply, prompt, shown, "me"),
    )
    messages.append(answer("".join(reply)))
    if wait:
        quiet(bot)
    return prompt, reply


def test_turns_that_leave_the_window_stay_as_a_short_note_that_rarely_changes(noting):
    bot, _ = noting
    messages, prompts, replies = [], [], []
    for number in range(14):
        prompt, reply = turn(noting, messages, number)
        prompts.append(prompt)
        replies.append(reply)
    notes = [prompt.note for prompt in prompts]
    assert all(bool(prompt.note) == bool(prompt.dropped) for prompt in prompts) and notes[-1]
    assert all(note.startswith("Earlier in this conversation: ") for note in notes if note)
    assert 2 <= len(set(notes)) - 1 < sum(map(bool, notes))
    for prompt, reply in zip(prompts[1:], replies[1:]):
        assert len(prompt.tokens) + prompt.max_tokens <= bot.engine.n_ctx
        assert prompt.max_tokens == 64
        assert len(prompt.tokens) - reply.stats.cached_tokens < 48  # the question alone was left to compute
    text = b"".join(bot.engine.model.piece(token, special=True) for token in prompts[-1].tokens).decode()
    assert text.count(notes[-1]) == 1 and f"user\n{notes[-1]}\n\nNumber {prompts[-1].dropped}:" in text


def test_a_question_does_not_wait_for_a_note(noting):
    bot, person = noting
    messages, ended = [user("Hello.")], []
    messages.append(answer("word " * 300))
    bot.engine.on_answer.append(ended.append)
    try:
        turn(noting, messages, 20, wait=False)
        until(lambda: person._noting and bot.engine.running)
        prompt, _ = turn(noting, messages, 21, wait=False)
    finally:
        bot.engine.on_answer.remove(ended.append)
    assert prompt.dropped and not prompt.note
    assert [reply.stats.finish_reason == "cancelled" for reply in ended] == [False, True, False]
    quiet(bot)
    assert not person._noting and turn(noting, messages, 22)[0].note  # there was time for it at last


def test_with_max_turns_turns_leave_no_note(make_bot):
    bot = make_bot(chat={"history": {"max_turns": 2, "overflow": "condense"}})
    asked = []
    bot.conversation.note_of = lambda client, place: asked.append(place) or "A note"
    prompt = bot.conversation.prompt([user("1"), answer("a"), user("2"), answer("b"), user("3")], client="me")
    assert prompt.dropped == 1 and not prompt.note and not asked


def test_a_note_for_which_there_is_no_room_is_left_out(noting):
    bot, _ = noting
    message = user("word " * (bot.conversation.longest() - 20))
    known = bot.conversation.note_of
    try:
        bot.conversation.note_of = lambda client, place: "A note. " * 20
        prompt = bot.conversation.prompt([user("Hi"), answer("Hello"), message])
    finally:
        bot.conversation.note_of = known
    assert prompt.dropped == 1 and not prompt.note and prompt.max_tokens >= 64

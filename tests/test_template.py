"""Chat templates of the shapes that models come with, on a real tokenizer."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from qwen_chat.config import Config
from qwen_chat.conversation import Conversation, TooLong
from qwen_chat.template import ChatTemplate, joined

ALTERNATES = (
    """{% for message in messages if message.role != 'system' %}"""
    """{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"""
)

TEMPLATES = {
    "plain": """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "a system prompt of its own": """{% if messages[0].role != 'system' %}<|im_start|>system
You are a helpful assistant that was made by somebody.<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "system in the last turn": ALTERNATES + """{{ bos_token }}{% for message in messages if message.role != 'system' %}
{% if message.role == 'user' %}[INST] {% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}{{ message.content }}[/INST]{% else %} {{ message.content | trim }}{{ eos_token }}{% endif %}{% endfor %}""",
    "system in the first turn, stripped": ALTERNATES + """{% for message in messages if message.role != 'system' %}
{% set content = message.content %}{% if loop.first and messages[0].role == 'system' %}
{% set content = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' + message.content %}{% endif %}
{% if message.role == 'user' %}{{ bos_token }}[INST] {{ content.strip() }} [/INST]{% else %}
 {{ content.strip() }} {{ eos_token }}{% endif %}{% endfor %}""",
    "no system role, stripped": """{% if messages[0].role == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}""" + ALTERNATES + """{{ bos_token }}
{%- for message in messages %}
<start>{{ 'model' if message.role == 'assistant' else message.role }}
{{ message.content | trim }}<end>
{% endfor %}{% if add_generation_prompt %}<start>model
{% endif %}""",
    "no system role, silently": """{% for message in messages %}
{% if message.role == 'user' %}USER: {{ message.content }}
{% elif message.role == 'assistant' %}ASSISTANT: {{ message.content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}""",
    "the question twice": """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}Answer this: {{ messages[-1].content }}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    "old messages left out": """{% for message in messages %}
{% if message.role == 'system' or loop.revindex <= 5 %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
}
SYSTEM = "You are terse, and you speak like a sailor."
KNOWS_NO_SYSTEM = ("no system role, stripped", "no system role, silently")
CONTINUES = ("plain", "a system prompt of its own", "no system role, stripped", "old messages left out")

TEXTS = st.sampled_from(["Hi", " two  words ", "\n\n多行\n", "a\tb", "🙂 ", "[INST]", "x" * 40])


class Model:
    """The real model with another chat template."""

    def __init__(self, model, chat_template):
        self._model, self.chat_template = model, chat_template

    def __getattr__(self, name):
        return getattr(self._model, name)


@pytest.fixture(params=TEMPLATES)
def shape(request):
    return request.param


@pytest.fixture
def model(bot, shape):
    return Model(bot.engine.model, TEMPLATES[shape])


def conversation_on(model, system=SYSTEM):
    config = Config.model_validate({"generation": {"max_tokens": 64}, "chat": {"system_prompt": system}})
    return Conversation(SimpleNamespace(model=model, n_ctx=512, can_shift=True), config)


def talk(*texts, system=SYSTEM):
    roles = ("user", "assistant")
    said = [{"role": roles[at % 2], "content": text} for at, text in enumerate(texts)]
    return [{"role": "system", "content": system}, *said] if system else said


def text_of(model, tokens):
    return b"".join(model.piece(token, special=True) for token in tokens).decode()


def rendered(model, shape, messages):
    """The template's own text of a conversation; where it knows no system messages, with that in the first question."""
    if shape in KNOWS_NO_SYSTEM and messages[0]["role"] == "system":
        messages = [{"role": "user", "content": f"{messages[0]['content']}\n\n{messages[1]['content']}"}, *messages[2:]]
    formatter = Jinja2ChatFormatter(model.chat_template, model.special_text("eos"), model.special_text("bos"))
    return formatter(messages=messages).prompt


def test_tokens_are_those_of_the_templates_own_text(model, shape):
    template = ChatTemplate(model)

    @settings(max_examples=40, deadline=None)
    @given(st.lists(TEXTS, min_size=1, max_size=7).filter(lambda texts: len(texts) % 2), st.booleans())
    def check(texts, with_system):
        messages = talk(*texts, system=SYSTEM if with_system else "")
        assert text_of(model, joined(template.render(messages))) == rendered(model, shape, messages)

    check()


def test_each_message_costs_what_its_texts_take_wherever_they_stand(model, shape):
    template = ChatTemplate(model)
    texts = [f"{'word ' * (5 + 7 * at)}{at}." for at in range(5)]
    sizes, end = template.sizes(talk(*texts))
    assert sum(sizes) + end == len(joined(template.render(talk(*texts))))
    times = {4: 2} if shape == "the question twice" else {0: 1}
    for at, (text, size) in enumerate(zip([SYSTEM, *texts], sizes)):
        shown = times.get(at - 1, 1) * len(model.tokenize(text))
        assert shown <= size <= shown + 40  # with what the template has before it


def test_where_less_of_a_chat_takes_more_than_all_of_it_the_answer_still_has_room(bot):
    """Nobody can tell from the whole chat and from its last turn what a template has around what is between them."""
    odd = "{% if 3 < messages | length < 24 %}{{ 'header ' * 60 }}{% endif %}" + TEMPLATES["plain"]
    conversation = conversation_on(Model(bot.engine.model, odd))
    texts = [f"{number} " + "word " * 12 for number in range(61)]
    for rounds in range(12, 31):
        prompt = conversation.prompt(talk(*texts[: 2 * rounds + 1], system=""))
        assert prompt.max_tokens == 64 and len(prompt.tokens) + 64 <= 512
        assert text_of(bot.engine.model, prompt.tokens).count("header") == 60


@pytest.mark.parametrize("system", [SYSTEM, "", "word " * 100])
def test_as_many_turns_are_kept_as_fit_and_no_fewer(model, system):
    conversation = conversation_on(model, system=system)
    messages = []
    for number in range(9):
        question, said = f"Question {number}: " + "word " * (20 + 11 * number % 40), f"Answer {number}: " + "word " * 15
        messages += talk(question, said, system="")
        asked = [*messages, {"role": "user", "content": "And now, a question of its own: " + "word " * 50}]
        prompt = conversation.prompt(asked)
        head = talk(system=system)

        def size(dropped):
            return len(joined(conversation.template.render(head + asked[2 * dropped :])))

        assert len(prompt.tokens) == size(prompt.dropped) and prompt.max_tokens == 64
        assert size(prompt.dropped) + 64 <= 512
        assert prompt.dropped == 0 or size(prompt.dropped - 1) + 64 > 512


def test_the_longest_message_that_fits_is_told_truly(model, shape):
    conversation = conversation_on(model)
    history = talk("Hi", "Hello", system="")
    longest = conversation.longest()
    fits, too_long = longest // (2 if shape == "the question twice" else 1), longest + 1
    question = {"role": "user", "content": "word" + " word" * (fits - 1)}
    assert conversation.count(question["content"]) == fits and conversation.fits(question["content"])
    assert conversation.prompt([*history, question]).max_tokens >= 64
    question = {"role": "user", "content": "word" + " word" * (too_long - 1)}
    assert not conversation.fits(question["content"])
    with pytest.raises(TooLong):
        conversation.prompt([*history, question])


def test_what_follows_and_what_opens_a_conversation_is_what_prompts_have_there(model, shape):
    conversation = conversation_on(model)
    first = conversation.prompt(talk("Hi", system=""))
    opening = conversation.opening()
    assert opening and first.tokens[: len(opening)] == opening
    second = conversation.prompt(talk("Hi", "Hello", "Again", system=""))
    expected = first.tokens + model.tokenize("Hello") + first.follow
    assert not first.follow or second.tokens[: len(expected)] == expected
    assert bool(first.follow) == (shape in CONTINUES)


def test_a_template_that_refuses_a_conversation_says_so(bot):
    template = ChatTemplate(Model(bot.engine.model, TEMPLATES["no system role, stripped"]))
    with pytest.raises(ValueError, match="refuses this conversation: roles must alternate"):
        template.render([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    with pytest.raises(ValueError, match="refuses this conversation: System role not supported"):
        template.render([{"role": "system", "content": "a"}])


@pytest.mark.parametrize("name", ["plain", "no system role, silently"])
def test_a_model_that_wants_a_start_token_gets_one(bot, name):
    model = Model(bot.engine.model, TEMPLATES[name])
    model.adds_bos = True
    start = model.tokenize(model.special_text("bos"), special=True)
    tokens = joined(ChatTemplate(model).render(talk("Hi", system="")))
    assert start and tokens[: len(start)] == start and tokens[len(start) : 2 * len(start)] != start


def test_an_answers_own_tokens_stay_where_a_template_strips_it(bot):
    model = Model(bot.engine.model, TEMPLATES["no system role, stripped"])
    template = ChatTemplate(model)
    letters = [model.tokenize(letter)[0] for letter in "hello"]
    blank = model.tokenize(" ")
    for own in (letters, blank + letters, letters + blank, blank + letters + blank):
        messages = talk("x", text_of(model, own), "y", system="")
        messages[1]["tokens"] = own
        piece = next(piece for piece in template.render(messages) if piece.message == 1)
        assert piece.text == letters
    messages[1] = {"role": "assistant", "content": " hello ", "tokens": model.tokenize(" hello ")}
    piece = next(piece for piece in template.render(messages) if piece.message == 1)
    assert text_of(model, piece.text) == "hello"


def test_only_tokens_that_are_exactly_the_text_count(bot):
    template, model = ChatTemplate(bot.engine.model), bot.engine.model
    yes, dot = model.tokenize("Yes"), model.tokenize(".")
    end = model.tokenize("<|im_start|>", special=True)
    face = model.tokenize("🙂")
    assert len(face) > 1
    assert template.exactly(yes, "Yes") == template.exactly(yes + dot, "Yes") == yes
    assert template.exactly(yes + face[:1], "Yes") == template.exactly(yes + end, "Yes") == yes
    other = [(yes, "Ye"), (yes, "Yes."), (end + yes, "Yes"), (yes + end + dot, "Yes."), (face[:1] + yes, "Yes")]
    other += [([], "Yes"), (yes, "")]
    assert all(template.exactly(tokens, text) == [] for tokens, text in other)

"""Sampler settings on the real model."""

import json
import math

import pytest
from test_engine import GREEDY, REPEATABLE, ask, quiet

from qwen_chat.engine import EngineError
from qwen_chat.sampling import Sampling

JSON = r"""
root ::= "{" ws "\"name\":" ws string "," ws "\"age\":" ws [0-9] [0-9]? ws "}"
string ::= "\"" [a-zA-Z ]{1,12} "\""
ws ::= " "?
"""


def test_a_grammar_is_kept_to(bot):
    for seed in range(3):
        text = "".join(ask(bot, "Invent a person as JSON.", Sampling(temperature=1.5, seed=seed, grammar=JSON), 60))
        assert json.loads(text).keys() == {"name", "age"}


def test_a_grammar_that_cannot_be_read_ends_that_request_alone(bot):
    with pytest.raises(EngineError, match="grammar cannot be read"):
        "".join(ask(bot, "Hello.", Sampling(grammar="root ::= nothing here")))
    assert "".join(ask(bot, "Hello."))


def test_a_bias_forbids_and_forces_tokens(bot):
    plain = ask(bot, "Count from one to ten.", max_tokens=8)
    "".join(plain)
    first = plain.tokens[0]
    banned = ask(bot, "Count from one to ten.", Sampling(temperature=0, repeat_penalty=1, logit_bias=((first, -100.0),)), 8)
    "".join(banned)
    assert banned.tokens[0] != first
    forced = ask(bot, "Count from one to ten.", Sampling(temperature=0.1, repeat_penalty=1, logit_bias=((1234, 100.0),)), 4)
    "".join(forced)
    assert forced.tokens == [1234] * 4


def test_presence_and_frequency_penalties_keep_tokens_from_coming_back(bot):
    def kinds(**penalties):
        reply = ask(bot, "Count from one to ten.", Sampling(temperature=0, repeat_penalty=1, logit_bias=((1234, 30.0),), **penalties), 24)
        "".join(reply)
        return len(set(reply.tokens))

    assert kinds() == 1
    assert kinds(frequency_penalty=2.0) > 1
    assert kinds(presence_penalty=2.0) == 1


def test_log_probabilities_are_those_of_the_model(bot):
    reply = ask(bot, "Count from one to ten.", Sampling(temperature=0, repeat_penalty=1, top_logprobs=5), 6)
    "".join(reply)
    assert [each.token for each in reply.logprobs[: len(reply.tokens)]] == reply.tokens
    for each in reply.logprobs:
        assert len(each.top) == 5 and each.top[0] == (each.token, each.logprob)
        assert sum(math.exp(logprob) for _, logprob in each.top) <= 1.0001
    assert ask(bot, "Hello.", GREEDY, 1).logprobs == []


@pytest.mark.parametrize("settings", [{"top_k": 0}, {"top_k": 1}, {"top_p": 0.01}, {"min_p": 1.0}, {"repeat_penalty": 0.5}, {"repeat_penalty": 2.0, "top_k": 0}, {"repeat_last_n": 0}, {"temperature": 2.0}])
def test_every_setting_at_its_end_answers(bot, settings):
    reply = ask(bot, "Hello.", Sampling(**settings), 6)
    assert "".join(reply) is not None and reply.stats.finish_reason in ("stop", "length")


def test_one_candidate_is_the_likeliest(bot):
    greedy = "".join(ask(bot, "Count from one to ten.", REPEATABLE, 12))
    quiet(bot)
    assert "".join(ask(bot, "Count from one to ten.", Sampling(top_k=1, repeat_penalty=1, seed=1), 12)) == greedy

"""What a tab sets otherwise than config.yaml."""

import pytest

from qwen_chat import preferences
from qwen_chat.config import Config, ConfigError

CONFIG = Config()


def test_the_defaults_are_those_of_the_file():
    config = Config.model_validate({"generation": {"temperature": 0.3}, "chat": {"history": {"max_turns": 3}}})
    given = preferences.defaults(config)
    assert given["temperature"] == 0.3 and given["max_turns"] == 3 and given["seed"] == -1
    assert preferences.applied(config, given) is config


def test_what_is_given_takes_the_place_of_the_files_value_and_nothing_else_changes():
    own = preferences.applied(CONFIG, {"temperature": 1, "max_tokens": 64.0, "max_turns": 2, "system_prompt": "Be brief."})
    assert own.generation.temperature == 1 and own.generation.max_tokens == 64
    assert own.chat.history.max_turns == 2 and own.chat.system_prompt == "Be brief."
    assert own.runtime == CONFIG.runtime and own.server == CONFIG.server and own.model == CONFIG.model
    assert CONFIG.generation.temperature == 0.7


def test_what_is_blank_or_missing_stays():
    assert preferences.applied(CONFIG, {"system_prompt": "  \n", "seed": None}) is CONFIG


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("temperature", 5, "generation.temperature: 5 found; allowed: a number from 0 to 2"),
        ("max_tokens", 4000, "generation.max_tokens: 4000 found; allowed: at most half of runtime.n_ctx (2048)"),
        ("seed", 1.5, "runtime.seed: 1.5 found"),
        ("max_turns", "three", "chat.history.max_turns: 'three' found"),
    ],
)
def test_what_the_file_may_not_say_a_tab_may_not_say_either(name, value, said):
    with pytest.raises(ConfigError) as error:
        preferences.applied(CONFIG, {name: value})
    assert error.value.faults[0].startswith(said)


def test_secrets_of_the_file_survive():
    config = Config.model_validate({"server": {"api_key": ["secret"], "auth": [{"user": "ann", "password": "word"}]}})
    own = preferences.applied(config, {"temperature": 1.0})
    assert own.server.api_keys() == ["secret"] and own.server.auth[0].password.get_secret_value() == "word"


def test_the_bounds_are_those_of_the_file():
    assert preferences.bounds("temperature") == (0, 2)
    assert preferences.bounds("max_turns") == (0, 10_000)
    assert preferences.bounds("top_p")[1] == 1

"""From JSON schemas to grammars that llama.cpp reads, and what the model then writes."""

import json

import llama_cpp
import numpy as np
import pytest
from test_engine import ask

from qwen_chat import json_grammar
from qwen_chat.json_grammar import MOST_SCHEMAS, MOST_TEXT, SchemaError, from_schema
from qwen_chat.json_ways import MOST_WAYS, most_ways
from qwen_chat.sampling import NO_BYTE, Sampling, _candidates

TREE = {"$ref": "#/$defs/tree", "$defs": {"tree": {"type": "object", "properties": {"parts": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}}, "required": ["parts"]}}}


def written(bot, grammar: str, seed: int):
    """What the model writes by a grammar, at random; None where it did not come to an end."""
    reply = ask(bot, "Write JSON.", Sampling(temperature=1.5, seed=seed, grammar=grammar, repeat_penalty=1.3), 100)
    text = "".join(reply)
    return json.loads(text) if reply.stats.finish_reason == "stop" else None


@pytest.mark.parametrize(
    "schema, fits",
    [
        ({"enum": ["春天", 'a "b" \\ c\n', "😀", 7, None]}, lambda value: value in ["春天", 'a "b" \\ c\n', "😀", 7, None]),
        ({"const": {"名字": [1, True]}}, lambda value: value == {"名字": [1, True]}),
        ({"type": "string", "format": "date-time"}, lambda value: len(value) >= 20 and value[10] == "T"),
        ({"type": "string", "minLength": 2, "maxLength": 5}, lambda value: 2 <= len(value) <= 5),
        ({"type": ["integer", "null"]}, lambda value: value is None or type(value) is int),
        ({"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3}, lambda value: len(value) in (2, 3)),
        ({"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}, "c": {"type": "null"}}, "required": ["b"]}, lambda value: "b" in value and value.keys() <= {"a", "b", "c"}),
        ({"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {"enum": [1]}}, lambda value: all(inner == (None if key == "a" else 1) or key == "a" for key, inner in value.items())),
        ({"anyOf": [{"const": "x"}, {"type": "array", "maxItems": 0}]}, lambda value: value in ("x", [])),
        (TREE, lambda value: value.keys() == {"parts"}),
        ({"allOf": [{"$ref": "#/definitions/x~1y"}], "definitions": {"x/y": {"const": 5}}}, lambda value: value == 5),
    ],
)
def test_what_is_written_fits_the_schema(bot, schema, fits):
    grammar = from_schema(schema)
    values = [written(bot, grammar, seed) for seed in range(3)]
    assert all(fits(value) for value in values if value is not None), values


def test_any_object_is_json(bot):
    assert type(written(bot, json_grammar.any_object(), 1)) in (dict, type(None))


@pytest.mark.parametrize(
    "schema, words",
    [
        ({"type": "string", "pattern": "^a$"}, "schema: pattern cannot be kept to"),
        ({"type": "object", "properties": {"age": {"type": "integer", "minimum": 0}}}, "schema.age: minimum cannot be kept to"),
        ({"type": "string", "format": "email"}, "schema.format: only date, time"),
        ({"type": "text"}, "schema.type: string, number"),
        ({"type": []}, "schema.type: string, number"),
        ({"$ref": "#/$defs/nowhere"}, "there is no #/$defs/nowhere"),
        ({"$ref": "https://example.org/schema"}, "only references within the schema"),
        ({"$ref": "#"}, "refers to itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/b"}]}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, "refers to itself"),
        ({"allOf": [{}, {}]}, "schema.allOf: only one schema"),
        ({"anyOf": []}, "schema.anyOf: a list that is not empty"),
        ({"enum": list(range(501))}, "more than 500"),
        ({"type": "object", "properties": {"a": {}}, "required": ["a"] * 90_000}, "schema.required: there are more than 500"),
        ({"enum": ["x" * (MOST_TEXT // 2), "y" * (MOST_TEXT // 2)]}, f"more than {MOST_TEXT} characters"),
        ({"properties": {"x" * MOST_TEXT: {}}}, f"more than {MOST_TEXT} characters"),
        ({"anyOf": [{"items": {"items": {"items": {"items": {"items": {}}}}}}] * 450}, f"more than {MOST_SCHEMAS} schemas"),
        ({"properties": {f"p{number}": {"maxLength": 1000} for number in range(11)}}, "schema.p10: minLength and maxLength are more than 10000"),
        ({"properties": {f"p{number}": {"minItems": 1000} for number in range(11)}}, "minItems and maxItems are more than 10000"),
        ({"properties": {f"p{number}": {} for number in range(MOST_WAYS + 1)}}, "more than 100 ways"),
        ({"anyOf": [{"type": "string", "minLength": 1}] * (MOST_WAYS + 1)}, "more than 100 ways"),
        ({"anyOf": [{"items": {"$ref": "#"}}, {"items": {"$ref": "#"}, "minItems": 1}]}, "more than 100 ways"),
        ({"type": "object", "required": ["x"]}, 'schema.required: "x" is not among the properties'),
        ({"type": "array", "minItems": 10**9}, "schema.minItems: a whole number from 0 to 1000"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength is above maxLength"),
        ({"type": "object", "properties": []}, "properties is an object"),
        ({"items": 5}, "schema.items: a schema is an object"),
        ({"const": "\ud800"}, "half a character"),
        ({"const": float("inf")}, "a number in it"),
    ],
)
def test_what_cannot_be_kept_to_is_refused(schema, words):
    with pytest.raises(SchemaError) as error:
        from_schema(schema)
    assert words in str(error.value)


def test_a_schema_nested_too_deeply_is_refused():
    schema = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(SchemaError, match="nested too deeply"):
        from_schema(schema)


def test_many_optional_properties_make_a_short_grammar():
    schema = {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(MOST_WAYS - 1)}}
    assert len(from_schema(schema)) < 20_000


# In how many ways a text may be read


def one_of(*options, **more) -> dict:
    return {"anyOf": list(options), **more}


def having(*required, **properties) -> dict:
    return {"type": "object", "properties": properties, "required": list(required)}


def kind(name: str, **properties) -> dict:
    return having("kind", *properties, kind={"const": name}, **properties)


HERE = {"$ref": "#"}
INTEGER, TEXT = {"type": "integer"}, {"type": "string"}


@pytest.mark.parametrize(
    "schema, ways",
    [
        ({}, 1),
        (INTEGER, 1),
        ({"enum": ["a", "b", 1, {"a": 1}]}, 1),
        (one_of(INTEGER, TEXT, {"type": "null"}, {"type": "array"}, {"type": "object"}), 1),
        (one_of(INTEGER, {"type": "number"}), 2),
        (one_of(TEXT, {"const": "a"}, {"format": "date"}), 3),
        (one_of({"const": "a"}, {"enum": ["b", "c"]}), 2),
        (one_of({"const": "a"}, {"enum": ["a", "c"]}), 2),
        (one_of({}, {"type": "null"}), 2),
        (having(a=TEXT, b=TEXT, c=TEXT), 4),
        (having("a", "b", "c", a=TEXT, b=TEXT, c=TEXT), 1),
        (having("c", a=TEXT, b=TEXT, c=TEXT), 3),
        (one_of(having("a", a=INTEGER), having("a", a=INTEGER, b=TEXT)), 3),
        (one_of(*(kind(name, x=INTEGER) for name in "abcdefgh")), 8),
        (one_of(*(having(name, **{name: INTEGER}) for name in "abcdefgh")), 8),
        ({"items": one_of(*(kind(name, x=one_of(INTEGER, {"type": "number"})) for name in "ab"))}, 2),
        ({"items": {"items": one_of({"items": INTEGER}, {"items": TEXT})}}, 2),
        ({"allOf": [one_of({"items": INTEGER}, {"items": TEXT})]}, 2),
        ({**having("a", a=TEXT), "additionalProperties": TEXT}, 2),
        ({**having("a", a=TEXT), "additionalProperties": INTEGER}, 1),
    ],
)
def test_the_ways_of_reading_are_counted(schema, ways):
    from_schema(schema)
    assert most_ways(schema) == ways


@pytest.mark.parametrize(
    "schema",
    [
        having("value", "next", value=INTEGER, next=one_of(HERE, {"type": "null"})),
        {"items": HERE},
        {"additionalProperties": HERE},
        one_of(kind("sum", left=HERE, right=HERE), kind("number", value=INTEGER)),
        one_of(having("sum", sum={"items": HERE}), having("product", product={"items": HERE}), INTEGER),
        {"$ref": "#/$defs/a", "$defs": {"a": {"items": {"$ref": "#/$defs/b"}}, "b": having("a", "n", a={"$ref": "#/$defs/a"}, n=one_of(INTEGER, {"type": "number"}))}},
    ],
)
def test_a_schema_that_refers_to_itself_is_followed_where_it_is_clear(schema):
    from_schema(schema)
    assert most_ways(schema) <= 2


@pytest.mark.parametrize(
    "schema",
    [
        one_of({"items": HERE}, {"items": HERE, "maxItems": 2}),
        one_of(having("a", a=HERE), having("a", a=HERE, b=TEXT)),
        one_of(kind("x", a=HERE), kind("x", a=HERE, b=TEXT)),
        one_of(kind("x", a=HERE), having("kind", kind=TEXT, a=HERE)),
        {**having("a", a=HERE), "additionalProperties": HERE},
        {"$ref": "#/$defs/a", "$defs": {"a": one_of({"items": {"$ref": "#/$defs/b"}}, {"items": {"$ref": "#/$defs/b"}}), "b": having("a", a={"$ref": "#/$defs/a"})}},
        {"$ref": "#/$defs/0", "$defs": {str(number): one_of(*[{"items": {"$ref": f"#/$defs/{number + 1}"}}] * 2) if number < 9 else INTEGER for number in range(10)}},
    ],
)
def test_ways_that_multiply_are_refused(schema):
    with pytest.raises(SchemaError, match="more than 100 ways"):
        from_schema(schema)


# What is held against a grammar


WRITTEN = ["", " ", "{", '{"', '{"kind": "', '{"kind":"cat","legs":', '{"kind":"cat","legs":4', '["', '["a', '["春', '"20', "-", "nul"]
SCHEMAS = [
    {},
    {"type": "object", "properties": {"kind": {"enum": ["cat", "car", "鸟", "鸭", "a\\"]}, "legs": INTEGER, "tame": {"type": "boolean"}}, "required": ["kind"]},
    {"type": "array", "items": {"enum": ["a", "ab", "abc", "春天", "春", "😀", ""]}},
    {"format": "date"},
    {"type": ["number", "null"]},
]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_only_what_begins_with_a_fitting_byte_is_held_against_a_grammar(bot, schema):
    model, chance = bot.engine.model, np.random.default_rng(1)
    for written in WRITTEN:
        sampler = model.sampler(Sampling(grammar=from_schema(schema)))
        try:
            for token in model.tokenize(written):
                one = _candidates(np.zeros(model.n_vocab, np.float32))[[token]]
                sampler._apply(one, sampler._grammar)
                if np.isneginf(one["logit"][0]):
                    break
                llama_cpp.llama_sampler_accept(sampler._grammar, token)
            else:
                logits = chance.normal(size=model.n_vocab).astype(np.float32)
                everything = _candidates(logits)
                sampler._apply(everything, sampler._grammar)
                fitting = sampler._fitting(logits)
                assert np.array_equal(fitting[~np.isneginf(fitting["logit"])], everything[~np.isneginf(everything["logit"])])
                assert written or len(fitting) < model.n_vocab / 20
        finally:
            sampler.close()


def test_the_first_bytes_of_tokens(bot):
    model = bot.engine.model
    for token in [*range(300), *range(model.n_vocab - 300, model.n_vocab)]:
        piece = model.piece(token)
        assert model.first_bytes.of[token] == (piece[0] if piece and not model.is_end(token) else NO_BYTE)
    assert all(len(model.piece(int(token))) == 1 for token in model.first_bytes.single)

"""From JSON schemas to grammars that llama.cpp reads, and what the model then writes."""

import json

import pytest
from test_engine import ask

from qwen_chat import json_grammar
from qwen_chat.json_grammar import SchemaError, from_schema
from qwen_chat.sampling import Sampling

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
    schema = {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(400)}}
    assert len(from_schema(schema)) < 100_000

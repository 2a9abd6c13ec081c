"""From a JSON schema to a grammar of llama.cpp: whatever fits the grammar fits the schema.

What a grammar cannot hold to is refused, so that nobody relies on a rule that is not kept. Properties
come in the schema's order; other properties are allowed only where `additionalProperties` says so.

llama.cpp follows all the ways at once in which a text so far may be read, and holds each of them against every token
of the vocabulary, on the thread that answers everybody. So there must be few: constants are told apart letter by
letter, and alternatives that begin alike are counted (json_ways), wherever they lead.
"""

import json
import os
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter

from .json_ways import KEYWORDS, MOST_WAYS, found, most_ways
from .openai_form import shortened

MOST_ITEMS = 1000  # of a repetition; llama.cpp itself takes 2000
MOST_REPEATED = 10_000  # of all repetitions: each is written out when the grammar is read
MOST_CHOICES = 500  # properties, constants and alternatives in all
MOST_SCHEMAS = 2000  # schemas within the schema, in all
MOST_TEXT = 100_000  # characters of names and constants in all
LONGEST_NAME = 40  # characters of a name, in an error
NOTES = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$schema", "$id", "$comment", "$defs", "definitions"}

SPACE = r'ws ::= | " " | "\n" [ \t]{0,20}'
PRIMITIVES = {
    "null": 'null ::= "null"',
    "boolean": 'boolean ::= "true" | "false"',
    "integer": 'integer ::= "-"? ("0" | [1-9] [0-9]{0,15})',
    "number": 'number ::= integer ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,2})?',
    "char": r'char ::= [^"\\\x00-\x1F\x7F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4})',
    "string": r'string ::= "\"" char* "\""',
    "array": 'array ::= "[" ws (any ("," ws any)*)? "]" ws',
    "object": r'object ::= "{" ws (string ws ":" ws any ("," ws string ws ":" ws any)*)? "}"',
    "any": "any ::= (object | array | string | number | boolean | null) ws",
}
NEEDS = {"number": ["integer"], "string": ["char"], "array": ["any"], "object": ["any", "string"], "any": ["object", "array", "string", "number", "boolean", "null"]}
DATE = (
    '[0-9]{4} "-" (("0" [13578] | "1" [02]) "-" ("0" [1-9] | [12] [0-9] | "3" [01])'
    ' | ("0" [469] | "11") "-" ("0" [1-9] | [12] [0-9] | "30") | "02-" ("0" [1-9] | "1" [0-9] | "2" [0-8]))'
)
TIME = '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9]{3})? ("Z" | [-+] ([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9])'
FORMATS = {
    "date": DATE,
    "time": TIME,
    "date-time": f'{DATE} "T" {TIME}',
    "uuid": '[0-9a-f]{8} "-" [0-9a-f]{4} "-" [0-9a-f]{4} "-" [0-9a-f]{4} "-" [0-9a-f]{12}',
}
TOO_MANY_WAYS = (
    f"the beginning of a text may be read in more than {MOST_WAYS} ways at once: have alternatives differ in their type,"
    " or in their first property, which is required, and have fewer optional properties in a row"
)


class SchemaError(ValueError):
    """A schema that no grammar can be made from; the message says which part of it."""


def any_object() -> str:
    """The grammar of every JSON object."""
    grammar = _Grammar({})
    return grammar.text(grammar.primitive("object"))


def from_schema(schema: dict) -> str:
    """The grammar of the texts that fit `schema`. Raises SchemaError."""
    grammar = _Grammar(schema)
    try:
        text = grammar.text(grammar.expression(schema, "schema"))
        text.encode()
        TopologicalSorter(grammar.leads).prepare()
        if most_ways(schema) > MOST_WAYS:
            raise SchemaError(TOO_MANY_WAYS)
    except RecursionError:
        raise SchemaError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise SchemaError("half a character is in it") from None
    except CycleError as error:
        raise SchemaError(f"{shortened(error.args[1][0], LONGEST_NAME)} refers to itself and to nothing else") from None
    return text


class _Grammar:
    def __init__(self, schema: dict):
        self._schema = schema
        self._rules: dict[str, str] = {"ws": SPACE}
        self._refs: dict[str, str] = {}
        self.leads: dict[str, set[str]] = {}  # from a reference to those that its value may begin as
        self._choices = self._schemas = self._repeated = self._length = 0

    def text(self, root: str) -> str:
        return "\n".join([f"root ::= {root}", *self._rules.values()])

    def primitive(self, name: str) -> str:
        if name not in self._rules:
            self._rules[name] = PRIMITIVES[name]
            for other in NEEDS.get(name, []):
                self.primitive(other)
        return name

    def expression(self, schema, path: str, start: str | None = None) -> str:
        """What a value by `schema` looks like. `start` is the reference whose value begins here, if any does."""
        if schema is True or schema == {}:
            return self.primitive("any")
        if not isinstance(schema, dict):
            raise SchemaError(f"{path}: a schema is an object")
        self._schemas += 1
        if self._schemas > MOST_SCHEMAS:
            raise SchemaError(f"{path}: there are more than {MOST_SCHEMAS} schemas in all")
        schema = {key: value for key, value in schema.items() if key not in NOTES}
        for keyword, make in (("$ref", self._reference), ("anyOf", self._any), ("oneOf", self._any), ("allOf", self._all)):
            if keyword in schema:
                _only(schema, {keyword}, path)
                return make(schema[keyword], f"{path}.{keyword}", start)
        for keyword in ("const", "enum"):
            if keyword in schema:
                _only(schema, {keyword, "type"}, path)
                return self._constants(schema[keyword] if keyword == "enum" else [schema[keyword]], f"{path}.{keyword}")
        return self._typed(schema, path)

    def _typed(self, schema: dict, path: str) -> str:
        given = schema.get("type", next((kind for kind, words in KEYWORDS.items() if words & schema.keys()), None))
        kinds = given if isinstance(given, list) and given else [given]
        _only(schema, {"type"}.union(*(KEYWORDS.get(kind, ()) for kind in kinds if isinstance(kind, str))), path)
        makers = {"object": self._object, "array": self._array, "string": self._string}
        found = []
        for kind in kinds:
            if not isinstance(kind, str) or kind in ("char", "any") or kind not in PRIMITIVES:
                raise SchemaError(f"{path}.type: string, number, integer, boolean, null, array or object is expected")
            found.append(makers[kind](schema, path) if KEYWORDS.get(kind, set()) & schema.keys() else self.primitive(kind))
        return _either(found)

    def _reference(self, ref, path: str, start: str | None) -> str:
        if not isinstance(ref, str):
            raise SchemaError(f"{path}: text is expected")
        self.leads.setdefault(start or "", set()).add(ref)
        if ref not in self._refs:
            name = self._refs[ref] = f"ref-{len(self._refs)}"
            value = self.expression(self._find(ref, path), shortened(ref, LONGEST_NAME), ref)
            self._rules[name] = f"{name} ::= {value}"
        return self._refs[ref]

    def _find(self, ref: str, path: str):
        if not ref.startswith("#"):
            raise SchemaError(f"{path}: only references within the schema, such as #/$defs/name, can be followed")
        try:
            return found(self._schema, ref)
        except LookupError:
            raise SchemaError(f"{path}: there is no {shortened(ref, LONGEST_NAME)}") from None

    def _any(self, options, path: str, start: str | None) -> str:
        self._count(options, path)
        return _either([self.expression(option, f"{path}[{number}]", start) for number, option in enumerate(options)])

    def _all(self, options, path: str, start: str | None) -> str:
        if not isinstance(options, list) or len(options) != 1:
            raise SchemaError(f"{path}: only one schema can be followed here")
        return self.expression(options[0], f"{path}[0]", start)

    def _constants(self, values, path: str) -> str:
        self._count(values, path)
        return _texts(sorted({self._literal(value) for value in values}))

    def _string(self, schema: dict, path: str) -> str:
        if "format" in schema:
            _only(schema, {"type", "format"}, path)
            if schema["format"] not in FORMATS:
                raise SchemaError(f"{path}.format: only {', '.join(FORMATS)} can be kept to")
            return rf'"\"" {FORMATS[schema["format"]]} "\""'
        return rf'"\"" {self.primitive("char")}{self._times(schema, path)} "\""'

    def _array(self, schema: dict, path: str) -> str:
        item = self._rule(f"{self.expression(schema.get('items', True), path + '.items')} ws")
        low, high = self._bounds(schema, "minItems", "maxItems", path)
        if high == 0:
            return '"[" ws "]"'
        more = f'{item} ("," ws {item}){{{max(low - 1, 0)},{"" if high is None else high - 1}}}'
        return f'"[" ws {more} "]"' if low else f'"[" ws ({more})? "]"'

    def _object(self, schema: dict, path: str) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise SchemaError(f"{path}: properties is an object, and required a list of names")
        self._count(list(properties), path, least=0)
        self._count(required, f"{path}.required", least=0)
        if lost := [name for name in required if not isinstance(name, str) or name not in properties]:
            first = shortened(json.dumps(lost[0]), LONGEST_NAME)
            raise SchemaError(f"{path}.required: {first} is not among the properties")
        pairs = []
        for name, inner in properties.items():
            pair = self._pair(_quoted(self._literal(name)[1:]), inner, f"{path}.{shortened(name, LONGEST_NAME)}")
            pairs.append((pair, name in required))
        others = schema.get("additionalProperties", False)
        if others is not False:
            pair = self._pair(rf'{self.primitive("char")}* "\""', others, f"{path}.additionalProperties")
            pairs.append((self._rule(rf'{pair} ("," ws "\"" {pair})*'), False))
        return f'"{{" ws {self._pairs(pairs)} "}}"'

    def _pair(self, name: str, schema, path: str) -> str:
        """A property without the quote before its name, which is the same for all of them."""
        return self._rule(f'{name} ws ":" ws {self.expression(schema, path)} ws')

    def _pairs(self, pairs: list[tuple[str, bool]]) -> str:
        """Pairs in their order, those that are not required each there or not, with commas between."""
        tail, more = "", ""  # what the rest may begin with, behind a quote; the rest behind a comma
        must = False  # whether any of the rest is required
        for pair, needed in reversed(pairs):
            whole = self._rule(f"{pair} {more}")
            tail = self._rule(f"{whole} | {tail}") if tail and not needed else whole
            must = must or needed
            more = self._rule(_perhaps(rf'"," ws "\"" {tail}', must))
        return _perhaps(rf'"\"" {tail}', must) if pairs else ""

    def _rule(self, expression: str) -> str:
        name = f"part-{len(self._rules)}"
        self._rules[name] = f"{name} ::= {expression}"
        return name

    def _literal(self, value) -> str:
        """The JSON of a value."""
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except ValueError:
            raise SchemaError("a number in it is not one of JSON's") from None
        self._length += len(text)
        if self._length > MOST_TEXT:
            raise SchemaError(f"there are more than {MOST_TEXT} characters of names and constants in it")
        return text

    def _times(self, schema: dict, path: str) -> str:
        low, high = self._bounds(schema, "minLength", "maxLength", path)
        return f"{{{low},{'' if high is None else high}}}"

    def _bounds(self, schema: dict, least: str, most: str, path: str) -> tuple[int, int | None]:
        low, high = schema.get(least, 0), schema.get(most)
        for keyword, value in ((least, low), (most, high)):
            if value is not None and (type(value) is not int or not 0 <= value <= MOST_ITEMS):
                raise SchemaError(f"{path}.{keyword}: a whole number from 0 to {MOST_ITEMS} is expected")
        if high is not None and low > high:
            raise SchemaError(f"{path}: {least} is above {most}")
        self._repeated += max(low, high or 0)
        if self._repeated > MOST_REPEATED:
            raise SchemaError(f"{path}: {least} and {most} are more than {MOST_REPEATED} in all")
        return low, high

    def _count(self, values, path: str, least: int = 1) -> None:
        if not isinstance(values, list) or len(values) < least:
            raise SchemaError(f"{path}: a list that is not empty is expected")
        self._choices += len(values)
        if self._choices > MOST_CHOICES:
            raise SchemaError(f"{path}: there are more than {MOST_CHOICES} properties, constants and alternatives in all")


def _only(schema: dict, allowed: set, path: str) -> None:
    for keyword in schema:
        if keyword not in allowed:
            raise SchemaError(f"{path}: {shortened(keyword, LONGEST_NAME)} cannot be kept to here")


def _either(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def _perhaps(expression: str, needed: bool) -> str:
    return expression if needed else f"({expression})?"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _texts(texts: list[str]) -> str:
    """One of some texts, sorted and all different, which are told apart at the first letter that differs."""
    groups = defaultdict(list)
    for text in texts:
        groups[text[:1]].append(text)
    options = []
    for group in groups.values():
        shared = os.path.commonprefix(group)
        rest = f" {_texts([text[len(shared) :] for text in group])}" if len(group) > 1 else ""
        options.append(_quoted(shared) + rest)
    return _either(options)

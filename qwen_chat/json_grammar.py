"""From a JSON schema to a grammar of llama.cpp: whatever fits the grammar fits the schema.

What a grammar cannot hold to is refused, so that nobody relies on a rule that is not kept. Properties
come in the schema's order; other properties are allowed only where `additionalProperties` says so.
"""

import json
from graphlib import CycleError, TopologicalSorter

MOST_ITEMS = 1000  # of a repetition; llama.cpp itself takes 2000
MOST_CHOICES = 500  # properties, constants and alternatives in all: each may slow every token down
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
KEYWORDS = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "format"},
}


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
    except RecursionError:
        raise SchemaError("it is nested too deeply") from None
    except UnicodeEncodeError:
        raise SchemaError("half a character is in it") from None
    except CycleError as error:
        raise SchemaError(f"{error.args[1][0]} refers to itself and to nothing else") from None
    return text


class _Grammar:
    def __init__(self, schema: dict):
        self._schema = schema
        self._rules: dict[str, str] = {"ws": SPACE}
        self._refs: dict[str, str] = {}
        self.leads: dict[str, set[str]] = {}  # from a reference to those that its value may begin as
        self._choices = 0

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
            self._rules[name] = f"{name} ::= {self.expression(self._find(ref, path), ref, ref)}"
        return self._refs[ref]

    def _find(self, ref: str, path: str):
        target = self._schema
        if not ref.startswith("#"):
            raise SchemaError(f"{path}: only references within the schema, such as #/$defs/name, can be followed")
        for part in ref[1:].split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(target, dict) or part not in target:
                raise SchemaError(f"{path}: there is no {ref}")
            target = target[part]
        return target

    def _any(self, options, path: str, start: str | None) -> str:
        self._count(options, path)
        return _either([self.expression(option, f"{path}[{number}]", start) for number, option in enumerate(options)])

    def _all(self, options, path: str, start: str | None) -> str:
        if not isinstance(options, list) or len(options) != 1:
            raise SchemaError(f"{path}: only one schema can be followed here")
        return self.expression(options[0], f"{path}[0]", start)

    def _constants(self, values, path: str) -> str:
        self._count(values, path)
        return _either([_literal(value) for value in values])

    def _string(self, schema: dict, path: str) -> str:
        if "format" in schema:
            _only(schema, {"type", "format"}, path)
            if schema["format"] not in FORMATS:
                raise SchemaError(f"{path}.format: only {', '.join(FORMATS)} can be kept to")
            return rf'"\"" {FORMATS[schema["format"]]} "\""'
        return rf'"\"" {self.primitive("char")}{_times(schema, "minLength", "maxLength", path)} "\""'

    def _array(self, schema: dict, path: str) -> str:
        item = self._rule(f"{self.expression(schema.get('items', True), path + '.items')} ws")
        low, high = _bounds(schema, "minItems", "maxItems", path)
        if high == 0:
            return '"[" ws "]"'
        more = f'{item} ("," ws {item}){{{max(low - 1, 0)},{"" if high is None else high - 1}}}'
        return f'"[" ws {more} "]"' if low else f'"[" ws ({more})? "]"'

    def _object(self, schema: dict, path: str) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise SchemaError(f"{path}: properties is an object, and required a list of names")
        if lost := [name for name in required if not isinstance(name, str) or name not in properties]:
            raise SchemaError(f"{path}.required: {json.dumps(lost[0])} is not among the properties")
        self._count(list(properties), path, least=0)
        pairs = [
            (self._rule(f'{_literal(name)} ws ":" ws {self.expression(inner, f"{path}.{name}")} ws'), name in required)
            for name, inner in properties.items()
        ]
        others = schema.get("additionalProperties", False)
        if others is not False:
            pair = self._rule(f'{self.primitive("string")} ws ":" ws {self.expression(others, path + ".additionalProperties")} ws')
            pairs.append((self._rule(f'{pair} ("," ws {pair})*'), False))
        return f'"{{" ws {self._pairs(pairs)} "}}"'

    def _pairs(self, pairs: list[tuple[str, bool]]) -> str:
        """Pairs in their order, those that are not required each there or not, with commas between."""
        after, whole = "", '""'  # what may follow a pair, and what may stand at the beginning
        for pair, needed in reversed(pairs):
            first = f"{pair} {after}"
            whole = first if needed else f"{first} | {whole}"
            after = self._rule(f'"," ws {pair} {after}' if needed else f'("," ws {pair})? {after}')
            whole = self._rule(whole)
        return whole

    def _rule(self, expression: str) -> str:
        name = f"part-{len(self._rules)}"
        self._rules[name] = f"{name} ::= {expression}"
        return name

    def _count(self, values, path: str, least: int = 1) -> None:
        if not isinstance(values, list) or len(values) < least:
            raise SchemaError(f"{path}: a list that is not empty is expected")
        self._choices += len(values)
        if self._choices > MOST_CHOICES:
            raise SchemaError(f"{path}: there are more than {MOST_CHOICES} properties, constants and alternatives in all")


def _only(schema: dict, allowed: set, path: str) -> None:
    for keyword in schema:
        if keyword not in allowed:
            raise SchemaError(f"{path}: {keyword} cannot be kept to here")


def _either(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"({' | '.join(options)})"


def _literal(value) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise SchemaError("a number in it is not one of JSON's") from None
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _times(schema: dict, least: str, most: str, path: str) -> str:
    low, high = _bounds(schema, least, most, path)
    return f"{{{low},{'' if high is None else high}}}"


def _bounds(schema: dict, least: str, most: str, path: str) -> tuple[int, int | None]:
    low, high = schema.get(least, 0), schema.get(most)
    for keyword, value in ((least, low), (most, high)):
        if value is not None and (type(value) is not int or not 0 <= value <= MOST_ITEMS):
            raise SchemaError(f"{path}.{keyword}: a whole number from 0 to {MOST_ITEMS} is expected")
    if high is not None and low > high:
        raise SchemaError(f"{path}: {least} is above {most}")
    return low, high

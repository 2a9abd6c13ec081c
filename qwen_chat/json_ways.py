"""In how many ways at once the beginning of a text may be read by a JSON schema.

Alternatives that begin alike are all followed until the text tells them apart. Where it does so only at their ends, and
they lead back to themselves, the ways multiply with every step: three kinds of lists of one another are 3**n ways after
n brackets.
"""

import json
from collections import Counter, defaultdict

MOST_WAYS = 100
MOST_ROUNDS = 8  # until the ways through references no longer grow
KEYWORDS = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    "string": {"minLength", "maxLength", "format"},
}
BEGINS = {"object": "{", "array": "[", "string": '"', "number": "0", "integer": "0", "boolean": "t", "null": "n"}
ANYHOW = "".join(dict.fromkeys(BEGINS.values()))


def most_ways(schema: dict) -> int:
    """The most ways, more than MOST_WAYS where they are without bound. `schema` is one that a grammar was made from."""
    return _Ways(schema).most()


def found(schema: dict, ref: str):
    """What a reference within `schema` refers to. Raises LookupError."""
    target = schema
    for part in ref[1:].split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(target, dict):
            raise LookupError(part)
        target = target[part]
    return target


class _Ways:
    """In how many ways at once a text so far may be read by a schema that a grammar was made from."""

    def __init__(self, schema: dict):
        self._schema = schema
        self._known: dict[str, int] = {}  # the ways through references, as found in the round before
        self._found: dict[str, int | None] = {}  # and in this one; None while it is computed
        self._heads: dict[str, dict] = {}

    def most(self) -> int:
        """Through a reference that leads back to itself there are as many as before, or ever more."""
        for _ in range(MOST_ROUNDS):
            self._found = {}
            most = self._ways(self._schema)
            if self._found == self._known or most > MOST_WAYS:
                return most
            self._known = self._found
        return MOST_WAYS + 1

    def _ways(self, schema) -> int:
        if not isinstance(schema, dict):
            return 1
        if ref := schema.get("$ref"):
            return self._through(ref)
        if options := _options(schema):
            return self._choice(options)
        if "const" in schema or "enum" in schema:
            return 1  # they are told apart letter by letter
        return max(self._object(schema), self._ways(schema.get("items")))

    def _through(self, ref: str) -> int:
        if ref not in self._found:
            self._found[ref] = None
            self._found[ref] = self._ways(found(self._schema, ref))
        return self._found[ref] or self._known.get(ref, 1)

    def _object(self, schema: dict) -> int:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        others = schema.get("additionalProperties", False)
        alike = run = 1  # names that may come next
        for name in properties:
            run = 1 if name in required else run + 1
            alike = max(alike, run)
        if others is False:
            return max([alike, *map(self._ways, properties.values())])
        return max([alike, self._ways(others), *(self._choice([inner, others]) for inner in properties.values())])

    def _choice(self, options: list) -> int:
        alike = defaultdict(list)
        for option in options:
            ways = self._ways(option)
            for kind, heads in self._begins(option).items():
                alike[kind].append((ways, heads))
        return max(_together(each) for each in alike.values())

    def _begins(self, schema) -> dict[str, set | None]:
        """The kinds of JSON that a value may be, and of each how it may begin: texts, or names of a first property with
        their values (None: any); None where it may begin anyhow."""
        if not isinstance(schema, dict) or not schema:
            return dict.fromkeys(ANYHOW)
        if ref := schema.get("$ref"):
            if ref not in self._heads:
                self._heads[ref] = self._begins(found(self._schema, ref))
            return self._heads[ref]
        if options := _options(schema):
            return _merged([self._begins(option) for option in options])
        if constants := _constants(schema):
            texts = map(json.dumps, constants)
            return _merged([{_kind(text): {("", text)} if text[0] != "{" else None} for text in texts])
        kinds = schema.get("type", next((kind for kind, words in KEYWORDS.items() if words & schema.keys()), None))
        kinds = kinds if isinstance(kinds, list) else [kinds]
        begins: dict[str, set | None] = dict.fromkeys([BEGINS[kind] for kind in kinds if kind in BEGINS] or ANYHOW)
        first = next(iter(schema.get("properties", {}).items()), None)
        if "{" in begins and first and first[0] in schema.get("required", []):
            values = _constants(first[1]) if isinstance(first[1], dict) else []
            begins["{"] = {(first[0], json.dumps(value)) for value in values} or {(first[0], None)}
        return begins


def _kind(text: str) -> str:
    return {"f": "t"}.get(text[0], text[0] if text[0] in '{["tn' else "0")


def _options(schema: dict) -> list:
    return schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf") or []


def _constants(schema: dict) -> list:
    return [schema["const"]] if "const" in schema else schema.get("enum", [])


def _merged(all_begins: list[dict]) -> dict[str, set | None]:
    merged: dict[str, set | None] = {}
    for begins in all_begins:
        for kind, heads in begins.items():
            before = merged.get(kind, set())
            merged[kind] = None if heads is None or before is None else before | heads
    return merged


def _together(alike: list[tuple[int, set | None]]) -> int:
    """The ways of alternatives of one kind: where what they begin with tells them apart, only one of them goes on."""
    heads = [head for _, heads in alike for head in heads or ()]
    names = Counter(name for _, heads in alike for name in {name for name, _ in heads or ()})
    apart = all(heads for _, heads in alike) and len(set(heads)) == len(heads)
    if apart and all(names[name] == 1 for name, value in heads if value is None):
        return max(len(alike), max(ways for ways, _ in alike))
    return sum(ways for ways, _ in alike)

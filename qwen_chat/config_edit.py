"""Changes single values in the text of a config.yaml; comments, order and everything else stay byte for byte.

PyYAML tells where each value stands in the text, and nothing but that is replaced. The result is read again, and
used only if it says what the old text said but for the values to be changed.
"""

import copy
import os
import shutil
import tempfile
from pathlib import Path

import yaml

from .config import ConfigError, load

Key = tuple[str, ...]  # such as ("runtime", "n_threads")


class EditError(Exception):
    """The file stays as it was; the message is a sentence for a person."""


def write(file: Path, values: dict[Key, object]) -> list[Key]:
    """Puts `values` into the file, in one step, and returns under which keys they stand there.

    A value goes into the profile that the file names, where that sets the same key and so would win. Raises EditError.
    """
    real = Path(os.path.realpath(file))  # a link stays a link
    try:
        text = real.read_bytes().decode("utf-8")
        where = {key: place(text, key) for key in values}
        content = edited(text, {where[key]: value for key, value in values.items()})
        if profile := _replace(real, content, values):
            where = {key: place(text, key, profile) for key in values}
            content = edited(text, {where[key]: value for key, value in values.items()})
            if _replace(real, content, values):
                names = ", ".join(".".join(key) for key in values)
                raise EditError(f"{file}: the profile {profile}, which is in force, sets some of {names} otherwise, and is not written out "
                                "in the file; with `profile: none` the file's own settings count. It stays as it is")
    except yaml.YAMLError as error:
        raise EditError(f"{file}: not valid YAML any more ({' '.join(str(error).split())[:200]}); it stays as it is") from None
    except UnicodeDecodeError:
        raise EditError(f"{file}: not UTF-8 text; nothing was written") from None
    except OSError as error:
        raise EditError(f"{file} cannot be written: {error.strerror}; it stays as it is") from None
    return list(where.values())


def place(text: str, key: Key, profile: str | None = None) -> Key:
    """Where a value must stand to count: `key`, or its place in `profile`, by default the one that `text` names, where
    that sets it too."""
    settings = yaml.safe_load(text)
    inner = settings.get("profiles") if isinstance(settings, dict) else None
    path = ("profiles", profile or settings.get("profile"), *key) if inner else ()
    for part in path[1:]:
        inner = inner.get(part) if isinstance(inner, dict) else None
    return key if inner is None else path


def edited(text: str, values: dict[Key, object]) -> str:
    """`text` with these values. Raises EditError where it cannot be changed without changing more."""
    try:
        expected = yaml.safe_load(text)
        result = text
        for key, value in values.items():
            result = _with_value(result, key, value)
            expected = _with_data(expected, key, value)
        if yaml.safe_load(result) == expected:
            return result
    except (yaml.YAMLError, AttributeError, TypeError, RecursionError, ValueError):
        pass
    names = ", ".join(".".join(key) for key in values)
    raise EditError(f"the file is written in a way in which {names} cannot be changed without changing more; it stays as it is")


def _with_data(settings: dict, key: Key, value: object) -> dict:
    """A copy of `settings` with this value; what shares a part of it by an alias keeps its own."""
    changed = dict(settings)
    changed[key[0]] = value if len(key) == 1 else _with_data(changed.get(key[0], {}), key[1:], value)
    return copy.deepcopy(changed)


def _with_value(text: str, key: Key, value: object) -> str:
    node = yaml.compose(text, yaml.SafeLoader)
    for depth, name in enumerate(key):
        found = [(name_node, inner) for name_node, inner in node.value if name_node.value == name]
        if not found:
            return _insert(text, node, key[depth:], value)
        name_node, node = found[0]
    start, end = node.start_mark.index, node.end_mark.index
    if start < name_node.end_mark.index or not isinstance(node, yaml.ScalarNode):  # an alias, whose node is elsewhere; a list
        raise ValueError
    return text[:start] + _scalar(value) + text[end:]


def _insert(text: str, mapping: yaml.MappingNode, key: Key, value: object) -> str:
    """`text` with a key that is missing in `mapping`, at its end."""
    flow = "".join(f"{{{name}: " for name in key[1:]) + _scalar(value) + "}" * len(key[1:])
    if mapping.flow_style:
        at = mapping.value[-1][1].end_mark.index if mapping.value else mapping.start_mark.index + 1
        return f"{text[:at]}{', ' if mapping.value else ''}{key[0]}: {flow}{text[at:]}"
    newline = "\r\n" if "\r\n" in text else "\n"
    indent = mapping.value[0][0].start_mark.column
    lines = [" " * (indent + 2 * depth) + f"{name}:" for depth, name in enumerate(key)]
    lines[-1] += f" {_scalar(value)}"
    at = _end_of_line(text, _last_leaf(mapping).end_mark)
    added = newline.join(lines)
    return text[:at] + (added + newline if text[:at].endswith("\n") else newline + added) + text[at:]


def _last_leaf(node: yaml.Node) -> yaml.Node:
    """A block's own end is only where the next one begins, with the next one's comments before it."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style:
        last = node.value[-1]
        node = last[1] if isinstance(last, tuple) else last
    return node


def _end_of_line(text: str, mark: yaml.Mark) -> int:
    """Where the line after the one of `mark` begins, or the text ends."""
    if mark.column == 0:  # a block of text ends with its last line
        return mark.index
    return text.find("\n", mark.index) + 1 or len(text)


def _scalar(value: object) -> str:
    """A value as it may stand anywhere, also in a list in brackets."""
    return yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, width=float("inf")).strip()[1:-1]


def _replace(file: Path, content: str, values: dict[Key, object]) -> str | None:
    """Puts `content` in the place of `file`, if it loads as a configuration. Where a profile keeps `values` from being in
    force in it, nothing is done but its name returned."""
    before = file.stat()
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(handle, "wb") as part:
            part.write(content.encode("utf-8"))
            part.flush()
            os.fsync(part.fileno())
        config = load(name, {})
        in_force = getattr(config, "in_force", None)
        if in_force and any(_value(config, key) != value for key, value in values.items()):
            return in_force.name
        shutil.copymode(file, name)
        if hasattr(os, "chown") and (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
            os.chown(name, before.st_uid, before.st_gid)
        os.replace(name, file)
    except ConfigError as error:
        faults = "; ".join(fault.removeprefix(f"{Path(name).name}: ") for fault in error.faults)
        raise EditError(f"{file}: the result would not be a valid configuration ({faults}); it stays as it is") from None
    finally:
        Path(name).unlink(missing_ok=True)
    return None


def _value(config: object, key: Key) -> object:
    for name in key:
        config = getattr(config, name)
    return config

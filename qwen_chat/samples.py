"""The texts that the tools compute with, as token ids: calibration.yaml, evaluation.yaml, or a person's own file."""

from pathlib import Path

import yaml

from .template import ChatTemplate, joined

CALIBRATION = Path(__file__).with_name("calibration.yaml")
EVALUATION = Path(__file__).with_name("evaluation.yaml")
ROLES = ("user", "assistant")


class SampleError(Exception):
    """A text cannot be used; the message is a sentence for a person."""


def load(file: Path) -> list[str | list[str]]:
    """The texts of a file: those of a .yaml as it lists them, a string for a text and a list of strings for a
    dialogue; any other file is one text. Raises SampleError."""
    try:
        content = file.read_text(encoding="utf-8")
        entries = yaml.safe_load(content) if file.suffix in (".yaml", ".yml") else [content]
    except OSError as error:
        raise SampleError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SampleError(f"{file}: not a text in UTF-8") from None
    except yaml.YAMLError as error:
        raise SampleError(f"{file}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(entries, list) or not all(map(_is_entry, entries)):
        raise SampleError(f"{file}: a list is expected, of texts and of dialogues (lists of texts)")
    return entries


def _is_entry(entry) -> bool:
    return isinstance(entry, str) or isinstance(entry, list) and all(isinstance(each, str) for each in entry)


def windows(file: Path, model, length: int) -> list[list[int]]:
    """The texts of `file` as token ids of `model`, those longer than `length` tokens cut into pieces.
    Pieces of a single token, which nothing can be told from, are left out. Raises SampleError."""
    template = ChatTemplate(model)
    pieces = []
    for entry in load(file):
        tokens = template.plain(entry) if isinstance(entry, str) else _dialogue(template, entry)
        pieces += [tokens[start : start + length] for start in range(0, len(tokens), length)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    if not pieces:
        raise SampleError(f"{file}: there is no text in it")
    return pieces


def _dialogue(template: ChatTemplate, turns: list[str]) -> list[int]:
    messages = [{"role": ROLES[number % 2], "content": text} for number, text in enumerate(turns)]
    return joined(template.render(messages, answering=False))

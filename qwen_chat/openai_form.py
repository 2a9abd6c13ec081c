"""The requests of OpenAI's API that are understood here, and its form of errors.

What the model cannot do is refused by name; a parameter that changes nothing here is taken and ignored.

Reading a request takes the interpreter's lock, which every stream needs, so what it may cost is bounded before it
is done: the values of the JSON are counted before they are made, the messages before each is checked, and of the
faults only the first is looked for.
"""

import difflib
import functools
import json
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

MOST_STOPS, LONGEST_STOP, MOST_BIASES = 16, 1000, 1024
MOST_VALUES = 50_000  # commas and opening brackets in a request's JSON; so many values are made within some 20 ms
MOST_KEYS = 64  # of an object whose keys are prescribed
MOST_PARTS = 1000  # of a message
LONGEST_NAME = 100  # characters of a parameter, in an error
LONGEST_MESSAGE = 500  # characters of an error

TOO_MANY_VALUES = f"more than {MOST_VALUES} commas and opening brackets outside texts"
NO_MARKS = bytes(set(range(256)) - set(b'"[{,'))  # what stands neither around texts nor before values


class ApiError(Exception):
    """What is answered in place of what was asked for. `headers` go with it. It is short, whatever it names."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None, headers: dict | None = None):
        super().__init__(shortened(message, LONGEST_MESSAGE))
        self.status, self.code, self.headers = status, code, headers
        self.param = param and shortened(param, LONGEST_NAME)

    @property
    def body(self) -> dict:
        kind = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def shortened(text: str, most: int) -> str:
    """`text`, or as much of its beginning as makes `most` characters with a sign that there was more."""
    return text if len(text) <= most else text[: most - 1] + "…"


class Form(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _has_few_keys(cls, value: Any) -> Any:
        """Each key that is not known would be a fault of its own."""
        if isinstance(value, dict) and len(value) > MOST_KEYS:
            counts = {"count": len(value), "most": MOST_KEYS}
            raise PydanticCustomError("too_many_keys", "it has {count} keys, and at most {most} are read", counts)
        return value


class TextPart(Form):
    type: Literal["text"]
    text: str


class Message(Form):
    """`developer` is read as `system`. What an answer of this API has besides may come back with it."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MOST_PARTS)]
    name: Any = None
    refusal: None = None
    annotations: Annotated[list, Field(max_length=0)] | None = None

    def plain(self) -> dict:
        content = self.content
        if not isinstance(content, str):
            content = [{"type": "text", "text": part.text} for part in content]
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class StreamOptions(Form):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class TextFormat(Form):
    type: Literal["text"]


class ObjectFormat(Form):
    type: Literal["json_object"]


class JsonSchema(Form):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class SchemaFormat(Form):
    type: Literal["json_schema"]
    json_schema: JsonSchema


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _few_biases(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MOST_BIASES:
        counts = {"count": len(value), "most": MOST_BIASES}
        raise PydanticCustomError("too_long", "it has {count} entries, and at most {most} are read", counts)
    return value


WHOLE = BeforeValidator(_whole)  # JSON does not tell 5.0 from 5
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]
TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
Biases = Annotated[dict[TokenId, Bias] | None, BeforeValidator(_few_biases)]
Penalty = Annotated[float, Field(ge=-2, le=2)] | None
Part = Annotated[float, Field(ge=0, le=1)] | None
Tokens = Annotated[int, Field(ge=1, le=2**31), WHOLE] | None


class Request(Form):
    """What both kinds of requests may say. What is left out, or null, is as config.yaml has it."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Tokens = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Part = None
    top_k: Annotated[int, Field(ge=0, le=1_000_000), WHOLE] | None = None
    min_p: Part = None
    repeat_penalty: Annotated[float, Field(ge=0.5, le=2)] | None = None
    repeat_last_n: Annotated[int, Field(ge=0, le=32768), WHOLE] | None = None
    frequency_penalty: Penalty = None
    presence_penalty: Penalty = None
    seed: Annotated[int, Field(ge=-1, le=2**63 - 1), WHOLE] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MOST_STOPS)] | None = None
    logit_bias: Biases = Field(None, json_schema_extra={"maxProperties": MOST_BIASES})
    n: Literal[1] | None = None
    # Taken and ignored.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    parallel_tool_calls: Any = None

    @property
    def stops(self) -> list[str] | None:
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatRequest(Request):
    subject: ClassVar = "messages"

    messages: Annotated[list[Message], FailFast(), Field(min_length=1)]
    max_completion_tokens: Tokens = None
    response_format: Annotated[TextFormat | ObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None

    @property
    def longest(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many likely tokens are reported for each one; None: nothing is."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TextRequest(Request):
    subject: ClassVar = "prompt"

    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1)]
    logprobs: Annotated[int, Field(ge=0, le=5), WHOLE] | None = None
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @property
    def text(self) -> str:
        return self.prompt if isinstance(self.prompt, str) else self.prompt[0]

    @property
    def longest(self) -> int | None:
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.logprobs


# What the model cannot do, and the values with which that is not asked for.
NO_TOOLS = "this model calls no tools or functions"
NO_SOUND = "this model reads and writes text alone"
REFUSED = {
    "tools": (NO_TOOLS, (None, [])),
    "tool_choice": (NO_TOOLS, (None, "none")),
    "functions": (NO_TOOLS, (None, [])),
    "function_call": (NO_TOOLS, (None, "none")),
    "tool_calls": (NO_TOOLS, (None, [])),
    "tool_call_id": (NO_TOOLS, (None,)),
    "audio": (NO_SOUND, (None,)),
    "modalities": (NO_SOUND, (None, ["text"])),
    "prediction": ("predicted output is not supported", (None,)),
    "web_search_options": ("this model searches nothing", (None,)),
    "reasoning_effort": ("this model does not reason before it answers", (None, "none")),
    "verbosity": ("the length of answers cannot be chosen; max_tokens limits it", (None, "medium")),
}
OTHER_PARTS = {"image_url", "input_audio", "file", "image", "video_url", "refusal"}
MORE_CHOICES = {"n": "one answer a request is given", "best_of": "one answer a request is given", "echo": "the prompt is not repeated", "suffix": "text cannot be inserted before other text"}

Kind = TypeVar("Kind", bound=Request)


def read(kind: type[Kind], raw: bytes, most_messages: int) -> Kind:
    """The request that `raw` holds. Raises ApiError, which names the parameter that is wrong.

    `most_messages` is how many the window could hold if each had next to no text.
    """
    body = _json(raw)
    if not isinstance(body, dict):
        raise ApiError(400, "the request's body must be a JSON object")
    body = _without_refused(body)
    if isinstance(body.get("messages"), list):
        if (count := len(body["messages"])) > most_messages:
            words = f"messages: there are {count}, and the window holds {most_messages} at most, however short they are"
            raise ApiError(400, words, "messages", "context_length_exceeded")
        body["messages"] = [_message(message, f"messages[{number}]") for number, message in enumerate(body["messages"])]
    try:
        request = kind.model_validate(body)
    except ValidationError as error:
        raise _as_api_error(kind, error, body) from None
    if request.stream_options and not request.stream:
        raise ApiError(400, "stream_options goes with stream: true", "stream_options")
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs goes with logprobs: true", "top_logprobs")
    return request


def few_values(raw: bytes) -> bool:
    """Whether no more than MOST_VALUES commas and opening brackets are in the JSON of `raw`, outside its texts.

    First all of them are counted, for that is quick.
    """
    if len(raw.translate(None, NO_MARKS + b'"')) <= MOST_VALUES:
        return True
    marks = raw.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, NO_MARKS)
    if marks.count(b'"') > 4 * MOST_VALUES:  # a text is a value or the name of one, and stands between two
        return False
    return len(b"".join(marks.split(b'"')[::2])) <= MOST_VALUES


def _json(raw: bytes) -> Any:
    def refuse(name: str):
        raise ValueError(f"{name} is not a JSON number")

    if not few_values(raw):
        raise ApiError(400, f"the request's body has too many values: {TOO_MANY_VALUES}", code="too_many_values")
    try:
        return json.loads(raw.decode("utf-8"), parse_constant=refuse)
    except UnicodeDecodeError:
        reason = "it is not UTF-8 text"
    except json.JSONDecodeError as error:
        reason = f"{error.msg} in line {error.lineno}, column {error.colno}"
    except ValueError as error:
        reason = str(error) if "JSON number" in str(error) else "a number in it is too long"
    except RecursionError:
        reason = "it is nested too deeply"
    raise ApiError(400, f"the request's body is not valid JSON: {reason}", code="invalid_json")


def _without_refused(body: dict, path: str = "") -> dict:
    for name, (reason, harmless) in REFUSED.items():
        if name in body and body[name] not in harmless:
            raise ApiError(400, f"{path}{name}: {reason}", f"{path}{name}", "unsupported_parameter")
    return {name: value for name, value in body.items() if name not in REFUSED}


def _message(message: Any, path: str) -> Any:
    """A message without what asks for nothing; raises ApiError where it holds what the model cannot read."""
    if not isinstance(message, dict):
        return message
    if message.get("role") in ("tool", "function"):
        raise ApiError(400, f"{path}.role: {NO_TOOLS}", f"{path}.role", "unsupported_parameter")
    parts = message.get("content")
    for number, part in enumerate(parts if isinstance(parts, list) else []):
        if isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] in OTHER_PARTS:
            raise ApiError(400, f"{path}.content[{number}]: {NO_SOUND}, not {part['type']}", f"{path}.content[{number}].type", "unsupported_parameter")
    return _without_refused(message, f"{path}.")


def _as_api_error(kind: type[Form], error: ValidationError, body: dict) -> ApiError:
    faults = [(_param(fault, body), fault) for fault in error.errors(include_url=False, include_context=False, include_input=False)]
    begun = faults[0][0]
    param, fault = max((each for each in faults if each[0].startswith(begun)), key=lambda each: len(each[0]))
    where = shortened(param, LONGEST_NAME) or "the request's body"
    if fault["type"] == "extra_forbidden":
        close = difflib.get_close_matches(param[:LONGEST_NAME], list(kind.model_fields), n=1)
        return ApiError(400, f"{where}: no such parameter" + (f"; did you mean {close[0]}?" if close else ""), param, "unknown_parameter")
    if param in MORE_CHOICES:
        return ApiError(400, f"{where}: {MORE_CHOICES[param]}", param, "unsupported_parameter")
    if fault["type"] == "missing":
        return ApiError(400, f"{where}: it is missing", param, "missing_required_parameter")
    reasons = dict.fromkeys(_lower(fault["msg"]) for path, fault in faults if path == param)
    return ApiError(400, f"{where}: {' or '.join(reasons)}", param or None, "invalid_value")


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _param(fault: dict, body: Any) -> str:
    """The path of a fault as it stands in the body; pydantic's also names the kinds that were tried."""
    path, value = "", body
    for number, part in enumerate(fault["loc"]):
        last = number == len(fault["loc"]) - 1
        if isinstance(value, list) and isinstance(part, int) and part < len(value):
            path, value = f"{path}[{part}]", value[part]
        elif isinstance(value, dict) and isinstance(part, str) and (part in value or last and fault["type"] == "missing"):
            path, value = f"{path}.{part}" if path else part, value.get(part)
    return path


@functools.cache
def document(version: str) -> dict:
    """The OpenAPI document of the API."""
    schemas: dict[str, Any] = {"Error": _ERROR}
    for kind in (ChatRequest, TextRequest):
        schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        schemas[kind.__name__] = schema
    key = {"type": "http", "scheme": "bearer", "description": "needed where server.api_key is set"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Qwen Chat", "version": version},
        "paths": {
            "/v1/chat/completions": {"post": _operation("The answer to a conversation.", "ChatRequest")},
            "/v1/completions": {"post": _operation("The continuation of a text.", "TextRequest")},
            "/v1/models": {"get": _operation("The model.")},
            "/health": {"get": {"summary": "Whether a question would be answered.", "security": [], "responses": {"200": _JSON, "503": _JSON}}},
        },
        "components": {"schemas": schemas, "securitySchemes": {"key": key}},
        "security": [{"key": []}, {}],
    }


_JSON = {"description": "JSON", "content": {"application/json": {"schema": {"type": "object"}}}}
_EVENT = {"type": "object", "required": ["data"], "properties": {"data": {"type": "string", "description": "a chunk as JSON, at the end [DONE]"}}}
_TEXT_OR_NULL = {"type": ["string", "null"]}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL},
        }
    },
}


def _operation(summary: str, request: str | None = None) -> dict:
    error = {"description": "Error", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}
    statuses = [401, 403, 405, 500, 503] + ([400, 408, 413, 415, 429] if request else [])
    answer = {**_JSON, "content": {**_JSON["content"], **({"text/event-stream": {"schema": _EVENT}} if request else {})}}
    operation = {"summary": summary, "responses": {"200": answer, **{str(status): error for status in sorted(statuses)}}}
    if request:
        schema = {"$ref": f"#/components/schemas/{request}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation

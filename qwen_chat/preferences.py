"""What one browser tab may set otherwise than config.yaml, and the configuration that comes of it."""

from .config import Config, Section, validated

# What the settings panel and the endpoint /chat offer, in their order: name -> where it stands in config.yaml.
KEYS = {
    "system_prompt": ("chat", "system_prompt"),
    "temperature": ("generation", "temperature"),
    "top_p": ("generation", "top_p"),
    "repeat_penalty": ("generation", "repeat_penalty"),
    "max_tokens": ("generation", "max_tokens"),
    "max_turns": ("chat", "history", "max_turns"),
    "seed": ("runtime", "seed"),
}


def defaults(config: Config) -> dict:
    """The settings as config.yaml has them."""
    return {name: _at(config, path) for name, path in KEYS.items()}


def bounds(name: str) -> tuple[float | None, float | None]:
    """The least and the greatest value that config.yaml allows for a number; None where there is no such."""
    *path, key = KEYS[name]
    limits = _at(Config(), path).__class__.model_fields[key].metadata
    least = next((limit.ge for limit in limits if hasattr(limit, "ge")), None)
    greatest = next((limit.le for limit in limits if hasattr(limit, "le")), None)
    return least, greatest


def applied(config: Config, values: dict) -> Config:
    """`config` with a tab's `values` in place of its own; what is None or blank stays as it is.

    Raises ConfigError with a line for each value that config.yaml would not allow either.
    """
    given = {name: _plain(value) for name, value in values.items() if value is not None and not _blank(value)}
    if all(_at(config, KEYS[name]) == value for name, value in given.items()):
        return config
    settings = config.model_dump()
    for name, value in given.items():
        *path, key = KEYS[name]
        section = settings
        for part in path:
            section = section[part]
        section[key] = value
    return validated(settings)


def _at(config: Section, path: tuple):
    for part in path:
        config = getattr(config, part)
    return config


def _plain(value):
    """A slider hands 256 over as 256.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _blank(value) -> bool:
    return isinstance(value, str) and not value.strip()

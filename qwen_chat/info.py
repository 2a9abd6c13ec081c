"""python -m qwen_chat info: what this device grants and what config.yaml comes to on it. Fetches and loads nothing."""

import argparse
import json
import os
import platform
from importlib import metadata
from pathlib import Path

from . import __version__, hardware, memory, weights
from .config import DEFAULT_FILE, Config, load_or_exit
from .memory import mb

PACKAGES = ("llama-cpp-python", "gradio", "huggingface-hub")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the same for programs; sizes in bytes")


def run(options) -> int:
    """Prints it; 0 unless config.yaml has a fault."""
    facts = gather(load_or_exit())
    print(json.dumps(facts, indent=1, ensure_ascii=False, default=str) if options.json else text(facts))
    return 0


def gather(config: Config) -> dict:
    """All that is told, in plain values."""
    from . import cpu_code
    from .gguf import read_shape

    cores, granted = hardware.cores(), hardware.usable_memory()
    code, code_fault = None, None
    try:
        code = cpu_code.use(config.runtime.cpu_code, config.runtime.cpu_code_exclude)
    except cpu_code.CpuCodeError as error:
        code_fault = str(error)
    file, fault = None, None
    try:
        file = weights.at_hand(config.model)
    except weights.WeightsError as error:
        fault = str(error)
    return {
        "versions": {"qwen-chat": __version__, "python": platform.python_version(), "system": platform.platform(), **{name: _version(name) for name in PACKAGES}},
        "device": {
            "board": hardware.device(), "processor": hardware.cpu_model(), "features": hardware.cpu_features(),
            "surroundings": hardware.surroundings(),
        },
        "cpu_code": {
            "computes": code is not None, "name": code.name if code else None, "uses": cpu_code.features(code) if code else [],
            "compiler": cpu_code.compiler(code) if code else None, "extra_buffers": bool(code and code.extra_buffers),
            "fault": code_fault or code.complaint or cpu_code.not_native(code) or None,
            "variants": [cpu_code.variant_name(file) for file in cpu_code.variants()],
        },
        "cores": {**vars(cores), "because": cores.because},
        "memory": vars(granted),
        "config": _config(config, cores),
        "weights": {
            "name": file.name if file else None, "path": str(file.path) if file else None, "bytes": file.path.stat().st_size if file else None,
            "note": fault or (file.fallback if file else f"{config.model.filename} is not here yet, the start would fetch it"),
        },
        "needs": _needs(read_shape(file.path) if file else None, config.runtime, granted, bool(code and code.extra_buffers)),
    }


def _config(config: Config, cores: hardware.Cores) -> dict:
    in_force, runtime = config.in_force, config.runtime
    threads = {name: cores.count if (value := getattr(runtime, name)) == "auto" else value for name in ("n_threads", "n_threads_batch")}
    if runtime.n_threads != "auto" and runtime.n_threads_batch == "auto":
        threads["n_threads_batch"] = runtime.n_threads
    return {
        "file": str(Path(os.environ.get("CONFIG") or DEFAULT_FILE).resolve()),
        "profile": config.profile,
        "in_force": in_force.name if in_force else None,
        "why": in_force.why if in_force else "config.yaml says none" if config.profile == "none" else "none is made for this device",
        "changes": {key: list(change) for key, change in in_force.changes.items()} if in_force else {},
        "runtime": runtime.model_dump(),
        "threads": threads,
    }


def _needs(shape: memory.Shape | None, runtime, granted: hardware.Memory, extra_buffers: bool) -> dict | None:
    """The sum, as the start reckons it; None where nothing is known of the weights."""
    if shape is None:
        return None
    own, refusal = hardware.held_by_process(), None
    need = memory.choose(shape, runtime, granted, own, extra_buffers)
    try:
        memory.check(shape, runtime, granted, own, extra_buffers)
    except memory.NotEnoughMemory as error:
        refusal = str(error)
    return {**vars(need), "layout": vars(need.layout), "copy_kinds": shape.copy_kinds, "least": need.least, "parts": need.parts(), "short": memory.short(need, granted, own), "refusal": refusal, "parking": memory.parking(need, runtime, granted, own)}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def text(facts: dict) -> str:
    """The facts for a person."""
    rows = [row for part in (_device, _cores, _memory, _profile, _settings, _weights) for row in part(facts)]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _device(facts: dict) -> list[tuple[str, str]]:
    versions, device = facts["versions"], facts["device"]
    listed = ", ".join(f"{name} {versions[name]}" for name in PACKAGES)
    return [
        ("qwen-chat", f"{versions['qwen-chat']}, Python {versions['python']}, {listed}"),
        ("device", ", in a ".join([device["board"] or versions["system"], *device["surroundings"]])),
        ("processor", f"{device['processor']}: {', '.join(device['features']) or 'its features are not listed by this system'}"),
        *_cpu_code(facts["cpu_code"]),
    ]


def _cpu_code(code: dict) -> list[tuple[str, str]]:
    made_by = f", compiled by {code['compiler']}" if code["compiler"] else ""
    computes = f"yes, with the {code['name']} code{made_by}: {', '.join(code['uses']) or 'no instruction sets of its own'}"
    rows = [("computes", computes if code["computes"] else "no")] + ([("", code["fault"])] if code["fault"] else [])
    return rows + ([("", f"variants for this processor: {', '.join(code['variants'])}")] if code["variants"] else [])


def _cores(facts: dict) -> list[tuple[str, str]]:
    return [("cores", f"{facts['cores']['count']}: {facts['cores']['because']}")]


def _memory(facts: dict) -> list[tuple[str, str]]:
    granted = facts["memory"]
    limit = ", by the limit of its container (cgroup)" if granted["limited"] else ""
    swap = f"; {mb(granted['swap'])} of swap" if granted["swap"] else ""
    return [("memory", f"{mb(granted['available'])} of {mb(granted['total'])} available{limit}{swap}")]


def _profile(facts: dict) -> list[tuple[str, str]]:
    config = facts["config"]
    name = config["in_force"]
    rows = [("config", config["file"]), ("profile", f"{config['profile']} -> {name or 'none'}, {config['why']}" if config["profile"] != name else f"{name}, {config['why']}")]
    return rows + [("", f"{key}: {before} -> {now}") for key, (before, now) in config["changes"].items()]


def _settings(facts: dict) -> list[tuple[str, str]]:
    config = facts["config"]
    runtime, rows = config["runtime"], []
    for name, count in config["threads"].items():
        source = f"auto -> {count}, because {facts['cores']['because']}"
        rows.append((name, source if runtime[name] == "auto" and count == facts["cores"]["count"] else str(count)))
    others = ("n_ctx", "n_batch", "n_ubatch", "kv_type", "flash_attn", "use_mmap", "use_mlock", "parallel", "cache_mb")
    return [*rows, ("runtime", ", ".join(f"{name} {str(runtime[name]).lower()}" for name in others))]


def _weights(facts: dict) -> list[tuple[str, str]]:
    file, needs = facts["weights"], facts["needs"]
    rows = [("weights", f"{file['name']}, {mb(file['bytes'])}, {file['path']}" if file["path"] else file["note"])]
    if file["path"] and file["note"]:
        rows.append(("", file["note"]))
    if needs is None:
        return [*rows, ("needs", "known once the weights are here")]
    rows.append(("needs", f"about {mb(needs['least'])} ({needs['parts']})"))
    if needs["repacked"]:
        rows.append(("", f"{mb(needs['repacked'])} of it is a copy of weights in the processor's own order ({', '.join(needs['copy_kinds'])})"))
    if needs["refusal"]:
        rows.append(("", needs["refusal"]))
    elif needs["short"]:
        rows.append(("", f"which is {mb(needs['short'])} more than there is: it starts, but answers may be slow"))
    else:
        rows.append(("", f"which is there; beside it {mb(needs['parking'])} for conversations that pause (cache_mb)"))
    return rows

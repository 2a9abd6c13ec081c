"""python -m qwen_chat quantize: weights made smaller and faster by llama.cpp's own quantiser.

The importance of each weight is measured first (offline.Activations). The file appears under its name only once
it has answered a question; whatever ends the work before leaves nothing behind.
"""

import argparse
import difflib
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np

from . import child, interrupt, offline, samples, weights
from .config import Model, load_or_exit
from .hardware import usable_cores
from .llama_log import GGML_LOG_LEVEL_ERROR
from .model import ModelError
from .offline import FLOATS, FTYPES, Activations, Scorer, tensor_types
from .template import ChatTemplate, joined

# What the official Q4_K_M file is made from, and the best there is to start from.
OFFICIAL = "Qwen/Qwen2.5-0.5B-Instruct-GGUF:qwen2.5-0.5b-instruct-fp16.gguf"

# The mix for CPUs: types by patterns of tensor names, all others CPU_BASE. IQ4_NL takes blocks of 32, which fit every row,
# and llama.cpp has repacked code for it on x86 from AVX2 on and on ARM with dot product (ggml-cpu/repack.cpp); Q8_0 has it
# on ARM alone. What each role loses when it alone is in IQ4_NL, the rest in Q8_0, measured on Qwen2.5-Coder-0.5B as mean
# divergence in 1/1000 nats a token, beside its part of the weights that a token has to read: ffn_gate and ffn_up 24 (42%),
# attn_k and attn_v 18 (1%), ffn_down 17 (21%), output 14 (28%), token_embd 7 (0%), attn_output 6 (4%), attn_q 4 (4%).
CPU = "cpu"
CPU_BASE = "IQ4_NL"
EMBEDDING = r"^token_embd\.weight"
CPU_MIX = {
    EMBEDDING: "Q8_0",
    r"attn_(k|v|output)\.weight": "Q8_0",
}

ALIASES = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}  # as llama.cpp's own tool has them
KINDS = [CPU, *sorted({*FTYPES, *ALIASES})]
UNWEIGHED = (*FLOATS, "Q8_0")  # types for which importance makes no difference
HUB = re.compile(r"(?P<repo_id>[^/:\s]+/[^/:\s]+):(?P<filename>[^/\\:\s]+\.gguf)")
SUFFIX = re.compile(rf"[-._](fp16|fp32|{'|'.join(map(re.escape, KINDS))})$", re.IGNORECASE)
QUESTION = "你好，请介绍一下你自己"
ANSWER = 48  # tokens


class QuantizeError(Exception):
    """The file cannot be made; the message is a sentence for a person."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", nargs="?", metavar="SOURCE", help=f"a .gguf file, or one of the hub as owner/name:file.gguf ({OFFICIAL})")
    parser.add_argument("type", nargs="?", metavar="TYPE", help=f"{CPU} (the default): a mix for CPUs; or one of llama.cpp's: {', '.join(KINDS[1:])}")
    parser.add_argument("--output", metavar="FILE", help="where to put it (models/NAME-TYPE.gguf)")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    parser.add_argument("--calibration", metavar="FILE", help="the text (or .yaml list of texts) from which the importance of each weight is measured, instead of the built-in one")
    parser.add_argument("--no-importance", action="store_true", help="treat all weights alike: quicker, and worse")


def run(options) -> int:
    """0, or 1 where the file cannot be made."""
    source, kind = options.source or OFFICIAL, options.type
    if kind is None and not os.path.exists(source) and source.upper() in map(str.upper, KINDS):
        source, kind = OFFICIAL, source
    try:
        config = load_or_exit()
        kind = named(kind or CPU)
        calibration = None if options.no_importance else Path(options.calibration or samples.CALIBRATION)
        target = Path(options.output) if options.output else None
        make(source, kind, target, config, calibration, options.force)
        return 0
    except (QuantizeError, ModelError, samples.SampleError) as error:
        interrupt.check()  # which ends loading
        print(f"quantize: {error}", file=sys.stderr)
        return 1


def named(kind: str) -> str:
    """The type that `kind` names in any case. Raises QuantizeError."""
    known = {name.upper(): name for name in KINDS}
    if kind.upper() not in known:
        close = difflib.get_close_matches(kind.upper(), known, n=1)
        meant = f"; did you mean {known[close[0]]}?" if close else ";"
        raise QuantizeError(f"type {kind!r} found{meant} allowed: {', '.join(KINDS)}")
    return known[kind.upper()]


def make(source: str, kind: str, target: Path | None, config, calibration: Path | None, force: bool) -> Path:
    """Makes the file and returns its path. Raises QuantizeError, ModelError, SampleError, WeightsError."""
    file = find(source, config.model)
    target = target or weights.ROOT / "models" / name_for(file, kind)
    _check(file, target, force)
    types = tensor_types(file)
    print(f"{file.name}: {_mb(file)}, {', '.join(sorted(set(types.values())))}")
    if lossy := sorted(set(types.values()) - set(FLOATS)):
        print(f"warning: {file.name} is quantised already ({', '.join(lossy)}); what it lost then stays lost, and the new loss comes on top. "
              "Start from an F16 file where you can.", file=sys.stderr)
    with interrupt.unfinished(_begin(target)) as part:
        weighed = importance(file, config.runtime, calibration) if calibration and kind not in UNWEIGHED else {}
        ftype, rules = (CPU_BASE, cpu_mix(types)) if kind == CPU else (ALIASES.get(kind, kind), {})
        _quantize(kind, (file, part, ftype, rules, weighed, usable_cores()))
        print(f"{QUESTION}\n> {answer(part, config)}")
        interrupt.check()
        part.replace(target)
    print(f"{target}: {_mb(target)}. To use it, set model.path in config.yaml to its path.")
    return target


def name_for(file: Path, kind: str) -> str:
    """The name of `file` with `kind` in place of the type that it ends with."""
    return f"{SUFFIX.sub('', file.stem)}-{kind}.gguf"


def cpu_mix(types: dict[str, str]) -> dict[str, str]:
    """The types of the mix by patterns of tensor names, for a model with these tensors."""
    tied = "output.weight" not in types  # then the embedding matrix computes the output too
    return {pattern: kind for pattern, kind in CPU_MIX.items() if not (tied and pattern == EMBEDDING)} | {".": CPU_BASE}


def find(source: str, configured: Model) -> Path:
    """The file that `source` names, fetched where it is one of the hub. Raises QuantizeError and WeightsError."""
    if os.path.isfile(source):
        return Path(source)
    match = HUB.fullmatch(source)
    if not match:
        folder = Path(source).parent
        there = [file.name for file in folder.glob("*.gguf")] if folder.is_dir() else []
        close = difflib.get_close_matches(Path(source).name, there, n=1)
        meant = f"did you mean {folder / close[0]}?" if close else "give a .gguf file, or one of the hub as owner/name:file.gguf"
        raise QuantizeError(f"{source}: {'a folder' if os.path.isdir(source) else 'no such file'}; {meant}")
    model = {**configured.model_dump(), **match.groupdict(), "path": None, "fallbacks": []}
    if match["repo_id"] != configured.repo_id:
        model["revision"] = Model().revision if match["repo_id"] == Model().repo_id else "main"
    if match["filename"] != configured.filename or match["repo_id"] != configured.repo_id:
        model["sha256"] = None
    return weights.find(Model.model_validate(model)).path


def _check(file: Path, target: Path, force: bool) -> None:
    if target.suffix != ".gguf":
        raise QuantizeError(f"{target}: the name must end in .gguf")
    if target.exists() and target.samefile(file):
        raise QuantizeError(f"{target} is the source itself; choose another name with --output")
    if target.exists() and not (force and target.is_file()):
        raise QuantizeError(f"{target} is there already; --force replaces it, --output names another")


def _begin(target: Path) -> Path:
    """An empty file beside `target` to work on. Raises QuantizeError where it cannot be made."""
    part = target.with_name(f"{target.name}.part")
    try:
        part.touch()
    except OSError as error:
        raise QuantizeError(f"{target}: cannot be written ({error.strerror or error})") from None
    return part


def importance(file: Path, runtime, calibration: Path) -> dict[str, np.ndarray]:
    """The mean square of what each weight is multiplied with over the calibration text, float32, by its name."""
    seen = Activations()
    model = Scorer(file, runtime, seen)
    try:
        texts = samples.windows(calibration, model, offline.WINDOW)
        print(f"Measuring which weights matter, over {sum(map(len, texts)):,} tokens of {calibration.name}")
        for tokens in _bar(texts, "measuring", len(texts)):
            for _ in model.score(tokens):
                pass
    finally:
        model.close()
    return seen.means()


def answer(file: Path, config) -> str:
    """What the model answers to QUESTION. Raises ModelError where it says nothing."""
    model = Scorer(file, config.runtime)
    try:
        messages = [{"role": "system", "content": config.chat.system_prompt}] if config.chat.system_prompt else []
        prompt = joined(ChatTemplate(model).render([*messages, {"role": "user", "content": QUESTION}]))
        text = model.answer(prompt[-offline.WINDOW // 2 :], ANSWER).decode("utf-8", "ignore").strip()
    finally:
        model.close()
    if not text:
        raise ModelError("the quantised model answers nothing: this type is too coarse for it")
    return text


# llama.cpp's quantiser, in a process of its own: it can only be stopped from outside


def _quantize(kind: str, job: tuple) -> None:
    """`job` is what offline.quantize takes first."""
    part = job[1]
    size = _apart(job, dry_run=True)
    free = shutil.disk_usage(part.parent).free
    if size and size > free:
        raise QuantizeError(f"the disk is full: {size / 1e6:,.0f} MB are needed in {part.parent}, {free / 1e6:,.0f} MB are free; --output names another place")
    print(f"Quantising to {kind}" + (f": about {size / 1e6:,.0f} MB" if size else ""))
    _apart(job, dry_run=False)


def _apart(job: tuple, dry_run: bool) -> float:
    """Runs the quantiser, with a progress bar. Returns the size of all tensors together in bytes, 0 where it is not said."""
    size, faults, bar = 0.0, [], None

    def note(message: tuple[str, object]) -> None:
        nonlocal size, bar
        kind, value = message
        if kind == "tensor" and not dry_run:
            bar = bar or iter(_bar(range(value), "quantising", value))
            next(bar, None)
        elif kind == "size":
            size = value
        elif kind == "fault":
            faults.append(value)

    try:
        went_well = child.run(_work, job, dry_run, on_message=note)
    except child.Died as died:
        raise QuantizeError(f"llama.cpp's quantiser ended with status {died.status}; is there enough memory?") from None
    if not went_well:
        raise QuantizeError(_why(faults, job[1]))
    return size


def _work(send, job: tuple, dry_run: bool) -> bool:
    text = ""

    def on_line(level: int, piece: str) -> None:
        """A line may come in several pieces."""
        nonlocal text
        text += piece
        if level == GGML_LOG_LEVEL_ERROR:
            send(("fault", piece))
        if match := re.search(r"\[ *\d+/ *(\d+)\] \S+ +- \[", text):
            send(("tensor", int(match[1])))
        elif match := re.search(r"quant size *= *([\d.]+) MiB", text):
            send(("size", float(match[1]) * (1 << 20)))
        elif not piece.endswith("\n"):
            return
        text = ""

    return offline.quantize(*job, dry_run, on_line)


def _why(faults: list[str], part: Path) -> str:
    """What llama.cpp complained of, in one line."""
    told = " ".join(" ".join(faults).replace("=", " ").split())
    if "iostream error" in told or "basic_ios" in told:
        return f"{part.parent} cannot take the file: {shutil.disk_usage(part.parent).free / 1e6:,.0f} MB are free"
    return f"llama.cpp cannot quantise this file: {told or 'no reason given'}"


def _bar(things, what: str, total: int):
    from huggingface_hub.utils import tqdm

    return tqdm(things, desc=what, total=total, leave=False, disable=not sys.stderr.isatty())


def _mb(file: Path) -> str:
    return f"{file.stat().st_size / 1e6:,.0f} MB"

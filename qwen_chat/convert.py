"""python -m qwen_chat convert: from a Hugging Face model to a quantised GGUF file that answers.

llama.cpp's own converter, which needs PyTorch, does the first half; quantize.py the second. Nothing of the model's own
code is executed.
"""

import argparse
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from . import child, interrupt, quantize, samples, weights
from .config import load_or_exit
from .model import ModelError

REQUIREMENTS = "requirements-convert.txt"
CONVERTER = "convert_hf_to_gguf"
NEEDED = (CONVERTER, "torch", "transformers", "sentencepiece")
KIND = "Q4_K_M"
REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]  # no code, no pickles
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
POINTER = b"version https://git-lfs"


class ConvertError(Exception):
    """The model cannot be converted; the message is a sentence for a person."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="FOLDER_OR_REPO", help="a folder with config.json and .safetensors files, or owner/name of the hub")
    parser.add_argument("--type", default=KIND, help=f"of the file that is made ({KIND}); F16 leaves it unquantised; all of `quantize -h`")
    parser.add_argument("--revision", metavar="NAME", help="commit, tag or branch of the repository")
    parser.add_argument("--output", metavar="FILE", help="where to put it (models/NAME-TYPE.gguf)")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    parser.add_argument("--no-importance", action="store_true", help="quantise all weights alike: quicker, and worse")


def run(options) -> int:
    """0, or 1 where the file cannot be made."""
    try:
        config = load_or_exit()
        kind = quantize.named(options.type)
        calibration = None if options.no_importance else Path(samples.CALIBRATION)
        convert(options.source, kind, Path(options.output) if options.output else None, config, calibration, options.force, options.revision)
        return 0
    except (ConvertError, quantize.QuantizeError, samples.SampleError, ModelError) as error:
        interrupt.check()  # which ends loading
        print(f"convert: {error}", file=sys.stderr)
        return 1


def convert(source: str, kind: str, target: Path | None, config, calibration: Path | None = None, force: bool = False, revision: str | None = None) -> Path:
    """Makes the file, has it answer a question, and returns its path. Nothing is left behind where that fails.

    Raises ConvertError, QuantizeError, SampleError, ModelError, and WeightsError where the hub has no such folder.
    """
    name = Path(os.path.abspath(source)).name
    target = target or weights.ROOT / "models" / f"{name}-{kind}.gguf"
    if target.exists() and not force:
        raise ConvertError(f"{target} is there already; --force replaces it, --output names another")
    if not target.parent.is_dir():
        raise ConvertError(f"{target.parent}: there is no such folder")
    folder = find(source, revision, config.model.endpoints)
    check(folder)
    check_installed()
    _check_room(folder, target.parent)
    try:
        with interrupt.unfinished(Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))) as work:
            whole = work / f"{name}-F16.gguf"
            to_gguf(folder, whole)
            return quantize.make(str(whole), kind, target, config, calibration, force)
    except OSError as error:
        raise ConvertError(f"{target}: cannot be written ({error.strerror or error})") from None


def check_installed() -> None:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    file = weights.ROOT / REQUIREMENTS
    if missing and not file.exists():
        raise ConvertError("the container image has no converter; convert outside, and mount the file as models/NAME.gguf")
    if missing:
        raise ConvertError(f"the converter is not installed ({', '.join(missing)} missing); install it with\n  {sys.executable} -m pip install -r {file}")


def find(source: str, revision: str | None, endpoints: list[str]) -> Path:
    """The folder that `source` names, fetched where it is a repository of the hub."""
    path = Path(os.path.expanduser(source))
    if path.is_dir():
        return path
    if path.is_file() and path.suffix == ".gguf":
        raise ConvertError(f"{source} is a GGUF file already; `python -m qwen_chat quantize` makes others of it")
    if path.exists():
        raise ConvertError(f"{source} is a file; give the folder it is in")
    if not REPO.fullmatch(source):
        raise ConvertError(f"{source}: no such folder; give one, or a repository of the hub as owner/name")
    check_installed()  # before gigabytes are fetched
    print(f"Fetching {source}")
    return weights.folder_from_hub(source, revision, PATTERNS, endpoints)


def check(folder: Path) -> None:
    """Raises ConvertError where `folder` holds no model that can be converted, and says what it holds."""
    files = {file.name for file in folder.iterdir()}
    tensors = sorted(name for name in files if name.endswith(".safetensors"))
    if "adapter_config.json" in files:
        raise ConvertError(f"{folder} is a LoRA adapter, no model of its own; merge it into its base with peft (merge_and_unload), save that, and convert it")
    if "config.json" not in files:
        gguf = [name for name in sorted(files) if name.endswith(".gguf")]
        hint = f"; {gguf[0]} needs no conversion" if gguf else ""
        raise ConvertError(f"{folder} is no model folder: there is no config.json in it{hint}")
    config = _json(folder / "config.json")
    if not isinstance(config, dict) or not config.get("architectures"):
        raise ConvertError(f"{folder / 'config.json'} names no architecture, so it is not a model's")
    if not tensors:
        pickles = [name for name in sorted(files) if name.endswith((".bin", ".pt", ".pth"))]
        why = f"only {pickles[0]}, which is a pickle and could run code; save the model with save_pretrained of transformers" if pickles else "no weights"
        raise ConvertError(f"{folder}: there are no .safetensors files in it, {why}")
    if "model.safetensors.index.json" in files:
        index = _json(folder / "model.safetensors.index.json")
        missing = sorted(set(index.get("weight_map", {}).values()) - files) if isinstance(index, dict) else []
        if missing:
            raise ConvertError(f"{folder} is not complete: {', '.join(missing)} missing")
    for name in tensors:
        with open(folder / name, "rb") as file:
            if file.read(len(POINTER)) == POINTER:
                raise ConvertError(f"{folder / name} is only a pointer to the file; fetch the file itself with `git lfs pull`")
    if not files & set(TOKENIZERS):
        raise ConvertError(f"{folder} has no tokenizer ({', '.join(TOKENIZERS)})")
    if "chat_template.jinja" not in files and not _has_template(folder):
        raise ConvertError(f"{folder} has no chat template, so it is not a chat model; choose an -Instruct or -Chat variant")


def _has_template(folder: Path) -> bool:
    found = [_json(folder / name) for name in ("tokenizer_config.json", "chat_template.json") if (folder / name).exists()]
    return any(isinstance(each, dict) and each.get("chat_template") for each in found)


def _json(file: Path):
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConvertError(f"{file} cannot be read: {getattr(error, 'strerror', None) or 'not JSON'}") from None


def _check_room(folder: Path, where: Path) -> None:
    """The F16 file is at most as large as what it is made from; the quantised one comes beside it."""
    needed = 1.5 * sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    free = shutil.disk_usage(where).free
    if needed > free:
        raise ConvertError(f"the disk is full: up to {needed / 1e6:,.0f} MB are needed in {where}, {free / 1e6:,.0f} MB are free; --output names another place")


def to_gguf(folder: Path, target: Path, kind: str = "f16") -> None:
    """Writes `target` by llama.cpp's converter, in a process of its own that asks no network. Raises ConvertError."""
    print(f"Converting {folder} to {kind.upper()}")
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONIOENCODING": "utf-8", "NO_COLOR": "1"}
    arguments = [str(folder.resolve()), "--outfile", str(target.resolve()), "--outtype", kind]
    with tempfile.TemporaryFile() as output:
        # from an empty folder: what lies in the current one would be imported in place of the converter's own modules
        with child.program(CONVERTER, *arguments, cwd=target.parent, env={**os.environ, **offline}, stdout=output, stderr=output) as process:
            process.wait()
        output.seek(0)
        if process.returncode != 0 or not target.is_file():
            raise ConvertError(f"{folder}: llama.cpp's converter cannot convert it: {reason(output.read().decode('utf-8', 'replace'), process.returncode)}")


def reason(output: str, status: int) -> str:
    """What the converter complained of, in one line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if "BPE pre-tokenizer was not recognized" in output:
        return "its tokenizer is none that the converter knows; that is so for a tokenizer that was changed or trained anew"
    if any("No space left on device" in line for line in lines):
        return "the disk is full"
    errors = [line.partition("ERROR:hf-to-gguf:")[2] for line in lines if "ERROR:hf-to-gguf:" in line]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Interrupt)\b", line)]
    told = (errors or raised or lines or [""])[-1]
    return told[:300] or f"it ended with status {status}"

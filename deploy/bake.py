"""Puts the weights into a container image, or fails: run by the Dockerfile, never by the program.

    python bake.py CONTEXT TARGET
    python bake.py --quantize QUANT BAKED TARGET

A .gguf in CONTEXT wins; else the model of config.yaml is fetched, as far as the build arguments below do not
name another. TARGET gets models/FILE and image.json, by which weights.py knows what the image was made for.
The second form makes TARGET of what the first has put into BAKED, quantised.
"""

import hashlib
import json
import logging
import os
import shutil
import sys
from pathlib import Path

from qwen_chat import config, weights

ARGUMENTS = {"MODEL_REPO": "repo_id", "MODEL_FILE": "filename", "MODEL_REVISION": "revision", "MODEL_SHA256": "sha256"}
TOKEN = Path("/run/secrets/HF_TOKEN")
UNQUANTISED = "qwen2.5-0.5b-instruct-fp16.gguf"  # of the default repository: what a quantisation of the default model starts from
AS_IT_IS = "none"


def wanted(configured: config.Model) -> config.Model:
    """The model of the build arguments: another file has another checksum, another repository other revisions."""
    given = {key: os.environ[name] for name, key in ARGUMENTS.items() if os.environ.get(name)}
    if starts_unquantised(configured):
        given = {"filename": UNQUANTISED}
    if given.keys() - {"sha256"}:
        given = {"sha256": None, **given}
    if "repo_id" in given:
        given = {"revision": "main", **given}
    return config.Model.model_validate({**configured.model_dump(), **given, "path": None, "fallbacks": []})


def starts_unquantised(configured: config.Model) -> bool:
    """Whether the default model is to be quantised, and nothing else is said about the weights."""
    said = any(os.environ.get(name) for name in ARGUMENTS) or weights.identity(configured) != weights.identity(config.Model())
    return os.environ.get("QUANT", AS_IT_IS) not in ("", AS_IT_IS) and not said


def in_context(folder: Path, configured: config.Model, model: config.Model) -> Path | None:
    """The .gguf that lies in the build context; its checksum counts where one is given for it."""
    files = {file.name: file for file in sorted(folder.glob("*.gguf"))}
    named = [name for name in (model.filename, Path(configured.path or "").name) if name in files]
    if len(files) > 1 and not named:
        sys.exit(f"models/ has {', '.join(files)}; leave one there, or name one of them as MODEL_FILE or in config.yaml")
    if not files:
        return None
    file = files[named[0]] if named else next(iter(files.values()))
    weights.find(config.Model(path=str(file)))
    if model.sha256 and (file.name == model.filename or os.environ.get("MODEL_SHA256")):
        with file.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        if found != model.sha256:
            sys.exit(f"models/{file.name} has the sha256 {found}; {model.sha256} is expected")
    return file


def in_the_build(message: str) -> str:
    """A message of weights.py for whoever builds: a file by hand goes into the build context."""
    lines = [line for line in message.splitlines() if not line.startswith("- model.fallbacks")]
    said = "\n".join(lines).replace(", or name it as model.path in config.yaml", "")
    return said.replace(str(weights.ROOT / "models"), "models/ beside the Dockerfile")


def main(context: Path, target: Path) -> None:
    if TOKEN.exists():
        os.environ["HF_TOKEN"] = TOKEN.read_text().strip()
    configured = config.load_or_exit(fitting=lambda: None).model  # no profile names a model
    try:
        model = wanted(configured)
        file = in_context(context, configured, model)
        source, name = (file, file.name) if file else (weights.find(model).path, model.filename)
    except (ValueError, weights.WeightsError) as error:
        said = in_the_build(str(error))
        sys.exit(f"{said}\nMODEL_*, HF_ENDPOINT and the secret HF_TOKEN are given to docker build (README).")
    named = [config.Model(), configured] + ([] if starts_unquantised(configured) else [model])
    _put(source, name, target, [weights.identity(each) for each in named])
    print("from models/" if file else "fetched")


def quantize(kind: str, baked: Path, target: Path) -> None:
    from qwen_chat import quantize as tool
    from qwen_chat.model import ModelError
    from qwen_chat.samples import CALIBRATION

    image = json.loads((baked / "image.json").read_text())
    source = baked / "models" / image["built_in"]
    made = source
    if kind != AS_IT_IS:
        try:
            kind = tool.named(kind)
            made = tool.make(str(source), kind, source.parent / tool.name_for(source, kind), config.Config(), CALIBRATION, force=True)
        except (tool.QuantizeError, ModelError) as error:
            sys.exit(f"QUANT: {error}")
    _put(made, made.name, target, image["stands_for"])


def _put(source: Path, name: str, target: Path, stands_for: list) -> None:
    (target / "models").mkdir(parents=True)
    baked = target / "models" / name
    shutil.copyfile(source, baked)
    os.utime(baked, (0, 0))  # the same weights make the same layer
    (target / "image.json").write_text(json.dumps({"built_in": name, "stands_for": stands_for}, indent=1))
    print(f"{name}, {baked.stat().st_size:,} bytes")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if sys.argv[1] == "--quantize":
        quantize(sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))

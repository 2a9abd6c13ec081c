"""Whether the program answers the same on other processors, Pythons and compilers as here: a tool for maintainers.

    .venv/bin/python tests/machines.py             # every variant of the llama.cpp that is installed here
    tests/machines.sh FOLDER                       # makes the other machines, once
    .venv/bin/python tests/machines.py FOLDER      # and those

On each of them a process of its own continues a text by a few tokens, greedily, with the program's own Engine and
Conversation. A table (Markdown) sets the tokens beside those of the Python that runs this script. Where they differ, it
tells how far apart the two likeliest tokens are there: a small margin is rounding, which differs between instruction
sets; a large one is wrong code. The exit status is 1 where a machine does not answer, or differs by more than rounding.

FOLDER, as machines.sh makes it:
    python3.*         virtual environments with requirements.txt
    x86_64, aarch64   each a Debian of that architecture with Python and the image's llama.cpp, compiled by the image's
                      compiler; run on this processor where it can, and on those that QEMU emulates
    compilers/        llama.cpp's native code by other compilers, loaded into the Python of this architecture

What emulation cannot show: speed; AVX-512, AVX-VNNI and AMX, which QEMU's x86 has not; the faults of a real processor;
another kernel; macOS and Windows. Needs Linux.
"""

import argparse
import ctypes
import json
import os
import platform
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEXT = "The capital of France is Paris, the capital of Japan is Tokyo, and the capital of Italy is"
ROUNDING = 0.5  # nats between the two likeliest tokens, up to which another order of them counts as rounding
EMULATED = {  # what QEMU is told, and what the processor has or which machines have it
    "x86_64": {"Nehalem": "SSE 4.2", "SandyBridge": "AVX", "IvyBridge": "AVX, F16C", "Haswell": "AVX2, FMA"},
    "aarch64": {
        "cortex-a72": "Raspberry Pi 4", "cortex-a76": "Raspberry Pi 5", "neoverse-n1": "Graviton 2, Ampere Altra",
        "max": "i8mm, SVE 2, SME",
    },
}
ALL_CODES = "max"  # emulation is slow: on the others only what llama.cpp chooses is tried
COLUMNS = ("machine", "Python", "compiler", "code", "starts", "answers", "same tokens")


# On the machine that is tried: a process of its own, which prints JSON


def codes() -> list[str]:
    """The files of llama.cpp's code that this processor can run, the one that llama.cpp chooses first; [] where the
    code is part of the library."""
    import llama_cpp

    files = (Path(llama_cpp.__file__).parent / "lib").glob("libggml-cpu-*.so")
    scores = {str(file): ctypes.CDLL(str(file)).ggml_backend_score() for file in files}  # 0: needs what is not there
    return sorted((file for file in scores if scores[file]), key=lambda file: -scores[file])


def answer(model: Path, n_tokens: int, n_threads: int | str, code: str) -> dict:
    """Continues TEXT with the code in the file `code`, or what llama.cpp chooses where that is "".

    Prints and returns what computes, whether it started, and for each token the two likeliest: [[id, log-probability
    in nats], [...]]. What is printed before it ends counts where it dies.
    """
    import importlib.util

    import llama_cpp

    from qwen_chat.config import Config
    from qwen_chat.conversation import Conversation
    from qwen_chat.engine import Engine
    from qwen_chat.sampling import Sampling
    from qwen_chat.weights import Weights

    if importlib.util.find_spec("gradio"):  # the Debian folders have only what the engine needs
        import qwen_chat.ui  # noqa: F401
    if code:
        load = llama_cpp.llama_cpp._lib.ggml_backend_load
        load.restype = ctypes.c_void_p
        if not load(os.fsencode(code)):
            raise SystemExit(f"llama.cpp does not load {code}")
    told = {"python": platform.python_version(), "compiler": compiler_in_use()}
    print(json.dumps(told), flush=True)
    config = Config.model_validate({"runtime": {"n_ctx": 256, "parallel": 1, "cache_mb": 0, "n_threads": n_threads}})
    engine = Engine(config.runtime, lambda report: Weights(model, model.stem, None))
    engine.start()
    while not engine.ready.wait(0.1):
        if engine.ended.is_set():
            raise SystemExit(str(engine.error))
    told |= {"started": True, "compiler": compiler_in_use()}
    told |= {"code": engine.info.cpu_code, "features": engine.info.cpu_features}
    print(json.dumps(told), flush=True)
    tokens = Conversation(engine, config).plain(TEXT).tokens
    reply = engine.stream(tokens, Sampling(temperature=0, repeat_penalty=1, top_logprobs=2), n_tokens)
    text = "".join(reply)
    engine.close()
    return {**told, "text": text, "tokens": reply.tokens, "top": [each.top for each in reply.logprobs]}


def compiler_in_use() -> str:
    """Which compiler made the code that is loaded; "" before any is."""
    libraries = re.findall(r"/\S*libggml-cpu\S*", Path("/proc/self/maps").read_text())
    return compiler(Path(libraries[-1])) if libraries else ""


def compiler(library: Path) -> str:
    """Which compiler made a library, as its section .comment says; "?" where it does not."""
    found = re.findall(rb"(GCC): \([^)]*\) (\d+\.\d+)|(clang) version (\d+\.\d+)", library.read_bytes())
    names = {b" ".join(filter(None, each)).decode() for each in found}
    clang = {name for name in names if name.startswith("clang")}
    return ", ".join(sorted(clang or names)) or "?"  # what clang makes has pieces by GCC beside its own


# Here


@dataclass(frozen=True)
class Machine:
    """Where the program is tried: `python` is the command, `codes` the files of llama.cpp's code to load in turn, of
    which "" is what llama.cpp chooses; None: all that the processor can run."""

    name: str
    python: list[str]
    codes: list[str] | None = None


def machines(folder: Path | None) -> list[Machine]:
    """This Python, then what `folder` has."""
    found = [Machine("this processor", [sys.executable])]
    if folder is None:
        return found
    environments = sorted(folder.glob("python3.*"), key=lambda path: int(path.suffix[1:]))
    found += [Machine("this processor", [str(path / "bin" / "python")]) for path in environments]
    for architecture, processors in EMULATED.items():
        if not (folder / architecture).is_dir():
            continue
        if architecture == platform.machine():
            python = debian_python(folder / architecture)
            natives = [str(file) for file in sorted(folder.glob("compilers/*.so"))]
            found += [Machine("this processor", python), Machine("this processor", python, natives)]
        for processor, known_as in processors.items():
            python = debian_python(folder / architecture, [f"qemu-{architecture}", "-cpu", processor])
            codes = None if processor == ALL_CODES else [""]
            found.append(Machine(f"{processor} ({known_as}), emulated", python, codes))
    return found


def debian_python(root: Path, emulator: list[str] = ()) -> list[str]:
    """The command for the Python of a Debian in a folder, which needs no root rights: its own loader starts it."""
    libraries = root / "usr" / "lib" / f"{root.name}-linux-gnu"
    paths = ":".join(str(libraries / name) for name in ("", "blas", "lapack"))
    loader = next(libraries.glob("ld-linux-*.so.*"))
    environ = ["env", f"PYTHONHOME={root / 'usr'}", "PYTHONNOUSERSITE=1", "PYTHONDONTWRITEBYTECODE=1"]
    return [*environ, *emulator, str(loader), "--library-path", paths, str(root / "usr" / "bin" / "python3")]


def run(machine: Machine, seconds: float, *arguments: str) -> tuple:
    """The last JSON that this script prints when it runs on `machine`, None for none; and why it failed, or ""."""
    command = [*machine.python, __file__, "--on-machine", *arguments]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", timeout=seconds)
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, error.strerror if isinstance(error, OSError) else f"not within {seconds / 60:g} minutes"
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "["))]
    return lines[-1] if lines else None, why_ended(done.returncode, done.stderr)


def why_ended(status: int, errors: str) -> str:
    """The reason in a few words, "" for status 0."""
    if status < 0:
        return signal.strsignal(-status) or f"signal {-status}"
    return (errors.strip().splitlines() or [f"status {status}"])[-1] if status else ""


def compare(here: dict, there: dict) -> tuple[bool, str]:
    """Whether two answers agree, rounding apart, and how."""
    pairs = enumerate(zip(here["tokens"], there["tokens"]))
    differ = next((number for number, (one, other) in pairs if one != other), None)
    same = len(here["tokens"]) if differ is None else differ
    apart = max((abs(a[0][1] - b[0][1]) for a, b in zip(here["top"][:same], there["top"][:same])), default=0.0)
    if not apart < ROUNDING:  # NaN too
        return False, f"no: log-probabilities are {apart:.2g} apart"
    if differ is None:
        agree = len(here["tokens"]) == len(there["tokens"])
        return agree, f"yes, within {apart:.1g}" if agree else f"no: {len(there['tokens'])} tokens"
    margins = [best[1] - second[1] for best, second in (here["top"][differ], there["top"][differ])]
    text = f"up to {differ}; then the two likeliest are {margins[0]:.2g} apart here, {margins[1]:.2g} there"
    return max(margins) < ROUNDING, text


def row(machine: Machine, code: str, result: dict, failure: str, reference: dict) -> tuple[bool, list[str]]:
    """A row of the table, and whether all is well in it."""
    answered = "tokens" in result
    fine, same = compare(reference, result) if answered else (False, "")
    name = Path(code).stem.partition("ggml-cpu-")[2]
    if answered and name not in ("", result["code"]):
        fine, same = False, f"no: {result['code']} was loaded"
    start = "yes" if result.get("started") else f"no: {failure}"
    return fine and not failure, [
        machine.name, result.get("python", ""), result.get("compiler", ""), name or result.get("code", ""),
        start, "yes" if answered else f"no: {failure}" if start == "yes" else "", same,
    ]


def line(cells) -> str:
    """A row of a Markdown table."""
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def main() -> int:
    options = parse()
    if options.model is None:
        from qwen_chat import config, weights

        options.model = weights.find(config.Model(endpoints=[], fallbacks=[config.SMOLLM2])).path
    question, seconds = (str(options.model.resolve()), str(options.tokens), options.threads), options.minutes * 60
    reference, failure = run(Machine("", [sys.executable]), seconds, *question, "")
    if failure:
        print(f"There is nothing to compare with: the program fails here: {failure}", file=sys.stderr)
        return 1
    print(f"The text goes on, here: {reference['text']!r}\n\n{line(COLUMNS)}\n{line(['---'] * len(COLUMNS))}")
    fine = True
    for machine in machines(options.folder):
        if options.only in machine.name:
            for code in files(machine, seconds):
                result, failure = run(machine, seconds, *question, code)
                well, cells = row(machine, code, result or {}, failure, reference)
                print(line(cells), flush=True)
                fine = fine and well
    return 0 if fine else 1


def files(machine: Machine, seconds: float) -> list[str]:
    """What `machine` loads in turn; "" where the code is part of the library, or where listing it fails."""
    return machine.codes if machine.codes is not None else run(machine, seconds)[0] or [""]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="what machines.sh has made")
    parser.add_argument("--model", type=Path, metavar="FILE", help="a .gguf; by default the small model, fetched once")
    parser.add_argument("--tokens", type=int, default=8, help="how many, default %(default)s")
    parser.add_argument("--threads", default="auto", help="1 where the machine is busy; default as the program chooses")
    parser.add_argument("--minutes", type=float, default=20, help="how long each may take, default %(default)s")
    parser.add_argument("--only", default="", metavar="WORD", help="only machines with this in their name")
    return parser.parse_args()


def on_machine(arguments: list[str]) -> None:
    """What the processes that `run` starts do."""
    if arguments:
        model, n_tokens, threads, code = arguments
        print(json.dumps(answer(Path(model), int(n_tokens), int(threads) if threads.isdigit() else threads, code)))
    else:
        print(json.dumps(codes()))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if sys.argv[1:2] == ["--on-machine"]:
        on_machine(sys.argv[2:])
    else:
        sys.exit(main())

"""Which of llama.cpp's code for processors computes here. It is tried before it is trusted.

llama.cpp is either built for one processor ("native", what pip does), or as variants for generations of processors
(GGML_CPU_ALL_VARIANTS, the container image). Either may end the program with "Illegal instruction", or compute
nonsense: built on another machine, or by a compiler that gets an instruction wrong (GCC 12 and AMX). So a short-lived
process computes with it first (cpu_check.py), and what it found is kept for this library and this processor.
"""

import ctypes
import hashlib
import json
import logging
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from . import folders, hardware, llama_log

log = logging.getLogger(__name__)

NATIVE = "native"
LARGEST_ERROR = 0.1  # of the logits: right code is off by 0.016, for quantising its inputs; one wrong matrix by 0.28 and more
CHECK_SECONDS = 120  # a check takes 0.5 s; emulated processors take many times as long
CRASHES = ("SIGILL", "SIGSEGV", "SIGBUS", "SIGFPE", "SIGABRT", "SIGTRAP")  # another signal says nothing about the code
# What makes the default install: this processor's own code, also where SOURCE_DATE_EPOCH is set, but no AMX: GCC 12
# loads an empty tile configuration, and a second copy of some weights is more memory than it is worth.
BUILD = "-DGGML_NATIVE=ON -DCMAKE_CXX_FLAGS=-U__AMX_INT8__"
WORTH_HAVING = {"avx", "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "dotprod", "i8mm"}  # native code lacks none by design
USES = {  # ggml-cpu.h: ggml_cpu_has_*, by what hardware.cpu_features calls them
    "avx": "avx", "avx2": "avx2", "fma": "fma", "f16c": "f16c", "avx_vnni": "avx_vnni", "avx512f": "avx512",
    "avx512_vnni": "avx512_vnni", "avx512_bf16": "avx512_bf16", "amx_int8": "amx_int8", "neon": "neon", "fp16": "fp16_va",
    "dotprod": "dotprod", "i8mm": "matmul_int8", "sve": "sve",
}
AMX_BUFFERS = "_Z28ggml_backend_amx_buffer_typev"  # a function of the part in C++, which -U__AMX_INT8__ leaves out


class CpuCodeError(Exception):
    """No code of llama.cpp's computes on this processor; the message says which was tried, and what to do."""


@dataclass(frozen=True)
class CpuCode:
    """Code that computes here. `library` is the file of a variant, "" for the code that is built in.

    `extra_buffers`: weights may be laid out anew for the processor (llama.cpp's buffer types CPU_REPACK and AMX).
    `complaint` says why it is not the first choice; "" where it is.
    """

    name: str
    library: str
    extra_buffers: bool = True
    complaint: str = ""


_in_use: CpuCode | None = None


def use(wanted: str = "auto", excluded: list[str] = ()) -> CpuCode:
    """Chooses the code and loads it into this process, once: later calls return what was loaded.

    `wanted` is a variant's name or "auto", `excluded` are variants that are not to be used (runtime.cpu_code and
    cpu_code_exclude). Raises CpuCodeError where nothing computes.
    """
    global _in_use
    if _in_use is None:
        chosen = choose(wanted, excluded)
        open_library(chosen.library)
        _in_use = chosen
        log.info("llama.cpp computes with its %s", _named(chosen))
        if complaint := chosen.complaint or not_native(chosen):
            log.warning("%s", complaint)
    return _in_use


def choose(wanted: str = "auto", excluded: list[str] = ()) -> CpuCode:
    """The fastest code that computes rightly, as far as could be tried."""
    candidates, verdicts, faults = _candidates(wanted, excluded), _Verdicts(), []
    for code in candidates:
        if not (fault := verdicts.of(code)):
            return CpuCode(code.name, code.library, code.extra_buffers, _complaint(candidates, faults, code))
        faults.append(f"{_named(code)} {fault}")
    raise CpuCodeError(_failure(candidates[0], faults))


def variants() -> list[Path]:
    """The libraries that this processor can run, the fastest first; [] where the code is built in."""
    scores = {file: _score(file) for file in _variant_files()}
    return sorted((file for file, score in scores.items() if score), key=scores.get, reverse=True)


def open_library(library: str) -> None:
    """Makes a variant the code that this process computes with; nothing to do for "", the code that is built in."""
    llama_log.install()
    if library and not _function("ggml_backend_reg_by_name", ctypes.c_char_p)(b"CPU"):
        _function("ggml_backend_load", ctypes.c_char_p)(os.fsencode(library))


def features(code: CpuCode) -> list[str]:
    """The instruction sets that the code was compiled for, by the names of hardware.cpu_features; runs none of them."""
    try:
        library = ctypes.CDLL(code.library or str(_built_in()))
        found = [name for name, asked in USES.items() if getattr(library, f"ggml_cpu_has_{asked}")()]
        return found if hasattr(library, AMX_BUFFERS) else [name for name in found if name != "amx_int8"]
    except (OSError, AttributeError):  # Windows lends no such functions
        return []


def not_native(code: CpuCode) -> str:
    """A sentence where the code was built for processors of any kind and leaves out what this one has; else ""."""
    used = features(code)
    unused = [name for name in hardware.cpu_features() if name in WORTH_HAVING and name not in used]
    if code.name != NATIVE or not used or not unused:
        return ""
    return (f"llama.cpp was not compiled for this processor: it makes no use of {', '.join(unused)}, which may cost most "
            f"of the speed. To have it made for this processor: {rebuild()}")


def compiler(code: CpuCode) -> str:
    """The compiler that made the code, such as "GCC 12.2.0"; "" where the file does not tell."""
    file = Path(code.library) if code.library else _built_in()
    found = re.search(rb"(GCC): \([^)\0]*\) (\d+\.\d+\.\d+)|(clang) version (\d+\.\d+\.\d+)", file.read_bytes() if file.is_file() else b"")
    return " ".join(part.decode() for part in found.groups() if part) if found else ""


def rebuild() -> str:
    """The command that compiles llama.cpp anew for this processor."""
    python = shlex.quote(sys.executable or "python3")
    package = f"llama-cpp-python=={metadata.version('llama-cpp-python')}"
    return f'CMAKE_ARGS="{BUILD}" {python} -m pip install --force-reinstall --no-deps --no-cache-dir {package}'


# Choosing


def _candidates(wanted: str, excluded: list[str]) -> list[CpuCode]:
    """What may be tried, in order: the variants by speed, then the same without extra buffers."""
    names = {variant_name(file): str(file) for file in variants()}
    if not names:
        if _variant_files():
            raise CpuCodeError(f"llama.cpp has no code for this processor, {hardware.cpu_model()}; there is code for: {_all_names()}")
        names = {NATIVE: ""}
    allowed = {name: file for name, file in names.items() if name not in excluded and wanted in ("auto", name)}
    if not allowed:
        setting = f"runtime.cpu_code: {wanted!r}" if wanted != "auto" else f"runtime.cpu_code_exclude: {list(excluded)}"
        raise CpuCodeError(f"{setting} found; on this processor there is: {', '.join(names)}")
    return [CpuCode(name, file, extra) for extra in (True, False) for name, file in allowed.items()]


def _complaint(candidates: list[CpuCode], faults: list[str], code: CpuCode) -> str:
    if not faults:
        return ""
    instead = f"{_named(code)} is used instead"
    remedy = f" To have it made for this processor: {rebuild()}" if code.name == NATIVE else ""
    return f"llama.cpp's {'; '.join(faults)} ({_circumstances(candidates[0])}); {instead}, which may be slower.{remedy}"


def _failure(code: CpuCode, faults: list[str]) -> str:
    remedy = f"Compile it on this machine: {rebuild()}" if code.name == NATIVE else "Another image or build is needed."
    return f"llama.cpp computes with none of its code on this processor: {'; '.join(faults)} ({_circumstances(code)}). {remedy}"


def _circumstances(code: CpuCode) -> str:
    """What the code needs, who made it, and what of it the processor has not."""
    used, has = features(code), hardware.cpu_features()
    missing = [name for name in used if has and name not in has]
    parts = [f"compiled by {made_by}" if (made_by := compiler(code)) else "", f"for {', '.join(used)}" if used else "",
             f"of which the {hardware.cpu_model()} does not have {', '.join(missing)}" if missing else f"on the {hardware.cpu_model()}"]
    return " ".join(filter(None, parts[:2])) + f", {parts[2]}"


def _named(code: CpuCode) -> str:
    return f"{code.name} code" + ("" if code.extra_buffers else " without repacked weights")


class _Verdicts:
    """What checks have found, kept in the cache folder for this library on this processor."""

    def __init__(self):
        self._file = folders.cache() / "cpu-code.json"
        self._key = _fingerprint()
        try:
            kept = json.loads(self._file.read_text(encoding="utf-8"))
            self._known = {str(name): str(fault) for name, fault in kept["verdicts"].items()} if kept["key"] == self._key else {}
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            self._known = {}

    def of(self, code: CpuCode) -> str:
        """What is wrong with the code, "" for nothing. What could not be tried is taken to be right, but not kept."""
        name = f"{code.name} {int(code.extra_buffers)}"
        if name not in self._known:
            fault = check(code)
            if fault is None:
                return ""
            self._known[name] = fault
            self._keep()
        return self._known[name]

    def _keep(self) -> None:
        part = self._file.with_suffix(f".{os.getpid()}.part")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps({"key": self._key, "verdicts": self._known}), encoding="utf-8")
            os.replace(part, self._file)
        except OSError as error:
            log.debug("what was found of the processor's code is not kept: %s", error)


def check(code: CpuCode) -> str | None:
    """Tries the code in a process of its own: what is wrong with it, "" for nothing, None where it could not be tried."""
    command = [sys.executable, "-m", f"{__package__}.cpu_check", code.library, str(int(code.extra_buffers))]
    path = os.pathsep.join([str(Path(__file__).resolve().parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environ = {**os.environ, "PYTHONPATH": path, "GGML_NO_BACKTRACE": "1"}
    try:
        done = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=CHECK_SECONDS)
        return _judged(done.returncode, done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        log.debug("%s could not be tried: %s", _named(code), error)
        return None


def _judged(status: int, output: bytes) -> str | None:
    if status < 0:
        name = signal.Signals(-status).name
        return f"ends with {signal.strsignal(-status)} ({name})" if name in CRASHES else None
    if status > 0:
        return None
    off_by = json.loads(output)["off_by"]
    return "" if off_by <= LARGEST_ERROR else f"computes nonsense (off by {off_by:.2g} of 1)"


def _fingerprint() -> str:
    """Of the library's files, the processor and the kernel, which allows AMX or does not."""
    files = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted((*_library_folder().glob("*ggml*"), *_variant_files()))]
    machine = [hardware.cpu_model(), hardware.cpu_features(), platform.machine(), platform.release(), metadata.version("numpy")]
    return hashlib.sha256(repr((files, machine, LARGEST_ERROR)).encode()).hexdigest()


# Where the code is


def _library_folder() -> Path:
    import llama_cpp

    return Path(llama_cpp.__file__).parent / "lib"


def _variant_files() -> list[Path]:
    """llama.cpp itself looks for them only beside the Python executable."""
    folder = _library_folder()
    return [file for place in (folder, folder.parent.parent / "bin") for file in sorted(place.glob("*ggml-cpu-*")) if file.suffix in (".so", ".dll")]


def _built_in() -> Path:
    return next((file for file in sorted(_library_folder().glob("libggml-cpu.*"))), _library_folder() / "libggml-cpu.so")


def variant_name(file: Path) -> str:
    """What a variant's library is called in runtime.cpu_code: libggml-cpu-zen4.so is "zen4"."""
    return file.stem.partition("ggml-cpu-")[2]


def _all_names() -> str:
    return ", ".join(variant_name(file) for file in _variant_files())


def _score(file: Path) -> int:
    """How well a variant suits this processor, by its own word; 0 where it does not run on it."""
    try:
        return ctypes.CDLL(str(file)).ggml_backend_score()
    except (OSError, AttributeError):
        return 0


def _function(name: str, *arguments):
    """A function of ggml that returns a handle, which llama.cpp's library brings along."""
    import llama_cpp

    function = getattr(llama_cpp.llama_cpp._lib, name)
    function.restype, function.argtypes = ctypes.c_void_p, arguments
    return function

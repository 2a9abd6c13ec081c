"""What this machine really grants: the cores and the memory a process may use, and what kind of device it is.

Everything is read below a `root` folder, "/" but in tests. What a system does not tell this way (macOS, Windows)
comes from psutil, or is left out.
"""

import os
import platform
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from .cgroups import cpu_quota, memory_limits
from .kernelfiles import listed, names, number, table, text

ROOT = Path("/")
TINY_BYTES = 800_000_000  # with less memory than the default settings need, a device is "tiny"
SERVER_CORES, SERVER_BYTES = 8, 8_000_000_000
ATOM_PER_CLOCK = 0.5  # of a large core's vector work in one clock: Gracemont's vector units are 128 bits wide, Golden Cove's 256
N100 = re.compile(r"\bN(50|95|97|100|150|200|250)\b")  # Intel's four-core Alder Lake-N and Twin Lake
PIES = {"raspberry-pi-4": r"Raspberry Pi (4|400|Compute Module 4S?)\b", "raspberry-pi-5": r"Raspberry Pi (5|500|Compute Module 5)\b"}
FEATURES = {  # what /proc/cpuinfo calls what llama.cpp's code makes use of
    **dict.fromkeys(("avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "i8mm", "sve", "sve2")),
    "asimd": "neon", "asimdhp": "fp16", "asimddp": "dotprod",
}


@dataclass(frozen=True)
class Cores:
    """How many threads may compute at once without getting in each other's way, and which limit says so.

    `reason` is a key of REASONS. `processors` are the logical ones this process may run on, of `all_processors`;
    `physical` the cores they belong to; `quota` is a container's share of processor time, in cores.
    """

    count: int
    reason: str
    processors: int
    all_processors: int
    physical: int
    quota: float | None

    @property
    def because(self) -> str:
        """The reason in words."""
        return REASONS[self.reason].format(**vars(self))


REASONS = {
    "all": "all {processors} processors are physical cores",
    "affinity": "{processors} of {all_processors} processors may be used (--cpuset-cpus, taskset)",
    "hyperthreads": "{processors} processors are {physical} physical cores",
    "hybrid": "{count} fast cores get on faster than all {physical}, which would wait for the slow ones",
    "quota": "the processor time is limited to {quota:g} (--cpus, CPUQuota)",
}


@dataclass(frozen=True)
class Memory:
    """Bytes: what there is for this process, and how much of it could be had now, with swap beside it.

    `limited` says whether a container's (a cgroup's) limit is what bounds `available`.
    """

    total: int
    available: int
    swap: int
    limited: bool


# Cores


def usable_cores(root: Path = ROOT) -> int:
    """How many threads should compute, at least 1."""
    return cores(root).count


def cores(root: Path = ROOT, allowed: set[int] | None = None) -> Cores:
    """The least of: the processors this process may run on, or `allowed`; the physical cores among them (two
    hyperthreads share one set of arithmetic units); the fast ones, where slow ones hold them up; the CPU quota rounded down."""
    processors = allowed or _affinity()
    everyone = len(_processors(root)) or os.cpu_count() or 1
    speeds = _core_speeds(root, processors)
    quota = cpu_quota(root)
    count, reason = len(processors), "affinity" if len(processors) < everyone else "all"
    for limit, why in ((len(speeds), "hyperthreads"), (_worthwhile(speeds), "hybrid"), (int(quota or count) or 1, "quota")):
        if limit < count:
            count, reason = limit, why
    return Cores(count, reason, len(processors), everyone, len(speeds), quota)


def allowed_processors() -> int:
    """The logical processors this process may run on (affinity, cpuset)."""
    return len(_affinity())


def _affinity() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _processors(root: Path) -> set[int]:
    """The processors that are switched on."""
    return listed(root / "sys/devices/system/cpu/online")


def _core_speeds(root: Path, processors: set[int]) -> list[float]:
    """The speed of each physical core that `processors` belong to, in any unit."""
    found: dict[frozenset, float] = {}
    for processor in processors:
        folder = root / f"sys/devices/system/cpu/cpu{processor}"
        siblings = listed(folder / "topology/thread_siblings_list")
        if not siblings:  # this system does not tell which processors share a core
            return [1.0] * min(len(processors), _ask(lambda: psutil.cpu_count(logical=False)) or len(processors))
        found[frozenset(siblings)] = _speed(root, folder, processor)
    return list(found.values())


def _speed(root: Path, folder: Path, processor: int) -> float:
    """ARM's kernel tells a core's capacity. Intel's tells the highest clock, and which cores are the small ones."""
    capacity = number(folder / "cpu_capacity") or 0
    if capacity > 0:
        return capacity
    clock = max(1, number(folder / "cpufreq/cpuinfo_max_freq") or 1)
    kinds = {kind: listed(root / f"sys/devices/cpu_{kind}/cpus") for kind in ("core", "atom", "lowpower")}
    small = kinds["core"] and processor in kinds["atom"] | kinds["lowpower"]
    return clock * (ATOM_PER_CLOCK if small else 1)


def _worthwhile(speeds: list[float]) -> int:
    """How many of the cores to use, the fastest first.

    llama.cpp's threads take about equal parts of every graph node and wait for each other at its end, so k threads get
    on like k times the slowest of them: of a big.LITTLE of 4 and 4 the four, of 2 fast and 8 half as fast cores all.
    The system itself puts busy threads on the fast ones. Cores within a tenth of each other count as equal: clocks
    differ by that much among cores of one kind.
    """
    ranked = sorted(speeds, reverse=True)
    gains = [number * speed for number, speed in enumerate(ranked, 1)]
    fewest = gains.index(max(gains)) + 1
    return sum(speed >= 0.9 * ranked[fewest - 1] for speed in ranked)


# Memory


def usable_memory(root: Path = ROOT) -> Memory:
    """The least of what the machine and each cgroup above this process have left."""
    total, available, swap = _host_memory(root)
    limited = False
    for group in memory_limits(root):
        total, swap = min(total, group.limit), min(swap, group.swap)
        if group.limit - group.held < available:
            available, limited = max(0, group.limit - group.held), True
    return Memory(total, available, max(0, swap), limited)


def held_by_process() -> int:
    """Bytes of memory that this process holds already, without what files and libraries it has mapped."""
    used = _ask(lambda: psutil.Process().memory_info())
    return used.rss - getattr(used, "shared", 0) if used else 0


def memory_limit(root: Path = ROOT) -> int | None:
    """A container's memory limit in bytes; None where there is none below what the machine has."""
    total = _host_memory(root)[0]
    return min((group.limit for group in memory_limits(root) if group.limit < total), default=None)


def _host_memory(root: Path) -> tuple[int, int, int]:
    """The machine's memory, what of it is available, and free swap."""
    found = table(root / "proc/meminfo")
    if {"MemTotal", "MemAvailable"} <= found.keys():
        return tuple(1024 * found.get(name, 0) for name in ("MemTotal", "MemAvailable", "SwapFree"))
    if real := _ask(psutil.virtual_memory):
        return real.total, real.available, getattr(_ask(psutil.swap_memory), "free", 0)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total, total, 0  # where nothing tells what is free, all is taken for it: a start is not refused on a guess


def _ask(question: Callable):
    """psutil's answer; None where it has none. It raises many things where a sandbox hides /proc from it."""
    try:
        return question()
    except (psutil.Error, OSError, LookupError, ValueError, AttributeError, RuntimeError):
        return None


# What it is


def device(root: Path = ROOT) -> str:
    """The model of a board such as the Raspberry Pi; "" where the system does not name one."""
    for file in ("proc/device-tree/model", "sys/firmware/devicetree/base/model"):
        if name := text(root / file).strip("\0 \n"):
            return name
    return _cpuinfo(root).get("Model", "")  # in a container the device tree is hidden, this is not


def cpu_model(root: Path = ROOT) -> str:
    """The processor's name."""
    info = _cpuinfo(root)
    return info.get("model name") or info.get("Model") or info.get("Hardware") or platform.processor() or platform.machine()


def cpu_features(root: Path = ROOT) -> list[str]:
    """Those of the processor's instruction sets that llama.cpp has code for; [] where the system does not list them."""
    info = _cpuinfo(root)
    flags = (info.get("flags") or info.get("Features") or "").split()
    return [name or flag for flag, name in FEATURES.items() if flag in flags]


def surroundings(root: Path = ROOT, environ=os.environ) -> list[str]:
    """In what the process runs, of: "Hugging Face Space", "container", "WSL2"."""
    groups = text(root / "proc/self/cgroup") + text(root / "proc/1/cgroup")
    signs = any(os.path.exists(root / file) for file in (".dockerenv", "run/.containerenv", "run/systemd/container"))
    told = "container" in environ or "KUBERNETES_SERVICE_HOST" in environ
    found = {
        "Hugging Face Space": bool(environ.get("SPACE_ID")),
        "container": signs or told or bool(re.search(r"docker|kubepods|libpod|lxc", groups)),
        "WSL2": bool(re.search("microsoft-standard|WSL2", text(root / "proc/sys/kernel/osrelease"))),  # not WSL1
    }
    return [name for name, true in found.items() if true]


def has_battery(root: Path = ROOT) -> bool:
    """Whether it is a laptop. A mouse has a battery too, but of another scope."""
    folder = root / "sys/class/power_supply"
    if supplies := [[text(folder / name / fact).strip() for fact in ("type", "scope")] for name in names(folder)]:
        return any(kind == "Battery" and scope != "Device" for kind, scope in supplies)
    return root == ROOT and _ask(lambda: psutil.sensors_battery()) is not None


def fitting_profile(root: Path = ROOT, environ=os.environ) -> tuple[str, str] | None:
    """The name of the profile in config.yaml for this device, and why; None where no one fits."""
    granted, board, processor = usable_memory(root).total, device(root), cpu_model(root)
    if granted < TINY_BYTES:
        return "tiny", f"it has {granted / 1e6:,.0f} MB of memory"
    if environ.get("SPACE_ID"):
        return "spaces", "it is a Hugging Face Space"
    for name, pattern in PIES.items():
        if re.search(pattern, board):
            return name, f"it is a {board}"
    if N100.search(processor):
        return "n100", f"its processor is an {processor}"
    if has_battery(root):
        return "laptop", "it has a battery"
    count = usable_cores(root)
    if count >= SERVER_CORES and granted >= SERVER_BYTES:
        return "server", f"it has {count} cores and {granted / 1e9:,.0f} GB of memory"
    return None


def _cpuinfo(root: Path) -> dict[str, str]:
    """The first value of each name in /proc/cpuinfo."""
    pairs = [line.partition(":") for line in text(root / "proc/cpuinfo").splitlines()]
    return {name.strip(): value.strip() for name, _, value in reversed(pairs)}

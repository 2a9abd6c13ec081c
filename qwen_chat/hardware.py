"""What this machine really grants: the cores and the memory a process may use, and what kind of device it is.

Everything is read below a `root` folder, "/" but in tests. What a system does not tell this way (macOS, Windows)
comes from psutil, or is left out.
"""

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path("/")
TINY_BYTES = 800_000_000  # with less memory than the default settings need, a device is "tiny"
SERVER_CORES, SERVER_BYTES = 8, 8_000_000_000
UNLIMITED = 2**62  # bytes; cgroup v1 states the largest number of pages where there is no limit
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
    return _listed(_text(root / "sys/devices/system/cpu/online"))


def _core_speeds(root: Path, processors: set[int]) -> list[float]:
    """The speed of each physical core that `processors` belong to, in any unit."""
    found: dict[frozenset, float] = {}
    for number in processors:
        folder = root / f"sys/devices/system/cpu/cpu{number}"
        siblings = _listed(_text(folder / "topology/thread_siblings_list"))
        if not siblings:  # this system does not tell which processors share a core
            count = min(len(processors), psutil.cpu_count(logical=False) or len(processors))
            return [1.0] * count
        found[frozenset(siblings)] = _speed(root, folder, number)
    return list(found.values())


def _speed(root: Path, folder: Path, number: int) -> float:
    """ARM's kernel tells a core's capacity. Intel's tells the highest clock, and which cores are the small ones."""
    capacity = _number(folder / "cpu_capacity")
    if capacity:
        return capacity
    clock = _number(folder / "cpufreq/cpuinfo_max_freq") or 1
    devices = root / "sys/devices"
    small = number in _listed(_text(devices / "cpu_atom/cpus")) and bool(_listed(_text(devices / "cpu_core/cpus")))
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


def cpu_quota(root: Path = ROOT) -> float | None:
    """A container's CPU limit in cores, as cgroup v2 or v1 states it; None where there is no limit.

    0.5 means half a core's time. Each group above this process counts. Source: kernel documentation,
    cgroup-v2 "cpu.max" and sched-bwc "cpu.cfs_quota_us".
    """
    quotas = [_quota_v2(folder) for folder in _groups(root)] + [_quota_v1(folder) for folder in _groups(root, "cpu")]
    return min((quota for quota in quotas if quota), default=None)


def _quota_v2(folder: Path) -> float | None:
    quota, _, period = _text(folder / "cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _quota_v1(folder: Path) -> float | None:
    quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota / period if quota and quota > 0 and period else None


# Memory


def usable_memory(root: Path = ROOT) -> Memory:
    """The least of what the machine and each cgroup above this process have left."""
    total, available, swap = _host_memory(root)
    limited = False
    for limit, used, swap_left in (*_memory_v2(root), *_memory_v1(root)):
        total, swap = min(total, limit), min(swap, swap_left)
        if limit - used < available:
            available, limited = max(0, limit - used), True
    return Memory(total, available, max(0, swap), limited)


def held_by_process() -> int:
    """Bytes of memory that this process holds already, without what files and libraries it has mapped."""
    used = psutil.Process().memory_info()
    return used.rss - getattr(used, "shared", 0)


def memory_limit(root: Path = ROOT) -> int | None:
    """A container's memory limit in bytes, as cgroup v2 or v1 states it; None where there is no limit."""
    limit = min((limit for limit, _, _ in (*_memory_v2(root), *_memory_v1(root))), default=None)
    return limit if limit is not None and limit < _host_memory(root)[0] else None


def _host_memory(root: Path) -> tuple[int, int, int]:
    """The machine's memory, what of it is available, and free swap."""
    found = {name: int(size) * 1024 for name, size in re.findall(r"^(\w+): +(\d+) kB$", _text(root / "proc/meminfo"), re.M)}
    if "MemAvailable" in found:
        return found["MemTotal"], found["MemAvailable"], found.get("SwapFree", 0)
    real = psutil.virtual_memory()
    return real.total, real.available, psutil.swap_memory().free


def _memory_v2(root: Path):
    """(limit, use that cannot be taken back, swap left) of each group that sets a limit."""
    for folder in _groups(root):
        limits = [limit for name in ("memory.max", "memory.high") if (limit := _number(folder / name)) is not None]
        if limits:
            swap_limit = _number(folder / "memory.swap.max")
            swap = UNLIMITED if swap_limit is None else swap_limit - (_number(folder / "memory.swap.current") or 0)
            yield min(limits), _held(folder, "memory.current", ""), swap


def _memory_v1(root: Path):
    for folder in _groups(root, "memory"):
        limit = _number(folder / "memory.limit_in_bytes")
        if limit is not None and limit < UNLIMITED:
            yield limit, _held(folder, "memory.usage_in_bytes", "total_"), _swap_v1(folder, limit)


def _swap_v1(folder: Path, limit: int) -> int:
    """v1 limits and counts memory and swap together ("memsw")."""
    both = _number(folder / "memory.memsw.limit_in_bytes")
    if both is None or both >= UNLIMITED:
        return UNLIMITED
    used, of_memory = _number(folder / "memory.memsw.usage_in_bytes") or 0, _number(folder / "memory.usage_in_bytes") or 0
    return both - limit - max(0, used - of_memory)


def _held(folder: Path, usage: str, prefix: str) -> int:
    """What a group uses without the pages of files, which the kernel takes back when memory is wanted: the active ones
    too, as MemAvailable has it; the weights are among them once they were downloaded and checked."""
    stat = dict(re.findall(r"^(\w+) (\d+)$", _text(folder / "memory.stat"), re.M))
    files = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
    return max(0, (_number(folder / usage) or 0) - files)


# What it is


def device(root: Path = ROOT) -> str:
    """The model of a board such as the Raspberry Pi; "" where the system does not name one."""
    for file in ("proc/device-tree/model", "sys/firmware/devicetree/base/model"):
        if name := _text(root / file).strip("\0 "):
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
    groups = _text(root / "proc/self/cgroup") + _text(root / "proc/1/cgroup")
    container = any((root / file).exists() for file in (".dockerenv", "run/.containerenv")) or "container" in environ or "KUBERNETES_SERVICE_HOST" in environ
    found = {
        "Hugging Face Space": bool(environ.get("SPACE_ID")),
        "container": container or bool(re.search(r"docker|kubepods|libpod|lxc", groups)),
        "WSL2": "microsoft" in _text(root / "proc/sys/kernel/osrelease").lower(),
    }
    return [name for name, true in found.items() if true]


def has_battery(root: Path = ROOT) -> bool:
    """Whether it is a laptop. A mouse has a battery too, but of another scope."""
    supplies = root / "sys/class/power_supply"
    if supplies.is_dir():
        return any(_text(each / "type").strip() == "Battery" and _text(each / "scope").strip() != "Device" for each in supplies.iterdir())
    try:
        return root == ROOT and psutil.sensors_battery() is not None
    except (AttributeError, OSError):
        return False


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


# Reading the system's files


def _groups(root: Path, controller: str = "") -> list[Path]:
    """The folders of this process's cgroup and of those above it, each of which may set a limit; v1's with a `controller`.

    Where the container has no view of the groups outside, the path does not exist and the top is its own group.
    """
    base = root / "sys/fs/cgroup" / controller
    lines = [line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines()]
    path = next((line[2] for line in lines if len(line) == 3 and controller in line[1].split(",")), "/")
    folder = base / path.strip("/")
    return [folder, *[parent for parent in folder.parents if parent.is_relative_to(base)]]


def _cpuinfo(root: Path) -> dict[str, str]:
    """The first value of each name in /proc/cpuinfo."""
    pairs = [line.partition(":") for line in _text(root / "proc/cpuinfo").splitlines()]
    return {name.strip(): value.strip() for name, _, value in reversed(pairs)}


def _listed(text: str) -> set[int]:
    """The numbers of a kernel's list such as "0-3,8"."""
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text):
        found.update(range(int(first), int(last or first) + 1))
    return found


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace")
    except OSError:
        return ""

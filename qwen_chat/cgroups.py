"""What the control groups (cgroups) that this process belongs to allow it: processor time and memory.

Containers, Kubernetes pods, systemd's services, slices and sessions are all control groups. Groups nest, and the
limits of each group above a process hold for it. The files are those of the kernel's documentation, cgroup-v2 and
cgroup-v1; where they are mounted and which are this process's stand in /proc/self/mountinfo and /proc/self/cgroup, see
proc(5). Everything is read below a `root` folder, "/" but in tests; without control groups nothing is limited.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from .kernelfiles import number, numbers, raw, table

ROOT = Path("/")
UNLIMITED = 2**62  # bytes; v1 states the largest number of pages where there is no limit
MOUNT = re.compile(r"^\S+ \S+ \S+ (?P<top>\S+) (?P<point>\S+) .*?- cgroup(?P<version>2?) \S* (?P<options>\S+)$", re.M)


@dataclass(frozen=True)
class MemoryLimit:
    """Bytes: a group's limit, what it uses of it that the kernel cannot take back, and the swap left to it.

    UNLIMITED stands for a limit that is not set.
    """

    limit: int
    held: int
    swap: int


def cpu_quota(root: Path = ROOT) -> float | None:
    """The share of processor time in cores, 0.5 for half a core's; None where there is no limit.

    Source: cgroup-v2 "cpu.max" and sched-bwc "cpu.cfs_quota_us".
    """
    stated = [numbers(folder / "cpu.max") for folder in _groups(root)]
    for folder in _groups(root, "cpu"):
        stated.append([number(folder / "cpu.cfs_quota_us"), number(folder / "cpu.cfs_period_us")])
    shares = [_share(*words) for words in stated if len(words) == 2]
    return min((share for share in shares if share), default=None)


def _share(quota: int | None, period: int | None) -> float | None:
    return quota / period if quota and period and quota > 0 and period > 0 else None


def memory_limits(root: Path = ROOT) -> list[MemoryLimit]:
    """Those of each group that sets any."""
    return [*_memory_v2(root), *_memory_v1(root)]


def _memory_v2(root: Path) -> Iterator[MemoryLimit]:
    for folder in _groups(root):
        stated = (number(folder / "memory.max"), number(folder / "memory.high"))
        limit = min((each for each in stated if each is not None), default=UNLIMITED)
        swap_limit = number(folder / "memory.swap.max")
        swap = UNLIMITED if swap_limit is None else swap_limit - (number(folder / "memory.swap.current") or 0)
        if min(limit, swap) < UNLIMITED:
            yield MemoryLimit(limit, _held(folder, "memory.current", ""), swap)


def _memory_v1(root: Path) -> Iterator[MemoryLimit]:
    for folder in _groups(root, "memory"):
        limit = number(folder / "memory.limit_in_bytes")
        if limit is not None and limit < UNLIMITED:
            yield MemoryLimit(limit, _held(folder, "memory.usage_in_bytes", "total_"), _swap_v1(folder, limit))


def _swap_v1(folder: Path, limit: int) -> int:
    """v1 limits and counts memory and swap together ("memsw")."""
    both = number(folder / "memory.memsw.limit_in_bytes")
    if both is None or both >= UNLIMITED:
        return UNLIMITED
    used, of_memory = (number(folder / f"memory.{name}usage_in_bytes") or 0 for name in ("memsw.", ""))
    return both - limit - max(0, used - of_memory)


def _held(folder: Path, usage: str, prefix: str) -> int:
    """What a group uses without the pages of files, which the kernel takes back when memory is wanted: the active ones
    too, as MemAvailable has it; the weights are among them once they were downloaded and checked."""
    stat = table(folder / "memory.stat")
    files = sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
    return max(0, (number(folder / usage) or 0) - files)


# Where this process's groups are


def _groups(root: Path, controller: str = "") -> list[Path]:
    """The folders of this process's group and of those above it, as far as they can be seen from here: v1's that has
    the `controller`, or v2's.

    Inside a container the top of the mount mostly is the container's own group. Its path is "/" if the container has a
    cgroup namespace. If it has none, the path is the one outside, and mountinfo says which part of it is mounted.
    """
    own, mounts = _own_group(root, controller), _mounts(root, controller)
    places = [(point, own.relative_to(top)) for point, top in mounts if own.is_relative_to(top)]
    found: dict[Path, None] = {}
    for point, inside in places or [(point, PurePosixPath()) for point, _ in mounts]:
        if ".." not in inside.parts:  # else the process was put into a group above the namespace, which cannot be seen
            found |= dict.fromkeys(point / each for each in (inside, *inside.parents))
    return list(found)


def _own_group(root: Path, controller: str) -> PurePosixPath:
    for line in os.fsdecode(raw(root / "proc/self/cgroup")).split("\n"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if path.startswith("/") and controller in controllers.split(","):
            return PurePosixPath(path)
    return PurePosixPath("/")


def _mounts(root: Path, controller: str) -> list[tuple[Path, PurePosixPath]]:
    """Where the controller's groups are mounted, and which group is at the top of that."""
    found = []
    for mount in MOUNT.finditer(os.fsdecode(raw(root / "proc/self/mountinfo"))):
        wanted = controller in mount["options"].split(",") if controller else mount["version"]
        if wanted:
            found.append((root / _unescaped(mount["point"]).lstrip("/"), PurePosixPath(_unescaped(mount["top"]))))
    return found or [(root / "sys/fs/cgroup" / controller, PurePosixPath("/"))]


def _unescaped(path: str) -> str:
    r"""mountinfo has blanks and backslashes as \040 and \134; systemd's names of units are full of backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), path)

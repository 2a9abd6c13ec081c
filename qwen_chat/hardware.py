"""What this machine really grants: the cores and the memory a process may use."""

import os
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """How many threads may compute at once without getting in each other's way, at least 1.

    The least of: the processors this process may run on, the physical cores (two hyperthreads share
    one set of arithmetic units), and a container's CPU quota rounded down.
    """
    limits = [allowed_processors(), psutil.cpu_count(logical=False), cpu_quota()]
    return max(1, min(int(limit) for limit in limits if limit))


def allowed_processors() -> int:
    """The logical processors this process may run on (affinity, cpuset)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_quota(root: Path = CGROUP) -> float | None:
    """A container's CPU limit in cores, as cgroup v2 or v1 states it; None where there is no limit.

    0.5 means half a core's time. Source: kernel documentation, cgroup-v2 "cpu.max" and
    sched-bwc "cpu.cfs_quota_us".
    """
    quotas = [_quota_v2(folder) for folder in _own_groups(root)] + [_quota_v1(root / "cpu")]
    quotas = [quota for quota in quotas if quota]
    return min(quotas) if quotas else None


def memory_limit(root: Path = CGROUP) -> int | None:
    """A container's memory limit in bytes, as cgroup v2 or v1 states it; None where there is no limit."""
    files = [folder / "memory.max" for folder in _own_groups(root)] + [root / "memory" / "memory.limit_in_bytes"]
    limits = [limit for limit in map(_number, files) if limit and limit < psutil.virtual_memory().total]
    return min(limits, default=None)


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _own_groups(root: Path) -> list[Path]:
    """This process's cgroup v2 folder and those above it, each of which may set a limit."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return [root]
    path = next((line[3:] for line in lines if line.startswith("0::")), "/")
    folder = root / path.strip("/")
    return [folder, *[parent for parent in folder.parents if parent.is_relative_to(root)]]


def _quota_v2(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _quota_v1(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
        return quota / period if quota > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None

"""Control groups: files copied from real systems, and real groups of this machine."""

import os
import tempfile
from pathlib import Path

import pytest
from realgroups import real_groups, said_inside

from qwen_chat import cgroups, hardware

MB = 1024 * 1024


# Real groups of this machine

SAY = """
import json
from qwen_chat import hardware
held = b"x" * (32 << 20)
cores, memory = hardware.cores(), hardware.usable_memory()
print(json.dumps([cores.count, cores.reason, cores.quota, memory.total, memory.available, memory.limited]))
"""
no_root = not hasattr(os, "geteuid") or os.geteuid() != 0
root_only = pytest.mark.skipif(no_root, reason="making control groups needs root")


def limits(version: int, quota: int, memory: int) -> dict[str, str]:
    if version == 2:
        return {"cpu.max": f"{quota} 100000", "memory.max": str(memory)}
    return {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": str(quota), "memory.limit_in_bytes": str(memory)}


def check(said: list, quota: float, memory: int) -> None:
    count, reason, told, total, available, limited = said
    assert (count, told, total, limited) == (max(1, int(quota)), quota, memory, True)
    assert reason == "quota" or len(os.sched_getaffinity(0)) == 1
    assert memory - 128 * MB < available < memory - 32 * MB  # the process itself, with 32 MB that it holds


@root_only
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("quota", [50_000, 150_000])
def test_a_process_in_a_real_group(version, quota):
    with real_groups(version, limits(version, quota, 600 * MB)) as groups:
        check(said_inside(groups, SAY), quota / 100_000, 600 * MB)


@root_only
@pytest.mark.parametrize("version", [1, 2])
def test_a_process_in_nested_real_groups(version):
    """The outer one bounds the processor, the inner one the memory."""
    outer, inner = limits(version, 150_000, 900 * MB), limits(version, 150_000, 500 * MB)
    inner |= {"cpu.max": "max"} if version == 2 else {"cpu.cfs_quota_us": "-1"}
    with real_groups(version, outer, inner) as groups:
        check(said_inside(groups, SAY), 1.5, 500 * MB)


@root_only
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("namespace", [True, False])
def test_a_real_group_as_a_container_sees_it(version, namespace, tmp_path):
    """Only the own group is mounted, and not at the usual place; /proc/self/cgroup says "/" with a namespace, and the
    path outside without."""
    mounts = []
    with real_groups(version, limits(version, 150_000, 600 * MB)) as groups:
        for controller, folder in groups.items():
            kind = "cgroup2" if version == 2 else f"cgroup -o {controller}"
            what = f"-t {kind} none" if namespace else f"--bind {folder}"
            mounts += [f"mkdir {tmp_path}/{controller}", f"mount {what} {tmp_path}/{controller}"]
        mounts.append("mount -t tmpfs none /sys/fs/cgroup")
        options = "--mount --cgroup" if namespace else "--mount"
        check(said_inside(groups, SAY, "\n".join(mounts), options), 1.5, 600 * MB)


@root_only
@pytest.mark.parametrize("version", [1, 2])
def test_pages_of_files_in_a_real_group_count_as_free(version):
    code = SAY.replace("held", "open(FILE, 'rb').read()\nheld")
    with real_groups(version, limits(version, 150_000, 600 * MB)) as groups, tempfile.NamedTemporaryFile(dir="/var/tmp") as file:
        file.write(os.urandom(128 * MB))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that the child's group is charged with them
        check(said_inside(groups, code.replace("FILE", repr(file.name))), 1.5, 600 * MB)

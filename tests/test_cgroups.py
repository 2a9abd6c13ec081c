"""Control groups: files copied from real systems, files typed after the kernel's form, real groups of this machine."""

import json
import os
import tempfile
from pathlib import Path

import psutil
import pytest
from realgroups import real_groups, said_inside

from qwen_chat import cgroups, hardware

MB = 1024 * 1024


def write(root: Path, files: dict[str, str]) -> None:
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(content)


# Real systems. systems.json has their files byte for byte, taken on Debian 12 under QEMU with four processors: of each
# machine what all its processes see, and of processes under limits their groups, mounts and what LXC shows them in the
# place of the machine's files. The limits below are those that systemd, LXC or Docker were asked for.

SYSTEMS = json.loads((Path(__file__).parent / "data" / "systems.json").read_text(encoding="utf-8"))
HOST = 3_054_636 * 1024  # MemTotal
SWAP = 262_140 * 1024  # SwapFree


@pytest.mark.parametrize(("system", "process", "quota", "memory", "swap"), [
    ("cgroup v2", "no limits", None, HOST, SWAP),
    ("cgroup v2", "service", 1.5, 800 * MB, 100 * MB),  # MemoryHigh=800M, MemoryMax=900M, MemorySwapMax=100M
    ("cgroup v2", "no swap", None, HOST, 0),  # MemorySwapMax=0 alone
    ("cgroup v2", "nested", 1.2, 1024 * MB, SWAP),  # a service of 300% in a slice of 120% in one of 250% and 1G
    ("cgroup v2", "user session", 1.5, 1200 * MB, SWAP),  # user-1000.slice is limited
    ("cgroup v2", "user service", 1.5, 700 * MB, SWAP),  # systemd-run --user
    ("cgroup v2", "nspawn", 0.5, HOST, SWAP),  # a service of CPUQuota=50%; the container's own limit is out of sight
    ("cgroup v2", "lxc", 1.5, 600 * MB, 0),  # with lxcfs, and processors 1 and 3
    ("cgroup v2", "lxc service", 0.5, 600 * MB, 0),  # CPUQuota=50% in that container
    ("cgroup v2", "docker", 1.5, 600 * MB, SWAP),
    ("cgroup v2", "docker half", 0.5, HOST, SWAP),
    ("cgroup v2", "docker cgroupns=host", 1.5, 600 * MB, 100 * MB),  # --memory-swap 700m
    ("cgroup v2", "pod", None, 700 * MB, SWAP),  # the container's own; the pod's 1.5 cores are out of sight
    ("cgroup v2", "pod cgroupns=host", 1.5, 700 * MB, SWAP),
])
def test_files_of_real_systems(tmp_path, system, process, quota, memory, swap):
    write(tmp_path, SYSTEMS[system]["machine"] | SYSTEMS[system][process])
    allowed = {1, 3} if "lxc" in process else {0, 1, 2, 3}
    cores, found = hardware.cores(tmp_path, allowed), hardware.usable_memory(tmp_path)
    assert (cores.quota, cores.count) == (quota, max(1, int(quota or len(allowed))))
    assert (found.total, found.swap) == (memory, swap)
    assert memory - 64 * MB < found.available < memory or memory == HOST and not found.limited
    container = any(word in process for word in ("docker", "pod", "lxc", "nspawn"))
    assert hardware.surroundings(tmp_path, {}) == ["container"] * container


def test_a_real_service_that_sees_no_meminfo(tmp_path):
    """ProcSubset=pid, with MemoryMax=900M and CPUQuota=150%."""
    write(tmp_path, SYSTEMS["cgroup v2"]["no proc"])
    memory = hardware.usable_memory(tmp_path)
    assert memory.total == min(900 * MB, psutil.virtual_memory().total)
    assert hardware.cpu_quota(tmp_path) == 1.5


def test_the_processor_of_a_real_system(tmp_path):
    """/proc/cpuinfo of a Xeon of the fourth generation, byte for byte, the first two of its processors."""
    write(tmp_path, SYSTEMS["Xeon"]["machine"])
    assert hardware.cpu_model(tmp_path) == "Intel(R) Xeon(R) Processor"
    named = {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "avx_vnni"}
    assert named <= set(hardware.cpu_features(tmp_path))


# Places, typed after the kernel's form

TOP = "sys/fs/cgroup/cpu.max"
OTHER_MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
28 27 0:24 / /srv/cgroup rw,relatime - tmpfs cgroup rw
"""


@pytest.mark.parametrize(("own", "top", "files", "quota"), [
    ("/", "/", {TOP: 2}, 2),
    ("/", "/", {TOP: 3, "sys/fs/cgroup/a/cpu.max": 1}, 3),
    ("/a/b", "/", {"sys/fs/cgroup/a/cpu.max": 2, "sys/fs/cgroup/a/b/cpu.max": 3, "sys/fs/cgroup/c/cpu.max": 1}, 2),
    ("/a/b", "/a", {TOP: 3, "sys/fs/cgroup/b/cpu.max": 2, "sys/fs/cgroup/a/b/cpu.max": 1}, 2),  # a part is mounted
    ("/a/b", "/c", {TOP: 2}, 2),  # a container that does not see its own path reads the top
    ("/a/gone (deleted)", "/", {"sys/fs/cgroup/a/cpu.max": 2}, 2),
    (r"/m.slice/m\x2dv.scope", r"/m.slice/m\134x2dv.scope", {TOP: 2}, 2),  # mountinfo escapes the backslash
    ("/a:b c", r"/a:b\040c", {TOP: 2}, 2),
    ("/", "/../..", {TOP: 2}, 2),  # a namespace without a mount of its own: the top is a group above it
    ("/../..", "/", {TOP: 2}, None),  # put into a group above the namespace, where the top is another process's
    ("/../other/a", "/..", {"sys/fs/cgroup/other/a/cpu.max": 2}, 2),
])
def test_where_the_groups_are_found(tmp_path, own, top, files, quota):
    mount = f"30 29 0:26 {top} /sys/fs/cgroup rw,nosuid,relatime shared:9 master:1 - cgroup2 cgroup2 rw,nsdelegate\n"
    write(tmp_path, {"proc/self/cgroup": f"0::{own}\n", "proc/self/mountinfo": OTHER_MOUNTS + mount})
    write(tmp_path, {path: f"{cores}00000 100000\n" for path, cores in files.items()})
    assert cgroups.cpu_quota(tmp_path) == quota


HYBRID = """\
31 23 0:28 / /sys/fs/cgroup ro,nosuid,nodev,noexec shared:9 - tmpfs tmpfs ro,mode=755
32 31 0:29 / /sys/fs/cgroup/unified rw,nosuid,nodev,noexec,relatime shared:10 - cgroup2 cgroup2 rw,nsdelegate
33 31 0:30 / /sys/fs/cgroup/systemd rw,nosuid,nodev,noexec,relatime shared:11 - cgroup cgroup rw,xattr,name=systemd
36 31 0:33 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid,nodev,noexec,relatime shared:15 - cgroup cgroup rw,cpu,cpuacct
37 31 0:34 / /sys/fs/cgroup/memory rw,nosuid,nodev,noexec,relatime shared:16 - cgroup cgroup rw,memory
"""


def test_a_hybrid_of_v1_and_v2(tmp_path):
    """systemd before version 250: v2 for itself, v1 for the controllers, cpu and cpuacct at one place."""
    own, folder = "/system.slice/chat.service", "sys/fs/cgroup/{}/system.slice/chat.service/"
    lines = ("9:memory", "4:cpu,cpuacct", "1:name=systemd", "0:")
    write(tmp_path, {
        "proc/self/mountinfo": HYBRID, "proc/self/cgroup": "".join(f"{line}:{own}\n" for line in lines),
        folder.format("cpu,cpuacct") + "cpu.cfs_quota_us": "150000\n",
        folder.format("cpu,cpuacct") + "cpu.cfs_period_us": "100000\n",
        folder.format("memory") + "memory.limit_in_bytes": "524288000\n",
        folder.format("memory") + "memory.usage_in_bytes": "104857600\n",
    })
    assert cgroups.cpu_quota(tmp_path) == 1.5
    assert cgroups.memory_limits(tmp_path) == [cgroups.MemoryLimit(500 * MB, 100 * MB, cgroups.UNLIMITED)]


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


def mounted_together(controller: str) -> str:
    """The controllers of v1 that share a mount with this one: most systems have "cpu,cpuacct"."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    return next(names for _, names, _ in (line.split(":", 2) for line in lines) if controller in names.split(","))


@root_only
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("namespace", [True, False])
def test_a_real_group_as_a_container_sees_it(version, namespace, tmp_path):
    """Only the own group is mounted, and not at the usual place; /proc/self/cgroup says "/" with a namespace, and the
    path outside without."""
    mounts = []
    with real_groups(version, limits(version, 150_000, 600 * MB)) as groups:
        for controller, folder in groups.items():
            kind = "cgroup2" if version == 2 else f"cgroup -o {mounted_together(controller)}"
            what = f"-t {kind} none" if namespace else f"--bind {folder}"
            mounts += [f"mkdir {tmp_path}/{controller}", f"mount {what} {tmp_path}/{controller}"]
        mounts.append("mount -t tmpfs none /sys/fs/cgroup")
        options = "--mount --cgroup" if namespace else "--mount"
        check(said_inside(groups, SAY, "\n".join(mounts), options), 1.5, 600 * MB)


@root_only
@pytest.mark.parametrize("version", [1, 2])
def test_pages_of_files_in_a_real_group_count_as_free(version):
    code = SAY.replace("held", "open(FILE, 'rb').read()\nheld")
    wanted = limits(version, 150_000, 600 * MB)
    with real_groups(version, wanted) as groups, tempfile.NamedTemporaryFile(dir="/var/tmp") as file:
        file.write(os.urandom(128 * MB))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # so that the child's group is charged with them
        check(said_inside(groups, code.replace("FILE", repr(file.name))), 1.5, 600 * MB)

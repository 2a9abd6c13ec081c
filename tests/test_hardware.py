"""What a device grants, read from trees of /proc and /sys as such devices have them."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_chat import hardware, kernelfiles, profiles

GB = 1_000_000_000


class Tree:
    """A folder that stands for a machine's root."""

    def __init__(self, root: Path):
        self.root = root
        self.processors: list[int] = []

    def write(self, path: str, text: str) -> "Tree":
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return self

    def cpus(self, siblings: list[str], **files: list) -> "Tree":
        """A processor for each entry of `siblings`; `files` has the content of other files of each: cpu_capacity=[...]."""
        self.processors = list(range(len(siblings)))
        self.write("sys/devices/system/cpu/online", f"0-{len(siblings) - 1}\n")
        for number, shared in enumerate(siblings):
            folder = f"sys/devices/system/cpu/cpu{number}"
            self.write(f"{folder}/topology/thread_siblings_list", shared + "\n")
            for name, values in files.items():
                self.write(f"{folder}/{name.replace('__', '/')}", f"{values[number]}\n")
        return self

    def memory(self, total: int, available: int | None = None, swap: int = 0) -> "Tree":
        sizes = {"MemTotal": total, "MemFree": 1024, "MemAvailable": total if available is None else available, "SwapTotal": swap, "SwapFree": swap}
        return self.write("proc/meminfo", "".join(f"{name}:  {size // 1024:>12} kB\n" for name, size in sizes.items()))

    def groups(self, version: int, path: str, outer: dict = {}, inner: dict = {}, controllers=("memory", "cpu")) -> "Tree":
        """Control groups: this process is in `path`, which has the files `inner`; the one above it has `outer`."""
        lines = [f"{number}:{name}:{path}" for number, name in enumerate(controllers, 1)] if version == 1 else [f"0::{path}"]
        self.write("proc/self/cgroup", "\n".join(lines) + "\n")
        for files, folder in ((outer, path.rpartition("/")[0]), (inner, path)):
            for name, text in files.items():
                controller = name.partition(".")[0] + "/" if version == 1 else ""
                self.write(f"sys/fs/cgroup/{controller}{folder.strip('/')}/{name}", text)
        return self

    def cores(self, allowed=None) -> hardware.Cores:
        return hardware.cores(self.root, set(self.processors if allowed is None else allowed))


@pytest.fixture
def tree(tmp_path):
    return Tree(tmp_path)


def arm64(features: str, count: int, part: str, implementer: str = "0x41") -> str:
    """/proc/cpuinfo of `count` ARM cores, which have numbers and no name."""
    kind = f"CPU implementer\t: {implementer}\nCPU architecture: 8\nCPU part\t: {part}\nCPU revision\t: 3"
    return "".join(
        f"processor\t: {n}\nBogoMIPS\t: 108.00\nFeatures\t: {features}\n{kind}\n\n" for n in range(count)
    )


def x86(name: str, flags: str, count: int) -> str:
    """/proc/cpuinfo of `count` Intel or AMD processors."""
    kind = f"cpu family\t: 6\nmodel\t\t: 190\nmodel name\t: {name}\nstepping\t: 0\ncpu MHz\t\t: 806.399\nfpu\t\t: yes"
    return "".join(
        f"processor\t: {n}\nvendor_id\t: GenuineIntel\n{kind}\nflags\t\t: {flags}\nbugs\t\t: spectre_v1\n"
        "address sizes\t: 39 bits physical, 48 bits virtual\npower management:\n\n" for n in range(count)
    )


def pi(tree: Tree, model: str, features: str, total: int) -> Tree:
    cpuinfo = arm64(features, 4, "0xd08") + f"Revision\t: c03114\nSerial\t\t: 10000000abcdef01\nModel\t\t: {model}\n"
    return tree.cpus(["0", "1", "2", "3"], cpu_capacity=[1024] * 4).write("proc/cpuinfo", cpuinfo).memory(total)


def pi4(tree: Tree) -> Tree:
    return pi(tree, "Raspberry Pi 4 Model B Rev 1.4", "fp asimd evtstrm crc32 cpuid", 4 * GB).write("proc/device-tree/model", "Raspberry Pi 4 Model B Rev 1.4\0")


def pi5(tree: Tree) -> Tree:  # in a container, where the device tree is hidden
    return pi(tree, "Raspberry Pi 5 Model B Rev 1.0", "fp asimd evtstrm aes crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp", 8 * GB)


def n100(tree: Tree) -> Tree:
    cpuinfo = x86("Intel(R) N100", "fpu sse4_2 avx avx2 fma f16c avx_vnni", 4)
    tree.cpus(["0", "1", "2", "3"], cpufreq__cpuinfo_max_freq=[3400000] * 4).memory(16 * GB)
    return tree.write("sys/devices/cpu/cpus", "0-3\n").write("proc/cpuinfo", cpuinfo)


def hybrid(tree: Tree, fast: int, small: int) -> Tree:
    """An Intel laptop: fast cores have two threads each."""
    siblings = [f"{2 * (n // 2)}-{2 * (n // 2) + 1}" for n in range(2 * fast)] + [str(2 * fast + n) for n in range(small)]
    clocks = [4700000 + 100000 * (n < 4) for n in range(2 * fast)] + [3500000] * small
    tree.cpus(siblings, cpufreq__cpuinfo_max_freq=clocks).memory(16 * GB)
    tree.write("sys/devices/cpu_core/cpus", f"0-{2 * fast - 1}\n").write("sys/devices/cpu_atom/cpus", f"{2 * fast}-{2 * fast + small - 1}\n")
    tree.write("sys/class/power_supply/AC/type", "Mains\n")
    cpuinfo = x86("12th Gen Intel(R) Core(TM) i7-12700H", "avx avx2 fma f16c avx_vnni", 2 * fast + small)
    return tree.write("sys/class/power_supply/BAT0/type", "Battery\n").write("proc/cpuinfo", cpuinfo)


def graviton(tree: Tree) -> Tree:  # a c7g
    features = "fp asimd evtstrm aes atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp sve svei8mm i8mm bf16"
    return tree.cpus([str(n) for n in range(8)]).memory(16 * GB).write("proc/cpuinfo", arm64(features, 8, "0xd40"))


def apple_vm(tree: Tree) -> Tree:
    features = "fp asimd evtstrm aes crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop asimddp asimdfhm"
    cpuinfo = arm64(features, 4, "0x000", "0x61")
    return tree.cpus([str(n) for n in range(4)]).memory(8 * GB).write("proc/cpuinfo", cpuinfo)


def wsl2(tree: Tree) -> Tree:
    tree.cpus([f"{2 * (n // 2)}-{2 * (n // 2) + 1}" for n in range(12)]).memory(8 * GB, swap=2 * GB)
    tree.write("proc/cpuinfo", x86("AMD Ryzen 5 5600X 6-Core Processor", "avx avx2 fma f16c", 12))
    tree.write("proc/sys/kernel/osrelease", "6.6.87.2-microsoft-standard-WSL2\n")
    return tree.write("proc/self/cgroup", "0::/\n")


def server(tree: Tree) -> Tree:
    """16 cores, 32 processors: the second threads are numbered after all the first ones."""
    tree.write("proc/cpuinfo", x86("AMD EPYC 7302 16-Core Processor", "avx avx2 fma f16c", 32))
    return tree.cpus([f"{n % 16},{n % 16 + 16}" for n in range(32)]).memory(64 * GB)


@pytest.mark.parametrize(("make", "count", "reason"), [
    (pi4, 4, "all"),
    (pi5, 4, "all"),
    (n100, 4, "all"),
    (server, 16, "hyperthreads"),
    (graviton, 8, "all"),
    (apple_vm, 4, "all"),
    (wsl2, 6, "hyperthreads"),
    (lambda tree: hybrid(tree, 6, 8), 6, "hybrid"),  # i7-12700H
    (lambda tree: hybrid(tree, 2, 8), 10, "hyperthreads"),  # i5-1235U: two alone would be slower than all ten
    (lambda tree: tree.cpus([str(n) for n in range(8)], cpu_capacity=[446] * 4 + [1024] * 4), 4, "hybrid"),  # RK3588
    (lambda tree: tree.cpus(["0"]), 1, "all"),
], ids=["pi4", "pi5", "n100", "server", "graviton", "apple", "wsl2", "6+8", "2+8", "big.LITTLE", "one"])
def test_the_cores_of_machines(tree, make, count, reason):
    cores = make(tree).cores()
    assert (cores.count, cores.reason) == (count, reason)
    assert cores.because


@pytest.mark.parametrize(("allowed", "count", "reason"), [
    ({0, 16}, 1, "hyperthreads"),  # --cpuset-cpus 0,16: two threads of one core
    ({0, 1}, 2, "affinity"),
    ({0, 1, 16, 17, 18}, 3, "hyperthreads"),
    (set(range(16)), 16, "affinity"),
])
def test_of_a_cpuset_the_physical_cores_count(tree, allowed, count, reason):
    cores = server(tree).cores(allowed)
    assert (cores.count, cores.reason) == (count, reason)
    assert cores.processors == len(allowed) and cores.all_processors == 32


def test_a_cpuset_of_the_small_cores_has_them_all(tree):
    assert hybrid(tree, 6, 8).cores(range(12, 20)).count == 8


def test_the_smallest_cores_are_small_ones(tree):
    """A Core Ultra of 6 fast cores, 8 small ones and 2 that are smaller still, as Linux 6.12 and later list them."""
    hybrid(tree, 6, 10).write("sys/devices/cpu_atom/cpus", "12-19\n").write("sys/devices/cpu_lowpower/cpus", "20-21\n")
    for number in (20, 21):
        tree.write(f"sys/devices/system/cpu/cpu{number}/cpufreq/cpuinfo_max_freq", "4700000\n")
    assert tree.cores().count == 6


def test_without_a_topology_the_physical_cores_are_psutils(tree, monkeypatch):
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 4)
    assert tree.cores(range(8)).count == 4
    assert tree.cores(range(2)).count == 2
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None)  # psutil does not know either
    assert tree.cores(range(8)).count == 8


@pytest.mark.parametrize(("text", "quota", "count"), [
    ("150000 100000\n", 1.5, 1), ("50000 100000\n", 0.5, 1), ("290000 100000\n", 2.9, 2), ("800000 100000\n", 8, 4),
    ("30000 20000\n", 1.5, 1), ("150000  100000", 1.5, 1), ("max 100000\n", None, 4), ("", None, 4), ("\n", None, 4),
    ("150000\n", None, 4), ("150000 0\n", None, 4), ("² ²\n", None, 4),
])
def test_the_quota_of_cgroup_v2(tree, text, quota, count):
    cores = pi4(tree).groups(2, "/", inner={"cpu.max": text}).cores()
    assert (cores.quota, cores.count) == (quota, count)
    assert (cores.reason == "quota") == (count < 4)


def test_the_tightest_quota_above_this_process_counts(tree):
    server(tree).groups(2, "/outer/inner", outer={"cpu.max": "200000 100000\n"}, inner={"cpu.max": "max 100000\n"})
    assert tree.cores().count == 2 and tree.cores().because == "the processor time is limited to 2 (--cpus, CPUQuota)"
    tree.write("sys/fs/cgroup/outer/inner/cpu.max", "100000 100000\n")
    assert tree.cores().count == 1


@pytest.mark.parametrize(("quota", "period", "expected"), [
    ("250000\n", "100000\n", 2.5), ("-1\n", "100000\n", None), ("250000\n", "0\n", None),
])
def test_the_quota_of_cgroup_v1(tree, quota, period, expected):
    tree.groups(1, "/docker/abc", inner={"cpu.cfs_quota_us": quota, "cpu.cfs_period_us": period}, controllers=("memory", "cpu,cpuacct"))
    assert hardware.cpu_quota(tree.root) == expected


def test_a_container_that_does_not_see_its_own_path_reads_the_top(tree):
    """cgroup v1 without a namespace: /proc names the path outside, but only this group is there."""
    tree.write("proc/self/cgroup", "4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n").memory(8 * GB)
    for name, text in {"cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000", "memory/memory.limit_in_bytes": "600000000", "memory/memory.usage_in_bytes": "100000000"}.items():
        tree.write(f"sys/fs/cgroup/{name}", text)
    assert hardware.cpu_quota(tree.root) == 1.5
    assert hardware.usable_memory(tree.root) == hardware.Memory(600_000_000, 500_000_000, 0, True)


V2 = {
    "memory.max": "600000000\n", "memory.current": "450000000\n",
    "memory.stat": "anon 100000000\ninactive_file 200000000\nactive_file 50000000\n",
}
V1 = {
    "memory.limit_in_bytes": "600000000\n", "memory.usage_in_bytes": "450000000\n",
    "memory.stat": "inactive_file 1\ntotal_inactive_file 200000000\ntotal_active_file 50000000\n",
}


@pytest.mark.parametrize(("version", "files"), [(2, V2), (1, V1)])
@pytest.mark.parametrize("where", ["outer", "inner"])
def test_pages_of_files_in_a_group_count_as_free(tree, version, files, where):
    tree.memory(8 * GB).groups(version, "/outer/inner", **{where: files})
    assert hardware.usable_memory(tree.root) == hardware.Memory(600_000_000, 400_000_000, 0, True)
    assert hardware.memory_limit(tree.root) == 600_000_000


def test_the_tightest_of_nested_memory_limits_counts(tree):
    outer, inner = {**V2, "memory.current": "590000000\n"}, {"memory.max": "900000000\n", "memory.current": "0\n"}
    tree.memory(8 * GB).groups(2, "/outer/inner", outer=outer, inner=inner)
    assert hardware.usable_memory(tree.root).available == 260_000_000
    assert hardware.usable_memory(tree.root).total == 600_000_000


def test_a_limit_above_what_the_machine_has_is_none(tree):
    tree.memory(GB, GB // 2).groups(2, "/a/b", inner={"memory.max": str(2 * GB), "memory.current": "0"})
    memory = hardware.usable_memory(tree.root)
    assert not memory.limited and hardware.memory_limit(tree.root) is None
    assert memory.total == pytest.approx(GB, abs=1024) and memory.available == pytest.approx(GB // 2, abs=1024)


@pytest.mark.parametrize(("version", "files"), [
    (2, {"memory.max": "max\n", "memory.high": "max\n", "memory.current": "5\n"}),
    (1, {"memory.limit_in_bytes": "9223372036854771712\n", "memory.usage_in_bytes": "5\n"}),
])
def test_no_limit_is_no_limit(tree, version, files):
    assert not hardware.usable_memory(tree.memory(8 * GB).groups(version, "/a/b", inner=files).root).limited


@pytest.mark.parametrize(("version", "files", "swap"), [
    (2, {"memory.swap.max": "0\n"}, 0),
    (2, {"memory.swap.max": "300000000\n", "memory.swap.current": "100000000\n"}, 200_000_000),
    (2, {"memory.swap.max": "max\n"}, GB),
    (1, {"memory.memsw.limit_in_bytes": "800000000\n", "memory.memsw.usage_in_bytes": "500000000\n"}, 150_000_000),
    (1, {"memory.memsw.limit_in_bytes": "9223372036854771712\n"}, GB),
    (1, {}, GB),
])
def test_swap_that_a_group_may_use(tree, version, files, swap):
    tree.memory(8 * GB, swap=GB).groups(version, "/a/b", inner={**(V2 if version == 2 else V1), **files})
    assert hardware.usable_memory(tree.root).swap == pytest.approx(swap, abs=1024)


def test_this_machine_as_it_is(monkeypatch):
    memory = hardware.usable_memory()
    assert 0 < memory.available <= memory.total
    assert 1 <= hardware.usable_cores() <= os.cpu_count()
    assert hardware.cpu_model() and hardware.held_by_process() > 1_000_000


def test_a_system_without_proc_and_sys(tree):
    """macOS, Windows."""
    memory = hardware.usable_memory(tree.root)
    assert memory.total == psutil.virtual_memory().total and not memory.limited
    assert hardware.usable_cores(tree.root) >= 1
    assert (hardware.device(tree.root), hardware.cpu_features(tree.root), hardware.surroundings(tree.root, {})) == ("", [], [])
    assert isinstance(hardware.cpu_model(tree.root), str)
    found = hardware.fitting_profile(tree.root, {})
    assert found is None or found[0] in ("server", "tiny")


@pytest.mark.parametrize(("make", "features"), [
    (pi4, ["neon"]), (pi5, ["neon", "fp16", "dotprod"]), (apple_vm, ["neon", "fp16", "dotprod"]),
    (graviton, ["i8mm", "sve", "neon", "fp16", "dotprod"]), (n100, ["avx", "avx2", "fma", "f16c", "avx_vnni"]),
    (server, ["avx", "avx2", "fma", "f16c"]), (wsl2, ["avx", "avx2", "fma", "f16c"]),
])
def test_the_instruction_sets(tree, make, features):
    assert hardware.cpu_features(make(tree).root) == features


@pytest.mark.parametrize(("files", "environ", "expected"), [
    ({".dockerenv": ""}, {}, ["container"]),
    ({"run/.containerenv": ""}, {}, ["container"]),
    ({"proc/self/cgroup": "0::/kubepods/besteffort/pod1\n"}, {}, ["container"]),
    ({"proc/self/cgroup": "0::/user.slice/session-1.scope\n"}, {}, []),
    ({"run/systemd/container": "lxc"}, {}, ["container"]),  # what systemd starts in LXC has no other sign of it
    ({"proc/1/cgroup": "0::/init.scope\n"}, {"container": "podman"}, ["container"]),
    ({"proc/1/cgroup": "0::/init.scope\n", "proc/sys/kernel/osrelease": "6.1.0-18-amd64\n"}, {}, []),
    ({"proc/sys/kernel/osrelease": "4.4.0-22621-Microsoft\n"}, {}, []),  # WSL1
    ({".dockerenv": ""}, {"SPACE_ID": "me/chat"}, ["Hugging Face Space", "container"]),
    ({"proc/sys/kernel/osrelease": "5.15.153.1-microsoft-standard-WSL2\n"}, {}, ["WSL2"]),
])
def test_in_what_it_runs(tree, files, environ, expected):
    for path, text in files.items():
        tree.write(path, text)
    assert hardware.surroundings(tree.root, environ) == expected


def limited(make):
    return lambda tree: make(tree).groups(2, "/", inner={"memory.max": str(512 * 2**20), "memory.current": "0"})


@pytest.mark.parametrize(("make", "environ", "name", "why"), [
    (pi4, {}, "raspberry-pi-4", "it is a Raspberry Pi 4 Model B Rev 1.4"),
    (pi5, {}, "raspberry-pi-5", "it is a Raspberry Pi 5 Model B Rev 1.0"),
    (n100, {}, "n100", "its processor is an Intel(R) N100"),
    (lambda tree: hybrid(tree, 6, 8), {}, "laptop", "it has a battery"),
    (limited(pi4), {}, "tiny", "it has 537 MB of memory"),
    (server, {"SPACE_ID": "me/chat"}, "spaces", "it is a Hugging Face Space"),
], ids=["pi4", "pi5", "n100", "laptop", "tiny", "spaces"])
def test_the_profile_that_fits(tree, make, environ, name, why):
    assert hardware.fitting_profile(make(tree).root, environ) == (name, why)
    assert name in profiles.SHIPPED


def test_large_machines_are_servers_and_others_have_no_profile(tree, monkeypatch):
    monkeypatch.setattr(hardware, "_affinity", lambda: set(tree.processors))
    assert hardware.fitting_profile(server(tree).root, {}) == ("server", "it has 16 cores and 64 GB of memory")
    tree.groups(2, "/", inner={"cpu.max": "400000 100000\n"})
    assert hardware.fitting_profile(tree.root, {}) is None


@pytest.mark.parametrize("board", ["Raspberry Pi 400 Rev 1.0", "Raspberry Pi Compute Module 4 Rev 1.1", "Raspberry Pi 500 Rev 1.0", "Raspberry Pi Compute Module 5 Rev 1.0", "Raspberry Pi 3 Model B Plus Rev 1.3"])
def test_other_boards(tree, board):
    found = hardware.fitting_profile(pi(tree, board, "fp asimd", 4 * GB).root, {})
    expected = "raspberry-pi-5" if "500" in board or "Module 5" in board else "raspberry-pi-4" if "4" in board else None
    assert (found and found[0]) == expected


def test_a_mouse_is_no_laptop(tree):
    tree.write("sys/class/power_supply/hidpp_battery_0/type", "Battery\n").write("sys/class/power_supply/hidpp_battery_0/scope", "Device\n")
    assert not hardware.has_battery(tree.root)


def test_affinity_is_honoured():
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system has no processor affinity")
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert hardware.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


# Whatever the files hold

READ = [  # every file that the readers look at, for a process in the group /a of both versions
    *(f"proc/{name}" for name in ("self/cgroup", "self/mountinfo", "1/cgroup", "meminfo", "cpuinfo")),
    "proc/sys/kernel/osrelease", "proc/device-tree/model",
    *(f"sys/devices/{name}" for name in ("system/cpu/online", "cpu_core/cpus", "cpu_atom/cpus", "cpu_lowpower/cpus")),
    *(f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list" for n in (0, 1)),
    *(f"sys/devices/system/cpu/cpu{n}/{name}" for n in (0, 1) for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq")),
    *(f"sys/class/power_supply/BAT0/{name}" for name in ("type", "scope")),
    "sys/fs/cgroup/cpu.max",
    *(f"sys/fs/cgroup/memory.{name}" for name in ("max", "high", "swap.max", "swap.current", "current", "stat")),
    *(f"sys/fs/cgroup/cpu/cpu.cfs_{name}_us" for name in ("quota", "period")),
    *(f"sys/fs/cgroup/memory/memory.{name}" for name in ("limit_in_bytes", "usage_in_bytes", "stat")),
    *(f"sys/fs/cgroup/memory/memory.memsw.{name}_in_bytes" for name in ("limit", "usage")),
    "run/systemd/container", ".dockerenv",
]
WORDS = [
    "max", "0", "-1", "-5", "1", "150000", "100000", "9223372036854771712", "18446744073709551615", "9" * 5000,
    "0-3", "3-0", "0-9999999999", "0,2", "²", "名字", "\0", "/\0", "\x1c", "\u2028", "\\134", "\\777", ":", "0:", "kB",
    "MemTotal:", "MemAvailable:", "SwapFree:", "inactive_file", "total_active_file", "Battery",
    "model name\t:", "Model\t\t:", "Features\t:", "0::/", "0::/../..", "4:memory:/a", "1:cpu,cpuacct:",
    "- cgroup2 none rw", "24 1 0:2 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
    "25 1 0:3 /.. /sys/fs/cgroup/cpu rw shared:1 - cgroup cgroup rw,cpu",
]
content = st.one_of(
    st.binary(max_size=64),
    st.lists(st.sampled_from([*WORDS, " ", "\n", "\t", "  "]), max_size=24).map(lambda words: "".join(words).encode()),
)


def ask_everything(root: Path) -> None:
    """Each public reader once; what they say has to make sense, whatever they read."""
    cores, memory = hardware.cores(root, {0, 1}), hardware.usable_memory(root)
    assert 1 <= cores.count <= 2 and cores.because
    assert memory.available >= 0 and memory.swap >= 0
    assert cores.quota is None or cores.quota > 0
    assert hardware.usable_cores(root) >= 1
    words = (hardware.device(root), hardware.cpu_model(root), *hardware.cpu_features(root))
    assert all(isinstance(word, str) for word in words)
    assert hardware.has_battery(root) in (True, False)
    hardware.memory_limit(root), hardware.surroundings(root, {}), hardware.fitting_profile(root, {})


@settings(deadline=None, max_examples=100)
@given(st.dictionaries(st.sampled_from(READ), content))
def test_no_content_of_any_file_raises(files):
    with tempfile.TemporaryDirectory() as root:
        for path, data in files.items():
            file = Path(root, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        ask_everything(Path(root))


def test_the_list_of_what_is_read_is_whole(tree, monkeypatch):
    """So that the test above forgets no file."""
    seen, real = set(), kernelfiles.raw
    monkeypatch.setattr(kernelfiles, "raw", lambda file: seen.add(file.relative_to(tree.root).as_posix()) or real(file))
    monkeypatch.setattr("qwen_chat.cgroups.raw", kernelfiles.raw)
    hybrid(tree, 1, 0).groups(1, "/", inner=V1).write("sys/fs/cgroup/memory.max", "max\n")
    tree.write("sys/fs/cgroup/memory.swap.max", "0\n").write("sys/fs/cgroup/memory/memory.memsw.limit_in_bytes", "5\n")
    tree.write("sys/class/power_supply/AC/type", "Battery\n").write("sys/class/power_supply/BAT0/scope", "Device\n")
    ask_everything(tree.root)
    assert {re.sub("/AC/", "/BAT0/", path) for path in seen} - set(READ) == {"sys/firmware/devicetree/base/model"}


@pytest.fixture
def root_of_nobody():
    """A folder that a user without rights may enter; the test is such a user while it calls what it is given."""
    def as_nobody(function, *arguments):
        before = os.geteuid()
        try:
            if before == 0:  # whom no mode keeps out
                os.seteuid(65534)
            return function(*arguments)
        finally:
            os.seteuid(before)

    if not hasattr(os, "geteuid"):
        pytest.skip("this system has no such rights")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder), as_nobody


@pytest.mark.parametrize("lock", ["files", "folders", "none"])
def test_what_may_not_be_read_is_as_if_it_were_not_there(root_of_nobody, lock):
    root, as_nobody = root_of_nobody
    for path in READ:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text("50000 100000\n")
    locked = [each for each in root.rglob("*") if lock == ("folders" if each.is_dir() else "files")]
    try:
        for each in reversed(locked):
            each.chmod(0)
        as_nobody(ask_everything, root)
        assert as_nobody(hardware.cpu_quota, root) == (0.5 if lock == "none" else None)
        assert as_nobody(hardware.device, root) == ("50000 100000" if lock == "none" else "")
    finally:
        for each in locked:
            each.chmod(0o700)


def test_folders_in_the_place_of_files(tree):
    for path in READ:
        (tree.root / path).mkdir(parents=True)
    ask_everything(tree.root)


CHILD = """
import sys
from pathlib import Path
from qwen_chat import hardware
root = Path(sys.argv[1])
found = hardware.usable_cores() >= 1, hardware.usable_memory().total > 0, hardware.held_by_process() >= 0
hardware.has_battery(), hardware.fitting_profile()
print(ascii([hardware.cpu_quota(root), hardware.device(root)]), all(found))
"""


def child(command: list, **environ) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60,
        env={**os.environ, **environ}, cwd=Path(__file__).parents[1],
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("environ", [
    {"LC_ALL": "C.UTF-8"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
], ids=["UTF-8", "ASCII"])
def test_names_that_the_locale_does_not_have(tree, environ):
    tree.write("proc/device-tree/model", "树莓派\0").groups(2, "/容器", inner={"cpu.max": "150000 100000\n"})
    assert child([sys.executable, "-c", CHILD, str(tree.root)], **environ) == f"{ascii([1.5, '树莓派'])} True"


def test_a_system_that_shows_no_proc(tree):
    """As in a service with ProcSubset=pid, or a sandbox; psutil, which is asked then, has only /proc itself."""
    try:
        subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/proc"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("/proc cannot be hidden here: that needs root and Linux")
    hidden = ["unshare", "--mount", "sh", "-ec", 'mount -t tmpfs none /proc; exec "$@"', "sh"]
    assert child([*hidden, sys.executable, "-c", CHILD, str(tree.root)]).endswith("True")

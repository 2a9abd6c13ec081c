"""What a device grants, read from trees of /proc and /sys as such devices have them."""

import os
from pathlib import Path

import psutil
import pytest

from qwen_chat import hardware, profiles

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


def pi(tree: Tree, model: str, features: str, total: int) -> Tree:
    cpuinfo = f"processor\t: 0\nBogoMIPS\t: 108.00\nFeatures\t: {features}\nCPU architecture: 8\n\nRevision\t: c03114\nModel\t\t: {model}\n"
    return tree.cpus(["0", "1", "2", "3"], cpu_capacity=[1024] * 4).write("proc/cpuinfo", cpuinfo).memory(total)


def pi4(tree: Tree) -> Tree:
    return pi(tree, "Raspberry Pi 4 Model B Rev 1.4", "fp asimd evtstrm crc32 cpuid", 4 * GB).write("proc/device-tree/model", "Raspberry Pi 4 Model B Rev 1.4\0")


def pi5(tree: Tree) -> Tree:  # in a container, where the device tree is hidden
    return pi(tree, "Raspberry Pi 5 Model B Rev 1.0", "fp asimd evtstrm aes crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp", 8 * GB)


def n100(tree: Tree) -> Tree:
    cpuinfo = "processor\t: 0\nmodel name\t: Intel(R) N100\nflags\t\t: fpu sse4_2 avx avx2 fma f16c avx_vnni\n"
    return tree.cpus(["0", "1", "2", "3"], cpufreq__cpuinfo_max_freq=[3400000] * 4).write("sys/devices/cpu/cpus", "0-3").write("proc/cpuinfo", cpuinfo).memory(16 * GB)


def hybrid(tree: Tree, fast: int, small: int) -> Tree:
    """An Intel laptop: fast cores have two threads each."""
    siblings = [f"{2 * (n // 2)}-{2 * (n // 2) + 1}" for n in range(2 * fast)] + [str(2 * fast + n) for n in range(small)]
    clocks = [4700000 + 100000 * (n < 4) for n in range(2 * fast)] + [3500000] * small
    tree.cpus(siblings, cpufreq__cpuinfo_max_freq=clocks).memory(16 * GB)
    tree.write("sys/devices/cpu_core/cpus", f"0-{2 * fast - 1}\n").write("sys/devices/cpu_atom/cpus", f"{2 * fast}-{2 * fast + small - 1}\n")
    tree.write("sys/class/power_supply/AC/type", "Mains\n")
    return tree.write("sys/class/power_supply/BAT0/type", "Battery\n").write("proc/cpuinfo", "model name\t: 12th Gen Intel(R) Core(TM) i7-12700H\n")


def server(tree: Tree) -> Tree:
    """16 cores, 32 processors: the second threads are numbered after all the first ones."""
    return tree.cpus([f"{n % 16},{n % 16 + 16}" for n in range(32)]).memory(64 * GB).write("proc/cpuinfo", "model name\t: AMD EPYC 7302\nflags\t\t: avx avx2 fma f16c\n")


@pytest.mark.parametrize(("make", "count", "reason"), [
    (pi4, 4, "all"),
    (pi5, 4, "all"),
    (n100, 4, "all"),
    (server, 16, "hyperthreads"),
    (lambda tree: hybrid(tree, 6, 8), 6, "hybrid"),  # i7-12700H
    (lambda tree: hybrid(tree, 2, 8), 10, "hyperthreads"),  # i5-1235U: two alone would be slower than all ten
    (lambda tree: tree.cpus([str(n) for n in range(8)], cpu_capacity=[446] * 4 + [1024] * 4), 4, "hybrid"),  # RK3588
    (lambda tree: tree.cpus(["0"]), 1, "all"),
], ids=["pi4", "pi5", "n100", "server", "6+8", "2+8", "big.LITTLE", "one"])
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


def test_without_a_topology_the_physical_cores_are_psutils(tree, monkeypatch):
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: 4)
    assert tree.cores(range(8)).count == 4
    assert tree.cores(range(2)).count == 2
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: None)  # psutil does not know either
    assert tree.cores(range(8)).count == 8


@pytest.mark.parametrize(("text", "quota", "count"), [("150000 100000", 1.5, 1), ("50000 100000", 0.5, 1), ("290000 100000", 2.9, 2), ("max 100000", None, 4), ("", None, 4), ("800000 100000", 8, 4)])
def test_the_quota_of_cgroup_v2(tree, text, quota, count):
    cores = pi4(tree).groups(2, "/", inner={"cpu.max": text}).cores()
    assert (cores.quota, cores.count) == (quota, count)
    assert (cores.reason == "quota") == (count < 4)


def test_the_tightest_quota_above_this_process_counts(tree):
    server(tree).groups(2, "/outer/inner", outer={"cpu.max": "200000 100000"}, inner={"cpu.max": "max 100000"})
    assert tree.cores().count == 2 and tree.cores().because == "the processor time is limited to 2 (--cpus, CPUQuota)"
    tree.write("sys/fs/cgroup/outer/inner/cpu.max", "100000 100000")
    assert tree.cores().count == 1


@pytest.mark.parametrize(("quota", "period", "expected"), [("250000", "100000", 2.5), ("-1", "100000", None), ("250000", "0", None)])
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


V2 = {"memory.max": "600000000", "memory.current": "450000000", "memory.stat": "anon 100000000\ninactive_file 200000000\nactive_file 50000000\n"}
V1 = {"memory.limit_in_bytes": "600000000", "memory.usage_in_bytes": "450000000", "memory.stat": "inactive_file 1\ntotal_inactive_file 200000000\ntotal_active_file 50000000\n"}


@pytest.mark.parametrize(("version", "files"), [(2, V2), (1, V1)])
@pytest.mark.parametrize("where", ["outer", "inner"])
def test_pages_of_files_in_a_group_count_as_free(tree, version, files, where):
    tree.memory(8 * GB).groups(version, "/outer/inner", **{where: files})
    assert hardware.usable_memory(tree.root) == hardware.Memory(600_000_000, 400_000_000, 0, True)
    assert hardware.memory_limit(tree.root) == 600_000_000


def test_the_tightest_of_nested_memory_limits_counts(tree):
    tree.memory(8 * GB).groups(2, "/outer/inner", outer={**V2, "memory.current": "590000000"}, inner={"memory.max": "900000000", "memory.current": "0"})
    assert hardware.usable_memory(tree.root).available == 260_000_000
    assert hardware.usable_memory(tree.root).total == 600_000_000


def test_a_limit_above_what_the_machine_has_is_none(tree):
    tree.memory(GB, GB // 2).groups(2, "/a/b", inner={"memory.max": str(2 * GB), "memory.current": "0"})
    memory = hardware.usable_memory(tree.root)
    assert not memory.limited and hardware.memory_limit(tree.root) is None
    assert memory.total == pytest.approx(GB, abs=1024) and memory.available == pytest.approx(GB // 2, abs=1024)


@pytest.mark.parametrize(("version", "files"), [
    (2, {"memory.max": "max", "memory.high": "max", "memory.current": "5"}),
    (1, {"memory.limit_in_bytes": "9223372036854771712", "memory.usage_in_bytes": "5"}),
])
def test_no_limit_is_no_limit(tree, version, files):
    assert not hardware.usable_memory(tree.memory(8 * GB).groups(version, "/a/b", inner=files).root).limited


@pytest.mark.parametrize(("version", "files", "swap"), [
    (2, {"memory.swap.max": "0"}, 0),
    (2, {"memory.swap.max": "300000000", "memory.swap.current": "100000000"}, 200_000_000),
    (2, {"memory.swap.max": "max"}, GB),
    (1, {"memory.memsw.limit_in_bytes": "800000000", "memory.memsw.usage_in_bytes": "500000000"}, 150_000_000),
    (1, {"memory.memsw.limit_in_bytes": "9223372036854771712"}, GB),
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


@pytest.mark.parametrize(("make", "features"), [(pi4, ["neon"]), (pi5, ["neon", "fp16", "dotprod"]), (n100, ["avx", "avx2", "fma", "f16c", "avx_vnni"]), (server, ["avx", "avx2", "fma", "f16c"])])
def test_the_instruction_sets(tree, make, features):
    assert hardware.cpu_features(make(tree).root) == features


@pytest.mark.parametrize(("files", "environ", "expected"), [
    ({".dockerenv": ""}, {}, ["container"]),
    ({"run/.containerenv": ""}, {}, ["container"]),
    ({"proc/self/cgroup": "0::/kubepods/besteffort/pod1\n"}, {}, ["container"]),
    ({"proc/self/cgroup": "0::/user.slice/session-1.scope\n"}, {}, []),
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
    tree.groups(2, "/", inner={"cpu.max": "400000 100000"})
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

import os

import psutil
import pytest

from qwen_chat import hardware


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


@pytest.mark.parametrize("text, quota", [("150000 100000", 1.5), ("50000 100000", 0.5), ("max 100000", None), ("", None)])
def test_the_quota_of_cgroup_v2(tmp_path, monkeypatch, text, quota):
    monkeypatch.setattr(hardware, "_own_groups", lambda root: [root])
    write(tmp_path, cpu__max=text)
    assert hardware.cpu_quota(tmp_path) == quota


def test_the_tightest_limit_above_this_process_counts(tmp_path, monkeypatch):
    inner = tmp_path / "outer" / "inner"
    monkeypatch.setattr(hardware, "_own_groups", lambda root: [inner, inner.parent, root])
    write(inner, cpu__max="max 100000")
    write(inner.parent, cpu__max="200000 100000")
    assert hardware.cpu_quota(tmp_path) == 2


@pytest.mark.parametrize("quota, period, cores", [("250000", "100000", 2.5), ("-1", "100000", None)])
def test_the_quota_of_cgroup_v1(tmp_path, quota, period, cores):
    write(tmp_path / "cpu", cpu__cfs_quota_us=quota, cpu__cfs_period_us=period)
    assert hardware.cpu_quota(tmp_path) == cores


@pytest.mark.parametrize(
    "allowed, physical, quota, cores",
    [(8, 4, None, 4), (2, 4, None, 2), (64, 32, 1.5, 1), (64, 32, 0.5, 1), (4, None, None, 4), (8, 4, 2.9, 2)],
)
def test_usable_cores_is_the_least_of_all_limits(monkeypatch, allowed, physical, quota, cores):
    monkeypatch.setattr(hardware, "allowed_processors", lambda: allowed)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: physical)
    monkeypatch.setattr(hardware, "cpu_quota", lambda: quota)
    assert hardware.usable_cores() == cores


def test_affinity_is_honoured():
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system has no processor affinity")
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert hardware.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)

"""The lock files that the image is built with: every package pinned, for every machine it is built on."""

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ["requirements.lock", "deploy/build.lock"]
ENTRY = re.compile(r"^(?P<requirement>[^\s#].*?) \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", re.M)
LINUX = {"sys_platform": "linux", "os_name": "posix", "platform_system": "Linux", "implementation_name": "cpython",
         "platform_python_implementation": "CPython", "extra": ""}
MACHINES = [
    {**LINUX, "python_version": version, "python_full_version": f"{version}.1", "platform_machine": machine}
    for version in ("3.10", "3.11", "3.12", "3.13") for machine in ("x86_64", "aarch64")
]


def entries(name: str) -> list[Requirement]:
    return [Requirement(entry["requirement"]) for entry in ENTRY.finditer((ROOT / name).read_text())]


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_file_has_pins_with_checksums_and_nothing_else(name):
    """No option, no address: where packages come from is the business of whoever installs them."""
    text = (ROOT / name).read_text()
    rest = ENTRY.sub("", text).splitlines()
    assert [line for line in rest if line and not line.lstrip().startswith("#")] == []
    assert "://" not in text
    for entry in entries(name):
        assert re.fullmatch(r"==[^*,]+", str(entry.specifier)) and entry.url is None, entry


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_file_says_how_it_is_renewed(name):
    assert f"-o {name}" in (ROOT / name).read_text().splitlines()[1]


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: "{python_version} {platform_machine}".format(**machine))
def test_the_lock_file_agrees_with_the_requirements_on_every_machine(machine):
    chosen = [entry for entry in entries("requirements.lock") if entry.marker is None or entry.marker.evaluate(machine)]
    locked = {canonicalize_name(entry.name): str(entry.specifier) for entry in chosen}
    assert len(locked) == len(chosen), "a package has two versions"
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    wanted = [Requirement(line.split(" --")[0]) for line in lines if line and not line.startswith(("#", "-"))]
    for each in wanted:
        assert locked.get(canonicalize_name(each.name)) == str(each.specifier), each

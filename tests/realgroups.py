"""Real control groups of this machine, for tests: made, given limits, entered by a child process, and removed."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

PROJECT = Path(__file__).parents[1]
NAME = f"qwen-chat-test-{os.getpid()}"
ENTER = 'for folder; do echo $$ > "$folder/cgroup.procs" || exit 1; done\n'


def mounted(version: int, controller: str) -> Path:
    """Where the groups of a controller are mounted; skips the test where this kernel has none of this version."""
    for each in psutil.disk_partitions(all=True):
        point = Path(each.mountpoint)
        if version == 1 and each.fstype == "cgroup" and controller in each.opts.split(","):
            return point
        if version == 2 and each.fstype == "cgroup2":
            if controller in (point / "cgroup.controllers").read_text().split():
                return point
    pytest.skip(f"this machine has no controller {controller!r} of cgroup v{version}")


@contextlib.contextmanager
def real_groups(version: int, *levels: dict[str, str]):
    """Makes groups one within the other, the outermost first, with the files that each level names, and gives the
    innermost folder for each controller. Skips the test where none can be made."""
    made: list[Path] = []
    inner: dict[str, Path] = {}
    try:
        for depth, files in enumerate(levels, 1):
            for name, content in files.items():
                controller = name.partition(".")[0]
                folder = mounted(version, controller).joinpath(*[NAME] * depth)
                if folder not in made:
                    folder.mkdir()
                    made.append(folder)
                if version == 2:  # each group hands its controllers on
                    (folder.parent / "cgroup.subtree_control").write_text(f"+{controller}")
                (folder / name).write_text(content)
                inner[controller] = folder
        yield inner
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    finally:
        for folder in reversed(made):
            folder.rmdir()


def said_inside(groups: dict[str, Path], code: str, before: str = "", unshare: str = ""):
    """What Python code prints as JSON in a process of these groups. `unshare` has the options of the command of that
    name, for namespaces of its own, in which `before`, of shell commands, is run first."""
    python = f'{before}\nexec "$PYTHON" -c "$CODE"'
    script = ENTER + (f"exec unshare {unshare} sh -ec '{python}'" if unshare else python)
    done = subprocess.run(
        ["sh", "-c", script, "sh", *map(str, dict.fromkeys(groups.values()))], capture_output=True, text=True,
        cwd=PROJECT, env={**os.environ, "PYTHON": sys.executable, "CODE": code}, timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)

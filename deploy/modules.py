"""Copies the modules of this package that others need: run by the Dockerfile, never by the program.

    python modules.py TARGET MODULE...

TARGET gets each MODULE, all of the package that it imports, directly or not, and the package's data files.
A stage of the build that takes its code from there is only repeated when that code changes.
"""

import shutil
import sys
from modulefinder import ModuleFinder
from pathlib import Path

PACKAGE = "qwen_chat"


def needed(folder: Path, names: list[str]) -> list[Path]:
    """The files that importing the modules of the package below `folder` reads, imports within functions included."""
    finder = ModuleFinder(path=[str(folder)])  # what is elsewhere is not looked at
    for name in names:
        finder.import_hook(name)
    return [Path(module.__file__) for module in finder.modules.values() if module.__file__]  # none: built into Python


def main(target: Path, names: list[str]) -> None:
    here = Path.cwd()
    for file in [*needed(here, names), *(here / PACKAGE).glob("*.yaml")]:
        copy = target / file.relative_to(here)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])

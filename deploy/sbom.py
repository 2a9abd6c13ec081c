"""Lists what an image is made of, as a CycloneDX 1.6 file (ECMA-424): run by the Dockerfile, never by the program.

    python sbom.py TARGET

The same contents make the same file, byte for byte: it has no time, and its serial number comes from the list.
"""

import ctypes
import hashlib
import json
import platform
import re
import runpy
import subprocess
import sys
import uuid
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from urllib.parse import quote

PACKAGES = Path("/env/lib/python3.12/site-packages")
REPORT = Path("/report.json")  # what pip says of the archives that it installed
ENGINE = Path("/engine.lock")  # llama-cpp-python's pin and the checksum of its source archive
APP = Path("/app")  # with the weights, and image.json
DPKG = ["dpkg-query", "--show", "--showformat", "${Package} ${Version} ${Architecture}\n"]
OPENMP = Path("/libgomp.txt")  # the same for the one package of which only the library is in the image


def component(
    kind: str, name: str, version: str | None, purl: str | None = None, sha256: str | None = None, **more
) -> dict:
    """One entry of the list; what is None or empty is left out."""
    entry = {
        "type": kind, "bom-ref": purl or name, "name": name, "version": version, "purl": purl,
        "hashes": sha256 and [{"alg": "SHA-256", "content": sha256}], **more,
    }
    return {key: value for key, value in entry.items() if value}


def licences(about: metadata.PackageMetadata) -> list[dict]:
    """What a package says about its licence: an SPDX expression, else a name, else the classifiers."""
    if expression := about.get("License-Expression"):
        return [{"expression": expression}]
    named = (about.get("License") or "").strip()
    if named and "\n" not in named:
        return [{"license": {"name": named}}]
    classified = [line.split(" :: ")[-1] for line in about.get_all("Classifier") or [] if line.startswith("License ::")]
    return [{"license": {"name": name}} for name in classified]


def python_packages(found: Iterable[metadata.Distribution], checksums: dict[str, str]) -> list[dict]:
    """`checksums` has the SHA-256 of the archive that each package came from."""
    listed = []
    for package in found:
        name = normal(package.name)
        purl = f"pkg:pypi/{name}@{quote(package.version, safe='')}"
        known = licences(package.metadata)
        listed.append(component("library", name, package.version, purl, checksums.get(name), licenses=known))
    return listed


def normal(name: str) -> str:
    """A package's name as the index has it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def checksums(report: dict, engine_lock: str) -> dict[str, str]:
    """The SHA-256 of each archive, by package; llama-cpp-python's is that of the source it was built from."""
    archives = {normal(each["metadata"]["name"]): each["download_info"]["archive_info"] for each in report["install"]}
    own = {"llama-cpp-python": re.search(r"--hash=sha256:(\w+)", engine_lock)[1]}
    return {name: archive["hashes"]["sha256"] for name, archive in archives.items()} | own


def debian_packages(listed: str, release: str) -> list[dict]:
    """`listed` is what DPKG prints, `release` Debian's number."""
    packages = []
    for name, version, architecture in (line.split() for line in listed.splitlines()):
        purl = f"pkg:deb/debian/{quote(name)}@{quote(version, safe=':')}?arch={architecture}&distro=debian-{release}"
        packages.append(component("library", name, version, purl))
    return packages


def llama_cpp(libraries: Path) -> dict:
    """llama.cpp, whose own version is not in llama-cpp-python's source; its tensor library has one."""
    base = ctypes.CDLL(str(libraries / "libggml-base.so"))
    base.ggml_version.restype = ctypes.c_char_p
    return component(
        "library", "llama.cpp", f"ggml {base.ggml_version().decode()}", "pkg:github/ggml-org/llama.cpp",
        description="built from the copy in llama-cpp-python's source archive", licenses=[{"license": {"id": "MIT"}}],
    )


def weights(app: Path) -> dict:
    name = json.loads((app / "image.json").read_text())["built_in"]
    file = app / "models" / name
    with file.open("rb") as content:
        sha256 = hashlib.file_digest(content, "sha256").hexdigest()
    size = {"name": "bytes", "value": str(file.stat().st_size)}
    return component("machine-learning-model", name, None, None, sha256, properties=[size])


def document(about: dict, components: list[dict]) -> dict:
    """The CycloneDX document on `about`, the component that all others are part of."""
    components = sorted(components, key=lambda each: each["bom-ref"])
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([about, components]))
    return {
        "bomFormat": "CycloneDX", "specVersion": "1.6", "serialNumber": f"urn:uuid:{serial}", "version": 1,
        "metadata": {"lifecycles": [{"phase": "build"}], "component": about}, "components": components,
    }


def main(target: Path) -> None:
    release = platform.freedesktop_os_release()["VERSION_ID"]
    debian = subprocess.run(DPKG, capture_output=True, text=True, check=True).stdout
    version = runpy.run_path("/qwen_chat/__init__.py")["__version__"]
    python = platform.python_version()
    archives = checksums(json.loads(REPORT.read_text()), ENGINE.read_text())
    listed = [
        *python_packages(metadata.distributions(path=[str(PACKAGES)]), archives),
        *debian_packages(debian + OPENMP.read_text(), release),
        component("operating-system", "debian", release),
        component("application", "python", python, f"pkg:generic/python@{python}"),
        llama_cpp(PACKAGES / "llama_cpp/lib"),
        weights(APP),
    ]
    about = component("container", "qwen-chat", version, licenses=[{"license": {"id": "Apache-2.0"}}])
    target.write_text(json.dumps(document(about, listed), indent=1) + "\n")
    print(f"{len(listed)} components")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

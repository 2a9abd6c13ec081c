"""The list of the parts of an image (deploy/sbom.py)."""

import json
import re
import runpy
import sysconfig
from email.message import Message
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SBOM = runpy.run_path(str(ROOT / "deploy" / "sbom.py"))
PACKAGES = sysconfig.get_path("purelib")
DEBIAN = "libc6 2.41-12 amd64\nlibstdc++6 14.2.0-19+b1 amd64\npasswd 1:4.17.4-2 amd64\n"


def valid(text: str) -> None:
    """Fails where `text` is not what the schema of CycloneDX 1.6 allows."""
    pytest.importorskip("jsonschema", reason="cyclonedx-python-lib[json-validation] is not installed")
    schema = pytest.importorskip("cyclonedx.schema", reason="cyclonedx-python-lib[json-validation] is not installed")
    from cyclonedx.validation.json import JsonStrictValidator

    assert JsonStrictValidator(schema.SchemaVersion.V1_6).validate_str(text) is None


def document(**more) -> dict:
    components = [
        *SBOM["python_packages"](metadata.distributions(path=[PACKAGES]), {"gradio": "0" * 64}),
        *SBOM["debian_packages"](DEBIAN, "13"),
        SBOM["component"]("machine-learning-model", "a.gguf", None, None, "1" * 64, properties=[{"name": "bytes", "value": "7"}]),
    ]
    return SBOM["document"](SBOM["component"]("container", "qwen-chat", "1.0"), components)


def test_it_is_what_the_schema_allows():
    valid(json.dumps(document()))
    with pytest.raises(AssertionError):
        valid(json.dumps({**document(), "components": [{"name": "no type"}]}))


def test_the_same_parts_make_the_same_file():
    assert json.dumps(document()) == json.dumps(document())
    assert not re.search(r'"timestamp"', json.dumps(document()))


def test_versions_are_written_as_package_urls_have_them():
    listed = {each["name"]: each["purl"] for each in SBOM["debian_packages"](DEBIAN, "13")}
    assert listed == {
        "libc6": "pkg:deb/debian/libc6@2.41-12?arch=amd64&distro=debian-13",
        "libstdc++6": "pkg:deb/debian/libstdc%2B%2B6@14.2.0-19%2Bb1?arch=amd64&distro=debian-13",
        "passwd": "pkg:deb/debian/passwd@1:4.17.4-2?arch=amd64&distro=debian-13",
    }


BSD = "License :: OSI Approved :: BSD License"


@pytest.mark.parametrize("said, listed", [
    ({"License-Expression": "MIT OR Apache-2.0", "License": "x"}, [{"expression": "MIT OR Apache-2.0"}]),
    ({"License": "BSD-3-Clause", "Classifier": BSD}, [{"license": {"name": "BSD-3-Clause"}}]),
    ({"License": "a whole\ntext", "Classifier": BSD}, [{"license": {"name": "BSD License"}}]),
    ({"Classifier": "Programming Language :: Python"}, []),
])
def test_what_a_package_says_about_its_licence(said, listed):
    about = Message()
    for name, value in said.items():
        about[name] = value
    assert SBOM["licences"](about) == listed


def test_checksums_are_those_of_the_archives_and_of_the_source_that_was_built():
    archive = {"archive_info": {"hashes": {"sha256": "1" * 64}}}
    report = {"install": [{"metadata": {"name": "Jinja2"}, "download_info": archive}]}
    lock = f"llama-cpp-python==0.3.36 \\\n    --hash=sha256:{'2' * 64}\n"
    assert SBOM["checksums"](report, lock) == {"jinja2": "1" * 64, "llama-cpp-python": "2" * 64}

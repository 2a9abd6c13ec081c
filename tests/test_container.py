"""The image: built by the Dockerfile as it is, with a small model, and run as a careful person would run it.

Without a Docker daemon one is started, where dockerd is installed and this runs as root. Nothing here depends on
how fast the machine is: times only bound how long a hang may last.
"""

import hashlib
import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from browser import free_port
from test_sbom import valid

from qwen_chat.config import Runtime
from qwen_chat.hardware import usable_cores

ROOT = Path(__file__).resolve().parent.parent
TOOLS = Path(__file__).parent / "container"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
CAREFUL = "--read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges --memory 1g".split()
LIBRARIES = "/usr/local/lib/python3.12/site-packages/llama_cpp/lib"
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
PATIENCE = 120  # seconds until something counts as hanging


def _client() -> str | None:
    """A docker command that can build: newer ones need a plugin for that."""
    for command in ("docker", "/usr/bin/docker"):
        if shutil.which(command) and subprocess.run([command, "build", "--help"], env={**os.environ, "DOCKER_BUILDKIT": "1"}, capture_output=True).returncode == 0:
            return command
    return None


class Docker:
    def __init__(self, command: str, host: str | None):
        self.command = command
        self.environ = {**os.environ, "DOCKER_BUILDKIT": "1", **({"DOCKER_HOST": host} if host else {})}

    def __call__(self, *arguments, **options) -> subprocess.CompletedProcess:
        """Runs a docker command; its output is `stdout`, its standard error included."""
        return subprocess.run([self.command, *map(str, arguments)], env=self.environ, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)

    def build(self, tag: str, context: str | Path, *arguments, **options) -> str:
        result = self("build", "--network", "host", "--progress", "plain", "--tag", tag, *arguments, context, **options)
        assert result.returncode == 0, result.stdout[-5000:]
        return tag


@pytest.fixture(scope="session")
def docker():
    """The Docker daemon at hand, else one of our own, with the base image in it."""
    command = _client()
    if command is None:
        pytest.skip("no docker command that can build images")
    if subprocess.run([command, "version"], capture_output=True).returncode == 0:
        yield _with_base(Docker(command, None))
        return
    if os.environ.get("DOCKER_HOST") or not shutil.which("dockerd") or os.getuid() != 0:
        pytest.skip("no Docker daemon answers, and none can be started (that needs dockerd and root)")
    script = [TOOLS / "with-docker", "sh", "-c", "echo $DOCKER_HOST; read line"]
    with subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as daemon:
        host = daemon.stdout.readline().strip()
        if not host:
            pytest.skip("dockerd does not start here")
        yield _with_base(Docker(command, host))
        daemon.stdin.close()


def _with_base(docker: Docker) -> Docker:
    if docker("image", "inspect", "python:3.12-slim-trixie").returncode:
        base = subprocess.run([TOOLS / "base"], env=docker.environ, capture_output=True, text=True)
        if base.returncode == 2:
            pytest.skip(base.stderr.splitlines()[-1])
        assert base.returncode == 0, base.stderr
    return docker


def _context(folder: Path) -> Path:
    """A build context with all that the image may see, but no model."""
    (folder / "models").mkdir(parents=True)
    for name in ("Dockerfile", ".dockerignore", "app.py", "config.yaml", "requirements.lock"):
        shutil.copy(ROOT / name, folder)
    for name in ("qwen_chat", "deploy"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="session")
def image(docker, small_model, tmp_path_factory):
    context = _context(tmp_path_factory.mktemp("image") / "context")
    shutil.copy(small_model, context / "models" / "small.gguf")
    return docker.build("qwen-chat-test", context)


class Container:
    def __init__(self, docker: Docker, image: str, *options, port: int | None = None):
        self.docker, self.port = docker, port or free_port()
        port_option = [] if port else ["--env", f"PORT={self.port}"]
        network = [] if "--network" in options else ["--network", "host"]
        started = docker("run", "--detach", *network, *port_option, *options, image)
        assert started.returncode == 0, started.stdout
        self.id = started.stdout.split()[-1]

    @property
    def log(self) -> str:
        return self.docker("logs", self.id).stdout

    def state(self, field: str) -> str:
        return self.docker("inspect", "--format", "{{.State.%s}}" % field, self.id).stdout.strip()

    def python(self, code: str) -> str:
        result = self.docker("exec", self.id, "python", "-c", code)
        assert result.returncode == 0, result.stdout
        return result.stdout.strip()

    def until(self, condition) -> "Container":
        end = time.monotonic() + PATIENCE
        while not condition():
            assert self.state("Running") == "true", self.log
            assert time.monotonic() < end, self.log
            time.sleep(0.1)
        return self

    def until_up(self) -> "Container":
        return self.until(lambda: self.health()[0] == 200)

    def health(self) -> tuple[int, dict]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except ConnectionError:
            return 0, {}
        finally:
            connection.close()

    def stop(self) -> int:
        """`docker stop`, with patience; the status is 137 where the process had to be killed."""
        self.docker("stop", "--time", PATIENCE, self.id)
        return int(self.state("ExitCode"))


@pytest.fixture
def run(docker, image):
    """Starts a container: `run(*options, image=..., port=...)`. All are removed at the end."""
    containers = []

    def run(*options, image: str = image, **more) -> Container:
        containers.append(Container(docker, image, *options, **more))
        return containers[-1]

    yield run
    for container in containers:
        docker("rm", "--force", container.id)


def _config(folder: Path, text: str) -> list[str]:
    """The options that put a config.yaml into the container."""
    file = folder / "config.yaml"
    file.write_text(text)
    return ["--volume", f"{file}:/app/config.yaml:ro"]


def _ask(container: Container, question: str) -> str:
    """Types a question on the page and returns the whole answer."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    with playwright.sync_playwright() as library:
        browser = library.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page()
        tab.set_default_timeout(PATIENCE * 1000)
        tab.goto(f"http://127.0.0.1:{container.port}/")
        box, stop = tab.get_by_test_id("textbox"), tab.get_by_test_id("stop-button")
        tab.wait_for_function("document.querySelector('[data-testid=textbox]')?.placeholder")
        box.fill(question)
        box.press("Enter")
        stop.wait_for()
        stop.wait_for(state="detached")
        answer = tab.get_by_test_id("bot").last.inner_text()
        browser.close()
    return answer


def test_it_answers_on_its_page_under_every_restriction(run):
    container = run(*CAREFUL, "--cpus", "1")
    container.until(lambda: container.state("Health.Status") == "healthy")
    assert container.health()[1]["model"] == "small"
    assert _ask(container, "What is the capital of France?").strip()
    assert container.python("import os; print(os.getuid(), os.environ['HOME'])") == "1000 /home/user"
    assert re.search(r"small is ready after .*: 1 threads", container.log)
    assert "Traceback" not in container.log
    assert container.stop() == 0


def test_it_needs_no_place_to_write_to(run):
    """The least that a host may grant: nothing can be written, not even below /tmp."""
    container = run("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges").until_up()
    assert _ask(container, "What is the capital of France?").strip()
    assert "Traceback" not in container.log
    assert container.stop() == 0


@pytest.mark.parametrize("name", ["TERM", "INT", "HUP", "QUIT"])
def test_every_signal_that_asks_for_an_end_ends_it(run, name):
    """Python is process 1, for which the kernel has no defaults."""
    container = run().until_up()
    container.docker("kill", "--signal", name, container.id)
    assert container.docker("wait", container.id).stdout.strip() == "0"
    assert f"SIG{name}" in container.log.splitlines()[-1] and "Traceback" not in container.log


def test_it_can_be_stopped_while_it_starts(run):
    container = run()
    container.until(lambda: "llama.cpp computes with" in container.log)
    assert container.stop() == 0


@pytest.fixture
def info(docker, image):
    """What `info --json` tells in a container with these options."""

    def info(*options) -> dict:
        command = ["python", "-m", "qwen_chat", "info", "--json"]
        told = docker("run", "--rm", *options, "--network", "host", image, *command)
        assert told.returncode == 0, told.stdout
        return json.loads(told.stdout)

    return info


@pytest.mark.parametrize("limits, most, quota", [
    (["--cpus", "0.5"], 1, 0.5),
    (["--cpus", "1"], 1, 1.0),
    (["--cpus", "1.5"], 1, 1.5),
    (["--cpuset-cpus", "0"], 1, None),
    (["--cpus", f"{os.cpu_count()}"], os.cpu_count(), None),
    ([], os.cpu_count(), None),
], ids=lambda value: " ".join(value) or "none" if isinstance(value, list) else "")
def test_the_threads_follow_the_limits(info, limits, most, quota):
    facts, expected = info(*limits), min(most, usable_cores())
    assert facts["cores"]["count"] == expected
    assert set(facts["config"]["threads"].values()) == {expected}
    if quota and expected < usable_cores():
        assert (facts["cores"]["reason"], facts["cores"]["quota"]) == ("quota", quota)


def test_it_tells_what_the_limits_leave_of_the_machine(info):
    facts = info("--cpus", "1.5", "--memory", "600m")
    assert facts["memory"]["total"] == 600 * 2**20 and facts["memory"]["limited"]
    assert 0 < facts["memory"]["available"] < 600 * 2**20
    assert facts["cores"]["count"] == 1
    assert facts["config"]["in_force"] == "tiny" and "container" in facts["device"]["surroundings"]
    assert facts["weights"]["name"] == "small" and not facts["needs"]["refusal"]


def test_a_port_below_1024_can_be_had_in_a_network_of_its_own(run):
    """There Docker lets every user have it; in the host's network it is the host's to say."""
    container = run("--network", "none", "--env", "PORT=80", port=80)
    container.until(lambda: container.state("Health.Status") == "healthy")


def test_too_little_memory_is_explained(run):
    container = run("--memory", "200m")
    assert container.docker("wait", container.id).stdout.strip() == "2"
    assert "Not enough memory: about " in container.log and "the container's limit leaves " in container.log
    assert "Traceback" not in container.log


def test_the_fastest_code_for_this_processor_is_chosen(run):
    container = run().until_up()
    chosen = re.search(r"its (\S+) code", container.log)[1]
    variants = container.python(f"import pathlib; print(*(file.stem[len('libggml-cpu-'):] for file in pathlib.Path('{LIBRARIES}').glob('libggml-cpu-*')))").split()
    assert len(variants) > 5
    assert chosen in variants
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "").split()
    if "avx2" in flags:
        assert chosen not in ("x64", "sse42", "sandybridge", "ivybridge", "piledriver")
    if "avx512f" in flags:
        assert chosen not in ("haswell", "alderlake")


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the plain code of another processor has another name")
def test_the_plain_code_answers_too(docker, image, run):
    plain = docker.build("qwen-chat-test-plain", "-", input=f"FROM {image}\nUSER 0\nRUN find {LIBRARIES} -name 'libggml-cpu-*' ! -name '*-x64.so' -delete\nUSER 1000\n")
    container = run(image=plain).until_up()
    assert "its x64 code" in container.log
    assert _ask(container, "What is the capital of France?").strip()


def test_a_mounted_config_takes_effect(run, tmp_path):
    port = free_port()
    options = _config(tmp_path, f"server: {{port: {port}, host: 127.0.0.1}}\nruntime: {{n_ctx: 512, n_threads: 1}}\ngeneration: {{max_tokens: 64}}\n")
    container = run(*CAREFUL, *options, port=port)
    container.until(lambda: container.state("Health.Status") == "healthy")  # its port is known to the check too
    assert container.health()[1]["model"] == "small"  # which the config does not name
    assert "1 threads, n_ctx 512" in container.log


def test_a_broken_config_is_explained(run, tmp_path):
    container = run(*CAREFUL, *_config(tmp_path, "runtime: {n_thread: 4}\n"))
    assert container.docker("wait", container.id).stdout.strip() == "2"
    assert container.log.strip() == NO_SUCH_KEY


NO_SUCH_KEY = ("config.yaml: runtime.n_thread: no such key; did you mean n_threads? allowed: "
               + ", ".join(Runtime.model_fields))


def test_compose_gives_up_on_a_broken_config(run, tmp_path):
    container = run("--restart", COMPOSE["services"]["chat"]["restart"], *_config(tmp_path, "runtime: {n_thread: 4}\n"))
    assert _gives_up(container) == "2"
    assert set(container.log.split("\n")) == {NO_SUCH_KEY, ""}


def _gives_up(container: Container) -> str:
    """The status that a container ends with for good, after its restarts."""
    end = time.monotonic() + PATIENCE
    while container.state("Status") != "exited":
        assert time.monotonic() < end, container.log
        time.sleep(0.1)
    return container.state("ExitCode")


@pytest.mark.parametrize("content, words", [
    (b"<html>", "not a GGUF file"),
    (b"GGUF" + bytes(1000), "llama.cpp cannot load this file"),
])
def test_weights_that_cannot_be_used_are_explained(run, tmp_path, content, words):
    (tmp_path / "mine.gguf").write_bytes(content)
    container = run(*CAREFUL, "--volume", f"{tmp_path / 'mine.gguf'}:/app/models/mine.gguf:ro")
    assert container.docker("wait", container.id).stdout.strip() == "4"
    assert words in container.log and "Traceback" not in container.log


def test_a_mounted_model_is_used(run, small_model, tmp_path):
    container = run(*CAREFUL, "--volume", f"{small_model}:/app/models/mine.gguf:ro").until_up()
    assert container.health()[1]["model"] == "mine"
    (tmp_path / "models").mkdir()
    shutil.copy(small_model, tmp_path / "models" / "other.gguf")
    container = run(*CAREFUL, "--volume", f"{tmp_path / 'models'}:/app/models:ro").until_up()
    assert container.health()[1]["model"] == "other"


def test_the_weights_can_be_quantised_on_the_way(docker, small_model, run, tmp_path):
    context = _context(tmp_path / "context")
    shutil.copy(small_model, context / "models" / "small.gguf")
    container = run(*CAREFUL, image=docker.build("qwen-chat-test-quant", context, "--build-arg", "QUANT=cpu")).until_up()
    assert container.health()[1]["model"] == "small-cpu"
    assert container.python("import os; print(os.listdir('/app/models'))") == "['small-cpu.gguf']"
    assert _ask(container, "What is the capital of France?").strip()


def test_nothing_is_in_it_that_a_chat_does_not_need(docker, image):
    code = """
import glob, importlib.util, os, pathlib, shutil
packages = pathlib.Path("/usr/local/lib/python3.12/site-packages")
libraries = [file for file in (packages / "llama_cpp/lib").iterdir() if file.is_file() and not file.is_symlink()]
print("tools", [tool for tool in ("gcc", "g++", "cc", "cmake", "ninja", "make", "pip") if shutil.which(tool)])
print("pip", importlib.util.find_spec("pip"))
print("folders", [str(folder) for folder in packages.rglob("*") if folder.is_dir() and folder.name in ("tests", "include")])
print("multimodal", [file.name for file in libraries if "mtmd" in file.name])
print("copies", len(libraries) - len({file.read_bytes() for file in libraries}))
print("caches", glob.glob("/root/.cache/*") + glob.glob("/var/lib/apt/lists/*_*") + glob.glob("/home/user/.cache/*"))
print("app", sorted(os.listdir("/app")))
print("models", os.listdir("/app/models"))
"""
    found = docker("run", "--rm", "--network", "host", "--user", "0", image, "python", "-c", code).stdout.splitlines()
    assert found == ["tools []", "pip None", "folders []", "multimodal []", "copies 0", "caches []",
                     "app ['app.py', 'config.yaml', 'image.json', 'models', 'qwen_chat', 'sbom.cdx.json']",
                     "models ['small.gguf']"]


def test_the_list_of_its_parts_is_whole(docker, image, small_model):
    """Every package of Python and Debian, by version, and the weights; nothing that is not there."""
    code = """
import json, re, subprocess
from importlib import metadata
print(open("/app/sbom.cdx.json").read().replace(chr(10), ""))
print(json.dumps({re.sub("[-_.]+", "-", each.name).lower(): each.version for each in metadata.distributions()}))
print(json.dumps(subprocess.check_output(["dpkg-query", "-W", "-f", "${Package} ${Version};"], text=True)))
"""
    lines = docker("run", "--rm", "--network", "host", image, "python", "-c", code).stdout.splitlines()
    sbom, installed, debian = (json.loads(line) for line in lines)
    valid(json.dumps(sbom))
    parts = {each.get("purl", each["name"]): each for each in sbom["components"]}
    packages = [each for purl, each in parts.items() if purl.startswith("pkg:pypi/")]
    assert {each["name"]: each["version"] for each in packages} == installed
    assert all(each["hashes"] and each["licenses"] for each in packages)
    listed = {f"{each['name']} {each['version']}" for purl, each in parts.items() if purl.startswith("pkg:deb/")}
    there = set(debian.strip(";").split(";"))
    assert there <= listed and {each.split(" ")[0] for each in listed - there} <= {"libgomp1"}
    assert parts["small.gguf"]["hashes"][0]["content"] == hashlib.sha256(small_model.read_bytes()).hexdigest()
    assert parts["pkg:github/ggml-org/llama.cpp"]["version"].startswith("ggml 0.")


def test_without_weights_there_is_no_image(docker, tmp_path):
    """Not even where the program itself would fall back to another model."""
    nowhere = "http://127.0.0.1:9"
    result = docker("build", "--network", "host", "--progress", "plain", "--target", "weights", "--build-arg", f"HF_ENDPOINT={nowhere}", _context(tmp_path / "context"))
    assert result.returncode != 0
    assert "127.0.0.1:9 cannot be reached" in result.stdout
    assert "No weights: qwen2.5-0.5b-instruct-q4_k_m.gguf" in result.stdout
    assert "put it into models/ beside the Dockerfile" in result.stdout and "/bake/models" not in result.stdout


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed")
def test_the_dockerfile_is_clean():
    result = subprocess.run([HADOLINT, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout

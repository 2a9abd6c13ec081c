"""Where the page is served: every form of server.host, and what is said of those that cannot be used."""

import errno
import socket

import pytest
from browser import PATIENCE, Program, free_port

from qwen_chat import address


def has(host: str) -> bool:
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
        return True
    except OSError:
        return False


ipv6 = pytest.mark.skipif(not has("::1"), reason="this machine has no IPv6")


@pytest.fixture(autouse=True)
def no_port(monkeypatch):
    monkeypatch.delenv("PORT", raising=False)


@pytest.mark.parametrize(
    "host, name, within, url",
    [
        ("0.0.0.0", "0.0.0.0", ["127.0.0.1"], "localhost"),
        ("0", "0.0.0.0", ["127.0.0.1"], "localhost"),
        ("::", "::", ["::1", "127.0.0.1"], "localhost"),
        ("[::]", "::", ["::1", "127.0.0.1"], "localhost"),
        ("0:0:0:0:0:0:0:0", "::", ["::1", "127.0.0.1"], "localhost"),
        ("::1", "::1", ["::1"], "[::1]"),
        ("[0:0::1]", "::1", ["::1"], "[::1]"),
        ("::ffff:127.0.0.1", "127.0.0.1", ["127.0.0.1"], "127.0.0.1"),
        ("::ffff:0.0.0.0", "0.0.0.0", ["127.0.0.1"], "localhost"),
        ("127.1", "127.0.0.1", ["127.0.0.1"], "127.0.0.1"),
        ("fe80::1%eth0", "fe80::1%eth0", ["fe80::1%eth0"], "[fe80::1%25eth0]"),
        ("localhost", "localhost", ["localhost"], "localhost"),
        ("my-nas.local", "my-nas.local", ["my-nas.local"], "my-nas.local"),
    ],
)
def test_a_host_in_its_usual_form(host, name, within, url):
    assert address.numeric(host) == name
    assert address.within(host) == tuple(within)
    assert address.url(host, 7860) == f"http://{url}:7860/"


@pytest.mark.parametrize(
    "host, reached",
    [
        ("127.0.0.1", ["127.0.0.1"]),
        ("0.0.0.0", ["127.0.0.1"]),
        ("localhost", ["127.0.0.1"]),
        ("::ffff:127.0.0.1", ["127.0.0.1"]),
        pytest.param("::1", ["::1"], marks=ipv6),
        pytest.param("[::1]", ["::1"], marks=ipv6),
        pytest.param("::", ["::1", "127.0.0.1"], marks=ipv6),
        pytest.param("[::]", ["::1", "127.0.0.1"], marks=ipv6),
    ],
)
def test_what_listens_is_reached_where_it_is_said_to_be(host, reached):
    port = free_port()
    sockets = address.sockets(host, port)
    try:
        for each in sockets:
            each.listen()
        for place in reached:
            socket.create_connection((place, port), 5).close()
        assert address.own_url(sockets[0]) in [address.url(place, port) for place in reached]
    finally:
        for each in sockets:
            each.close()
    assert address.why_not(host, port) is None


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:8080",
        "[::1]:8080",
        "http://127.0.0.1",
        "*",
        " ",
        " 127.0.0.1",
        "127.0.0.1 x",
        "a..b",
        "x" * 70,
        "no.such.host.invalid",
        "192.0.2.77",
        "fe80::1",
        "::1%nosuchinterface",
        "0x.1.2",
        "主机",
        "a\0b",
    ],
)
def test_what_cannot_be_used_is_told_in_one_line(host):
    said = address.why_not(host, free_port())
    assert host.split("\0")[0].strip() in said and "cannot be used: " in said
    assert said.endswith(address.FORMS) and "server.host" in said and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    "listening, host",
    [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "0.0.0.0"), ("127.0.0.1", "::"), ("127.0.0.1", "localhost")],
)
@pytest.mark.parametrize(
    "variable, key",
    [("", "server.port in config.yaml, or PORT, names another"), ("1", "PORT in the environment names another")],
)
def test_a_port_that_is_taken(listening, host, variable, key, monkeypatch):
    monkeypatch.setenv("PORT", variable)
    with socket.create_server((listening, 0)) as other:
        said = address.why_not(host, other.getsockname()[1])
    assert "Another program is using it" in said and key in said and "server.host" not in said


@pytest.mark.parametrize("variable, key", [("", "server.port"), ("80", "PORT in the environment")])
def test_a_port_that_is_not_for_everybody(variable, key, monkeypatch):
    def refuse(family, address):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(address, "_bound", refuse)
    monkeypatch.setenv("PORT", variable)
    said = address.why_not("0.0.0.0", 80)
    assert (
        said.startswith("0.0.0.0:80 cannot be used: Permission denied. Ports below 1024 need root; ")
        and key in said
        and "server.host" not in said
    )
    assert "1024" not in address.why_not("0.0.0.0", 8080)


def test_where_there_is_no_ipv6_its_name_for_anywhere_stands_for_ipv4(monkeypatch):
    real = address._bound

    def without(family, place):
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return real(family, place)

    monkeypatch.setattr(address, "_bound", without)
    (bound,) = address.sockets("::", free_port())
    with bound:
        assert address.own_url(bound).startswith("http://127.0.0.1:")
    assert "Address family not supported" in address.why_not("::1", free_port())


def test_nothing_stays_open_after_a_refusal(monkeypatch):
    made, real = [], address._bound
    monkeypatch.setattr(address, "_bound", lambda *where: made.append(real(*where)) or made[-1])
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(address.AddressError):
        address.sockets("::", other.getsockname()[1])
    assert all(each.fileno() == -1 for each in made)


def test_an_address_that_is_lost_between_the_check_and_the_start(small_model, tmp_path):
    program = Program(
        tmp_path, patch="pass", model={"path": str(small_model)}, server={"host": "192.0.2.77"}
    )  # with a patch, it is not checked
    assert program.process.wait(PATIENCE) == 2
    assert "192.0.2.77" in program.log and "cannot be used" in program.log and "Traceback" not in program.log

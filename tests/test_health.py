"""The container's health check, against a server that plays the program."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from qwen_chat import health


@pytest.fixture
def server():
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(self.server.status if self.path == "/health" else 404)
            self.end_headers()
            self.wfile.write(b'{"status": "played"}')

        def log_message(self, *ignored):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def config(tmp_path, monkeypatch):
    file = tmp_path / "config.yaml"
    monkeypatch.setenv("CONFIG", str(file))
    monkeypatch.delenv("PORT", raising=False)
    file.write_text("chat: {}\n")
    return file


@pytest.mark.parametrize("status, result", [(200, 0), (503, 1), (404, 1)])
def test_only_200_is_healthy(server, config, status, result, capsys):
    server.status = status
    config.write_text(f"server: {{port: {server.server_port}}}\n")
    assert health.main() == result
    assert "played" in capsys.readouterr().out


def test_nobody_at_the_port(server, config, capsys):
    server.shutdown()
    server.server_close()
    config.write_text(f"server: {{port: {server.server_port}}}\n")
    assert health.main() == 1


@pytest.mark.parametrize("text, hosts, port", [
    ("", ["127.0.0.1"], 7860),
    ("server:\n", ["127.0.0.1"], 7860),
    ("server: {host: '::', port: 80}\n", ["::1", "127.0.0.1"], 80),
    ("server: {host: '[::1]'}\n", ["::1"], 7860),
    ("server: {host: 192.0.2.1}\n", ["192.0.2.1"], 7860),
])
def test_the_address_is_the_configs(config, text, hosts, port):
    config.write_text(text)
    assert health.place() == (tuple(hosts), port)


def test_port_goes_before_the_config(config, monkeypatch):
    config.write_text("server: {port: 80}\n")
    monkeypatch.setenv("PORT", "81")
    assert health.place() == (("127.0.0.1",), 81)


def test_where_ipv6_does_not_answer_ipv4_is_asked(server, config, capsys):
    server.status = 200
    config.write_text(f"server: {{host: '::', port: {server.server_port}}}\n")
    assert health.main() == 0
    assert "played" in capsys.readouterr().out


@pytest.mark.parametrize("text, port", [
    ("[1]", ""), ("server: 7860", ""), ("server: {host: 0}", ""), ("server: {port: x}", ""), ("a: [", ""), ("", "x"),
])
def test_what_the_program_would_not_start_with_is_told_in_a_line(config, monkeypatch, capsys, text, port):
    config.write_text(text)
    monkeypatch.setenv("PORT", port)
    assert health.main() == 1
    assert capsys.readouterr().out == f"{config} or PORT does not say where the program listens\n"


@pytest.mark.parametrize("host", ["a..b", "no.such.host.invalid"])
def test_a_host_that_is_none(config, capsys, host):
    config.write_text(f"server: {{host: {host}}}")
    assert health.main() == 1
    assert len(capsys.readouterr().out.splitlines()) == 1

"""Proxies on this machine, and a server that has one file, for the tests."""

import contextlib
import socket
import socketserver
import threading
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit


@contextlib.contextmanager
def serving(server):
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class Proxy(ThreadingHTTPServer):
    """An HTTP proxy that sends every request to `port` of this machine, whichever host it is for. `seen` has each
    request's line and login; with a `status` it answers that itself."""

    daemon_threads = True

    def __init__(self, port: int = 0, status: int = 0):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.port, self.status, self.seen = port, status, []

    def address(self, login: str = "") -> str:
        return f"http://{login}127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def answer(self):
        proxy = self.server
        proxy.seen.append((self.command, self.path, self.headers.get("Proxy-Authorization")))
        if proxy.status or self.command == "CONNECT":
            return self.send_error(proxy.status or 501)
        parts = urlsplit(self.path)
        connection = HTTPConnection("127.0.0.1", proxy.port, timeout=60)
        headers = {name: value for name, value in self.headers.items() if not name.startswith("Proxy-")}
        connection.request(self.command, parts.path or "/", headers=headers)
        answer = connection.getresponse()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            self.send_header(name, value)
        self.end_headers()
        while piece := answer.read(1 << 20):
            self.wfile.write(piece)
        connection.close()
        self.close_connection = True

    do_GET = do_HEAD = do_CONNECT = do_POST = answer

    def log_message(self, *ignored):
        pass


class Socks(socketserver.ThreadingTCPServer):
    """A SOCKS5 proxy (RFC 1928, without login) that connects to `port` of this machine, whatever host is asked for;
    `seen` has those hosts."""

    daemon_threads = allow_reuse_address = True

    def __init__(self, port: int):
        super().__init__(("127.0.0.1", 0), _SocksHandler)
        self.port, self.seen = port, []

    @property
    def address(self) -> str:
        return f"socks5://127.0.0.1:{self.server_address[1]}"


class _SocksHandler(socketserver.StreamRequestHandler):
    def handle(self):
        read = self.rfile.read
        read(read(2)[1])  # version, and the kinds of login that are offered
        self.wfile.write(b"\5\0")
        kind = read(4)[3]
        host = (
            read(read(1)[0]).decode()
            if kind == 3
            else socket.inet_ntop(*((socket.AF_INET, read(4)) if kind == 1 else (socket.AF_INET6, read(16))))
        )
        read(2)
        self.server.seen.append(host)
        with socket.create_connection(("127.0.0.1", self.server.port)) as there:
            self.wfile.write(b"\5\0\0\1" + bytes(6))
            back = threading.Thread(target=_copy, args=[there, self.connection], daemon=True)
            back.start()
            _copy(self.connection, there)
            back.join(60)


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(1 << 16):
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)

"""The real program as a process of its own, and a tab of a real browser on its page.

Times here only bound how long a hang may last; nothing depends on how fast the machine is.
"""

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import yaml

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ROOT = Path(__file__).resolve().parent.parent
PATIENCE = 240  # seconds until something counts as hanging
# Counts how often Stop has come: an answer can be over before anybody could see it.
COUNT_STOPS = """
window.stops = 0;
const isStop = (node) => node.matches?.("[data-testid=stop-button]") || node.querySelector?.("[data-testid=stop-button]");
new MutationObserver((changes) => {
  for (const { addedNodes } of changes) for (const node of addedNodes) if (isStop(node)) window.stops++;
}).observe(document, { childList: true, subtree: true });
"""
STORY = "Tell me a very long story about a cat and a dog."  # greedily answered, it does not end by itself


def free_port() -> int:
    """A port of this machine's that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


class Program:
    """`python app.py` with a config of its own; `patch` is code that runs between importing it and starting it."""

    def __init__(self, folder: Path, patch: str = "", **sections):
        self.port = free_port()
        sections["profile"] = sections.get("profile", "none")  # the tests are the same on every machine
        sections["server"] = {"host": "127.0.0.1", "port": self.port, **sections.get("server", {})}
        config, self.log_file = folder / "config.yaml", folder / "log"
        config.write_text(yaml.safe_dump(sections, allow_unicode=True), encoding="utf-8")
        code = ["-c", f"import sys, app\n{textwrap.dedent(patch)}\nsys.exit(app.main())"] if patch else ["app.py"]
        environ = {**os.environ, "CONFIG": str(config), "PYTHONPATH": str(ROOT)}
        environ.pop("PORT", None)
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen([sys.executable, *code], cwd=ROOT, env=environ, stdout=log, stderr=subprocess.STDOUT)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8")

    @property
    def answers(self) -> list[dict]:
        """The figures of each answer so far, from the log."""
        pattern = r"answer: (\d+) prompt tokens \((\d+) cached\), (\d+) answer tokens, .*, (\w+)$"
        names = ("prompt", "cached", "answer", "reason")
        return [dict(zip(names, (*map(int, found[:3]), found[3]))) for found in re.findall(pattern, self.log, re.M)]

    def health(self) -> tuple[int, dict] | None:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request("GET", "/health")
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        except ConnectionError:
            return None
        finally:
            connection.close()

    def until_up(self, status: int = 200) -> "Program":
        until(lambda: self.process.poll() is not None or (self.health() or (0,))[0] == status)
        assert self.process.poll() is None, self.log
        return self

    def end(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(PATIENCE)


def until(condition):
    """Waits for `condition` and returns its value."""
    end = time.monotonic() + PATIENCE
    while not (value := condition()):
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)
    return value


class Page:
    """A tab on the page, and what a person does there."""

    def __init__(self, context, url: str):
        self.tab = context.new_page()
        self.tab.set_default_timeout(PATIENCE * 1000)
        self.tab.add_init_script(COUNT_STOPS)
        self.hosts, self.requests, self.errors = set(), [], []
        self._stops = 0  # that were waited for
        self.tab.on("request", lambda request: self._requested(request))
        self.tab.on("pageerror", lambda error: self.errors.append(error))
        self.tab.goto(url)
        self.box = self.tab.locator("#box").get_by_test_id("textbox")
        self.stop_button = self.tab.get_by_test_id("stop-button")
        self.bots = self.tab.get_by_test_id("bot")
        self.users = self.tab.get_by_test_id("user")
        self.box.wait_for()
        self.tab.wait_for_function("document.querySelector('[data-testid=textbox]').placeholder")

    def _requested(self, request):
        self.requests.append(request)
        if request.url.startswith(("http", "ws")):
            self.hosts.add(request.url.split("/")[2])

    def reload(self):
        self.tab.reload()
        self._stops = 0
        self.box.wait_for()

    def send(self, text: str):
        self.box.fill(text)
        self.box.press("Enter")

    def finish(self):
        """Waits for the end of the answer that was just asked for."""
        self.tab.wait_for_function(f"window.stops > {self._stops}")
        self.idle()

    def stop(self):
        self.stop_button.click()
        self.idle()

    def idle(self):
        """Waits until no answer is on its way."""
        self.stop_button.wait_for(state="detached")
        self._stops = self.tab.evaluate("window.stops")

    def ask(self, text: str) -> str:
        self.send(text)
        self.finish()
        return self.answer

    @property
    def answer(self) -> str:
        return self.bots.last.inner_text()

    def growing(self):
        """Waits until an answer is seen to grow."""
        start = until(lambda: self.bots.count() and self.answer.strip())
        until(lambda: len(self.answer) > len(start))

    def figures(self) -> str:
        return until(lambda: self.tab.locator("#chat .message-buttons-left").last.get_attribute("data-figures"))

    def button(self, name: str):
        return self.tab.locator("#chat").get_by_role("button", name=name, exact=True).last

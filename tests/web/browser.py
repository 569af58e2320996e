"""Starts a server and a headless Chromium for the dashboard's tests and screenshots."""

import contextlib
import importlib.util
import json
import pathlib
import shutil
import socket
import socketserver
import threading
import time
import urllib.request

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

ROOT = pathlib.Path(__file__).resolve().parents[2]
VIEWS = ("experts", "tokens", "requests", "playground", "compare")
TEMPLATE = ROOT / "tests/chat/templates/chatml.jinja"
# This option keeps the server's log out of the tests' output.
QUIET = ("--log-level", "error")


def load_clients():
    """Loads tests/clients/conftest.py, which starts and stops servers."""
    spec = importlib.util.spec_from_file_location("clients", ROOT / "tests/clients/conftest.py")
    clients = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(clients)
    return clients


clients = load_clients()


@contextlib.contextmanager
def serving(*arguments, **options):
    server = clients.start_server(*QUIET, *arguments, **options)
    try:
        yield server
    finally:
        clients.stop_server(server)


class Relay(socketserver.ThreadingTCPServer):
    """An address behind which servers can be exchanged: forwards every connection to the address
    `target` (HOST:PORT), or closes it if that is None."""
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), self.Connection)
        self.url = "http://%s:%d" % self.server_address
        self.target = None
        self.thread = threading.Thread(target=self.serve_forever)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.thread.join()
        self.server_close()

    class Connection(socketserver.BaseRequestHandler):
        def handle(self):
            if self.server.target is None:
                return
            host, _, port = self.server.target.partition(":")
            with socket.create_connection((host, int(port))) as server:
                back = threading.Thread(target=self.copy, args=(server, self.request))
                back.start()
                self.copy(self.request, server)
                back.join()

        @staticmethod
        def copy(source, sink):
            with contextlib.suppress(OSError):
                while data := source.recv(65536):
                    sink.sendall(data)
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)


def missing():
    """Returns the reason why no browser can be started, or None if one can be started."""
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"there is no {program}"
    return None


def start_browser():
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage",
                     "--hide-scrollbars", "--disable-background-networking",
                     "--disable-component-update", "--no-first-run"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def set_size(driver, width, height=900):
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
        "width": width, "height": height, "deviceScaleFactor": 1, "mobile": False})


def set_media(driver, scheme="light", motion="no-preference"):
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [
        {"name": "prefers-color-scheme", "value": scheme},
        {"name": "prefers-reduced-motion", "value": motion}]})


def open_view(driver, server, view):
    """Loads a view in a new page. Changing only the URL's fragment would not reload the page."""
    driver.get("about:blank")
    driver.get(f"{server.url}/#/{view}")


def get_json(server, path):
    return json.load(urllib.request.urlopen(server.url + path))


def complete(server, prompt, **fields):
    return clients.post(server, "/v1/completions", {"prompt": prompt, **fields})


def wait_until(condition, what, seconds=10.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s: {what}")

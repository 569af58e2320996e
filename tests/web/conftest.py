"""Provides Chromium to the tests of this folder. Without Chromium, the tests are skipped and report
the reason."""

import json

import pytest

selenium = pytest.importorskip("selenium")

import browser  # noqa: E402


@pytest.fixture(scope="session")
def server():
    with browser.serving("--routing-records", "--chat-template", browser.TEMPLATE) as running:
        for seed in range(4):
            browser.complete(running, "In the beginning", max_tokens=40, seed=seed)
        yield running


@pytest.fixture(scope="session")
def chromium():
    why = browser.missing()
    if why:
        pytest.skip(why)
    driver = browser.start_browser()
    yield driver
    driver.quit()


class Watch:
    """Records the requests that a page sends and its console messages."""

    def __init__(self, driver):
        self.driver = driver
        self.allowed = ()  # parts of console messages that do not fail the test
        self.urls = []
        self.console = []
        self.collect()
        self.urls.clear()
        self.console.clear()

    def collect(self):
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self.urls.append(message["params"]["request"]["url"])
        self.console += [entry["message"] for entry in self.driver.get_log("browser")]
        return self.urls

    def check(self):
        self.collect()
        origins = {url.split("/")[2] for url in self.urls if not url.startswith("about:")}
        assert all(origin.startswith("127.0.0.1:") for origin in origins), origins
        trouble = [m for m in self.console if not any(part in m for part in self.allowed)]
        assert not trouble, trouble


@pytest.fixture
def watch(driver):
    return driver.watch


@pytest.fixture
def driver(chromium):
    """Provides a wide page in light mode with empty storage. Fails the test if the page sends
    requests to another host or writes to the console."""
    browser.set_size(chromium, 1280)
    browser.set_media(chromium)
    chromium.get("about:blank")
    chromium.watch = Watch(chromium)
    yield chromium
    if chromium.current_url.startswith("http"):
        chromium.execute_script("localStorage.clear(); sessionStorage.clear()")
    chromium.watch.check()
    chromium.get("about:blank")

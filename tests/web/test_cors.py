"""Web pages of other origins in a real browser: what --cors-origin lets them do, and what not."""

import http.server
import json
import threading

import pytest

import browser

KEY = "key-of-the-page-1234567890"

# Returns what a page sees of a request: status, request id, body; or the error.
FETCH = """
const [url, options, done] = [arguments[0], arguments[1], arguments[2]];
fetch(url, options).then(async (answer) => done({
  status: answer.status, id: answer.headers.get("x-request-id"), body: await answer.text(),
})).catch((error) => done({error: String(error)}));
"""


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>page</title>")

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def pages():
    """Returns the origins of two sites."""
    sites = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), Page) for _ in range(2)]
    for site in sites:
        threading.Thread(target=site.serve_forever, daemon=True).start()
    yield [f"http://127.0.0.1:{site.server_port}" for site in sites]
    for site in sites:
        site.shutdown()


@pytest.fixture
def fetch(chromium):
    chromium.set_script_timeout(30)

    def run(page, url, **options):
        chromium.get(page)
        return chromium.execute_async_script(FETCH, url, options)

    return run


def completion(**headers):
    return {"method": "POST", "headers": {"Content-Type": "application/json", **headers},
            "body": json.dumps({"prompt": "The", "max_tokens": 2})}


def test_only_the_listed_page_with_its_key(pages, fetch, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(KEY + "\n")
    keys.chmod(0o600)
    with browser.serving("--api-key-file", keys, "--cors-origin", pages[0]) as server:
        url = server.url + "/v1/completions"
        key = {"Authorization": f"Bearer {KEY}", "X-Request-Id": "from-the-page"}
        answer = fetch(pages[0], url, **completion(**key))
        assert answer["status"] == 200 and answer["id"] == "from-the-page", answer
        assert json.loads(answer["body"])["id"] == "cmpl-from-the-page"
        refused = fetch(pages[0], url, **completion())
        assert refused["status"] == 401 and refused["id"], "pages can read errors"
        assert "error" in fetch(pages[1], url, **completion(**key)), "not in the list"
        cookies = {**completion(**key), "credentials": "include"}
        assert "error" in fetch(pages[0], url, **cookies), "no cookies, no certificates"


def test_any_page_with_a_star(pages, fetch, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(KEY + "\n")
    keys.chmod(0o600)
    with browser.serving("--api-key-file", keys, "--cors-origin", "*") as server:
        for page in pages:
            answer = fetch(page, server.url + "/v1/models", headers={"Authorization":
                                                                     f"Bearer {KEY}"})
            assert answer["status"] == 200, answer


def test_nothing_without_the_option(pages, fetch):
    with browser.serving() as server:
        assert "error" in fetch(pages[0], server.url + "/v1/completions", **completion())
        assert "error" in fetch(pages[0], server.url + "/v1/models")

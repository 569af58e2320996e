"""Opens the page of `moeserve score --report` in Chromium and prints it on A4.

MOESERVE_PICTURES=FOLDER also saves pictures of the page, and what is printed.
"""

import base64
import json
import os
import pathlib
import re
import subprocess

import pytest

import browser
from browser import set_size
from test_layout import CUT_TEXTS

MODELS = browser.ROOT / "deploy/models"
WORDS = "values\noperator\nthe\nking\n"
NAMES = ("mh-moe", "moa", "hmoe-topp", "x-moe", "dense")
# What a page of the model must cite, besides what all routed models have.
CITED = {
    "mh-moe": {"MH-MoE, fig. 7", "MH-MoE, fig. 8, with tokens in the place of patches"},
    "moa": {"MoA, eq. 18"},
    "hmoe-topp": {"HMoE, fig. 3 (right) and 8 (right)", "HMoE, fig. 6"},
    "x-moe": {"X-MoE, fig. 2 (a, b), which uses UMAP"},
}
ALL_ROUTED = {"MH-MoE, fig. 1 (a) and 5", "MoA, fig. 3 and 4", "HMoE, fig. 9 (a) and 13",
              "HMoE, fig. 9 (b)", "HMoE, fig. 10", "MoA, table 4; HMoE, table 3",
              "HMoE, fig. 5 (right) and table 2", "MH-MoE, fig. 7"}

# Returns the texts of charts that lie outside of their chart or overlap another text of it.
CHART_FAULTS = """
  const faults = [];
  for (const svg of document.querySelectorAll("svg")) {
    const frame = svg.getBoundingClientRect();
    const boxes = [...svg.querySelectorAll("text:not(.axis)")].map((text) =>
      [text.textContent, text.getBoundingClientRect()]).filter(([text]) => text);
    for (const [text, box] of boxes) {
      if (box.left < frame.left - 2 || box.right > frame.right + 2 ||
          box.top < frame.top - 2 || box.bottom > frame.bottom + 2) faults.push(["outside", text]);
    }
    for (let i = 0; i + 1 < boxes.length; ++i) {
      const [a, b] = [boxes[i][1], boxes[i + 1][1]];
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 2 && high > 4) faults.push(["overlap", boxes[i][0], boxes[i + 1][0]]);
    }
  }
  return faults;"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    text = (browser.ROOT / "tests/data/heldout.txt").read_bytes()[:6000]
    # Markup in a text must not become markup of the page.
    (folder / "text.txt").write_bytes(text + b"\n<script>document.title = 'x'</script> <b>&amp;\n" * 8)
    (folder / "words.txt").write_text(WORDS)
    return folder


def make(folder, name, *arguments):
    page = folder / f"{name}.html"
    command = [browser.clients.binary(), "score", "--model", MODELS / name, "--text",
               folder / "text.txt", "--report", page, "--json", "--quiet", *arguments]
    done = subprocess.run([str(c) for c in command], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    return page, json.loads(done.stdout)


def picture(driver, name):
    if not (target := os.environ.get("MOESERVE_PICTURES")):
        return
    height = driver.execute_script("return document.documentElement.scrollHeight")
    set_size(driver, driver.execute_script("return innerWidth"), height)
    (pathlib.Path(target) / f"report-{name}.png").write_bytes(driver.get_screenshot_as_png())


@pytest.mark.parametrize("name", NAMES)
def test_page(chromium, folder, name):
    words = ("--words", folder / "words.txt") if name == "mh-moe" else ()
    page, report = make(folder, name, *words)
    chromium.get_log("browser")
    chromium.get_log("performance")
    for width in (1000, 420):
        set_size(chromium, width)
        chromium.get(page.as_uri())
        assert chromium.title == f"Experts of {name}"
        assert chromium.execute_script(CUT_TEXTS) == []
        assert chromium.execute_script(
            "return document.documentElement.scrollWidth - innerWidth") <= 0
        picture(chromium, f"{name}-{width}")
    set_size(chromium, 1000)
    chromium.get(page.as_uri())
    assert chromium.execute_script(CHART_FAULTS) == []
    requests = [json.loads(entry["message"])["message"] for entry in chromium.get_log("performance")]
    urls = {r["params"]["request"]["url"] for r in requests
            if r["method"] == "Network.requestWillBeSent"}
    assert urls <= {page.as_uri()}, "the page needs no other file"
    assert chromium.get_log("browser") == []
    text = page.read_text()
    assert "<script" not in text and "http://" not in text and "https://" not in text
    cited = set(chromium.execute_script(
        "return [...document.querySelectorAll('cite')].map((c) => c.textContent)"))
    if name != "dense":
        assert ALL_ROUTED | CITED[name] <= cited
    facts = chromium.find_element("css selector", ".facts").text
    assert f"{report['perplexity']:.3f}" in facts
    assert ("routes nothing" in text) == (name == "dense")


def test_what_is_printed(chromium, folder):
    page, report = make(folder, "mh-moe", "--capacity", "gshard")
    chromium.get(page.as_uri())
    printed = chromium.execute_cdp_cmd("Page.printToPDF", {"printBackground": True,
                                                           "preferCSSPageSize": True})
    data = base64.b64decode(printed["data"])
    if target := os.environ.get("MOESERVE_PICTURES"):
        (pathlib.Path(target) / "report.pdf").write_bytes(data)
    boxes = set(re.findall(rb"/MediaBox \[([\d. ]+)\]", data))
    sizes = [[round(float(v)) for v in box.split()] for box in boxes]
    assert sizes == [[0, 0, 595, 842]] or sizes == [[0, 0, 594, 841]], "A4, in points"
    assert 3 <= len(re.findall(rb"/Type /Page\b", data)) <= 12
    # On paper, no figure is wider than the page or higher than it.
    set_size(chromium, 688, 1000)  # the width of A4 within the margins
    chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert chromium.execute_script(CUT_TEXTS) == []
        assert chromium.execute_script(CHART_FAULTS) == []
        highest = chromium.execute_script(
            "return Math.max(...[...document.querySelectorAll('figure')].map((f) => "
            "f.getBoundingClientRect().height))")
        assert highest < 1000
    finally:
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    dropped = chromium.find_element("xpath", "//h2[text()='Capacity']/..").text
    assert f"{report['capacity']['without']['perplexity']:.3f}" in dropped
    assert f"{report['perplexity']:.3f}" in dropped

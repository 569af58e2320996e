"""Shows every view at two widths and in both themes, with a model of 61 layers of 256 experts and
with three models, and checks that nothing is cut off and that text is legible.

MOESERVE_PICTURES=FOLDER also saves a picture of every page that is checked.
"""

import base64
import contextlib
import os
import pathlib

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

import browser
import wide_model
from browser import open_view, set_media, set_size, wait_until
from test_dashboard import by_id, fill, text

MODELS = browser.ROOT / "deploy/models"
OPTIONS = ("--routing-records", "--routing-control", "--chat-template", MODELS / "plain_text.jinja")
STATES = ("experts", "tokens", "requests", "playground", "masked", "chat", "compare")
PROMPTS = {"a": "rose: a shrub of", "b": "def main(): return 0"}

# Returns the texts that are cut off, or lie outside of the page, with the element that shows them.
CUT_TEXTS = """
  const width = document.documentElement.clientWidth, cut = [];
  // An element scrolls sideways, or shows an ellipsis, on purpose.
  const scrolls = (node) => node && node !== document.documentElement && (
    ["auto", "scroll"].includes(getComputedStyle(node).overflowX) ||
    getComputedStyle(node).textOverflow === "ellipsis" || scrolls(node.parentElement));
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const parent = node.parentElement;
    if (!node.textContent.trim() || !parent.checkVisibility({ checkVisibilityCSS: true })) continue;
    if (parent.closest("svg, script, style, option, .visually-hidden, .skip")) continue;
    if (scrolls(parent)) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) {
      if (box.width < 2 || box.height < 2) continue;
      if (box.left < -1 || box.right > width + 1) cut.push([parent.className || parent.tagName,
        node.textContent.trim().slice(0, 60), Math.round(box.left), Math.round(box.right)]);
      for (let outer = parent; outer; outer = outer.parentElement) {
        const style = getComputedStyle(outer), frame = outer.getBoundingClientRect();
        if (style.overflowX === "hidden" && frame.width > 1 &&
            (box.right > frame.right + 1 || box.left < frame.left - 1)) {
          cut.push(["hidden by " + (outer.id || outer.className),
            node.textContent.trim().slice(0, 60)]);
        }
      }
    }
  }
  return cut;"""

# Returns the controls that lie outside of the page, or whose text does not fit.
CUT_CONTROLS = """
  const width = document.documentElement.clientWidth;
  return [...document.querySelectorAll("button, input, select, textarea, summary, [role=tab]")]
    .filter((node) => node.checkVisibility({ checkVisibilityCSS: true }) &&
      !node.closest(".skip, .visually-hidden"))
    .filter((node) => {
      const box = node.getBoundingClientRect();
      if (box.width < 2 || getComputedStyle(node).opacity === "0") return false;
      const scroller = node.parentElement.closest(".heatmap, .scroll, table, .table");
      const clipped = node.tagName === "BUTTON" && node.scrollWidth > node.clientWidth + 1;
      return !scroller && (box.left < -1 || box.right > width + 1) || clipped;
    }).map((node) => [node.tagName, node.id, node.textContent.slice(0, 40)]);"""

# Returns the tables that are wider than their place.
SIDEWAYS = """
  return [...document.querySelectorAll(".scroll")]
    .filter((node) => node.checkVisibility() && node.querySelector("table") &&
      node.scrollWidth > node.clientWidth + 1)
    .map((node) => [node.getAttribute("aria-label"), node.scrollWidth, node.clientWidth]);"""

# Returns texts whose contrast with the colour behind them is below 3 : 1.
PALE_TEXTS = """
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (c) => {
    const [r, g, b] = c.slice(0, 3).map((v) => {
      v /= 255;
      return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const style = getComputedStyle(node);
      if (style.backgroundImage !== "none") return null;  // cannot be told
      const colour = rgba(style.backgroundColor);
      if (colour[3] > 250) return colour;
      if (colour[3] > 0) return null;
    }
    return [255, 255, 255, 255];
  };
  const pale = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].filter((n) => n.nodeType === 3 && n.textContent.trim());
    if (own.length === 0 || node.closest("svg, option, .skip, .visually-hidden, :disabled") ||
        !node.checkVisibility({ checkVisibilityCSS: true, checkOpacity: true })) continue;
    const back = behind(node), front = rgba(getComputedStyle(node).color);
    if (!back || front[3] < 250) continue;
    const [high, low] = [luminance(front), luminance(back)].sort((a, b) => b - a);
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < 3) {
      pale.push([node.className || node.tagName, own[0].textContent.trim().slice(0, 40), ratio]);
    }
  }
  return pale;"""


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wide") / "model"
    wide_model.write(folder, MODELS / "smoe")
    with contextlib.ExitStack() as stack:
        wide = stack.enter_context(browser.serving(
            "--token-stats-mib", "300", *OPTIONS, folder=folder, name=None))
        three = stack.enter_context(browser.serving(
            "--model", MODELS / "smoe", "--model", f"hmoe-topp={MODELS / 'hmoe-topp'}", *OPTIONS,
            folder=MODELS / "mh-moe", name=None))
        yield {"wide": wide, "three": three}


def use(server):
    """Sends requests, so that the last minute has some."""
    for model in browser.get_json(server, "/v1/models")["data"]:
        for seed in range(2):
            browser.complete(server, PROMPTS["a"], max_tokens=40, seed=seed, model=model["id"])


def answer(driver, chat=False):
    wait_until(lambda: by_id(driver, "color-block").get_attribute("value"), "the layout")
    if chat:
        driver.find_element(By.CSS_SELECTOR, "[name=mode][value=chat]").send_keys(Keys.SPACE)
    fill(driver, "seed", 39)
    fill(driver, "max-tokens", 24)
    by_id(driver, "generate").click()
    wait_until(lambda: text(driver, "answer-note"), "an answer", 30)


def show(driver, server, state):
    address = {"masked": "playground", "chat": "playground", "tokens": "tokens?min_count=1"}
    open_view(driver, server, address.get(state, state))
    if state == "experts":
        wait_until(lambda: text(driver, "window-tokens") not in ("\u2013", "0"), "tokens")
    elif state == "tokens":
        wait_until(lambda: driver.find_elements(By.CLASS_NAME, "token-expert"), "tokens")
    elif state == "requests":
        wait_until(lambda: driver.find_elements(By.CSS_SELECTOR, "#request-tiles dd"), "tiles")
    elif state == "compare":
        wait_until(lambda: by_id(driver, "compare-color").get_attribute("value"), "the layout")
        for name, value in (*PROMPTS.items(), ("max-tokens", 12), ("seed", 3)):
            fill(driver, f"compare-{name}", value)
        by_id(driver, "compare-run").click()
        wait_until(lambda: text(driver, "compare-summary"), "a comparison", 30)
    else:
        answer(driver, chat=state == "chat")
        driver.find_elements(By.CLASS_NAME, "chip")[3].click()
        if state == "masked":
            badge = driver.find_element(By.CSS_SELECTOR, "#detail-body tr .badge")
            driver.execute_script("arguments[0].scrollIntoView({ block: 'center' })", badge)
            badge.click()
            wait_until(lambda: text(driver, "changed-summary"), "the second answer", 30)
    driver.execute_script("document.activeElement.blur(); scrollTo(0, 0)")


def save_picture(driver, name):
    folder = os.environ.get("MOESERVE_PICTURES")
    if folder is None:
        return
    height = driver.execute_script("return document.documentElement.scrollHeight")
    width = driver.execute_script("return document.documentElement.clientWidth")
    picture = driver.execute_cdp_cmd("Page.captureScreenshot", {
        "captureBeyondViewport": True,
        "clip": {"x": 0, "y": 0, "width": width, "height": min(height, 6000), "scale": 1}})
    (pathlib.Path(folder) / f"{name}.png").write_bytes(base64.b64decode(picture["data"]))


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("kind", ["wide", "three"])
def test_nothing_is_cut(driver, servers, kind, width, scheme, state):
    set_size(driver, width)
    set_media(driver, scheme)
    use(servers[kind])
    show(driver, servers[kind], state)
    save_picture(driver, f"{kind}-{state}-{width}-{scheme}")
    assert driver.execute_script("return document.documentElement.scrollWidth") == width
    assert driver.execute_script(CUT_TEXTS) == []
    assert driver.execute_script(CUT_CONTROLS) == []
    assert driver.execute_script(SIDEWAYS) == []
    assert driver.execute_script(PALE_TEXTS) == []

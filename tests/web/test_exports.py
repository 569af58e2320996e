"""Tests that the dashboard's views are saved as they are shown: tables as CSV, pictures as PNG."""

import base64
import csv
import io
import re

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from browser import get_json, open_view, set_media, set_size, wait_until
from test_compare import compare, shown_shares
from test_dashboard import (PROMPT, by_id, choose_window, generate, open_experts, record,
                            stub_tokens, text)


def cell(text):
    """Returns what a table has for a text: an apostrophe before what a spreadsheet would run as a
    formula, unless it is a number (server/web/export/csv.js)."""
    number = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text, re.ASCII)
    return f"'{text}" if re.match(r"[=+\-@\t\r\n]", text) and not number else text


def save(driver, folder, what, kind):
    """Clicks a view's button and returns the content of the file that the browser saves."""
    driver.execute_cdp_cmd("Browser.setDownloadBehavior",
                           {"behavior": "allow", "downloadPath": str(folder)})
    before = set(folder.iterdir())
    driver.find_element(By.CSS_SELECTOR, f"[aria-label='Save {what} as {kind}']"
                        ).send_keys(Keys.ENTER)

    def new():
        names = [path for path in set(folder.iterdir()) - before
                 if path.suffix == f".{kind.lower()}"]
        return names and names[0].stat().st_size > 0 and names

    [path] = wait_until(new, f"a {kind} file")
    assert path.name.startswith("moeserve-")
    return path.read_bytes()


def table(driver, folder, what):
    content = save(driver, folder, what, "CSV").decode()
    assert content.endswith("\r\n")
    return list(csv.DictReader(io.StringIO(content, newline="")))


def difference(driver, png, element):
    """Returns the mean difference (0 to 255) between the pixels of a picture and of the element as
    the browser shows it, and the difference that an empty picture would have."""
    box = driver.execute_script("""
      const box = arguments[0].getBoundingClientRect();
      return {x: box.x + scrollX - 12, y: box.y + scrollY - 12, width: box.width + 24,
              height: box.height + 24, scale: 1};""", element)
    screen = driver.execute_cdp_cmd("Page.captureScreenshot", {
        "clip": box, "captureBeyondViewport": True})["data"]
    return driver.execute_async_script("""
      const [pictures, done] = arguments;
      Promise.all(pictures.map((text) =>
        createImageBitmap(new Blob([Uint8Array.from(atob(text), (c) => c.charCodeAt(0))]))))
        .then(([saved, screen]) => {
          const pixels = (image) => {
            // Smaller pictures do not tell by which fraction of a pixel a text is moved.
            const [width, height] = [screen.width >> 2, screen.height >> 2];
            const context = new OffscreenCanvas(width, height).getContext("2d");
            context.imageSmoothingQuality = "high";
            context.drawImage(image, 0, 0, width, height);
            return context.getImageData(0, 0, width, height).data;
          };
          const [a, b] = [pixels(saved), pixels(screen)];
          let [sum, blank] = [0, 0];
          for (let i = 0; i < a.length; ++i) {
            sum += Math.abs(a[i] - b[i]);
            blank += Math.abs(b[i % 4] - b[i]);
          }
          done([sum / a.length, blank / a.length, saved.width / screen.width]);
        });""", [base64.b64encode(png).decode(), screen])


def check_picture(driver, folder, what, element):
    """Checks that the picture looks like the element without its buttons for exports."""
    visibility = ("for (const node of document.querySelectorAll('[data-export]')) "
                  "node.style.visibility = arguments[0]; document.activeElement.blur();")
    png = save(driver, folder, what, "PNG")
    assert png.startswith(b"\x89PNG")
    driver.execute_script(visibility, "hidden")
    mean, blank, scale = difference(driver, png, element)
    driver.execute_script(visibility, "")
    assert scale == pytest.approx(2, rel=0.01)
    assert mean < 0.35 * blank and mean < 4, (mean, blank)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_loads_and_balance(driver, server, tmp_path, scheme):
    set_media(driver, scheme, motion="reduce")
    open_experts(driver, server)
    rows = table(driver, tmp_path, "the loads")
    layers = get_json(server, "/v1/experts/stats")["layers"]
    assert [int(row["selections"]) for row in rows] == [
        n for layer in layers for n in layer["counts"]]
    assert [(row["layer"], row["block"], row["expert"]) for row in rows] == [
        (str(layer["layer"]), layer["block"], str(e))
        for layer in layers for e in range(layer["experts"])]
    assert sum(float(row["share"]) for row in rows) == pytest.approx(len(layers))
    balance = table(driver, tmp_path, "the balance")
    for row, layer in zip(balance, layers, strict=True):
        counts = layer["counts"]
        assert float(row["balance"]) == pytest.approx(sum(counts) / len(counts) / max(counts))
        assert int(row["hottest_expert"]) == counts.index(max(counts))
    for what, name in (("the loads", "heatmap-card"), ("the balance", "balance-card")):
        check_picture(driver, tmp_path, what, by_id(driver, name))


def test_tokens_of_experts(driver, server, tmp_path):
    hostile = ["=1+2", "+3 cells", "-x", "@sum", "-5", "+1.5e3", "a\"b", "c,d", "e\nf", "\t=1",
               None]
    undo = stub_tokens(driver, {"layer": 0, "block": "feed_forward", "min_count": 5, "experts": [
        {"expert": 0, "tokens": [{"id": i, "text": value, "count": 30 - i, "pmi": 9.0 - i,
                                  "log_pmi": 1.0 - 0.2 * i, "g2": 5.0} for i, value in enumerate(hostile)]}]})
    try:
        open_view(driver, server, "tokens")
        wait_until(lambda: driver.find_elements(By.CLASS_NAME, "token-expert"), "cards")
        rows = table(driver, tmp_path, "the tokens")
        assert [row["token"] for row in rows] == [
            "'=1+2", "'+3 cells", "'-x", "'@sum", "-5", "+1.5e3", "a\"b", "c,d", "e\nf", "'\t=1",
            ""]
        assert [float(row["log_pmi"]) for row in rows] == pytest.approx(
            [1.0 - 0.2 * i for i in range(len(hostile))]), "negative numbers stay numbers"
        check_picture(driver, tmp_path, "the tokens", by_id(driver, "tokens-card"))
    finally:
        undo()


def test_charts_of_requests(driver, server, tmp_path):
    open_view(driver, server, "requests")
    points = "return document.querySelector('.line-0')?.getAttribute('d').split('L').length"
    wait_until(lambda: text(driver, "request-tiles").count("–") < 2, "tiles")
    wait_until(lambda: len(table(driver, tmp_path, "the charts")) >= 2, "two readings", 20)
    rows = table(driver, tmp_path, "the charts")
    assert driver.execute_script(points) is not None
    times = [row["time"] for row in rows]
    assert times == sorted(times) and all(time.endswith("Z") for time in times)
    assert float(rows[-1]["requests_running"]) == 0
    assert {"ttft_p50", "itl_p99", "duration_p90", "tokens_generated", "requests_waiting",
            "cache_used"} <= set(rows[0])
    driver.execute_script("window.fetch = () => new Promise(() => {})")
    check_picture(driver, tmp_path, "the charts", by_id(driver, "requests"))


def test_tokens_of_the_playground(driver, server, tmp_path):
    generate(driver, server)
    texts, tokens, blocks = record(server)
    rows = table(driver, tmp_path, "the answer")
    by_position = {}
    for row in rows:
        by_position.setdefault(int(row["position"]), []).append(row)
    assert len(by_position) == len(texts)
    assert {row["kind"] for row in rows} == {"prompt", "generated"}
    for at, value in enumerate(texts):
        mine = by_position[at]
        assert mine[0]["token"] == cell(value)
        if at == len(texts) - 1:
            assert [row["expert"] for row in mine] == [""]
            continue
        wanted = [(block["layer"], r, expert, weight) for block in blocks
                  for r in range(block["sub_tokens"])
                  for expert, weight in tokens[at][block["first_row"] + r]]
        assert [(int(row["layer"]), int(row["sub_token"]), int(row["expert"]))
                for row in mine] == [entry[:3] for entry in wanted]
        assert [float(row["weight"]) for row in mine] == pytest.approx(
            [entry[3] for entry in wanted])
    driver.find_elements(By.CLASS_NAME, "chip")[5].click()
    check_picture(driver, tmp_path, "the answer", by_id(driver, "answer-cards"))
    assert PROMPT.split()[-1] in "".join(texts)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_comparison(driver, server, tmp_path, scheme):
    set_media(driver, scheme)
    compare(driver, server, 6)
    rows = table(driver, tmp_path, "the comparison")
    for side in "ab":
        shares = [share for block in shown_shares(driver, side) for share in block]
        assert [float(row[f"share_{side}"]) for row in rows] == pytest.approx(shares)
    assert all(0 <= float(row["block_overlap"]) <= 1 for row in rows)
    check_picture(driver, tmp_path, "the comparison", by_id(driver, "compare-results"))
    for side in "AB":
        of_side = table(driver, tmp_path, f"the tokens of {side}")
        assert sum(row["kind"] == "generated" and row["expert"] == "" for row in of_side) == 1
        check_picture(driver, tmp_path, f"the tokens of {side}",
                      by_id(driver, f"card-{side.lower()}"))


def test_hidden_rows_of_tables_are_drawn(driver, server, tmp_path):
    set_size(driver, 400)
    open_experts(driver, server)
    by_id(driver, "load-details").find_element(By.TAG_NAME, "summary").send_keys(Keys.ENTER)
    box = "return document.querySelector(arguments[0]).style.maxHeight = '40px'"
    driver.execute_script(box, "#load-details .scroll")
    small = by_id(driver, "heatmap-card").size["height"]
    png = save(driver, tmp_path, "the loads", "PNG")
    height = int.from_bytes(png[20:24], "big")
    assert height > 2 * small + 100
    assert by_id(driver, "heatmap-card").size["height"] == small
    choose_window(driver, "60")

"""Tests the dashboard with a model of 61 layers of 256 experts, and how it rounds."""

import contextlib

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

import browser
import wide_model
from browser import complete, get_json, open_view, set_size, wait_until
from test_dashboard import by_id, fill, open_experts, stub_tokens, text

LABELS = 104  # pixels left of the first column of a heatmap
PROMPTS = {"a": "In the beginning God created", "b": "def main(): return 0"}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wide") / "model"
    wide_model.write(folder, browser.ROOT / "deploy/models/smoe")
    with contextlib.ExitStack() as servers:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MOESERVE_MODEL", str(folder))
            running = servers.enter_context(browser.serving("--routing-records"))
        complete(running, PROMPTS["a"], max_tokens=10, seed=1)
        yield running


def map_sizes(driver, view):
    """Returns the widths of a heatmap's content and of the element that shows it."""
    return driver.execute_script("""
      const map = document.querySelector(`#${arguments[0]} .heatmap`);
      return [map.scrollWidth, map.clientWidth];""", view)


def extent(driver, view):
    """Returns the sentence about the experts that the heatmap shows, "" while it shows all."""
    return driver.find_element(By.CSS_SELECTOR, f"#{view} .heatmap + .extent").text


def run_comparison(driver, server):
    open_view(driver, server, "compare")
    wait_until(lambda: by_id(driver, "compare-color").get_attribute("value"), "the layout")
    for name, value in (*PROMPTS.items(), ("max-tokens", 4), ("seed", 3)):
        fill(driver, f"compare-{name}", value)
    by_id(driver, "compare-run").click()
    wait_until(lambda: text(driver, "compare-summary"), "a comparison")


def test_all_experts_are_visible(driver, wide):
    open_experts(driver, wide)
    content, shown = map_sizes(driver, "experts")
    assert content <= shown
    assert extent(driver, "experts") == ""
    heatmap = driver.find_element(By.CSS_SELECTOR, "#experts .heatmap")
    ActionChains(driver).move_to_element_with_offset(
        heatmap, heatmap.size["width"] // 2 - 1, 0).perform()
    assert "expert 255: " in text(driver, "readout")


def test_a_narrow_window_says_which_experts_it_shows(driver, wide):
    set_size(driver, 390)
    open_experts(driver, wide)
    wait_until(lambda: extent(driver, "experts"), "a sentence")
    content, shown = map_sizes(driver, "experts")
    last = round((shown - LABELS) / ((content - LABELS) / 256)) - 1
    assert 60 < last < 255
    assert extent(driver, "experts") == (
        f"Experts 0–{last} of 256: scroll sideways for the others.")
    driver.find_element(By.CSS_SELECTOR, "#experts .heatmap").send_keys(Keys.END)
    wait_until(lambda: "–255 of 256" in extent(driver, "experts"), "the last experts")


def test_a_comparison_is_a_map_of_differences(driver, wide):
    run_comparison(driver, wide)
    content, shown = map_sizes(driver, "compare")
    assert content <= shown
    blocks = get_json(wide, "/v1/experts/layout")["blocks"]
    assert len(blocks) == 61
    assert text(driver, "compare-summary").startswith("Mean over 61 blocks")
    figures = "#compare-charts figure"
    assert len(driver.find_elements(By.CSS_SELECTOR, figures)) == 1, "one block at a time"
    # Two rows below the first; the cell is chosen with the Enter key.
    heatmap = driver.find_element(By.CSS_SELECTOR, "#compare .heatmap")
    heatmap.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.END, Keys.ENTER)
    figure = driver.find_element(By.CSS_SELECTOR, figures)
    assert figure.find_element(By.TAG_NAME, "figcaption").text.startswith("Layer 2, feed-forward")
    said = text(driver, "compare-readout")
    assert said.startswith("Layer 2, feed-forward, expert 255: ")
    bars = [figure.find_elements(By.CSS_SELECTOR, f".pair-{side}")[255] for side in "ab"]
    titles = [bar.find_element(By.TAG_NAME, "title").get_property("textContent") for bar in bars]
    for title, side in zip(titles, "AB"):
        assert title.partition(": ")[2] in said, side
    Select(by_id(driver, "compare-bars")).select_by_value("60/feed_forward")
    assert driver.find_element(By.CSS_SELECTOR, figures).text.startswith("Layer 60")


def test_the_map_has_the_colours_of_the_differences(driver, wide):
    run_comparison(driver, wide)
    shares = [driver.execute_script("""
      return [...document.querySelectorAll("#compare-charts .pair-" + arguments[0])].map((bar) =>
        Number(bar.dataset.share));""", side) for side in "ab"]
    colors = driver.execute_script("""
      const shown = document.querySelector("#compare .heatmap canvas");
      const canvas = new OffscreenCanvas(shown.width, shown.height);
      const context = canvas.getContext("2d", {willReadFrequently: true});
      context.drawImage(shown, 0, 0);
      const cell = (canvas.width - arguments[0]) / 256;
      return Array.from({length: 256}, (_, e) => [...context.getImageData(
        arguments[0] + Math.round((e + 0.5) * cell - 0.5), 7, 1, 1).data]);""", LABELS)
    differences = [a - b for a, b in zip(*shares)]
    assert min(differences) < 0 < max(differences)
    neutral = [colors[e][:3] for e, value in enumerate(differences) if value == 0]
    assert neutral and all(color == neutral[0] for color in neutral)
    for value, (red, _, blue, _) in zip(differences, colors):
        if value > 0:
            assert blue > red, value
        elif value < 0:
            assert red > blue, value


def test_frequent_tokens_are_counted(driver, wide):
    for _ in range(3):
        complete(wide, PROMPTS["a"], max_tokens=40, seed=1)
    open_view(driver, wide, "tokens")
    # 4,096 tokens and 61 * 256 experts, 4 bytes each.
    wait_until(lambda: "--token-stats-mib 244 counts all" in text(driver, "tokens-limited"),
               "how many tokens are counted")
    wait_until(lambda: driver.find_elements(By.CLASS_NAME, "token-expert"), "tokens of experts")
    answer = get_json(wide, "/v1/experts/tokens?layer=3&min_count=1&top=1000&rank=count")
    assert answer["vocabulary"] == 4096 and 5 < answer["counted_tokens"] < 200
    layer = get_json(wide, "/v1/experts/stats")["layers"][3]
    for expert in answer["experts"]:
        # Every token has a row yet, so the counts add up to the expert's load.
        load = layer["counts"][expert["expert"]]
        assert sum(token["count"] for token in expert["tokens"]) == load


def test_experts_without_tokens_share_a_line(driver, server):
    undo = stub_tokens(driver, {"layer": 0, "block": "feed_forward", "min_count": 5, "experts": [
        {"expert": expert, "tokens": [] if expert != 200 else [
            {"id": 7, "text": "x", "count": 9, "pmi": 2, "log_pmi": 0.7, "g2": 12345.6}]}
        for expert in range(256)]})
    try:
        open_view(driver, server, "tokens")
        wait_until(lambda: driver.find_elements(By.CLASS_NAME, "token-expert"), "a card")
        [card] = driver.find_elements(By.CLASS_NAME, "token-expert")
        assert "Expert 200" in card.text and "12.3K" in card.text
        assert text(driver, "tokens-empty").startswith(
            "255 experts without a token seen often enough: 0, 1, 2, ")
        Select(by_id(driver, "tokens-expert")).select_by_value("3")
        assert "Expert 3" in driver.find_element(By.CLASS_NAME, "token-expert").text
        assert not by_id(driver, "tokens-empty").is_displayed()
    finally:
        undo()


def test_parts_are_not_rounded_to_the_whole(driver, wide):
    open_view(driver, wide, "experts")
    got = driver.execute_async_script("""
      const done = arguments[0];
      import("./dashboard/format.js").then((m) => done(["percent", "wholePercent"].map((name) =>
        [1, 1 - 1e-13, 0.99999, 0.9997, 0.9994, 0.5, 0.00004, 0, NaN].map(m[name]))));""")
    assert got == [
        ["100 %", "100 %", ">99.9 %", ">99.9 %", "99.9 %", "50.0 %", "<0.01 %", "0 %", "–"],
        ["100 %", "100 %", ">99 %", ">99 %", ">99 %", "50 %", "<1 %", "0 %", "–"]]

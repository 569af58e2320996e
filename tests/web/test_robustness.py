"""Tests the page when fields are being edited, views are hidden, storage is blocked, and models or
servers are replaced."""

import json
import urllib.parse

from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

import browser
from browser import open_view, wait_until
from test_compare import compare, shown_shares
from test_dashboard import by_id, chart_points, fill, text


def test_a_comparison_that_ends_while_hidden_is_drawn(driver, server):
    compare(driver, server, 0)
    first = shown_shares(driver, "a")
    fill(driver, "compare-a", "def main(): return 0")
    driver.execute_script(
        "document.getElementById('compare-run').click();"
        "document.getElementById('tab-tokens').click();")
    wait_until(lambda: driver.execute_script(
        "return document.getElementById('compare-run').textContent") == "Compare", "the end")
    by_id(driver, "tab-compare").click()
    wait_until(lambda: shown_shares(driver, "a") != first, "new bars")
    assert shown_shares(driver, "a") == shown_shares(driver, "b")


def test_details_follow_the_token_of_either_side(driver, server):
    compare(driver, server, 4)
    chip = {side: driver.find_elements(By.CSS_SELECTOR, f"#chips-{side} .chip") for side in "ab"}
    for side, at in (("a", 2), ("b", 1), ("a", 2)):
        driver.execute_script("arguments[0].focus()", chip[side][at])
        assert f"Position {at}, prompt" in text(driver, "compare-detail")
        assert len(driver.find_elements(By.CSS_SELECTOR, ".chip.chosen")) == 1
    # One token of each side is reached by the Tab key.
    chip["a"][3].click()
    chip["a"][3].send_keys(Keys.ARROW_RIGHT)
    for side in "ab":
        assert [c.get_attribute("tabindex") for c in chip[side]].count("0") == 1


def test_a_run_stops_while_a_field_is_invalid(driver, server):
    open_view(driver, server, "playground")
    wait_until(lambda: by_id(driver, "color-block").get_attribute("value"), "the layout")
    fill(driver, "max-tokens", 2048)
    titles = driver.execute_script("""
      const button = document.getElementById("generate");
      const titles = [button.textContent];
      button.click();
      titles.push(button.textContent);
      const field = document.getElementById("temperature");
      const valid = field.value;
      field.value = "9";
      button.click();
      field.value = valid; // the run reads it later if it goes on
      return titles;""")
    assert titles == ["Generate", "Stop"]
    wait_until(lambda: text(driver, "generate") == "Generate", "the end")
    assert not driver.find_elements(By.CSS_SELECTOR, ".chip")
    # A run is not started with such a field.
    fill(driver, "temperature", 9)
    by_id(driver, "generate").click()
    assert text(driver, "generate") == "Generate"


def test_another_server_at_the_same_address(driver, watch):
    watch.allowed = ("Failed to load resource",)
    with browser.Relay() as relay:
        for name in ("first", "second"):
            with browser.serving(name=name) as server:
                relay.target = server.http
                if name == "first":
                    open_view(driver, relay, "playground")
                wait_until(lambda: text(driver, "model") == name, name, seconds=60)
            relay.target = None
            wait_until(lambda: text(driver, "state") != "live", "an error", seconds=30)


def test_links_with_odd_calls(driver, server):
    calls = [{"role": "assistant", "content": "", "tool_calls": [{"id": {"toString": 1}}]}]
    open_view(driver, server,
              "playground?mode=chat&messages=" + urllib.parse.quote(json.dumps(calls)))
    wait_until(lambda: text(driver, "state") == "live", "the view")
    assert by_id(driver, "playground").is_displayed()
    assert "Calls ? (?):" in text(driver, "messages")


def test_a_link_with_stop_strings_shows_them(driver, server):
    open_view(driver, server, "compare?stop=x")
    wait_until(lambda: by_id(driver, "compare-stop").is_displayed(), "the field")


def test_shortcuts_of_the_browser_are_left_alone(driver, server):
    open_view(driver, server, "experts")
    by_id(driver, "tab-experts").send_keys(Keys.ALT, Keys.ARROW_RIGHT)
    assert by_id(driver, "tab-experts").get_attribute("aria-selected") == "true"


def test_blocked_storage(driver, server):
    script = driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": """
      for (const name of ["localStorage", "sessionStorage"]) {
        Object.defineProperty(window, name, { configurable: true,
          get() { throw new DOMException("blocked", "SecurityError"); } });
      }"""})
    try:
        open_view(driver, server, "experts")
        wait_until(lambda: text(driver, "state") == "live", "the page")
        by_id(driver, "theme-button").click()
        assert by_id(driver, "theme-button").text == "Light mode"
    finally:
        driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)
        driver.get("about:blank")


def test_a_gap_is_filled_from_the_history(driver, server, watch):
    open_view(driver, server, "requests")
    wait_until(lambda: chart_points(driver, "Requests")[0] >= 1, "a reading")
    by_id(driver, "tab-tokens").click()
    driver.execute_async_script("setTimeout(arguments[0], 7000)")
    before = sum("metrics/history" in url for url in watch.collect())
    by_id(driver, "tab-requests").click()
    wait_until(lambda: sum("metrics/history" in url for url in watch.collect()) > before,
               "another history")


def test_token_spellings(driver, server):
    open_view(driver, server, "experts")
    texts = driver.execute_async_script("""
      const done = arguments[arguments.length - 1];
      import("./dashboard/token_text.js").then(({ tokenTexts }) =>
        done(arguments[0].map(tokenTexts)));""", [
            ["\u0120the", "\u010a"], ["\u2581the", "e"],
            ["<\uff5cUser\uff5c>", "\u00e4\u00bd\u0142", "\u00e5\u00a5\u00bd"],
            ["\u00e9t\u00e9"], ["plain"]])
    assert texts == [[" the", "\n"], [" the", "e"], ["<\uff5cUser\uff5c>", "你", "好"],
                     ["été"], ["plain"]]


def test_the_cache_of_all_models_together(driver, server):
    script = driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": """
      const real = window.fetch;
      window.fetch = (path, options) => (String(path).includes("history")
        ? Promise.resolve(new Response("{}", {status: 404}))
        : String(path) !== "metrics" ? real(path, options) : Promise.resolve(new Response(
          [["a", 90, 10, 0], ["b", 0, 0, 0], ["c", 10, 50, 40]].flatMap(([model, ...tokens]) =>
            ["used", "free", "evictable"].map((state, i) =>
              `moeserve_kv_cache_tokens{model="${model}",state="${state}"} ${tokens[i]}`))
            .join("\\n"))));"""})
    try:
        open_view(driver, server, "requests")
        shown = ("return [...document.querySelectorAll('#request-charts figure')].at(-1)"
                 ".querySelector('.plot').getAttribute('aria-label')")
        wait_until(lambda: driver.execute_script(shown) == "KV cache in use: now used 50.0 %",
                   "the share")
    finally:
        driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)

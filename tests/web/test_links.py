"""Tests the dashboard's addresses: they hold a view and its options, and opening one restores
them."""

import json
import urllib.parse

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

from browser import open_view, wait_until
from test_dashboard import by_id, choose_window, fill, text
from test_playground_chat import messages


def value(driver, name):
    return by_id(driver, name).get_property("value")


def chosen(driver, name):
    return driver.execute_script(
        "return document.querySelector(`[name=${arguments[0]}]:checked`).value", name)


def options(driver):
    """Returns the options in the address."""
    fragment = driver.execute_script("return location.hash")
    return dict(urllib.parse.parse_qsl(fragment.partition("?")[2], keep_blank_values=True))


def wait_for_options(driver, wanted):
    wait_until(lambda: options(driver) == wanted, f"{wanted} in {driver.current_url}", 3)


def link(name, **fields):
    return f"{name}?{urllib.parse.urlencode(fields)}"


def posts(watch):
    return [url for url in watch.collect() if url.endswith(("completions", "tokenize"))]


def test_experts(driver, server, watch):
    open_view(driver, server, "experts?window=600&block=1/feed_forward&threshold=0.05"
              "&diversity=2/feed_forward")
    wait_until(lambda: value(driver, "load-block"), "statistics")
    assert chosen(driver, "window") == "600"
    assert value(driver, "load-block") == "1/feed_forward"
    assert by_id(driver, "load-details").get_property("open")
    assert value(driver, "diversity-block") == "2/feed_forward"
    assert text(driver, "threshold-text") == "5.00 %"
    wait_until(lambda: any("threshold=0.05&window=600" in url for url in watch.collect()),
               "a request with the options")
    choose_window(driver, "")
    wait_for_options(driver, {"window": "all", "block": "1/feed_forward", "threshold": "0.05",
                              "diversity": "2/feed_forward"})
    driver.refresh()
    wait_until(lambda: "server started" in text(driver, "window-note"), "the whole time")
    driver.execute_script("location.hash = '#/experts'")
    wait_until(lambda: chosen(driver, "window") == "60", "the initial options")
    assert not by_id(driver, "load-details").get_property("open")


def test_tokens(driver, server, watch):
    open_view(driver, server, "tokens?block=2/feed_forward&expert=3&top=4&min_count=1&show=count")
    wait_until(lambda: driver.find_elements(By.CLASS_NAME, "token-expert"), "tokens")
    assert any("layer=2&block=feed_forward&top=4&min_count=1" in url for url in watch.collect())
    assert value(driver, "tokens-expert") == "3"
    assert chosen(driver, "pmi") == "count"
    fill(driver, "tokens-top", 5)
    wait_for_options(driver, {"block": "2/feed_forward", "expert": "3", "top": "5",
                              "min_count": "1", "show": "count"})


def test_playground_text(driver, server, watch):
    prompt = "50% of \"a&b\" = c?\n#\u00e9\u202e"
    fields = {"prompt": prompt, "max_tokens": 9, "temperature": 0.25, "top_p": 0.5, "seed": 42,
              "stop": "x\ny", "show_prompt": 0, "block": "1/feed_forward"}
    open_view(driver, server, link("playground", **fields))
    wait_until(lambda: value(driver, "color-block"), "the layout")
    shown = {"prompt": prompt, "max-tokens": "9", "temperature": "0.25", "top-p": "0.5",
             "seed": "42", "stop": "x\ny", "color-block": "1/feed_forward"}
    assert {name: value(driver, name) for name in shown} == shown
    assert not by_id(driver, "show-prompt").is_selected()
    assert by_id(driver, "more").get_property("open"), "options that are set are visible"
    fill(driver, "seed", 43)
    wait_for_options(driver, {name: str(v) for name, v in fields.items()} | {"seed": "43"})
    assert posts(watch) == [], "an address never sends a request for tokens"


def test_playground_chat(driver, server, watch):
    chat = [{"role": "system", "content": "Be <b>brief</b>."}, {"role": "user", "content": "Hi"},
            {"role": "tool", "content": "1", "tool_call_id": "c"}]
    fields = {"mode": "chat", "messages": json.dumps(chat), "tools": "[]",
              "tool_choice": "required", "template": "{{ 1 }}"}
    open_view(driver, server, link("playground", **fields))
    wait_until(lambda: value(driver, "color-block"), "the layout")
    assert chosen(driver, "mode") == "chat" and by_id(driver, "messages").is_displayed()
    assert messages(driver) == [(m["role"], m["content"]) for m in chat]
    assert (value(driver, "tool-choice"), value(driver, "chat-template")) == ("required", "{{ 1 }}")
    driver.find_element(By.CSS_SELECTOR, "[aria-label='Remove message 3']").click()
    wait_until(lambda: json.loads(options(driver)["messages"]) == chat[:2], "two messages")
    driver.find_element(By.CSS_SELECTOR, "[name=mode][value=text]").send_keys(Keys.SPACE)
    wait_for_options(driver, {})
    assert posts(watch) == []


def test_compare(driver, server, watch):
    open_view(driver, server, link("compare", a="one", b="two", max_tokens=0, count="prompt",
                                   block="3/feed_forward"))
    wait_until(lambda: value(driver, "compare-color"), "the layout")
    names = ("a", "b", "max-tokens", "count", "color")
    assert [value(driver, f"compare-{name}") for name in names] == [
        "one", "two", "0", "prompt", "3/feed_forward"]
    assert posts(watch) == []
    by_id(driver, "compare-run").click()
    wait_until(lambda: text(driver, "compare-summary"), "a comparison")
    Select(by_id(driver, "compare-count")).select_by_value("")
    wait_for_options(driver, {"a": "one", "b": "two", "max_tokens": "0",
                              "block": "3/feed_forward"})


@pytest.mark.parametrize("fragment", [
    "playground?max_tokens=-5&temperature=hot&top_p=7&seed=1.5&mode=dance&show_prompt=maybe"
    "&block=9/none&tool_choice=all&messages=[1,{%22role%22:%22king%22}]",
    "playground?messages=%7B&max_tokens=1e99&prompt=" + "x" * 100_000,
    "experts?window=5&threshold=2&block=__proto__&diversity=%00",
    "tokens?top=9999&min_count=&show=__proto__", "compare?%%%&a&&=&max_tokens=0x10", "nothing?a=b"])
def test_bad_addresses_are_harmless(driver, server, fragment, watch):
    open_view(driver, server, fragment)
    wait_until(lambda: text(driver, "state") == "live", "a view")
    shown = {name: value(driver, name) for name in ("max-tokens", "temperature", "top-p", "seed")}
    assert shown == {"max-tokens": "48", "temperature": "0.7", "top-p": "0.9", "seed": ""}
    assert (chosen(driver, "window"), chosen(driver, "pmi"), chosen(driver, "mode")) == (
        "60", "g2", "text")
    assert (value(driver, "tokens-top"), value(driver, "compare-max-tokens")) == ("8", "24")
    assert len(value(driver, "prompt")) <= 20_000
    assert posts(watch) == []


def test_tabs_keep_their_options(driver, server):
    open_view(driver, server, "playground?seed=7")
    by_id(driver, "tab-tokens").click()
    assert driver.current_url.endswith("#/tokens")
    by_id(driver, "tab-playground").click()
    assert driver.current_url.endswith("#/playground?seed=7")


def test_copy_link(driver, server):
    open_view(driver, server, "playground")
    driver.execute_script("navigator.clipboard.writeText = (text) => {window.copied = text;"
                          "return Promise.resolve();}")
    fill(driver, "seed", 5)
    by_id(driver, "link-button").send_keys(Keys.ENTER)
    wait_until(lambda: text(driver, "link-status") == "Link copied.", "a message")
    assert driver.execute_script("return window.copied") == f"{server.url}/#/playground?seed=5"
    driver.execute_script("document.getElementById('prompt').value = 'x'.repeat(9000)")
    by_id(driver, "link-button").click()
    wait_until(lambda: text(driver, "link-status") == "Link copied without prompt: too long.",
               "what is missing")
    copied = driver.execute_script("return window.copied")
    assert copied == f"{server.url}/#/playground?seed=5"


def test_copy_link_without_the_clipboard_api(driver, server):
    open_view(driver, server, "experts?window=10")
    driver.execute_script("navigator.clipboard.writeText = () => Promise.reject(new Error());"
                          "document.addEventListener('copy', () => "
                          "{window.copied = document.activeElement.value;});")
    by_id(driver, "link-button").click()
    wait_until(lambda: text(driver, "link-status") == "Link copied.", "a message")
    assert driver.execute_script("return window.copied") == f"{server.url}/#/experts?window=10"
    assert driver.switch_to.active_element.get_attribute("id") == "link-button"

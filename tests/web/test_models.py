"""Tests the dashboard of a server with several models: a picker, and requests that name the model."""

import contextlib

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

import browser
from browser import get_json, open_view, set_size, wait_until
from test_dashboard import by_id, chart_points, text
from test_links import options
from test_playground_chat import sent  # noqa: F401 (a fixture)

NAMES = ["mh-moe", "smoe", "moa & \u00e4"]
FIRST, SECOND, THIRD = NAMES


@pytest.fixture(scope="module")
def several():
    models = browser.ROOT / "deploy/models"
    with contextlib.ExitStack() as servers:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MOESERVE_MODEL", str(models / FIRST))
            running = servers.enter_context(browser.serving(
                "--model", models / SECOND, "--model", f"{THIRD}={models / 'moa'}",
                "--routing-records", "--routing-control", "--chat-template", browser.TEMPLATE,
                name=None))
        for at, name in enumerate(NAMES):
            for seed in range(at + 1):
                browser.complete(running, "In the beginning", model=name, max_tokens=10 + at,
                                 seed=seed)
        yield running


def names(driver):
    return [option.text for option in
            by_id(driver, "model-picker").find_elements(By.TAG_NAME, "option")]


def pick(driver, name):
    Select(by_id(driver, "model-picker")).select_by_value(name)


def wait_for_picker(driver):
    wait_until(lambda: by_id(driver, "model-picker").is_displayed(), "a picker")


def test_a_single_model_needs_no_picker(driver, server):
    open_view(driver, server, "experts")
    wait_until(lambda: text(driver, "model") == "test-model", "the model's name")
    assert not by_id(driver, "model-picker").is_displayed()
    open_view(driver, server, "requests")
    wait_until(lambda: chart_points(driver, "Requests")[0] >= 1, "a reading")
    assert not by_id(driver, "requests-of").is_displayed()


def test_statistics_of_the_chosen_model(driver, several, watch):
    open_view(driver, several, "experts?window=all")
    wait_for_picker(driver)
    assert names(driver) == NAMES
    tokens = {name: get_json(several, "/v1/experts/stats?" + query)["tokens"] for name, query in (
        (FIRST, ""), (SECOND, "model=smoe"), (THIRD, "model=moa%20%26%20%C3%A4"))}
    assert len(set(tokens.values())) == 3
    for name in (FIRST, THIRD, SECOND):
        pick(driver, name)
        wait_until(lambda: text(driver, "window-tokens") == str(tokens[name]), name)
        wait_until(lambda: driver.title == f"{name} · moeserve" or name != FIRST, "the title")
    wait_until(lambda: options(driver) == {"window": "all", "model": SECOND}, "the address")
    pick(driver, FIRST)
    wait_until(lambda: "model" not in options(driver), "no model in the address: it is the first")
    assert any("model=moa%20%26%20%C3%A4" in url for url in watch.collect())


@pytest.mark.parametrize("place", ["#/experts?window=all&model=smoe",
                                   "?model=smoe#/experts?window=all"])
def test_an_address_names_the_model(driver, several, place):
    wanted = get_json(several, "/v1/experts/stats?model=smoe")["tokens"]
    driver.get("about:blank")
    driver.get(f"{several.url}/{place}")
    wait_until(lambda: text(driver, "window-tokens") == str(wanted), "the model's tokens")
    wait_until(lambda: by_id(driver, "model-picker").get_property("value") == SECOND, "the picker")
    by_id(driver, "tab-playground").click()
    wait_until(lambda: by_id(driver, "color-block").get_attribute("value"), "the layout")
    driver.execute_script("location.hash = `#/experts?window=all&model=mh-moe`")
    first = get_json(several, "/v1/experts/stats?model=mh-moe")["tokens"]
    wait_until(lambda: text(driver, "window-tokens") == str(first), "the other model's tokens")


def test_every_request_names_the_model(driver, several, sent, watch):
    open_view(driver, several, "playground?mode=chat&max_tokens=4&seed=1&model=smoe")
    wait_until(lambda: by_id(driver, "color-block").get_attribute("value"), "the layout")
    by_id(driver, "generate").click()
    wait_until(lambda: text(driver, "answer-note"), "an answer")
    driver.find_element(By.CSS_SELECTOR, "#expert-legend .badge").click()
    wait_until(lambda: text(driver, "changed-summary"), "a second answer")
    driver.find_element(By.CSS_SELECTOR, "[name=mode][value=text]").send_keys(Keys.SPACE)
    by_id(driver, "overrides-clear").click()
    by_id(driver, "generate").click()
    wait_until(lambda: len(sent()) == 4 and text(driver, "generate") == "Generate", "a text")
    by_id(driver, "tab-compare").click()
    wait_until(lambda: by_id(driver, "compare-color").get_attribute("value"), "the layout")
    by_id(driver, "compare-run").click()
    wait_until(lambda: text(driver, "compare-summary"), "a comparison")
    assert [path for path, _ in sent()] == ["tokenize", *["v1/chat/completions"] * 2,
                                            *["v1/completions"] * 3]
    assert [body["model"] for _, body in sent()] == [SECOND] * 6
    by_id(driver, "tab-tokens").click()
    wait_until(lambda: any("experts/tokens" in url for url in watch.collect()), "tokens")
    asked = [url for url in watch.urls if "/v1/experts/" in url]
    assert all("model=smoe" in url for url in asked), asked


def test_an_answer_ends_with_its_model(driver, several):
    open_view(driver, several, "playground?max_tokens=4&seed=1")
    wait_for_picker(driver)
    by_id(driver, "generate").click()
    wait_until(lambda: text(driver, "answer-note"), "an answer")
    driver.find_element(By.CSS_SELECTOR, "#expert-legend .badge").click()
    wait_until(lambda: text(driver, "changed-summary"), "a second answer")
    pick(driver, THIRD)
    wait_until(lambda: len(by_id(driver, "color-block").find_elements(By.TAG_NAME, "option")) == 4
               and "attention" in text(driver, "color-block"), "the blocks of the other model")
    assert not by_id(driver, "changed-card").is_displayed()
    assert not driver.find_elements(By.CSS_SELECTOR, "#chips .chip")


def finished(driver):
    return driver.execute_script("return document.querySelector('#request-tiles dd').textContent")


def test_requests_of_one_model_and_of_all(driver, several):
    open_view(driver, several, "requests?model=smoe")
    wait_for_picker(driver)
    counts = {name: int(value) for name, value in (
        line.split("=") for line in driver.execute_async_script("""
          const done = arguments[0];
          fetch("metrics").then((r) => r.text()).then((text) => {
            const sums = {};
            for (const line of text.split("\\n")) {
              const match = /^moeserve_requests_finished_total\\{model="([^"]*)".*\\} (\\d+)/
                .exec(line);
              if (match) sums[match[1]] = (sums[match[1]] ?? 0) + Number(match[2]);
            }
            done(Object.entries(sums).map(([name, n]) => `${name}=${n}`));
          });"""))}
    assert len(counts) == 3
    wait_until(lambda: finished(driver) == str(counts[SECOND]), "the model's requests")
    # Points from before the view was opened.
    wait_until(lambda: chart_points(driver, "Requests")[0] >= 2, "a history")
    driver.find_element(By.CSS_SELECTOR, "[name=requests-of][value=all]").send_keys(Keys.SPACE)
    wait_until(lambda: finished(driver) == str(sum(counts.values())), "the requests of all")
    wait_until(lambda: options(driver) == {"model": SECOND, "of": "all"}, "the address")
    driver.find_element(By.CSS_SELECTOR, "[name=requests-of][value='']").send_keys(Keys.SPACE)
    wait_until(lambda: finished(driver) == str(counts[SECOND]), "the model's requests again")


def test_a_model_that_is_not_served(driver, several, watch):
    watch.allowed = ("404",)
    open_view(driver, several, "experts?window=all&model=other")
    wait_until(lambda: "other" in text(driver, "experts-note"), "a note")
    wait_for_picker(driver)
    assert names(driver) == [*NAMES, "other (not served)"]
    pick(driver, FIRST)
    wait_until(lambda: text(driver, "window-tokens") not in ("–", "0"), "tokens")
    assert names(driver) == NAMES


@pytest.mark.parametrize("width", [390, 1280])
def test_the_picker_fits(driver, several, width):
    set_size(driver, width)
    open_view(driver, several, "experts")
    wait_for_picker(driver)
    assert driver.execute_script("return document.documentElement.scrollWidth") == width

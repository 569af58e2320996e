"""Tests the dashboard of an encoder-decoder: a picker of the stack whose experts are shown."""

import pathlib
import sys

import pytest
from selenium.webdriver.support.ui import Select

import browser
from browser import get_json, open_view, wait_until
from test_dashboard import by_id, text
from test_links import options

sys.path.insert(0, str(browser.ROOT / "tests/clients"))
import encoder_models  # noqa: E402

PAIR = browser.ROOT / "tests/golden/pairs/tiny-pair-moa"


@pytest.fixture(scope="module")
def translator(tmp_path_factory):
    folder = encoder_models.make_pair(PAIR, pathlib.Path(tmp_path_factory.mktemp("pair")))
    with browser.serving("--token-stats-mib", "16", "--routing-records", folder=folder,
                         name="pair") as running:
        for seed in range(3):
            browser.complete(running, "a rose", max_tokens=8, seed=seed)
        yield running


def shown_tokens(driver):
    return text(driver, "window-tokens")


def test_the_picker_chooses_the_stack(driver, translator, watch):
    tokens = {stack: get_json(translator, f"/v1/experts/stats?stack={stack}")["tokens"]
              for stack in ("encoder", "decoder")}
    assert tokens["encoder"] != tokens["decoder"]
    open_view(driver, translator, "experts?window=all")
    wait_until(lambda: by_id(driver, "stack-picker").is_displayed(), "a picker")
    wait_until(lambda: shown_tokens(driver) == str(tokens["decoder"]), "the decoder's tokens")
    Select(by_id(driver, "stack-picker")).select_by_value("encoder")
    wait_until(lambda: shown_tokens(driver) == str(tokens["encoder"]), "the encoder's tokens")
    wait_until(lambda: options(driver) == {"window": "all", "stack": "encoder"}, "the address")
    assert any("stack=encoder" in url for url in watch.collect())
    by_id(driver, "tab-tokens").click()
    wait_until(lambda: by_id(driver, "tokens-block").is_displayed(), "the tokens")
    wait_until(lambda: any("experts/tokens?stack=encoder" in url for url in watch.collect()),
               "the encoder's tokens")
    Select(by_id(driver, "stack-picker")).select_by_value("decoder")
    wait_until(lambda: "stack" not in options(driver), "no stack in the address")
    wait_until(lambda: "Layer 0, cross-attention" in text(driver, "tokens-block"),
               "the decoder's blocks")


def test_an_address_names_the_stack(driver, translator):
    open_view(driver, translator, "experts?window=all&stack=encoder")
    wanted = get_json(translator, "/v1/experts/stats?stack=encoder")["tokens"]
    wait_until(lambda: shown_tokens(driver) == str(wanted), "the encoder's tokens")
    assert Select(by_id(driver, "stack-picker")).first_selected_option.text == "encoder experts"


def test_other_models_have_no_picker(driver, server, watch):
    watch.allowed = ("stack=encoder",)
    open_view(driver, server, "experts?window=all&stack=encoder")
    wait_until(lambda: "stack" not in options(driver), "no stack in the address")
    wait_until(lambda: shown_tokens(driver) not in ("", "–"), "the statistics")
    assert not by_id(driver, "stack-picker").is_displayed()


def test_a_source_is_answered(driver, translator):
    open_view(driver, translator, "playground")
    wait_until(lambda: by_id(driver, "generate").is_displayed(), "the playground")
    prompt = by_id(driver, "prompt")
    prompt.clear()
    prompt.send_keys("a rose")
    by_id(driver, "generate").click()
    wait_until(lambda: by_id(driver, "chips").text != "", "an answer")

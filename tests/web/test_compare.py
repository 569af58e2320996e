"""Tests the dashboard's comparison of two prompts."""

import math

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

import browser
from browser import complete, get_json, open_view, wait_until
from test_dashboard import by_id, fill, text

PROMPTS = {"a": "In the beginning God created", "b": "def main(): return 0"}


def compare(driver, server, max_tokens, seed=3):
    open_view(driver, server, "compare")
    wait_until(lambda: by_id(driver, "compare-color").get_attribute("value"), "the layout")
    for name, value in (("a", PROMPTS["a"]), ("b", PROMPTS["b"]), ("max-tokens", max_tokens),
                        ("seed", seed)):
        fill(driver, f"compare-{name}", value)
    by_id(driver, "compare-run").click()
    wait_until(lambda: text(driver, "compare-summary") and text(driver, "compare-run") == "Compare",
               "a comparison")


def record(server, prompt, max_tokens, seed=3):
    """Returns the number of the prompt's tokens and the experts [token][row] of a request."""
    answer = complete(server, prompt, max_tokens=max_tokens, seed=seed, temperature=0.7, top_p=0.9,
                      echo=True, logprobs=0, return_routing=True, return_token_ids=True)
    [choice] = answer["choices"]
    routing, rows = choice["routing"], get_json(server, "/v1/experts/layout")["rows_per_token"]
    lists = [routing["experts"][begin:end]
             for begin, end in zip(routing["offsets"], routing["offsets"][1:])]
    return len(choice["prompt_token_ids"]), [
        lists[i:i + rows] for i in range(0, len(lists), rows)]


def shares(tokens, block):
    chosen = [expert for token in tokens
              for row in token[block["first_row"]:block["first_row"] + block["sub_tokens"]]
              for expert in row]
    return [chosen.count(expert) / len(chosen) for expert in range(block["experts"])]


def shown_shares(driver, side):
    """Returns the shares [block][expert] that the bars of a side have."""
    return driver.execute_script("""
      return [...document.querySelectorAll("#compare-charts figure")].map((figure) =>
        [...figure.querySelectorAll(".pair-" + arguments[0])].map((bar) =>
          Number(bar.dataset.share)));""", side)


def distance(a, b):
    """Returns the Jensen-Shannon distance from entropies: another formula than the page's."""
    def entropy(values):
        return -sum(v * math.log2(v) for v in values if v > 0)
    mean = [(x + y) / 2 for x, y in zip(a, b)]
    return math.sqrt(max(0, entropy(mean) - (entropy(a) + entropy(b)) / 2))


@pytest.mark.parametrize("max_tokens", [0, 8])
def test_shares_of_both_prompts(driver, server, max_tokens):
    compare(driver, server, max_tokens)
    blocks = get_json(server, "/v1/experts/layout")["blocks"]
    wanted = {side: record(server, prompt, max_tokens) for side, prompt in PROMPTS.items()}
    kinds = {"": slice(None)}
    if max_tokens > 0:
        kinds |= {"prompt": "prompt", "generated": "generated"}
    for kind in kinds:
        Select(by_id(driver, "compare-count")).select_by_value(kind)
        expected = {}
        for side, (prompt, tokens) in wanted.items():
            part = {"": tokens, "prompt": tokens[:prompt], "generated": tokens[prompt:]}[kind]
            expected[side] = [shares(part, block) for block in blocks]
            shown = shown_shares(driver, side)
            assert len(shown) == len(blocks)
            for one, other in zip(shown, expected[side]):
                assert one == pytest.approx(other)
        figures = driver.find_elements(By.CSS_SELECTOR, "#compare-charts figcaption")
        for figure, a, b in zip(figures, expected["a"], expected["b"]):
            overlap = 100 * sum(min(x, y) for x, y in zip(a, b))
            said = figure.text
            shown = float(said.split("overlap ")[1].split(" %")[0])
            assert shown == pytest.approx(overlap, abs=.06)
            assert float(said.rsplit(" ", 1)[1]) == pytest.approx(distance(a, b), abs=.006)


def test_with_nothing_generated_there_are_no_generated_experts(driver, server):
    compare(driver, server, 0)
    assert not driver.find_elements(By.CSS_SELECTOR, "#compare .chip:not(.prompt-chip)")
    Select(by_id(driver, "compare-count")).select_by_value("generated")
    assert "No experts" in text(driver, "compare-summary")
    assert not by_id(driver, "compare-charts").is_displayed()


def test_the_table_has_the_shares(driver, server):
    compare(driver, server, 4)
    driver.find_element(By.CSS_SELECTOR, "#compare-table-details summary").send_keys(Keys.ENTER)
    Select(by_id(driver, "compare-block")).select_by_index(2)
    rows = driver.execute_script("""
      return [...document.querySelectorAll("#compare-table tbody tr")].map((row) =>
        [...row.cells].map((cell) => parseFloat(cell.textContent)));""")
    assert [row[0] for row in rows] == list(range(8))
    for column, side in ((1, "a"), (2, "b")):
        assert [row[column] for row in rows] == pytest.approx(
            [100 * share for share in shown_shares(driver, side)[2]], abs=0.06)


def test_measures(driver, server):
    open_view(driver, server, "compare")
    got = driver.execute_async_script("""
      const done = arguments[0];
      import("./dashboard/routing_shares.js").then((m) => done(
        [[[1, 0], [1, 0]], [[1, 0], [0, 1]], [[0.5, 0.5], [1, 0]]].map(([a, b]) =>
          [m.overlap(a, b), m.jensenShannonDistance(a, b)])));""")
    assert got[:2] == [[1, 0], [0, 1]]
    assert got[2] == pytest.approx([0.5, distance([.5, .5], [1, 0])])


def test_tokens_of_both_show_details(driver, server):
    compare(driver, server, 4)
    for side in "ab":
        driver.find_element(By.CSS_SELECTOR, f"#chips-{side} .chip").send_keys(Keys.ARROW_RIGHT)
        assert "Position 1, prompt" in text(driver, "compare-detail")
        assert "prompt and 4 generated tokens" in text(driver, f"summary-{side}")
        assert len(driver.find_elements(
            By.CSS_SELECTOR, f"#chips-{side} .chip:not(.prompt-chip)")) == 4


def test_a_refused_comparison(driver, watch):
    watch.allowed = ("403",)
    with browser.serving() as server:
        open_view(driver, server, "compare")
        wait_until(lambda: text(driver, "state") == "live", "the layout")
        by_id(driver, "compare-run").click()
        wait_until(lambda: text(driver, "compare-note").startswith("No comparison: "), "a refusal")
        assert "keeps no routing records" in text(driver, "compare-note")
        assert not by_id(driver, "compare-results").is_displayed()

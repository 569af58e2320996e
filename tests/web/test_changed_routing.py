"""Tests how the playground colours tokens by their experts, and its second answer, for which experts
are masked or biased."""

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

import browser
from browser import complete, open_view, wait_until
from test_dashboard import PROMPT, by_id, fill, generate, text
from test_links import options, posts
from test_playground_chat import messages


@pytest.fixture(scope="module")
def changeable():
    with browser.serving("--routing-records", "--routing-control", "--chat-template",
                         browser.TEMPLATE) as running:
        yield running


def chips(driver, host):
    return driver.execute_script("""
      return [...document.querySelectorAll(`#${arguments[0]} .chip`)].map((chip) => ({
        text: chip.querySelector(".chip-text").textContent, title: chip.title,
        generated: !chip.classList.contains("prompt-chip"),
        differs: chip.classList.contains("differs"),
        experts: (chip.dataset.experts || "").split(" ").filter(Boolean).map(Number)}));""", host)


def wait_for_change(driver):
    wait_until(lambda: text(driver, "changed-summary") and
               text(driver, "changed-run") == "Answer again", "a second answer")


def expected(server, control, seed=7):
    """Returns the texts of the generated tokens that the API gives with `control`."""
    answer = complete(server, PROMPT, max_tokens=20, seed=seed, temperature=0.7, top_p=0.9,
                      logprobs=0, routing_control=control)
    return [token.replace(" ", "·").replace("\n", "⏎")
            for token in answer["choices"][0]["logprobs"]["tokens"]]


def generated(driver, host):
    return [chip["text"] for chip in chips(driver, host) if chip["generated"]]


def test_tokens_have_the_colours_of_their_first_experts(driver, changeable):
    generate(driver, changeable)
    tokens = chips(driver, "chips")
    tints = driver.execute_script("""
      return [...document.querySelectorAll("#chips .chip")].map((chip) =>
        chip.style.getPropertyValue("--tint"));""")
    known = [(chip, tint) for chip, tint in zip(tokens, tints) if chip["experts"]]
    assert len(known) == len(tokens) - 1
    by_expert = {}
    for chip, tint in known:
        assert by_expert.setdefault(chip["experts"][0], tint) == tint
        assert chip["title"].startswith(f"expert {chip['experts'][0]}: ")
    assert len(set(by_expert.values())) == len(by_expert) > 1
    legend = driver.execute_script("""
      return [...document.querySelectorAll("#expert-legend .badge")].map((badge) =>
        [Number(badge.dataset.expert), Number(badge.lastChild.textContent)]);""")
    firsts = [chip["experts"][0] for chip, _ in known]
    assert dict(legend) == {expert: firsts.count(expert) for expert in set(firsts)}
    assert [n for _, n in legend] == sorted((n for _, n in legend), reverse=True)


def test_the_first_token_is_open(driver, changeable):
    generate(driver, changeable)
    assert "Position 0, prompt" in text(driver, "detail-body")
    assert driver.find_elements(By.CSS_SELECTOR, "#detail-body .badge")


def test_masking_an_expert_by_a_click_changes_the_second_answer(driver, changeable):
    generate(driver, changeable)
    first = generated(driver, "chips")
    assert not by_id(driver, "changed-card").is_displayed()
    driver.find_element(By.CSS_SELECTOR, "#chips .chip").click()
    row = driver.find_element(By.CSS_SELECTOR, "#detail-body tr[data-block='0/feed_forward']")
    badge = row.find_element(By.CLASS_NAME, "badge")
    expert = int(badge.get_attribute("data-expert"))
    badge.click()
    wait_for_change(driver)
    second = generated(driver, "changed-chips")
    assert second == expected(changeable, {"masked_experts": [{"layer": 0, "experts": [expert]}]})
    assert second != first == generated(driver, "chips")
    assert all(expert not in chip["experts"] for chip in chips(driver, "changed-chips"))
    at = next(i for i, (one, other) in enumerate(zip(first, second)) if one != other)
    marks = [chip["differs"] for chip in chips(driver, "changed-chips") if chip["generated"]]
    assert marks == [i >= at for i in range(len(second))]
    assert text(driver, "changed-summary").startswith("Differs from position ")
    # The details of the first answer stay, and a second click ends the change.
    badge = driver.switch_to.active_element
    assert badge.get_attribute("data-expert") == str(expert)
    assert badge.get_attribute("aria-pressed") == "true"
    badge.click()
    assert badge.get_attribute("aria-pressed") == "false"
    assert not by_id(driver, "changed-card").is_displayed()


def test_an_expert_is_biased(driver, changeable):
    generate(driver, changeable)
    driver.find_element(By.CSS_SELECTOR, "#expert-legend .badge").click()
    wait_for_change(driver)
    masked = generated(driver, "changed-chips")
    expert = int(driver.find_element(By.CSS_SELECTOR, "#expert-legend .badge"
                                     ).get_attribute("data-expert"))
    Select(driver.find_element(By.CSS_SELECTOR, "#overrides select")).select_by_value("biased")
    field = driver.find_element(By.CSS_SELECTOR, "#overrides input")
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys("1000", Keys.TAB)
    control = {"biased_experts": [{"layer": 0, "expert": expert, "bias": 1000}]}
    wanted = expected(changeable, control)
    assert wanted != masked
    wait_until(lambda: generated(driver, "changed-chips") == wanted, "the answer with the bias")
    wait_until(lambda: options(driver).get("change") == f"0/feed_forward/{expert}:1000",
               "the change in the address")


def test_changes_in_the_address(driver, changeable, watch):
    open_view(driver, changeable,
              "playground?seed=7&change=1/feed_forward/2,0/feed_forward/3:-2.5,9/none/1,x,"
              "0/feed_forward/99,7/feed_forward/1,1/feed_forward/2:1")
    wait_until(lambda: by_id(driver, "color-block").get_attribute("value"), "the layout")
    wait_until(lambda: options(driver)["change"] == "1/feed_forward/2,0/feed_forward/3:-2.5",
               "an address without the experts that the model lacks")
    driver.execute_async_script("setTimeout(arguments[0], 500)")
    assert posts(watch) == []
    for name, value in (("prompt", PROMPT), ("max-tokens", 20)):
        fill(driver, name, value)
    by_id(driver, "generate").click()
    wait_for_change(driver)
    assert generated(driver, "changed-chips") == expected(changeable, {
        "masked_experts": [{"layer": 1, "experts": [2]}],
        "biased_experts": [{"layer": 0, "expert": 3, "bias": -2.5}]})
    by_id(driver, "overrides-clear").click()
    wait_until(lambda: "change" not in options(driver), "no changes in the address")


def test_a_chat_does_not_continue_with_the_second_answer(driver, changeable):
    open_view(driver, changeable, "playground?mode=chat&max_tokens=12&seed=5")
    wait_until(lambda: by_id(driver, "color-block").get_attribute("value"), "the layout")
    by_id(driver, "generate").click()
    wait_until(lambda: text(driver, "answer-note"), "an answer")
    before = messages(driver)
    driver.find_element(By.CSS_SELECTOR, "#expert-legend .badge").click()
    wait_for_change(driver)
    assert messages(driver) == before
    assert driver.find_element(By.CSS_SELECTOR, "#changed-chat [data-part=content]").text
    prompts = [[chip["text"] for chip in chips(driver, host) if not chip["generated"]]
               for host in ("chips", "changed-chips")]
    assert prompts[0] == prompts[1] != []


def test_without_a_seed_both_answers_have_the_same(driver, changeable):
    generate(driver, changeable, seed="")
    first = generated(driver, "chips")
    badges = driver.find_elements(By.CSS_SELECTOR, "#expert-legend .badge")
    badges[0].click()
    wait_for_change(driver)
    # A bias of 0 changes nothing, so the answer is the first one.
    Select(driver.find_element(By.CSS_SELECTOR, "#overrides select")).select_by_value("biased")
    field = driver.find_element(By.CSS_SELECTOR, "#overrides input")
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys("0", Keys.TAB)
    wait_until(lambda: text(driver, "changed-summary").startswith("The same tokens"),
               "the same answer")
    assert generated(driver, "changed-chips") == first


def test_a_server_that_lets_nobody_change_its_routing(driver, server, watch):
    watch.allowed = ("403",)
    generate(driver, server)
    driver.find_element(By.CSS_SELECTOR, "#expert-legend .badge").click()
    wait_until(lambda: "start the server with --routing-control" in text(driver, "changed-note"),
               "what is missing")

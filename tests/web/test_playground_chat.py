"""Tests the options and the chats of the dashboard's playground."""

import json

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

import browser
from browser import get_json, open_view, set_size, wait_until
from test_dashboard import by_id, fill, generate, shown_experts, text

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"place": {"type": "string", "maxLength": 8}},
    "required": ["place"], "additionalProperties": False}}}]


@pytest.fixture
def sent(driver):
    """Provides a function that returns the [path, body] of every POST of the page so far."""
    script = driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": """
      const real = window.fetch;
      window.posted = [];
      window.fetch = (path, options) => {
        if (options?.method === "POST") window.posted.push([path, JSON.parse(options.body)]);
        return real(path, options);
      };"""})
    yield lambda: driver.execute_script("return window.posted")
    driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)


def open_playground(driver, server, mode):
    open_view(driver, server, "playground")
    wait_until(lambda: by_id(driver, "color-block").get_attribute("value"), "the layout")
    driver.find_element(By.CSS_SELECTOR, f"[name=mode][value={mode}]").send_keys(Keys.SPACE)
    by_id(driver, "more").find_element(By.TAG_NAME, "summary").send_keys(Keys.ENTER)


def ask(driver):
    by_id(driver, "generate").click()
    wait_until(lambda: text(driver, "answer-note") and text(driver, "generate") != "Stop",
               "the end of the answer")


def messages(driver):
    """Returns the (role, text) of the messages that the page shows."""
    return [tuple(pair) for pair in driver.execute_script("""
      return [...document.querySelectorAll("#messages .message")].map((message) =>
        [message.querySelector("select").value, message.querySelector("textarea").value]);""")]


def chips(driver, kind):
    """Returns the texts of the tokens that match the selector `kind`."""
    return driver.execute_script("""
      return [...document.querySelectorAll(`${arguments[0]} .chip-text`)].map(
        (node) => node.textContent);""", kind)


def test_options_are_sent(driver, server, sent):
    open_playground(driver, server, "text")
    for name, value in (("max-tokens", 5), ("temperature", "0.5"), ("top-p", "0.9"), ("seed", 11),
                        ("stop", "\\nEnd\n stop\\\\")):
        fill(driver, name, value)
    ask(driver)
    [[path, body]] = sent()
    assert path == "v1/completions"
    names = ("max_tokens", "temperature", "top_p", "seed", "stop")
    assert {name: body[name] for name in names} == {
        "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 11,
        "stop": ["\nEnd", " stop\\"]}


def test_a_chat_and_its_experts(driver, server, sent):
    open_playground(driver, server, "chat")
    for name, value in (("max-tokens", 12), ("seed", 5)):
        fill(driver, name, value)
    ask(driver)
    tokenize, chat = sent()
    assert (tokenize[0], chat[0]) == ("tokenize", "v1/chat/completions")
    body = chat[1]
    question = [{"role": "user", "content": "rose: a shrub of"}]
    assert body["messages"] == question
    assert all(body[name] for name in ("stream", "logprobs", "return_token_ids", "return_routing"))
    wanted = browser.clients.post(server, "/v1/chat/completions", {
        "messages": question, "max_tokens": 12, "seed": 5, "temperature": 0.7, "top_p": 0.9,
        "logprobs": True, "return_routing": True})["choices"][0]
    answer = wanted["message"]["content"]
    assert messages(driver) == [("user", question[0]["content"]), ("assistant", answer)]
    assert driver.find_element(By.CSS_SELECTOR, "[data-part=content] p").get_property(
        "textContent") == answer
    tokens = [entry["token"] for entry in wanted["logprobs"]["content"]]
    assert [t.replace("·", " ").replace("⏎", "\n") for t in
            chips(driver, ".chip:not(.prompt-chip)")] == tokens
    prompt = chips(driver, ".prompt-chip")
    assert "".join(prompt).replace("·", " ").replace("⏎", "\n").endswith(
        "user\nrose: a shrub of<|im_end|>\n<|im_start|>assistant\n")
    routing, layout = wanted["routing"], get_json(server, "/v1/experts/layout")
    rows, block = layout["rows_per_token"], layout["blocks"][0]
    bars = shown_experts(driver)
    assert len(bars) == len(prompt) + len(tokens)
    for at in range(routing["tokens"]):
        first = at * rows + block["first_row"]
        begin, end = routing["offsets"][first], routing["offsets"][first + block["sub_tokens"]]
        assert {e for e, _ in bars[at]} == set(routing["experts"][begin:end])


def test_messages_are_edited(driver, server, sent):
    open_playground(driver, server, "chat")
    by_id(driver, "show-prompt").click()
    fill(driver, "max-tokens", 4)
    by_id(driver, "add-message").click()
    assert driver.switch_to.active_element.get_attribute("aria-label") == "Text of message 2"
    driver.switch_to.active_element.send_keys("The earth.")
    by_id(driver, "add-message").click()
    driver.switch_to.active_element.send_keys("42")
    Select(driver.find_elements(By.CSS_SELECTOR, ".message select")[2]).select_by_value("tool")
    driver.find_element(By.CSS_SELECTOR, "[aria-label='Id of the call that message 3 answers']"
                        ).send_keys("call_1")
    Select(driver.find_elements(By.CSS_SELECTOR, ".message select")[0]).select_by_value("system")
    driver.find_element(By.CSS_SELECTOR, "[aria-label='Remove message 2']").send_keys(Keys.ENTER)
    assert driver.switch_to.active_element.get_attribute("aria-label") == "Remove message 2"
    by_id(driver, "generate").click()
    wait_until(lambda: text(driver, "generate") == "Send" and sent(), "an answer")
    [[path, body]] = sent()
    assert path == "v1/chat/completions", "no prompt is shown, so it is not tokenized"
    assert body["messages"] == [
        {"role": "system", "content": "rose: a shrub of"},
        {"role": "tool", "content": "42", "tool_call_id": "call_1"}]
    assert "tools" not in body and "chat_template" not in body


def test_tools_are_called(driver, server, sent):
    open_playground(driver, server, "chat")
    driver.execute_script("arguments[0].value = arguments[1]", by_id(driver, "tools"),
                          json.dumps(TOOLS))
    Select(by_id(driver, "tool-choice")).select_by_value("required")
    for name, value in (("max-tokens", 200), ("seed", 1)):
        fill(driver, name, value)
    ask(driver)
    body = sent()[-1][1]
    assert (body["tools"], body["tool_choice"]) == (TOOLS, "required")
    call = driver.find_element(By.CSS_SELECTOR, "[data-part=call-0]")
    assert call.find_element(By.TAG_NAME, "h3").get_property("textContent") == "Call of weather"
    arguments = json.loads(call.find_element(By.TAG_NAME, "p").get_property("textContent"))
    assert list(arguments) == ["place"]
    bubble = driver.find_elements(By.CSS_SELECTOR, "#messages .message")[1]
    assert "Calls weather (" in bubble.text
    assert json.loads(bubble.find_element(By.TAG_NAME, "pre").text) == arguments
    fill(driver, "max-tokens", 3)
    ask(driver)
    history = sent()[-1][1]["messages"]
    made = history[1]["tool_calls"]
    assert json.loads(made[0]["function"]["arguments"]) == arguments


@pytest.mark.parametrize("value, complaint", [
    ('[{"type": "function",\n  "function": {"name" "x"}}]',
     'line 2, column 23: expected ":", found """'),
    ('[1, 2', 'line 1, column 6: expected "," or "]", found the end'),
    ('{"a": 01}', 'line 1, column 8: expected "," or "}", found "1"'),
    ("{}", "expected a list of tools"),
    ('[{"type": "function", "function": {}}]', "tool 1: \"function\" must be an object"),
])
def test_tools_are_checked(driver, server, sent, value, complaint):
    open_playground(driver, server, "chat")
    driver.execute_script("arguments[0].value = arguments[1]", by_id(driver, "tools"), value)
    by_id(driver, "generate").click()
    wait_until(lambda: complaint in text(driver, "tools-error"), complaint)
    assert driver.switch_to.active_element.get_attribute("id") == "tools"
    assert by_id(driver, "tools").get_attribute("aria-invalid") == "true"
    assert sent() == []


def test_json_is_checked_like_the_browser_does(driver, server):
    open_view(driver, server, "playground")
    texts = ["", "1", "-0.5e+3", "+1", "01", "1.", ".5", "tru", "null ", '"a\\u00e9"', '"a\\x"',
             '"a\tb"', "[]", "[,]", "[1,]", "[1 2]", "{}", '{"a":1,}', '{"a" 1}', "{a:1}", "[[]",
             "[1]]", '{"a":{"b":[true,false,null,{"c":"d"}]}}', "\ufeff1", "NaN", "'a'"]
    wrong = driver.execute_async_script("""
      const [texts, done] = arguments;
      import("./dashboard/json_check.js").then(({parseJson}) => done(texts.filter((text) => {
        let valid = true;
        try { JSON.parse(text); } catch { valid = false; }
        return valid !== !("error" in parseJson(text));
      })));""", texts)
    assert wrong == []


def test_a_template_may_be_refused(driver, server, watch):
    watch.allowed = ("400",)
    open_playground(driver, server, "chat")
    by_id(driver, "chat-template").send_keys("plain")
    by_id(driver, "generate").click()
    wait_until(lambda: "--allow-request-chat-template" in text(driver, "playground-note"),
               "the server's refusal")
    assert len(messages(driver)) == 1, "no answer is appended"


def test_reasoning_is_shown_apart(driver, server):
    open_view(driver, server, "playground")
    parts = driver.execute_async_script("""
      const done = arguments[0];
      import("./dashboard/views/chat_answer.js").then(({ChatAnswer}) => {
        const answer = new ChatAnswer(document.getElementById("chat-answer"));
        for (const delta of [{role: "assistant", content: ""}, {reasoning_content: "It <b>is"},
                             {reasoning_content: " so."}, {content: "Yes."}]) answer.add(delta);
        done([...document.querySelectorAll("#chat-answer section")].map((section) =>
          [...section.children].map((node) => node.textContent)));
      });""")
    assert parts == [["Reasoning", "It <b>is so."], ["Answer", "Yes."]]


def test_texts_of_prompt_tokens(driver, server):
    open_view(driver, server, "playground")
    got = driver.execute_async_script("""
      const [lists, done] = arguments;
      import("./dashboard/token_text.js").then(({tokenTexts}) => done(lists.map(tokenTexts)));""",
        [["Hi", "\u0120there", "\u00c3\u00a9", "\u00c3", "<|\u4e2d|>"], ["\u2581Hi", "\u00e9"]])
    assert got == [["Hi", " there", "\u00e9", "\ufffd", "<|\u4e2d|>"], [" Hi", "\u00e9"]]


def test_ctrl_enter_sends_a_message(driver, server):
    open_playground(driver, server, "chat")
    fill(driver, "max-tokens", 3)
    driver.find_element(By.CSS_SELECTOR, ".message textarea").send_keys(Keys.CONTROL, Keys.ENTER)
    wait_until(lambda: len(messages(driver)) == 2, "an answer")


def test_an_answer_can_be_stopped(driver, server):
    generate(driver, server, max_tokens=3)
    fill(driver, "max-tokens", 2000)
    by_id(driver, "generate").click()
    count = "return document.querySelectorAll('.chip').length"
    wait_until(lambda: driver.execute_script(count) > 12, "tokens")
    by_id(driver, "generate").click()
    wait_until(lambda: text(driver, "generate") == "Generate", "the end")
    assert text(driver, "playground-note") == ""


def places(driver):
    """Returns the role of each message and its distances to the left and right of the chat."""
    return driver.execute_script("""
      const chat = document.getElementById("messages").getBoundingClientRect();
      return [...document.querySelectorAll("#messages .message")].map((message) => {
        const box = message.getBoundingClientRect();
        return [message.dataset.role, box.left - chat.left, chat.right - box.right];
      });""")


@pytest.mark.parametrize("width", [390, 1280])
def test_a_chat_looks_like_one(driver, server, sent, width):
    set_size(driver, width)
    open_playground(driver, server, "chat")
    for name, value in (("max-tokens", 6), ("seed", 5)):
        fill(driver, name, value)
    assert text(driver, "generate") == "Send"
    ask(driver)
    by_id(driver, "chat-input").send_keys("And then?", Keys.SHIFT, Keys.ENTER)
    by_id(driver, "chat-input").send_keys("What?")
    assert len(messages(driver)) == 2, "Shift+Enter sends nothing"
    by_id(driver, "chat-input").send_keys(Keys.ENTER)
    wait_until(lambda: len(messages(driver)) == 4 and text(driver, "generate") == "Send",
               "a second answer")
    assert by_id(driver, "chat-input").get_property("value") == ""
    assert sent()[-1][1]["messages"][2] == {"role": "user", "content": "And then?\nWhat?"}
    roles = places(driver)
    assert [role for role, _, _ in roles] == ["user", "assistant"] * 2
    assert not by_id(driver, "chat-answer").is_displayed(), "the messages have the answer"
    for role, left, right in roles:
        if width == 1280:
            assert (left > 100 and right < 1) if role == "user" else (left < 1 and right > 100)
        assert left >= -1 and right >= -1
    # A bubble is as tall as its text.
    assert driver.execute_script("""
      return [...document.querySelectorAll("#messages textarea")].every((field) =>
        field.scrollHeight <= field.clientHeight + 1);""")


def test_an_answer_is_a_bubble_while_it_comes(driver, server):
    open_playground(driver, server, "chat")
    driver.execute_script("""
      window.seen = [];
      const bubble = document.getElementById("chat-answer");
      new MutationObserver(() => {
        if (bubble.checkVisibility()) window.seen.push(bubble.querySelector("p")?.textContent);
      }).observe(bubble, {attributes: true, childList: true, subtree: true, characterData: true});""")
    for name, value in (("max-tokens", 12), ("seed", 5)):
        fill(driver, name, value)
    ask(driver)
    answer = messages(driver)[-1][1]
    seen = driver.execute_script("return window.seen")
    assert len(seen) > 1 and all(answer.startswith(piece) for piece in seen if piece)
    assert not by_id(driver, "chat-answer").is_displayed()

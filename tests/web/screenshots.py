"""Takes the screenshots of the dashboard that README.md shows.

    MOESERVE_BIN=build/release/moeserve python tests/web/screenshots.py [FOLDER]

Writes light.png (the experts), dark.png (the playground), chat.png (a chat with a tool) and
compare.png (the comparison of two prompts) into FOLDER, by default server/web/screenshots.
"""

import base64
import json
import os
import pathlib
import sys
import threading
import time

from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

import browser

WIDTH = 1280
PROMPTS = ("rose: a shrub of", "The history of the city of London", "def main():\n",
           "To install the package, run", "She said that she would never", "1, 2, 3, 4,")
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"place": {"enum": ["Rome", "London"]}},
    "required": ["place"], "additionalProperties": False}}}


def drive(server, stop, client):
    """Sends the requests of one simulated user until `stop` is set."""
    turn = client
    while not stop.is_set():
        browser.complete(server, PROMPTS[turn % len(PROMPTS)], max_tokens=60, seed=turn)
        turn += 3
        time.sleep(0.2)


def save(driver, path):
    picture = driver.execute_cdp_cmd("Page.captureScreenshot", {})
    path.write_bytes(base64.b64decode(picture["data"]))
    print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


def fit_window(driver):
    """Makes the window as tall as the page. A screenshot could extend beyond the window, but the
    pointer can only hover over elements inside it."""
    browser.set_size(driver, WIDTH, 600)
    browser.set_size(driver, WIDTH, driver.execute_script(
        "return document.documentElement.scrollHeight"))


def show_experts(driver, server):
    browser.set_media(driver, "light")
    browser.open_view(driver, server, "experts")
    time.sleep(12)
    driver.find_element(By.ID, "threshold").send_keys(Keys.END, *[Keys.ARROW_LEFT] * 2)
    driver.execute_script("document.activeElement.blur()")
    time.sleep(3)
    fit_window(driver)
    heatmap = driver.find_element(By.CLASS_NAME, "heatmap")
    ActionChains(driver).move_to_element_with_offset(heatmap, -213, 5).perform()
    time.sleep(0.5)


def show_playground(driver, server):
    browser.set_media(driver, "dark")
    browser.open_view(driver, server, "playground")
    browser.wait_until(lambda: driver.find_element(By.ID, "color-block").get_attribute("value"),
                       "the layout")
    Select(driver.find_element(By.ID, "color-block")).select_by_index(1)
    driver.find_element(By.ID, "seed").send_keys("39")
    driver.find_element(By.ID, "generate").click()
    browser.wait_until(lambda: driver.find_element(By.ID, "answer-note").text, "an answer")
    driver.find_elements(By.CLASS_NAME, "chip")[6].click()
    row = driver.find_element(By.CSS_SELECTOR, "#detail-body tr[data-block='1/feed_forward']")
    row.find_element(By.CLASS_NAME, "badge").click()
    browser.wait_until(lambda: driver.find_element(By.ID, "changed-summary").text, "both answers")
    driver.execute_script("document.activeElement.blur()")
    fit_window(driver)


def fill(driver, name, value):
    field = driver.find_element(By.ID, name)
    field.clear()
    field.send_keys(str(value))


def show_chat(driver, server):
    browser.set_media(driver, "light")
    browser.open_view(driver, server, "playground")
    browser.wait_until(lambda: driver.find_element(By.ID, "color-block").get_attribute("value"),
                       "the layout")
    driver.find_element(By.CSS_SELECTOR, "[name=mode][value=chat]").send_keys(Keys.SPACE)
    driver.find_element(By.ID, "more").find_element(By.TAG_NAME, "summary").send_keys(Keys.ENTER)
    question = driver.find_element(By.CSS_SELECTOR, "#messages textarea")
    question.clear()
    question.send_keys("Is it raining in Rome?")
    driver.execute_script("arguments[0].value = arguments[1]",
                          driver.find_element(By.ID, "tools"), json.dumps([TOOL], indent=1))
    Select(driver.find_element(By.ID, "tool-choice")).select_by_value("required")
    driver.find_element(By.ID, "show-prompt").click()
    fill(driver, "max-tokens", 60)
    fill(driver, "seed", 2)
    driver.find_element(By.ID, "generate").click()
    browser.wait_until(lambda: driver.find_element(By.ID, "answer-note").text, "an answer")
    driver.execute_script("document.getElementById('more').open = false;"
                          "document.activeElement.blur()")
    fit_window(driver)


def show_comparison(driver, server):
    browser.set_media(driver, "dark")
    browser.open_view(driver, server, "compare")
    browser.wait_until(lambda: driver.find_element(By.ID, "compare-color").get_attribute("value"),
                       "the layout")
    for name, value in (("a", PROMPTS[0]), ("b", PROMPTS[2]), ("max-tokens", 24), ("seed", 3)):
        fill(driver, f"compare-{name}", value)
    driver.find_element(By.ID, "compare-run").click()
    browser.wait_until(lambda: driver.find_element(By.ID, "compare-summary").text, "a comparison")
    driver.execute_script("document.activeElement.blur()")
    fit_window(driver)


def main():
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1
                          else browser.ROOT / "server/web/screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("MOESERVE_MODEL", str(browser.ROOT / "deploy/models/mh-moe"))
    driver = browser.start_browser()
    stop = threading.Event()
    try:
        browser.set_size(driver, WIDTH, 800)
        with browser.serving("--routing-records", "--routing-control", "--chat-template",
                             browser.TEMPLATE, name="mh-moe") as server:
            clients = [threading.Thread(target=drive, args=(server, stop, i)) for i in range(3)]
            for client in clients:
                client.start()
            show_experts(driver, server)
            save(driver, folder / "light.png")
            show_playground(driver, server)
            save(driver, folder / "dark.png")
            show_chat(driver, server)
            save(driver, folder / "chat.png")
            show_comparison(driver, server)
            save(driver, folder / "compare.png")
            stop.set()
            for client in clients:
                client.join()
    finally:
        stop.set()
        driver.quit()


if __name__ == "__main__":
    main()

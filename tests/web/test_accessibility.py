"""Tests the dashboard's accessibility: contrast, names of elements, keyboard operation, narrow
windows and reduced motion."""

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

import browser
from browser import VIEWS, open_view, set_media, set_size, wait_until
from test_dashboard import by_id, fill, stub_tokens, text

# The views as `filled` opens them. The playground has two modes.
FORMS = [*VIEWS, "playground chat"]

TOKENS = {"layer": 0, "block": "feed_forward", "min_count": 5, "experts": [
    {"expert": expert, "tokens": [
        {"id": i, "text": f" word{i}" * (1 + i % 3), "count": 40, "pmi": 4.0 - i, "log_pmi": 1.5,
         "g2": 80.0 - i}
        for i in range(8)]} for expert in range(8)]}

# Returns every visible text on the page with its contrast ratio to its background.
CONTRASTS = """
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const rgba = (color) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((c) =>
      c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const background = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const color = rgba(getComputedStyle(at).backgroundColor);
      if (color[3] === 255) return color;
      if (color[3] > 0) throw new Error("translucent background of " + at.outerHTML);
    }
    return [255, 255, 255];
  };
  const out = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility()) continue;
    if (node.closest("title")) continue;
    const style = getComputedStyle(node);
    const inSvg = node instanceof SVGElement;
    const [a, b] = [luminance(rgba(inSvg ? style.fill : style.color)), luminance(background(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    out.push([ratio, walker.currentNode.data.trim().slice(0, 40), node.className.toString()]);
  }
  return out;"""


@pytest.fixture
def filled(driver, server):
    """Provides a function that opens a view and waits until the view has content."""
    undo = stub_tokens(driver, TOKENS)

    def open_filled(view):
        view, _, chat = view.partition(" ")
        open_view(driver, server, view)
        wait_until(lambda: text(driver, "state") == "live", "an answer")
        if view == "tokens":
            wait_until(lambda: driver.find_elements(By.CLASS_NAME, "token-expert"), "tokens")
        elif view == "playground":
            driver.execute_script("document.getElementById('more').open = true")
            if chat:
                driver.find_element(By.CSS_SELECTOR, "[name=mode][value=chat]"
                                    ).send_keys(Keys.SPACE)
                by_id(driver, "add-message").click()
                Select(driver.find_elements(By.CSS_SELECTOR, ".message select")[1]
                       ).select_by_value("tool")
                fill(driver, "tools", "[")
            by_id(driver, "generate").click()
            if chat:
                wait_until(lambda: text(driver, "tools-error"), "what is wrong with the tools")
                by_id(driver, "tools").clear()
                by_id(driver, "generate").click()
            wait_until(lambda: text(driver, "answer-note"), "an answer")
            # One script, because the page may draw the chips again between two commands.
            driver.execute_script("document.querySelectorAll('.chip')[1].click()")
        elif view == "compare":
            fill(driver, "compare-max-tokens", 4)
            driver.execute_script("for (const node of document.querySelectorAll("
                                  "'#compare details')) node.open = true")
            by_id(driver, "compare-run").click()
            wait_until(lambda: text(driver, "compare-summary"), "a comparison")
            driver.find_elements(By.CSS_SELECTOR, "#chips-b .chip")[1].click()
        elif view == "experts":
            driver.execute_script("document.getElementById('load-details').open = true")

    yield open_filled
    undo()


@pytest.mark.parametrize("view", FORMS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(driver, filled, scheme, view):
    set_media(driver, scheme)
    filled(view)
    contrasts = driver.execute_script(CONTRASTS)
    assert len(contrasts) > 15
    assert [entry for entry in contrasts if entry[0] < 4.5] == []


@pytest.mark.parametrize("view", FORMS)
def test_no_width_scrolls_sideways(driver, filled, view):
    set_size(driver, 360)
    filled(view)
    for width in (360, 420, 768, 1024, 1600):
        set_size(driver, width)
        # Charts are resized one frame after the cards that contain them.
        driver.execute_async_script("requestAnimationFrame(() => setTimeout(arguments[0], 60))")
        widths = driver.execute_script(
            "return [document.documentElement.scrollWidth, document.body.scrollWidth, innerWidth]")
        assert max(widths) == width, (width, widths)


@pytest.mark.parametrize("view", FORMS)
def test_everything_has_a_name(driver, filled, view):
    filled(view)
    driver.execute_cdp_cmd("Accessibility.enable", {})
    nodes = driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    driver.execute_cdp_cmd("Accessibility.disable", {})
    seen = {}
    for node in nodes:
        if node.get("ignored"):
            continue
        seen.setdefault(node["role"]["value"], []).append(
            node.get("name", {}).get("value", "").strip())
    for role in ("button", "tab", "tabpanel", "textbox", "spinbutton", "combobox", "slider",
                 "radio", "checkbox", "image", "img", "region", "application", "table", "group",
                 "radiogroup", "link", "dialog"):
        if role != "table":
            assert "" not in seen.get(role, []), (role, seen[role])
    for role in ("banner", "main", "contentinfo", "tablist", "tabpanel"):
        assert len(seen.get(role, [])) == 1, role
    assert seen["tab"] == ["Experts", "Tokens", "Requests", "Playground", "Compare"]
    assert driver.execute_script("return document.querySelectorAll('h1').length") == 1
    ids = driver.execute_script("return [...document.querySelectorAll('[id]')].map(n => n.id)")
    assert len(ids) == len(set(ids))
    dangling = driver.execute_script("""
      return ["aria-controls", "aria-labelledby", "aria-describedby", "for"].flatMap((name) =>
        [...document.querySelectorAll(`[${name}]`)].map((node) => node.getAttribute(name)))
        .filter((id) => !document.getElementById(id));""")
    assert dangling == []


@pytest.mark.parametrize("width", [320, 360, 390])
@pytest.mark.parametrize("view", VIEWS)
def test_no_tab_is_cut(driver, server, view, width):
    set_size(driver, width)
    open_view(driver, server, view)
    boxes = driver.execute_script("""
      return [...document.querySelectorAll("[role=tab]")].map((tab) => {
        const box = tab.getBoundingClientRect();
        return [box.left, box.right, tab.scrollWidth - tab.clientWidth];
      });""")
    assert all(left >= 0 and right <= width and over <= 0 for left, right, over in boxes), boxes


def test_tabs_by_keyboard(driver, filled):
    filled("experts")
    tab = by_id(driver, "tab-experts")
    chosen = "return document.querySelector('[role=tab][aria-selected=true]').textContent"
    for key, name in ((Keys.ARROW_RIGHT, "Tokens"), (Keys.ARROW_RIGHT, "Requests"),
                      (Keys.END, "Compare"), (Keys.ARROW_RIGHT, "Experts"),
                      (Keys.ARROW_LEFT, "Compare"), (Keys.HOME, "Experts")):
        (tab if name == "Tokens" else driver.switch_to.active_element).send_keys(key)
        assert driver.execute_script(chosen) == name == driver.switch_to.active_element.text
        visible = driver.find_elements(By.CSS_SELECTOR, "[role=tabpanel]:not([hidden])")
        assert [panel.get_attribute("id") for panel in visible] == [name.lower()]
    assert "#/experts" in driver.current_url


def test_tab_reaches_everything_and_shows_it(driver, server):
    open_view(driver, server, "experts")
    wait_until(lambda: text(driver, "state") == "live", "an answer")
    reached = []
    driver.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    for _ in range(20):
        focused = driver.switch_to.active_element
        if focused.tag_name == "body":
            break
        name = focused.get_attribute("id") or focused.get_attribute("class") or focused.tag_name
        reached.append(name)
        shown = driver.execute_script("""
          const node = arguments[0];
          const mark = node.matches("[type=radio]") ? node.nextElementSibling : node;
          const style = getComputedStyle(mark);
          return style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2;""", focused)
        assert shown, f"no outline around {name}"
        focused.send_keys(Keys.TAB)
    for name in ("skip", "theme-button", "tab-experts", "threshold", "heatmap", "diversity-block"):
        assert name in reached
    assert reached.index("skip") == 0
    assert "tab-tokens" not in reached, "one stop for all tabs"


def test_theme_is_kept(driver, server):
    set_media(driver, "dark")
    open_view(driver, server, "experts")
    color = "return getComputedStyle(document.body).backgroundColor"
    dark = driver.execute_script(color)
    assert by_id(driver, "theme-button").text == "Light mode"
    by_id(driver, "theme-button").click()
    light = driver.execute_script(color)
    assert light != dark
    driver.refresh()
    assert driver.execute_script(color) == light
    assert by_id(driver, "theme-button").text == "Dark mode"


def test_reduced_motion(driver, server):
    for motion in ("reduce", "no-preference"):
        set_media(driver, motion=motion)
        open_view(driver, server, "experts")
        moves = driver.execute_async_script(
            "import('./dashboard/theme.js').then((theme) => arguments[0](theme.wantsMotion()))")
        assert moves == (motion == "no-preference")

"""Tests the dashboard at "/": each view must show the values that the server's API returns."""

import http.client
import json
import re
import urllib.error
import urllib.request

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select

import browser
from browser import complete, get_json, open_view, set_media, wait_until


def text(driver, name):
    return driver.execute_script("return document.getElementById(arguments[0]).textContent", name)


def by_id(driver, name):
    return driver.find_element(By.ID, name)


def fill(driver, name, value):
    field = by_id(driver, name)
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys(str(value))


def choose_window(driver, value):
    driver.find_element(By.CSS_SELECTOR, f"[name=window][value='{value}']").send_keys(Keys.SPACE)


def open_experts(driver, server, window=""):
    open_view(driver, server, "experts")
    choose_window(driver, window)
    wait_until(lambda: "server started" in text(driver, "window-note"), "statistics")


def pixels(driver):
    """Returns the heatmap's luminances [4 layers][8 experts], one pixel per cell."""
    return driver.execute_script("""
      const shown = document.querySelector(".heatmap canvas");
      const canvas = new OffscreenCanvas(shown.width, shown.height);
      const context = canvas.getContext("2d", {willReadFrequently: true});
      context.drawImage(shown, 0, 0);
      const rows = arguments[0], columns = arguments[1];
      const left = 104, axis = 20;
      const cell = (canvas.width - left) / columns, height = (canvas.height - axis) / rows;
      return Array.from({length: rows}, (_, r) => Array.from({length: columns}, (_, c) => {
        const [red, green, blue] = context.getImageData(
          left + (c + 0.25) * cell, (r + 0.25) * height, 1, 1).data;
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
      }));""", 4, 8)


# ---- Experts


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_heatmap_shows_the_loads(driver, server, scheme):
    set_media(driver, scheme)
    open_experts(driver, server)
    layers = get_json(server, "/v1/experts/stats")["layers"]
    highest = max(max(layer["counts"]) for layer in layers)
    sign = -1 if scheme == "light" else 1

    def wrong():
        """Returns the pairs of experts whose colours contradict their counts."""
        return [(layer["layer"], a, b, layer["counts"], row)
                for layer, row in zip(layers, pixels(driver))
                for a, one in enumerate(layer["counts"]) for b, other in enumerate(layer["counts"])
                if one > other + 0.05 * highest and not sign * row[a] > sign * row[b]]

    # The heatmap fades from the colours of the first window to these.
    try:
        wait_until(lambda: not wrong(), "the colours of the counts")
    except AssertionError:
        assert wrong() == []
        raise


def test_heatmap_moves_with_traffic(driver, server):
    open_experts(driver, server)
    before = pixels(driver)
    tokens = text(driver, "window-tokens")
    for seed in range(3):
        complete(server, "def main():\n    return", max_tokens=60, seed=seed)
    wait_until(lambda: text(driver, "window-tokens") != tokens, "more tokens")
    wait_until(lambda: pixels(driver) != before, "other colours")


def test_heatmap_by_keyboard(driver, server):
    open_experts(driver, server)
    layer = get_json(server, "/v1/experts/stats")["layers"][2]
    heatmap = driver.find_element(By.CLASS_NAME, "heatmap")
    heatmap.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN, *[Keys.ARROW_RIGHT] * 5)
    said = text(driver, "readout")
    assert said.startswith("Layer 2, feed-forward, expert 5: ")
    assert f"({layer['counts'][5]:,} of {sum(layer['counts']):,}" in said
    heatmap.send_keys(Keys.END, Keys.ARROW_RIGHT)
    assert "expert 7: " in text(driver, "readout")


def test_heatmap_by_pointer(driver, server):
    open_experts(driver, server)
    heatmap = driver.find_element(By.CLASS_NAME, "heatmap")
    width, height = heatmap.size["width"], heatmap.size["height"]
    cell = (width - 104) / 8

    def point(x, y):
        ActionChains(driver).move_to_element_with_offset(
            heatmap, round(x - width / 2), round(y - height / 2)).perform()
        return text(driver, "readout")

    assert point(104 + 3.5 * cell, 2.5 * 30).startswith("Layer 2, feed-forward, expert 3: ")
    assert point(104 + 7.5 * cell, 0.5 * 30).startswith("Layer 0, feed-forward, expert 7: ")
    ActionChains(driver).move_to_element(by_id(driver, "load-details")).perform()
    assert text(driver, "readout").startswith("Point at a cell")


def test_table_of_loads(driver, server):
    open_experts(driver, server)
    by_id(driver, "load-details").find_element(By.TAG_NAME, "summary").send_keys(Keys.ENTER)
    for layer in get_json(server, "/v1/experts/stats")["layers"]:
        Select(by_id(driver, "load-block")).select_by_value(f"{layer['layer']}/{layer['block']}")
        rows = driver.execute_script(
            "return [...document.querySelectorAll('#load-table tbody tr')].map("
            "row => [...row.cells].map(cell => cell.textContent))")
        assert [int(row[1].replace(",", "")) for row in rows] == layer["counts"]
        share = 100 * layer["counts"][7] / sum(layer["counts"])
        assert abs(float(rows[7][2].split()[0]) - share) < 0.06


def test_histogram_of_distinct_experts(driver, server):
    open_experts(driver, server)
    stats = get_json(server, "/v1/experts/stats")
    wanted = {f"{layer['layer']}/{layer['block']}": layer["distinct_experts_histogram"]
              for layer in stats["layers"]}
    if "diversity" in stats:
        wanted[""] = stats["diversity"]["histogram"]
    for key, histogram in wanted.items():
        Select(by_id(driver, "diversity-block")).select_by_value(key)
        bars = dict(driver.execute_script(
            "return [...document.querySelectorAll('#experts .bar')].map("
            "bar => [Number(bar.dataset.from), Number(bar.dataset.count)])"))
        assert sum(bars.values()) == stats["layers"][0]["tokens"] > 0
        assert {n: c for n, c in bars.items() if c} == {
            n: c for n, c in enumerate(histogram) if c}


def test_threshold_and_tiles(driver, server):
    open_experts(driver, server)
    slider = by_id(driver, "threshold")
    for keys, threshold in (([], 0), ([Keys.END], 0.5), ([Keys.ARROW_LEFT] * 2, 0.1)):
        slider.send_keys(*keys)
        stats = get_json(server, f"/v1/experts/stats?threshold={threshold}")
        percent = 100 * stats["activation_ratio"]
        wait_until(lambda: abs(float(text(driver, "activation-ratio").split()[0]) - percent) < 0.1,
                   f"an activation ratio of {percent}")
    assert text(driver, "window-tokens") == f"{stats['tokens']:,}"
    shown = text(driver, "activated-parameters")
    number = re.search(r"([\d.]+)([KM])", shown)
    shown_count = float(number[1]) * {"K": 1e3, "M": 1e6}[number[2]]
    assert shown_count == pytest.approx(stats["activated_parameters"]["compute"], rel=0.01), shown


def test_windows_are_asked_for(driver, server, watch):
    open_view(driver, server, "experts")
    for value in ("10", "600"):
        choose_window(driver, value)
        wait_until(lambda: any(f"window={value}" in url for url in watch.collect()), value)


def test_nobody_asks_while_nobody_looks(driver, server, watch):
    open_experts(driver, server)
    hide = ("Object.defineProperty(document, 'hidden', {value: arguments[0], configurable: true});"
            "document.dispatchEvent(new Event('visibilitychange'))")
    driver.execute_script(hide, True)
    watch.collect()
    seen = len(watch.urls)
    driver.execute_async_script("setTimeout(arguments[0], 2500)")
    assert len(watch.collect()) == seen
    driver.execute_script(hide, False)
    wait_until(lambda: len(watch.collect()) > seen, "a request after coming back")


def test_statistics_may_be_switched_off(driver, watch):
    watch.allowed = ("404",)
    with browser.serving("--moe-metrics=off") as server:
        open_view(driver, server, "experts")
        wait_until(lambda: "switched off" in text(driver, "experts-note"), "a note")
        assert text(driver, "state") == "live"
        assert not by_id(driver, "experts-body").is_displayed()
        driver.execute_async_script("setTimeout(arguments[0], 2500)")
        assert sum("experts/stats" in url for url in watch.collect()) == 1


# ---- Tokens

HOSTILE = ["<img src=x onerror=window.pwned=1>", "\u202egnp.exe\u0007", "a\u0000b\u001b[31m", "",
           " the", "e" + "\u0301" * 40, "x" * 500, "\ud800",
           "</code><script>window.pwned=1</script>"]


def stub_tokens(driver, answer, status=200):
    """Makes pages that are loaded from now on receive `answer` for /v1/experts/tokens, without a
    request to the server. Returns a function that removes this stub."""
    script = driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": """
      const real = window.fetch;
      window.asked = [];
      window.fetch = (path, options) => {
        if (!String(path).includes("experts/tokens")) return real(path, options);
        window.asked.push(String(path));
        return Promise.resolve(new Response(JSON.stringify(%s), {status: %d}));
      };""" % (json.dumps(answer), status)})
    return lambda: driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", script)


def test_tokens_of_experts_are_text(driver, server):
    tokens = [{"id": i, "text": value, "count": 10 + i, "pmi": 9.0 - i, "log_pmi": 3.0 - 0.25 * i,
               "g2": 99.5 - i}
              for i, value in enumerate(HOSTILE)]
    undo = stub_tokens(driver, {"layer": 0, "block": "feed_forward", "min_count": 5, "experts": [
        {"expert": 0, "tokens": tokens},
        {"expert": 1, "tokens": [{"id": 77, "text": None, "count": 9, "pmi": 1, "log_pmi": 0,
                                  "g2": 0}]},
        {"expert": 2, "tokens": []}]})
    try:
        open_view(driver, server, "tokens")
        wait_until(lambda: len(driver.find_elements(By.CLASS_NAME, "token-expert")) == 3, "cards")
        shown = [node.get_property("textContent") for node in
                 driver.find_elements(By.CSS_SELECTOR, "[data-expert='0'] code")]
        assert shown[0] == HOSTILE[0].replace(" ", "·")
        assert shown[1] == "\\u{202e}gnp.exe\\x07"
        assert shown[2] == "a\\x00b\\x1b[31m"
        assert shown[3] == "∅"
        assert shown[4] == "·the"
        assert shown[5].count("\u0301") == 3
        assert len(shown[6]) == 61
        assert shown[7] == "\\u{d800}"
        assert driver.execute_script("return window.pwned") is None
        assert not driver.find_elements(By.CSS_SELECTOR, "#tokens img, #tokens script")
        values = ("return [...document.querySelectorAll('[data-expert=\"0\"] .number')]"
                  ".map((node) => node.textContent)")
        assert driver.execute_script(values)[:2] == ["99.50", "98.50"]
        asked = "return window.asked.at(-1)"
        assert driver.execute_script(asked).endswith("&rank=g2"), "by evidence"
        driver.find_element(By.CSS_SELECTOR, "[name=pmi][value=log_pmi]").send_keys(Keys.SPACE)
        assert driver.execute_script(values)[:2] == ["3.00", "2.75"]
        wait_until(lambda: driver.execute_script(asked).endswith("&rank=pmi"), "the first by PMI")
        driver.find_element(By.CSS_SELECTOR, "[name=pmi][value=pmi]").send_keys(Keys.SPACE)
        assert driver.execute_script(values)[:2] == ["9.00", "8.00"]
        driver.find_element(By.CSS_SELECTOR, "[name=pmi][value=count]").send_keys(Keys.SPACE)
        assert driver.execute_script(values)[:2] == ["18", "17"], "the most frequent first"
        Select(by_id(driver, "tokens-expert")).select_by_value("1")
        assert len(driver.find_elements(By.CLASS_NAME, "token-expert")) == 1
        assert driver.find_element(By.CSS_SELECTOR, ".token-expert code").text == "#77"
        Select(by_id(driver, "tokens-block")).select_by_value("3/feed_forward")
        fill(driver, "tokens-top", 3)
        wait_until(lambda: "layer=3&block=feed_forward&top=3&min_count=5" in
                   driver.execute_script("return window.asked.at(-1)"), "the chosen block")
        fill(driver, "tokens-top", 0)
        wait_until(lambda: "whole numbers" in text(driver, "tokens-note"), "a complaint")
    finally:
        undo()


def test_tokens_are_ranked_by_evidence(driver, server):
    open_view(driver, server, "tokens?top=3&min_count=1")
    wait_until(lambda: driver.find_elements(By.CLASS_NAME, "token-expert"), "tokens")
    for rank in ("g2", "count", "pmi"):
        driver.find_element(By.CSS_SELECTOR, f"[name=pmi][value={rank}]").send_keys(Keys.SPACE)
        answer = get_json(server, "/v1/experts/tokens?layer=0&block=feed_forward&top=3"
                          f"&min_count=1&rank={rank}")
        wanted = [f"token {token['id']}, seen {token['count']:,} times"
                  for expert in answer["experts"] for token in expert["tokens"]]
        for expert in answer["experts"]:
            values = [token[rank] for token in expert["tokens"]]
            assert values == sorted(values, reverse=True)
        wait_until(lambda: driver.execute_script(
            "return [...document.querySelectorAll('#tokens-list li')].map((node) => node.title)")
            == wanted, f"the first by {rank}")


def test_tokens_may_be_missing(driver, server):
    undo = stub_tokens(driver, {"error": {"message": "nothing is counted", "code": None}}, 404)
    try:
        open_view(driver, server, "tokens")
        wait_until(lambda: "not available: nothing is counted." in text(driver, "tokens-note"),
                   "a note")
        assert text(driver, "state") == "live"
    finally:
        undo()


# ---- Requests


def test_requests_charts(driver, server):
    open_view(driver, server, "requests")
    wait_until(lambda: text(driver, "request-tiles").count("–") < 2, "tiles")
    for seed in range(3):
        complete(server, "London is", max_tokens=50, seed=seed)
    p50 = ("return [...document.querySelectorAll('#request-charts .legend li:first-child .value')]"
           ".map(node => node.textContent)")
    wait_until(lambda: "–" not in driver.execute_script(p50), "a value in every chart", 15)
    figures = driver.find_elements(By.CSS_SELECTOR, "#request-charts figure")
    assert len(figures) == 6
    for figure in figures:
        title = figure.find_element(By.TAG_NAME, "figcaption").text
        plot = figure.find_element(By.CLASS_NAME, "plot")
        assert plot.get_attribute("aria-label").startswith(f"{title}: now ")
        assert figure.find_element(By.CLASS_NAME, "line-0").get_attribute("d")
    metrics = urllib.request.urlopen(server.url + "/metrics").read().decode()
    finished = sum(int(n) for n in re.findall(r"requests_finished_total\{.*\} (\d+)", metrics))
    wait_until(lambda: driver.execute_script(
        "return document.querySelector('#request-tiles dd').textContent") == str(finished),
        "the number of finished requests")


def chart_points(driver, title):
    """Returns the number of points that the lines of a chart have, by series."""
    return driver.execute_script("""
      const figure = [...document.querySelectorAll("#request-charts figure")].find((one) =>
        one.querySelector("figcaption").textContent === arguments[0]);
      return [...figure.querySelectorAll("path.line")].filter((one) => one.closest(".plot"))
        .map((one) => one.getAttribute("d").split(/[ML]/).length - 1);""", title)


def test_charts_begin_before_the_view(driver, watch):
    def readings(server):
        return len(get_json(server, "/v1/metrics/history")["readings"])

    with browser.serving() as server:
        # Times are known for requests between two readings.
        wait_until(lambda: readings(server) >= 1, "a first reading")
        complete(server, "London is", max_tokens=50, seed=1)
        wait_until(lambda: readings(server) >= 3, "a history", 15)
        open_view(driver, server, "requests")
        wait_until(lambda: text(driver, "request-tiles").count("–") < 2, "tiles")
        assert min(chart_points(driver, "Requests")) >= 4
        assert min(chart_points(driver, "Time to first token")) >= 1
        # The view is asked again after it was hidden; no reading is taken twice.
        before = chart_points(driver, "Requests")[0]
        by_id(driver, "tab-tokens").click()
        by_id(driver, "tab-requests").click()
        wait_until(lambda: chart_points(driver, "Requests")[0] > before, "a new reading")
        assert chart_points(driver, "Requests")[0] <= before + 8
        # The history was asked for once, and again if the machine paused for some seconds.
        assert sum("metrics/history" in url for url in watch.collect()) in (1, 2)


def test_running_and_waiting_requests(driver):
    with browser.serving("--max-num-seqs", "1") as server:
        open_view(driver, server, "requests")
        wait_until(lambda: chart_points(driver, "Requests")[0] >= 1, "a reading")
        shown = ("return [...document.querySelectorAll('#request-charts figure')].find((one) => "
                 "one.querySelector('figcaption').textContent === 'Requests')"
                 ".querySelector('.plot').getAttribute('aria-label')")
        host, _, port = server.http.rpartition(":")
        body = json.dumps({"prompt": "London is", "max_tokens": 8000, "ignore_eos": True})
        requests = [http.client.HTTPConnection(host, int(port)) for _ in range(3)]
        for request in requests:
            request.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        # A fast processor completes a request within one polling interval. A view that is shown
        # again polls at once.
        by_id(driver, "tab-tokens").click()
        by_id(driver, "tab-requests").click()
        wait_until(lambda: driver.execute_script(shown)
                   == "Requests: now running 1, waiting 2", "one running, two waiting")
        for request in requests:
            request.close()
        wait_until(lambda: driver.execute_script(shown)
                   == "Requests: now running 0, waiting 0", "the end")


def test_quantiles(driver, server):
    open_view(driver, server, "requests")
    got = driver.execute_async_script("""
      const done = arguments[0];
      import("./dashboard/prometheus.js").then((m) => {
        const text = (a, b, c) => `# HELP moeserve_t_seconds x
# TYPE moeserve_t_seconds histogram
moeserve_t_seconds_bucket{le="0.1"} ${a}
moeserve_t_seconds_bucket{le="1"} ${b}
moeserve_t_seconds_bucket{le="+Inf"} ${c}
moeserve_t_seconds_sum 3
moeserve_t_seconds_count ${c}
moeserve_other{a="b"} 3
moeserve_n_total{reason="x\\\\"y",z="1"} 2
moeserve_n_total{reason="z"} 3
`;
        const read = (...counts) => m.parseMetrics(text(...counts), ["t_seconds", "n_total"]);
        const [late, early] = [m.buckets(read(4, 14, 20), "t_seconds"),
                               m.buckets(read(4, 4, 10), "t_seconds")];
        const delta = m.bucketDelta(late, early);
        done({delta, q: [0.5, 0.9, 0.99].map((q) => m.quantile(late, q)),
              recent: m.quantile(delta, 0.5), empty: m.quantile(m.bucketDelta(late, late), 0.5),
              n: m.valueOf(read(1, 1, 1), "n_total"), size: read(1, 1, 1).size});
      });""")
    assert [count for _, count in got["delta"]] == [0, 10, 10]
    # The median has rank 10 of 20, which is the 6th of the 10 values in (0.1, 1]. Quantiles in the
    # last bucket, (1, +Inf], are reported as 1.
    assert got["q"] == pytest.approx([0.1 + 0.9 * 0.6, 1, 1])
    assert got["recent"] == pytest.approx(0.55)
    assert got["empty"] is None
    assert got["n"] == 5
    assert got["size"] == 4


# ---- Playground

PROMPT = "In the beginning God"


def generate(driver, server, max_tokens=20, seed=7):
    open_view(driver, server, "playground")
    wait_until(lambda: by_id(driver, "color-block").get_attribute("value"), "the layout")
    for name, value in (("prompt", PROMPT), ("max-tokens", max_tokens), ("seed", seed)):
        fill(driver, name, value)
    by_id(driver, "generate").click()
    wait_until(lambda: text(driver, "answer-note") and text(driver, "generate") == "Generate",
               "the end of the answer")


def record(server, max_tokens=20, seed=7):
    """Sends a unary request. Returns the tokens' texts, the routes [token][row] as lists of
    (expert, weight), and the blocks of /v1/experts/layout."""
    answer = complete(server, PROMPT, max_tokens=max_tokens, seed=seed, temperature=0.7, top_p=0.9,
                      echo=True, logprobs=0, return_routing=True)
    [choice] = answer["choices"]
    routing, layout = choice["routing"], get_json(server, "/v1/experts/layout")
    offsets, per_token = routing["offsets"], layout["rows_per_token"]
    pairs = list(zip(routing["experts"], routing["weights"]))
    rows = [pairs[begin:end] for begin, end in zip(offsets, offsets[1:])]
    tokens = [rows[i:i + per_token] for i in range(0, len(rows), per_token)]
    return choice["logprobs"]["tokens"], tokens, layout["blocks"]


def shown_experts(driver):
    """Returns, for each token, the list of (expert, color) of the segments of its bar."""
    return driver.execute_script("""
      return [...document.querySelectorAll(".chip")].map((chip) =>
        [...chip.querySelectorAll(".chip-bar > span")].map((part) =>
          [Number(part.dataset.expert), getComputedStyle(part).backgroundColor]));""")


def test_playground_shows_the_record(driver, server):
    generate(driver, server)
    texts, tokens, blocks = record(server)
    chips = driver.find_elements(By.CLASS_NAME, "chip")
    assert [chip.find_element(By.CLASS_NAME, "chip-text").text for chip in chips] == [
        value.replace(" ", "·").replace("\n", "⏎") for value in texts]
    assert len(tokens) == len(texts) - 1, "the last token is not run"
    colors = {}
    for block in (blocks[0], blocks[3]):
        Select(by_id(driver, "color-block")).select_by_value(f"{block['layer']}/{block['block']}")
        bars = shown_experts(driver)
        assert bars[-1] == []
        for token, bar in zip(tokens, bars):
            rows = token[block["first_row"]:block["first_row"] + block["sub_tokens"]]
            sums = {}
            for expert, weight in (pair for row in rows for pair in row):
                sums[expert] = sums.get(expert, 0.0) + weight
            assert [e for e, _ in bar] == sorted(sums, key=lambda e: (-sums[e], e))
            for expert, color in bar:
                assert colors.setdefault(expert, color) == color
    assert len(set(colors.values())) == len(colors), "no two experts share a colour"


def test_playground_unfolds_sub_tokens(driver, server):
    generate(driver, server)
    _, tokens, blocks = record(server)
    block = blocks[1]
    Select(by_id(driver, "color-block")).select_by_value(f"{block['layer']}/{block['block']}")
    chip = driver.find_elements(By.CLASS_NAME, "chip")[5]
    chip.click()
    assert chip.get_attribute("aria-expanded") == "true"
    rows = driver.find_elements(By.CSS_SELECTOR, ".sub-token")
    wanted = tokens[5][block["first_row"]:block["first_row"] + block["sub_tokens"]]
    assert len(rows) == block["sub_tokens"] == 2
    assert [row.get_attribute("data-experts") for row in rows] == [
        " ".join(str(expert) for expert, _ in row) for row in wanted]
    for row, pairs in zip(rows, wanted):
        assert all(f"{weight:.2f}" in row.text for _, weight in pairs)
    detail = driver.execute_script("""
      return [...document.querySelectorAll("#detail-body .detail-row")].map((row) =>
        [...row.querySelectorAll(".badge")].map((badge) => Number(badge.dataset.expert)));""")
    assert detail == [[expert for expert, _ in row] for row in tokens[5]]
    chip.click()
    assert not driver.find_elements(By.CSS_SELECTOR, ".sub-token")


def test_playground_by_keyboard(driver, server):
    generate(driver, server)
    driver.find_elements(By.CLASS_NAME, "chip")[0].send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    focused = driver.switch_to.active_element
    assert focused.get_attribute("data-position") == "2"
    assert "Position 2, prompt" in text(driver, "detail-body")
    focused.send_keys(Keys.ENTER)
    assert len(driver.find_elements(By.CSS_SELECTOR, ".sub-token")) == 2
    focused.send_keys(Keys.END)
    assert "it was the last one" in text(driver, "detail-body")
    assert len(driver.find_elements(By.CSS_SELECTOR, ".chip[tabindex='0']")) == 1


def test_playground_shows_refusals(driver, server, watch):
    watch.allowed = ("400",)
    open_view(driver, server, "playground")
    wait_until(lambda: by_id(driver, "color-block").get_attribute("value"), "the layout")
    by_id(driver, "prompt").clear()
    by_id(driver, "prompt").send_keys("word " * 10)
    driver.execute_script("document.getElementById('max-tokens').max = 100000;"
                          "document.getElementById('max-tokens').value = 90000")
    by_id(driver, "generate").click()
    wait_until(lambda: text(driver, "playground-note").startswith("No answer: "), "a refusal")


def test_playground_without_records(driver, watch):
    watch.allowed = ("403",)
    with browser.serving() as server:
        generate(driver, server)
        assert "keeps no routing records" in text(driver, "playground-note")
        assert len(driver.find_elements(By.CSS_SELECTOR, ".chip:not(.prompt-chip)")) == 20
        driver.find_elements(By.CLASS_NAME, "chip")[1].click()
        assert "not known" in text(driver, "detail-body")
        by_id(driver, "generate").click()
        wait_until(lambda: text(driver, "generate") == "Generate", "a second answer")
        assert sum("v1/completions" in url for url in watch.collect()) == 3


@pytest.mark.parametrize("name", ["moa", "hmoe-topp", "smoe", "dense"])
def test_other_architectures(driver, monkeypatch, name):
    monkeypatch.setenv("MOESERVE_MODEL", str(browser.ROOT / "deploy/models" / name))
    with browser.serving("--routing-records") as server:
        complete(server, "In the beginning", max_tokens=40, seed=1)
        blocks = get_json(server, "/v1/experts/layout")["blocks"]
        open_view(driver, server, "experts")
        if not blocks:
            wait_until(lambda: "dense" in text(driver, "experts-note"), "a note")
        else:
            choose_window(driver, "")
            wait_until(lambda: text(driver, "window-tokens") not in ("–", "0"), "tokens")
            rows = driver.find_elements(By.CSS_SELECTOR, "#balance-table tbody tr")
            assert len(rows) == len(blocks)
        open_view(driver, server, "playground")
        wait_until(lambda: text(driver, "state") == "live", "the layout")
        by_id(driver, "generate").click()
        wait_until(lambda: text(driver, "answer-note"), "an answer")
        experts = [bool(bar) for bar in shown_experts(driver)]
        assert experts == [bool(blocks)] * (len(experts) - 1) + [False]


# ---- Keys


def test_a_key_is_asked_for(driver, watch, tmp_path):
    watch.allowed = ("401",)
    keys = tmp_path / "keys"
    keys.write_text("correct-key\n")
    with browser.serving("--api-key-file", keys) as server:
        for path in ("/", "/dashboard/main.js"):
            assert urllib.request.urlopen(server.url + path).status == 200
        open_view(driver, server, "experts")
        wait_until(lambda: by_id(driver, "key-dialog").get_property("open"), "the question")
        by_id(driver, "key-input").send_keys("wrong-key", Keys.ENTER)
        wait_until(lambda: "does not know" in text(driver, "key-error"), "a refusal")
        by_id(driver, "key-input").send_keys("correct-key", Keys.ENTER)
        wait_until(lambda: text(driver, "state") == "live", "an answer")
        assert not by_id(driver, "key-dialog").get_property("open")
        driver.refresh()
        wait_until(lambda: text(driver, "state") == "live", "an answer after a reload")
        stored = "return [JSON.stringify({...localStorage}), document.cookie, location.href].join()"
        assert "correct-key" not in driver.execute_script(stored)
        assert not any("key" in url for url in watch.collect() if "?" in url)


def test_the_page_can_be_left_out():
    with browser.serving("--no-dashboard") as server:
        for path in ("/", "/dashboard/main.js"):
            with pytest.raises(urllib.error.HTTPError) as error:
                urllib.request.urlopen(server.url + path)
            assert error.value.code == 404


def test_a_server_that_leaves(driver, watch):
    watch.allowed = ("ERR_CONNECTION_REFUSED", "503")
    with browser.serving() as server:
        open_view(driver, server, "experts")
        wait_until(lambda: text(driver, "state") == "live", "an answer")
    wait_until(lambda: text(driver, "state") == "the server cannot be reached", "that it is gone")

// The "Requests" view: latency and throughput, computed from differences between readings of
// /metrics. Readings from before the view was shown come from /v1/metrics/history.
import { getJson, getText, model, queryOf } from "../api.js";
import { LineChart } from "../charts/charts.js";
import { byId, el, setText } from "../dom.js";
import { exportButtons } from "../export/export_buttons.js";
import { compact, count, none, percent, seconds } from "../format.js";
import { LinkedOptions, linkRadios } from "../linked_options.js";
import { Poller } from "../poller.js";
import { bucketDelta, buckets, familiesOf, ofModel, parseMetrics, quantile, valueOf }
  from "../prometheus.js";

const pollMilliseconds = 2000;
// Quantiles are computed over this time, because one polling interval can contain too few requests.
const quantileSeconds = 30;
const quantiles = [0.5, 0.9, 0.99];
// After a longer pause, the readings of the server's history fill the gap.
const maxPauseSeconds = 5;

const histograms = {
  ttft: "time_to_first_token_seconds",
  itl: "inter_token_latency_seconds",
  duration: "request_duration_seconds",
};
const wanted = [
  ...Object.values(histograms), "generation_tokens_total", "prompt_tokens_total",
  "requests_running", "requests_waiting", "kv_cache_tokens", "requests_finished_total",
  "requests_rejected_total", "prefix_cache_hit_tokens_total", "prefix_cache_queried_tokens_total",
  "preemptions_total",
];

const tiles = [
  ["finished", "Requests finished"], ["rejected", "Requests refused"],
  ["generated", "Tokens generated"], ["hits", "Prompt found in the cache"],
  ["preemptions", "Preemptions"],
];

// The counter of generated tokens grows when a request ends. These histograms count each token when
// it is given: the first one of each sequence, and all others.
const tokensGiven = (families) => [histograms.ttft, histograms.itl]
  .reduce((sum, name) => sum + (buckets(families, name).at(-1)?.[1] ?? 0), 0);

// Returns the share of the caches of all models together that is in use. Readings of the history
// have it.
function cacheInUse(families) {
  const tokens = families.get("kv_cache_tokens");
  if (!tokens) return valueOf(families, "kv_cache_usage_ratio");
  const sum = (samples) => samples.reduce((total, { value }) => total + value, 0);
  const all = sum(tokens);
  return all > 0 ? sum(tokens.filter(({ labels }) => labels.state === "used")) / all : 0;
}

// The values that grow as long as the server runs.
const counters = [
  tokensGiven,
  (families) => valueOf(families, "requests_finished_total"),
  (families) => valueOf(families, "prompt_tokens_total"),
];

const rate = (value) => (Number.isFinite(value) ? compact(Math.round(value * 10) / 10) : none);

export class RequestsView {
  constructor(page) {
    this.page = page;
    this.readings = []; // {time, families} of the last quantileSeconds
    this.only = ""; // the only model whose requests they are, "" for all models
    const percentiles = quantiles.map((q) => ({ name: `p${100 * q}` }));
    this.charts = {
      ttft: new LineChart({ title: "Time to first token", series: percentiles, format: seconds }),
      itl: new LineChart({ title: "Time between tokens", series: percentiles, format: seconds }),
      duration: new LineChart({ title: "Duration of requests", series: percentiles,
        format: seconds }),
      tokens: new LineChart({ title: "Tokens per second",
        series: [{ name: "generated" }, { name: "prompt" }], format: rate, floor: 10 }),
      requests: new LineChart({ title: "Requests", series: [{ name: "running" },
        { name: "waiting" }], format: rate, floor: 4 }),
      cache: new LineChart({ title: "KV cache in use", series: [{ name: "used" }],
        format: percent, floor: 0.1 }),
    };
    byId("request-charts").append(...Object.values(this.charts).map((chart) => chart.node));
    this.tiles = {};
    byId("request-tiles").append(...tiles.map(([name, title]) => {
      this.tiles[name] = el("dd", {}, none);
      return el("div", { class: "card tile" }, el("dt", {}, title), this.tiles[name]);
    }));
    byId("requests-exports").replaceWith(exportButtons({ what: "the charts", name: "requests",
      node: () => byId("requests"), rows: () => this.#rows() }));
    this.poller = new Poller((signal) => this.#ask(signal), pollMilliseconds, (error) => {
      page.setState(error);
      byId("requests-note").hidden = !error;
      if (error) setText(byId("requests-note"), `No metrics: ${error.message}.`);
    });
    for (const input of document.getElementsByName("requests-of")) {
      input.addEventListener("change", () => {
        this.reset();
        this.poller.refresh();
      });
    }
    this.options = new LinkedOptions({ of: linkRadios("requests-of") });
  }

  show() {
    this.hasHistory = true; // until the server refuses it
    this.poller.start();
  }

  hide() {
    this.poller.stop();
  }

  // Begins anew, for the requests of other models.
  reset() {
    this.readings = [];
    this.hasHistory = true;
    for (const chart of Object.values(this.charts)) chart.clear();
  }

  // Returns the name of the only model whose requests are shown, "" if they are those of all. The
  // metrics know each model by one of its names.
  #onlyModel(families) {
    const all = document.querySelector("[name=requests-of]:checked").value === "all";
    const known = (families.get("requests_running") ?? []).some(({ labels }) =>
      labels.model === model.get());
    return known && !all ? model.get() : "";
  }

  // All charts have their points at the same times.
  #rows() {
    const charts = Object.entries(this.charts);
    const head = ["time", ...charts.flatMap(([name, { series }]) =>
      series.map((one) => `${name}_${one.name}`))];
    return [head, ...this.charts.ttft.points.map(({ time }, i) => [
      new Date(1000 * time).toISOString(),
      ...charts.flatMap(([, { points }]) =>
        points[i].values.map((value) => (Number.isFinite(value) ? value : "")))])];
  }

  async #ask(signal) {
    const begin = Date.now() / 1000;
    const families = parseMetrics(await getText("metrics", signal), wanted);
    const only = this.#onlyModel(families);
    if (only !== this.only) this.reset();
    this.only = only;
    if (this.hasHistory && this.#isBehind()) await this.#catchUp(begin, signal);
    this.#take(Date.now() / 1000, only ? ofModel(families, only) : families);
  }

  #isBehind() {
    const last = this.readings.at(-1);
    return !last || Date.now() / 1000 - last.time > maxPauseSeconds;
  }

  // Takes the server's readings since the last one of this view, up to the time `end`.
  async #catchUp(end, signal) {
    let history;
    try {
      const query = queryOf(this.only ? { model: this.only } : {});
      history = await getJson(`v1/metrics/history${query}`, signal);
    } catch (error) {
      if (error.status !== 403 && error.status !== 404) throw error;
      this.hasHistory = false; // the charts begin now
      return;
    }
    const now = Date.now() / 1000;
    for (const reading of history.readings) {
      const time = now - reading.age_seconds;
      const last = this.readings.at(-1)?.time ?? -Infinity;
      if (time > last + 1 && time < end) this.#take(time, familiesOf(reading, history.bounds), false);
    }
  }

  // `shown`: whether this reading is the newest one, which the tiles show.
  #take(time, families, shown = true) {
    const value = (name) => valueOf(families, name);
    const last = this.readings.at(-1);
    if (last && time <= last.time) {
      // The computer's clock was set back.
      this.readings = [];
      for (const chart of Object.values(this.charts)) chart.clear();
    }
    // If a counter has decreased, the server was restarted.
    const restarted = last && counters.some((read) => read(families) < read(last.families));
    // After a pause in polling, drop the older readings: a difference to them would describe the
    // whole pause, but a point of a chart describes the time just before it.
    if (restarted || (last && time - last.time > quantileSeconds)) this.readings = [];
    const before = this.readings.at(-1);
    this.readings.push({ time, families });
    while (this.readings.length > 2 && time - this.readings[1].time > quantileSeconds) {
      this.readings.shift();
    }
    const base = this.readings[0].families;
    for (const [name, family] of Object.entries(histograms)) {
      const delta = bucketDelta(buckets(families, family), buckets(base, family));
      this.charts[name].add(time, quantiles.map((q) => quantile(delta, q)), shown);
    }
    const perSecond = (read) =>
      (before ? (read(families) - read(before.families)) / (time - before.time) : NaN);
    this.charts.tokens.add(time, [perSecond(tokensGiven),
      perSecond((of) => valueOf(of, "prompt_tokens_total"))], shown);
    this.charts.requests.add(time, [value("requests_running"), value("requests_waiting")], shown);
    this.charts.cache.add(time, [cacheInUse(families)], shown);
    if (!shown) return;
    setText(this.tiles.finished, count(value("requests_finished_total")));
    setText(this.tiles.rejected, count(value("requests_rejected_total")));
    setText(this.tiles.generated, compact(value("generation_tokens_total")));
    setText(this.tiles.preemptions, count(value("preemptions_total")));
    const queried = value("prefix_cache_queried_tokens_total");
    setText(this.tiles.hits,
      queried > 0 ? percent(value("prefix_cache_hit_tokens_total") / queried) : none);
  }
}

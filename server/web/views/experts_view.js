// The "Experts" view: load of the experts in a time window.
import { getOfModel, stack } from "../api.js";
import { BarChart } from "../charts/charts.js";
import { byId, el, setOptions, setText } from "../dom.js";
import { exportButtons } from "../export/export_buttons.js";
import { blockKey, blockLabel, blockTitle, compact, count, decimal, none, percent }
  from "../format.js";
import { Heatmap } from "../charts/heatmap.js";
import { LoadScale } from "../charts/color_scales.js";
import { LinkedOptions, linkRadios } from "../linked_options.js";
import { bar } from "../charts/marks.js";
import { Poller } from "../poller.js";

const pollMilliseconds = 2000;
const thresholds = [0, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5];
const numListed = 6;
const maxDeadListed = 24;

const sum = (values) => values.reduce((a, b) => a + b, 0);

// Computes the load of a block: each expert's share relative to an even share, and measures of
// balance.
export function measure(layer) {
  const total = sum(layer.counts);
  const relative = layer.counts.map((n) => (total > 0 ? (n / total) * layer.counts.length : 0));
  const highest = layer.counts.reduce((a, b) => Math.max(a, b), 0);
  let entropy = 0;
  for (const n of layer.counts) if (n > 0) entropy -= (n / total) * Math.log(n / total);
  const dead = layer.counts.flatMap((n, e) => (n === 0 ? [e] : []));
  return {
    total,
    relative,
    dead: total > 0 ? dead : [],
    hottest: layer.counts.indexOf(highest),
    balance: total > 0 ? total / layer.counts.length / highest : NaN,
    entropy: total > 0 ? (layer.counts.length > 1 ? entropy / Math.log(layer.counts.length) : 1)
      : NaN,
  };
}

export class ExpertsView {
  constructor(page) {
    this.page = page;
    this.stats = null;
    this.loads = [];
    this.heatmap = new Heatmap({ label: "Load by layer and expert", describedBy: "readout",
      scale: new LoadScale(), onCursor: (row, column, moved) => this.#showCursor(row, column, moved) });
    byId("heatmap").replaceWith(this.heatmap.node, this.heatmap.extent.node);
    byId("heatmap-legend").replaceWith(this.heatmap.legend);
    this.diversity = new BarChart({ label: "Tokens by number of distinct experts",
      unit: "experts" });
    byId("diversity").replaceWith(this.diversity.node);
    this.poller = new Poller((signal) => this.#ask(signal), pollMilliseconds,
      (error) => this.#onState(error));
    for (const input of document.getElementsByName("window")) {
      input.addEventListener("change", () => this.poller.refresh());
    }
    const slider = byId("threshold");
    slider.max = thresholds.length - 1;
    slider.addEventListener("input", () => {
      this.#showThreshold();
      this.poller.refresh();
    });
    this.#showThreshold();
    this.#showCursor(null, null, true);
    byId("load-block").addEventListener("change", () => this.#showTable());
    byId("load-details").addEventListener("toggle", () => this.#showTable());
    byId("diversity-block").addEventListener("change", () => this.#showDiversity());
    byId("loads-exports").replaceWith(exportButtons({ what: "the loads", name: "loads",
      node: () => byId("heatmap-card"), rows: () => this.#loadRows() }));
    byId("balance-exports").replaceWith(exportButtons({ what: "the balance", name: "balance",
      node: () => byId("balance-card"), rows: () => this.#balanceRows() }));
    this.options = new LinkedOptions({ window: linkRadios("window"), threshold: thresholdLink,
      block: tableLink, diversity: byId("diversity-block") });
  }

  show() {
    this.poller.start();
  }

  hide() {
    this.poller.stop();
  }

  // Forgets what another model has done.
  reset() {
    this.stats = null;
    byId("experts-body").hidden = true;
    this.#showNote("");
    setText(byId("window-note"), "");
  }

  async #ask(signal) {
    const query = { threshold: thresholds[byId("threshold").value], ...stack.field() };
    const window = document.querySelector("[name=window]:checked").value;
    if (window) query.window = window;
    this.#show(await getOfModel("v1/experts/stats", query, signal));
  }

  #onState(error) {
    // Status 404 means that this server collects no statistics, not that the connection has failed.
    const missing = error?.status === 404;
    this.page.setState(missing ? null : error);
    if (missing) this.poller.stop();
    if (missing || (error && !this.stats)) {
      byId("experts-body").hidden = true;
      this.#showNote(`No statistics: ${error.message}.`);
    }
  }

  #showNote(text) {
    byId("experts-note").hidden = !text;
    setText(byId("experts-note"), text);
  }

  #show(stats) {
    this.stats = stats;
    this.page.noteModel(stats.model);
    const { layers } = stats;
    this.#showNote(layers.length > 0 ? "" : "This model has no routed blocks: it is dense.");
    byId("experts-body").hidden = layers.length === 0;
    if (layers.length === 0) return;
    this.loads = layers.map(measure);
    setText(byId("window-note"), windowNote(stats));
    this.#showTiles();
    this.heatmap.set(layers.map((layer, i) =>
      ({ label: blockLabel(layer), values: this.loads[i].relative })));
    const blocks = layers.map((layer) => [blockKey(layer), blockTitle(layer)]);
    setOptions(byId("load-block"), blocks);
    const all = layers.some((layer) => layer.split_heads > 1) ? "all that split" : "all";
    setOptions(byId("diversity-block"), stats.diversity ? [["", all], ...blocks] : blocks);
    this.#showBalance();
    this.#showRanking();
    this.#showDiversity();
    this.#showTable();
  }

  #showThreshold() {
    const value = percent(thresholds[byId("threshold").value]);
    setText(byId("threshold-text"), value);
    byId("threshold").setAttribute("aria-valuetext", value);
  }

  #showTiles() {
    const { stats } = this;
    const idle = stats.tokens === 0;
    setText(byId("activation-ratio"), idle ? none : percent(stats.activation_ratio));
    setText(byId("activated-parameters"),
      idle ? none : compact(stats.activated_parameters_per_token));
    setText(byId("activated-note"),
      `for each token, ${compact(stats.always_active_parameters)} of them always`);
    const tokens = sum(stats.layers.map((layer) => layer.tokens));
    const distinct = sum(stats.layers.map((layer) => layer.tokens * layer.distinct_experts_mean));
    setText(byId("distinct-mean"), tokens > 0 ? decimal(distinct / tokens) : none);
    setText(byId("window-tokens"), count(stats.tokens));
    const dead = sum(this.loads.map((load) => load.dead.length));
    const experts = sum(stats.layers.map((layer) => layer.experts));
    setText(byId("dead-note"), idle ? `${count(experts)} experts waiting`
      : `${count(dead)} of ${count(experts)} experts chosen by none`);
  }

  #showBalance() {
    // The server records router scores in some steps only, or never.
    const scored = this.stats.layers.some((layer) => layer.router?.rows > 0);
    byId("router-head").hidden = !scored;
    const rows = this.stats.layers.map((layer, i) => {
      const load = this.loads[i];
      const idle = load.total === 0;
      return el("tr", {},
        el("th", { scope: "row" }, blockTitle(layer)),
        meterCell(load.balance), meterCell(load.entropy),
        scored ? el("td", { class: "number" },
          layer.router?.rows > 0 ? decimal(layer.router.entropy_mean) : none) : null,
        el("td", { class: "number" },
          idle ? none : `${load.hottest} (${decimal(load.relative[load.hottest])}×)`),
        el("td", { class: "number" }, idle ? none : count(load.dead.length)));
    });
    byId("balance-table").tBodies[0].replaceChildren(...rows);
  }

  #showRanking() {
    const all = this.stats.layers.flatMap((layer, i) =>
      this.loads[i].relative.map((value, expert) => ({ layer, expert, value })));
    const alive = all.filter(({ value }) => value > 0).sort((a, b) => b.value - a.value);
    const top = alive[0]?.value ?? 1;
    const list = (entries) => entries.map(({ layer, expert, value }) =>
      el("li", {},
        el("span", {}, `${blockLabel(layer)} · expert ${expert}`),
        bar(value / top),
        el("span", { class: "number" }, `${decimal(value)}×`)));
    byId("hot").replaceChildren(...list(alive.slice(0, numListed)));
    byId("cold").replaceChildren(...list(alive.slice(-numListed).reverse()));
    const dead = this.stats.layers.flatMap((layer, i) => {
      const ids = this.loads[i].dead;
      if (ids.length === 0) return [];
      const more = ids.length > maxDeadListed ? ` and ${ids.length - maxDeadListed} more` : "";
      return [el("li", {}, el("strong", {}, `${blockLabel(layer)}: `),
        ids.slice(0, maxDeadListed).join(", ") + more)];
    });
    byId("dead").replaceChildren(...(dead.length > 0 ? dead : [el("li", { class: "muted" },
      this.stats.tokens > 0 ? "None in this window." : "No tokens in this window.")]));
  }

  #showDiversity() {
    const { stats } = this;
    if (!stats || stats.layers.length === 0) return;
    const key = byId("diversity-block").value;
    const layer = stats.layers.find((one) => blockKey(one) === key);
    const histogram = layer ? layer.distinct_experts_histogram : stats.diversity.histogram;
    this.diversity.set(histogram);
    const tokens = sum(histogram);
    const mean = sum(histogram.map((n, value) => n * value)) / tokens;
    let splits = "";
    let each = "";
    if (layer?.split_heads > 1) {
      splits = `${layer.split_heads} sub-tokens of a token, ${layer.max_selected} experts each. `;
    } else if (!layer) {
      const { blocks } = stats.diversity;
      each = `, ${decimal(mean / blocks)} for each of ${blocks} blocks`;
    }
    setText(byId("diversity-note"), tokens > 0
      ? `${splits}Mean ${decimal(mean)}${each}; ${count(tokens)} tokens.` : "No tokens yet.");
  }

  #showTable() {
    if (!byId("load-details").open || !this.stats) return;
    const at = this.stats.layers.findIndex((one) => blockKey(one) === byId("load-block").value);
    if (at < 0) return;
    const layer = this.stats.layers[at];
    const { relative, total } = this.loads[at];
    byId("load-table").tBodies[0].replaceChildren(...layer.counts.map((selections, e) =>
      el("tr", {},
        el("th", { scope: "row" }, String(e)),
        ...[count(selections), percent(total > 0 ? selections / total : NaN),
          decimal(total > 0 ? relative[e] : NaN),
          decimal(selections > 0 ? layer.weight_sums[e] / selections : NaN),
          count(layer.expert_parameters[e])].map((text) => el("td", { class: "number" }, text)))));
  }

  #loadRows() {
    const head = ["layer", "block", "expert", "selections", "share", "times_even", "mean_weight",
      "parameters"];
    return [head, ...(this.stats?.layers ?? []).flatMap((layer, i) => {
      const { relative, total } = this.loads[i];
      return layer.counts.map((selections, e) => [layer.layer, layer.block, e, selections,
        total > 0 ? selections / total : "", total > 0 ? relative[e] : "",
        selections > 0 ? layer.weight_sums[e] / selections : "", layer.expert_parameters[e]]);
    })];
  }

  #balanceRows() {
    const head = ["layer", "block", "selections", "balance", "load_entropy", "router_entropy",
      "hottest_expert", "hottest_times_even", "dead_experts"];
    return [head, ...(this.stats?.layers ?? []).map((layer, i) => {
      const { total, balance, entropy, hottest, relative, dead } = this.loads[i];
      const router = layer.router?.rows > 0 ? layer.router.entropy_mean : "";
      return [layer.layer, layer.block, total, ...(total > 0
        ? [balance, entropy, router, hottest, relative[hottest], dead.length]
        : ["", "", router, "", "", ""])];
    })];
  }

  #showCursor(row, column, moved) {
    // Screen readers speak what the cursor points at, but not each update of it.
    byId("readout").setAttribute("aria-live", moved ? "polite" : "off");
    if (row === null) {
      setText(byId("readout"), "Point at a cell, or focus the map and use the arrow keys.");
      return;
    }
    const layer = this.stats.layers[row];
    const { relative, total } = this.loads[row];
    const selections = layer.counts[column];
    const place = `${blockTitle(layer)}, expert ${column}`;
    if (total === 0) {
      setText(byId("readout"), `${place}: no tokens in this window`);
      return;
    }
    const weight = selections > 0
      ? `, mean weight ${decimal(layer.weight_sums[column] / selections)}` : "";
    setText(byId("readout"),
      `${place}: ${percent(selections / total)} of the selections, ` +
      `${decimal(relative[column])} × an even share ` +
      `(${count(selections)} of ${count(total)}${weight})`);
  }
}

// The address has the threshold itself, not its place on the slider.
const thresholdLink = {
  get: () => (byId("threshold").value === "0" ? "" : String(thresholds[byId("threshold").value])),
  set(value) {
    byId("threshold").value = Math.max(0, thresholds.indexOf(Number(value)));
    byId("threshold").dispatchEvent(new Event("input", { bubbles: true }));
  },
};

// The block of the table of loads, if the table is open.
const tableLink = {
  get: () => (byId("load-details").open
    ? byId("load-block").dataset.wanted ?? byId("load-block").value : ""),
  set(value) {
    const select = byId("load-block");
    if (select.options.length === 0 && value !== "") select.dataset.wanted = value;
    else if ([...select.options].some((one) => one.value === value)) select.value = value;
    byId("load-details").open = value !== "";
    select.dispatchEvent(new Event("change", { bubbles: true }));
  },
};

function windowNote({ window_seconds: covered, tokens }) {
  if (covered === null) return "Since the server started.";
  const time = covered < 90 ? `${covered.toFixed(0)} s` : `${(covered / 60).toFixed(1)} min`;
  return tokens > 0 ? `The last ${time}.` : `No tokens in the last ${time}.`;
}

const meterCell = (value) =>
  el("td", {}, el("span", { class: "meter" }, bar(Number.isFinite(value) ? value : 0),
    el("span", { class: "number" }, decimal(value))));

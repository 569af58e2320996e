// The "Tokens" view: tokens that select an expert more often than chance would.
import { getOfModel, stack } from "../api.js";
import { byId, debounce, el, setOptions, setText } from "../dom.js";
import { bar, swatch } from "../charts/marks.js";
import { exportButtons } from "../export/export_buttons.js";
import { blockKey, blockTitle, compact, count, decimal, visible } from "../format.js";
import { LinkedOptions, linkRadios } from "../linked_options.js";
import { Poller } from "../poller.js";

const pollMilliseconds = 10000;
const maxExpertsShown = 512;
// More experts without tokens share one line.
const maxEmptyCards = 16;

export class TokensView {
  constructor(page) {
    this.page = page;
    this.layers = [];
    this.answer = null;
    this.poller = new Poller((signal) => this.#ask(signal), pollMilliseconds,
      (error) => this.#onState(error));
    byId("tokens-form").addEventListener("submit", (event) => event.preventDefault());
    const refresh = debounce(() => this.poller.refresh(), 250);
    for (const id of ["tokens-top", "tokens-min"]) byId(id).addEventListener("input", refresh);
    byId("tokens-block").addEventListener("change", () => this.poller.refresh());
    byId("tokens-expert").addEventListener("change", () => this.#draw());
    for (const input of document.getElementsByName("pmi")) {
      input.addEventListener("change", () => {
        this.#draw();
        this.poller.refresh(); // for the tokens that are the first by this value
      });
    }
    byId("tokens-exports").replaceWith(exportButtons({ what: "the tokens", name: "tokens",
      node: () => byId("tokens-card"), rows: () => this.#rows() }));
    this.options = new LinkedOptions({ block: byId("tokens-block"),
      expert: byId("tokens-expert"), top: byId("tokens-top"), min_count: byId("tokens-min"),
      show: linkRadios("pmi") });
  }

  show() {
    this.layers = []; // another model may be loaded by now
    this.poller.start();
  }

  hide() {
    this.poller.stop();
  }

  // Forgets what another model has done.
  reset() {
    this.answer = null;
    this.#draw();
  }

  async #ask(signal) {
    if (this.layers.length === 0) {
      this.layers = (await getOfModel("v1/experts/stats", stack.field(), signal)).layers;
      setOptions(byId("tokens-block"),
        this.layers.map((layer) => [blockKey(layer), blockTitle(layer)]));
      if (this.layers.length === 0) {
        this.#note("This model has no routed blocks: it is dense.");
        return;
      }
    }
    const layer = this.layers.find((one) => blockKey(one) === byId("tokens-block").value);
    const top = byId("tokens-top").valueAsNumber;
    const least = byId("tokens-min").valueAsNumber;
    if (!byId("tokens-form").checkValidity() || !Number.isInteger(top + least)) {
      this.#note("Give whole numbers of tokens: 1 to 50, seen at least once.");
      return;
    }
    this.answer = await getOfModel("v1/experts/tokens",
      { ...stack.field(), layer: layer.layer, block: layer.block, top, min_count: least,
        rank: chosenKind().replace("log_", "") }, signal);
    this.#draw();
  }

  #onState(error) {
    // Status 404 means that this server does not count tokens, not that the connection has failed.
    const missing = error?.status === 404;
    this.page.setState(missing ? null : error);
    if (missing) this.poller.stop();
    // With status 503 the server is busy: keep the last response until the next poll succeeds.
    if (!error || error.status === 503) return;
    this.answer = null;
    this.layers = [];
    this.#draw();
    this.#note(missing ? `Token statistics are not available: ${error.message}.`
      : `No token statistics: ${error.message}.`);
  }

  #note(text) {
    byId("tokens-note").hidden = !text;
    setText(byId("tokens-note"), text);
  }

  #shown() {
    const experts = (this.answer?.experts ?? []).slice(0, maxExpertsShown);
    const chosen = byId("tokens-expert").value;
    return experts.filter(({ expert }) => chosen === "" || String(expert) === chosen);
  }

  #rows() {
    const head = ["layer", "block", "expert", "token_id", "token", "count", "pmi", "log_pmi",
      "g2"];
    return [head, ...this.#shown().flatMap(({ expert, tokens }) =>
      tokens.map(({ id, text, count: seen, pmi, log_pmi: logPmi, g2 }) =>
        [this.answer.layer, this.answer.block, expert, id, text, seen, pmi, logPmi, g2]))];
  }

  #draw() {
    const experts = (this.answer?.experts ?? []).slice(0, maxExpertsShown);
    this.#note("");
    // An expert that the address names stays wanted until the experts are known.
    if (this.answer) {
      setOptions(byId("tokens-expert"),
        [["", "all"], ...experts.map(({ expert }) => [String(expert), String(expert)])]);
    }
    const shown = this.#shown();
    const empty = shown.filter(({ tokens }) => tokens.length === 0);
    const listed = empty.length > maxEmptyCards
      ? shown.filter(({ tokens }) => tokens.length > 0) : shown;
    byId("tokens-list").replaceChildren(
      ...listed.map((entry) => expertCard(entry, chosenKind())));
    byId("tokens-empty").hidden = listed === shown;
    setText(byId("tokens-empty"), listed === shown ? "" : `${count(empty.length)} experts without ` +
      `a token seen often enough: ${empty.map(({ expert }) => expert).join(", ")}.`);
    const limited = (this.answer?.counted_tokens ?? 0) < (this.answer?.vocabulary ?? 0);
    byId("tokens-limited").hidden = !limited;
    setText(byId("tokens-limited"), !limited ? "" :
      `The table has counts of ${count(this.answer.counted_tokens)} of the ` +
      `${count(this.answer.vocabulary)} tokens: those that occur most often. ` +
      `--token-stats-mib ${this.answer.token_stats_mib_of_all} counts all.`);
    if (this.answer && experts.every(({ tokens }) => tokens.length === 0)) {
      this.#note("No token was seen often enough yet.");
    }
  }
}

const chosenKind = () => document.querySelector("[name=pmi]:checked").value;

function expertCard({ expert, tokens: all }, kind) {
  // Evidence below 0 is for tokens that choose the expert less often than chance.
  const tokens = all.filter((token) => kind !== "g2" || Number(token.g2) >= 0);
  const values = tokens.map((token) => Number(token[kind]));
  const order = tokens.map((_, i) => i).sort((a, b) => values[b] - values[a]);
  const top = Math.max(...values, 0);
  const title = el("h3", {}, swatch(expert), `Expert ${expert}`);
  if (tokens.length === 0) {
    return el("article", { class: "token-expert" }, title,
      el("p", { class: "muted" }, "No token seen often enough."));
  }
  return el("article", { class: "token-expert", "data-expert": expert }, title,
    el("ol", { class: "ranking" }, order.map((i) => {
      const { text, id, count: seen } = tokens[i];
      return el("li", { title: `token ${id}, seen ${count(seen)} times` },
        el("code", {}, text === null ? `#${id}` : visible(text)),
        bar(top > 0 ? Math.max(0, values[i] / top) : 0),
        el("span", { class: "number" }, kind === "count" || Math.abs(values[i]) >= 1000
          ? compact(values[i]) : decimal(values[i])));
    })));
}

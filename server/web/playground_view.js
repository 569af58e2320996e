// The "Playground" view: a prompt, its streamed completion, and the experts that computed each
// token.
import { getJson, streamCompletion } from "./api.js";
import { byId, el, setOptions, setText } from "./dom.js";
import { blockKey, blockTitle, count, decimal, percent, seconds, visible } from "./format.js";
import { Poller } from "./poller.js";
import { makeLayout, RoutingRecord, summarize } from "./routing_record.js";
import { expertColor } from "./theme.js";

const maxChips = 4096;
const retryMilliseconds = 2000;

export class PlaygroundView {
  constructor(page) {
    this.page = page;
    this.layout = null;
    this.record = null;
    this.tokens = []; // {text, position, generated, logprob, chip}
    this.chosen = null;
    this.controller = null;
    this.recordsRefused = false; // true if the server keeps no routing records
    // Polls only until the layout has been loaded.
    this.poller = new Poller(() => this.#loadLayout(), retryMilliseconds, (error) => {
      page.setState(error);
      if (!error) this.poller.stop();
    });
    byId("prompt-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.controller) this.controller.abort();
      else this.#generate();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        byId("prompt-form").requestSubmit();
      }
    });
    byId("color-block").addEventListener("change", () => {
      for (const token of this.tokens) this.#paint(token);
    });
    byId("chips").addEventListener("keydown", (event) => this.#onKey(event));
  }

  show() {
    this.poller.start();
  }

  hide() {
    this.poller.stop();
  }

  async #loadLayout() {
    if (this.layout) return;
    this.layout = makeLayout(await getJson("v1/experts/layout"));
    setOptions(byId("color-block"),
      this.layout.blocks.map((block) => [blockKey(block), blockTitle(block)]));
    byId("color-label").hidden = this.layout.blocks.length === 0;
  }

  #note(text) {
    byId("playground-note").hidden = !text;
    setText(byId("playground-note"), text);
  }

  #request() {
    const body = {
      prompt: byId("prompt").value,
      max_tokens: byId("max-tokens").valueAsNumber,
      temperature: byId("temperature").valueAsNumber,
      echo: byId("show-prompt").checked,
      logprobs: 0,
      return_token_ids: true,
      stream_options: { include_usage: true },
    };
    const seed = byId("seed").valueAsNumber;
    if (Number.isInteger(seed)) body.seed = seed;
    if (!this.recordsRefused && this.layout.blocks.length > 0) body.return_routing = true;
    return body;
  }

  async #generate() {
    const controller = new AbortController();
    this.controller = controller;
    setText(byId("generate"), "Stop");
    this.#note("");
    try {
      await this.#loadLayout();
      this.#clear();
      const body = this.#request();
      try {
        await this.#stream(body, controller.signal);
      } catch (error) {
        if (error.code !== "not_enabled") throw error;
        delete body.return_routing;
        this.recordsRefused = true;
        this.#note(`Tokens without their experts: ${error.message}.`);
        await this.#stream(body, controller.signal);
      }
    } catch (error) {
      if (error.name !== "AbortError") this.#note(`No answer: ${error.message}.`);
    } finally {
      this.controller = null;
      setText(byId("generate"), "Generate");
    }
  }

  #clear() {
    this.tokens = [];
    this.chosen = null;
    this.record = new RoutingRecord(this.layout);
    byId("chips").replaceChildren();
    setText(byId("answer-note"), "");
    byId("detail-body").replaceChildren(el("p", { class: "muted" }, "No token chosen yet."));
  }

  async #stream(body, signal) {
    const begin = performance.now();
    let first = 0;
    let position = 0;
    let promptTokens = 0;
    let started = false;
    let generated = 0;
    for await (const chunk of streamCompletion(body, signal)) {
      const choice = chunk.choices?.[0];
      if (!choice) {
        this.#summary(chunk.usage, generated, first, begin);
        continue;
      }
      if (!started) {
        started = true;
        first = performance.now();
        promptTokens = choice.prompt_token_ids?.length ?? 0;
        position = body.echo ? 0 : promptTokens;
      }
      const texts = choice.logprobs?.tokens ?? [];
      texts.forEach((text, i) => {
        const isGenerated = position >= promptTokens;
        if (isGenerated) ++generated;
        this.#addToken(text, position++, isGenerated, choice.logprobs.token_logprobs?.[i]);
      });
      if (choice.routing) this.#addRouting(choice.routing);
    }
    for (const token of this.tokens) this.#paint(token);
  }

  #summary(usage, generated, first, begin) {
    const now = performance.now();
    const time = (now - begin) / 1000;
    const rate = now > first ? (generated - 1) / ((now - first) / 1000) : NaN;
    setText(byId("answer-note"),
      `${count(usage?.prompt_tokens)} prompt and ${count(generated)} generated tokens in ` +
      `${seconds(time)}, first after ${seconds((first - begin) / 1000)}` +
      (generated > 1 ? `, then ${rate < 100 ? decimal(rate) : count(rate)} a second.` : "."));
  }

  #addToken(text, position, generated, logprob) {
    if (this.tokens.length >= maxChips) return;
    const token = { text, position, generated, logprob };
    token.bar = el("span", { class: "chip-bar", "aria-hidden": "true" });
    token.chip = el("button", {
      type: "button", class: generated ? "chip" : "chip prompt-chip",
      tabindex: this.tokens.length === 0 ? 0 : -1, "aria-expanded": "false",
      "data-position": position,
      onclick: () => this.#toggle(token),
      onfocus: () => this.#choose(token),
      onpointerenter: (event) => event.pointerType === "mouse" && this.#choose(token),
    }, el("span", { class: "chip-text" }, visible(text)), token.bar);
    token.node = el("span", { class: "token" }, token.chip);
    this.tokens.push(token);
    byId("chips").append(token.node);
    this.#paint(token);
  }

  #addRouting(piece) {
    if (!this.record.add(piece)) {
      this.#note("A routing record of the answer does not fit this model.");
      return;
    }
    for (const token of this.tokens) {
      const at = token.position - piece.first_position;
      if (at >= 0 && at < piece.tokens) this.#paint(token);
    }
    if (this.chosen) this.#showDetail(this.chosen);
  }

  #block() {
    return this.layout.blocks.find((block) => blockKey(block) === byId("color-block").value);
  }

  // Shows the experts that a token selected in the chosen block, as far as they are known.
  #paint(token) {
    const block = this.#block();
    const rows = block ? this.record.rowsOf(token.position, block) : null;
    token.bar.replaceChildren(...(rows ? segments(summarize(rows)) : []));
    const experts = rows ? summarize(rows).map(({ expert }) => expert) : [];
    token.chip.setAttribute("aria-label", `${visible(token.text)}, ` +
      (rows ? `experts ${experts.join(", ")}` : "experts unknown"));
    token.chip.dataset.experts = experts.join(" ");
    if (token.subTokens) this.#unfold(token);
  }

  #toggle(token) {
    this.#choose(token);
    if (token.subTokens) {
      token.subTokens.remove();
      token.subTokens = null;
      token.chip.setAttribute("aria-expanded", "false");
    } else {
      this.#unfold(token);
    }
  }

  // Shows a token's rows in the chosen block, one below another.
  #unfold(token) {
    token.subTokens?.remove();
    token.subTokens = null;
    const block = this.#block();
    const rows = block ? this.record.rowsOf(token.position, block) : null;
    if (rows) {
      token.subTokens = el("span", { class: "sub-tokens", role: "list" },
        rows.map((row, r) => el("span", { class: "sub-token", role: "listitem",
          "data-experts": row.map(({ expert }) => expert).join(" ") },
          el("span", { class: "muted" }, rows.length > 1 ? `sub-token ${r}` : "experts"),
          expertBadges(row))));
      token.node.append(token.subTokens);
    }
    token.chip.setAttribute("aria-expanded", String(Boolean(rows)));
  }

  #choose(token) {
    if (this.chosen === token) return;
    this.chosen?.chip.classList.remove("chosen");
    this.chosen = token;
    token.chip.classList.add("chosen");
    this.#showDetail(token);
  }

  #showDetail(token) {
    const facts = [`Position ${token.position}, ${token.generated ? "generated" : "prompt"}`];
    if (typeof token.logprob === "number") {
      facts.push(`probability ${percent(Math.exp(token.logprob))}`);
    }
    const head = el("p", {}, el("code", { class: "detail-token" }, visible(token.text)), " ",
      el("span", { class: "muted" }, facts.join(", ")));
    if (!this.record.has(token.position)) {
      const last = token === this.tokens.at(-1);
      byId("detail-body").replaceChildren(head, el("p", { class: "muted" },
        last ? "No experts: the model has not read this token, it was the last one."
          : "The experts of this token are not known."));
      return;
    }
    const rows = this.layout.blocks.map((block) =>
      el("tr", { "data-block": blockKey(block) },
        el("th", { scope: "row" }, blockTitle(block)),
        el("td", {}, this.record.rowsOf(token.position, block).map((row, r) =>
          el("div", { class: "detail-row" },
            block.subTokens > 1
              ? el("span", { class: "muted row-number", title: `sub-token ${r}` }, `${r}`) : null,
            expertBadges(row))))));
    byId("detail-body").replaceChildren(head, el("table", { class: "detail-table" },
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Block"),
        el("th", { scope: "col" }, "Experts and weights"))),
      el("tbody", {}, rows)));
  }

  // Arrow keys, Home and End move between tokens; Tab leaves the list of tokens.
  #onKey(event) {
    const at = this.tokens.findIndex((token) => token.chip === event.target);
    if (at < 0) return;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0,
      End: this.tokens.length - 1 }[event.key];
    const next = this.tokens[to];
    if (!next) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    next.chip.tabIndex = 0;
    next.chip.focus();
  }
}

function segments(experts) {
  return experts.map(({ expert, weight }) => {
    const node = el("span", { "data-expert": expert });
    node.style.background = expertColor(expert);
    node.style.flexGrow = Number.isFinite(weight) ? Math.max(weight, 0.02) : 1;
    return node;
  });
}

function expertBadges(row) {
  return row.map(({ expert, weight }) => {
    const swatch = el("span", { class: "swatch", "aria-hidden": "true" });
    swatch.style.background = expertColor(expert);
    return el("span", { class: "badge", "data-expert": expert }, swatch, el("b", {}, `${expert}`),
      Number.isFinite(weight) ? el("span", { class: "muted" }, decimal(weight)) : null);
  });
}

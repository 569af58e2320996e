// Tokens as chips, each with a bar of its experts, and the details of the chosen token.
import { swatch } from "../charts/marks.js";
import { el, hasModifier } from "../dom.js";
import { blockKey, blockTitle, decimal, percent, visible } from "../format.js";
import { RoutingRecord, summarize } from "../routing_record.js";
import { expertColor } from "../theme.js";

const maxChips = 4096;
// Experts that a legend shows.
const maxLegend = 16;

export class TokenPanel {
  // `chips` and `detail` are elements that the panel fills. `blockName()` returns the key of the
  // block whose experts the bars and the tokens' colours show. `onChoose` is called before the
  // details of a token are shown; panels that share `detail` must then forget their own choice.
  // `legend`: a list that the panel fills with the experts that have given their colours, or null.
  // `routing`: null, or an object whose toggle(block, expert) is called when an expert is clicked and
  // whose kindOf(block, expert) is a class for the experts whose routing is changed. With
  // `openFirst`, the details of the first token are shown as soon as they are known.
  constructor({ chips, detail, blockName, onChoose = () => {}, legend = null, routing = null,
    openFirst = false }) {
    Object.assign(this, { chips, detail, blockName, onChoose, legend, routing, openFirst });
    this.layout = null;
    this.record = null;
    this.tokens = []; // {text, position, generated, logprob, chip}
    this.chosen = null;
    chips.addEventListener("keydown", (event) => this.#onKey(event));
  }

  clear(layout) {
    this.layout = layout;
    this.tokens = [];
    this.record = new RoutingRecord(layout);
    this.chips.replaceChildren();
    this.legend?.replaceChildren();
    // Without a chosen token, the details are those of another panel.
    if (!this.chosen) return;
    this.forgetChoice();
    this.detail.replaceChildren(el("p", { class: "muted" }, "No token chosen yet."));
  }

  add({ text, position, generated, logprob }) {
    if (this.tokens.length >= maxChips) return;
    const token = { text, position, generated, logprob };
    token.bar = el("span", { class: "chip-bar", "aria-hidden": "true" });
    token.chip = el("button", {
      type: "button", class: generated ? "chip" : "chip prompt-chip",
      tabindex: this.tokens.length === 0 ? 0 : -1, "aria-expanded": "false",
      "data-position": position,
      onclick: () => this.#toggle(token),
      onfocus: () => this.#onFocus(token),
      // Scrolling under the pointer enters tokens, too, but does not move the pointer.
      onpointermove: (event) => event.pointerType === "mouse" && !this.detail.dataset.pinned &&
        this.#choose(token),
    }, el("span", { class: "chip-text" }, visible(text)), token.bar);
    token.node = el("span", { class: "token" }, token.chip);
    if (this.tokens.length === 0) this.reachable = token;
    this.tokens.push(token);
    this.chips.append(token.node);
    this.#paint(token);
  }

  // Adds one routing record of the stream. Returns false if the record does not fit the model.
  addRouting(piece) {
    if (!this.record.add(piece)) return false;
    for (const token of this.tokens) {
      const at = token.position - piece.first_position;
      if (at >= 0 && at < piece.tokens) this.#paint(token);
    }
    const [first] = this.tokens;
    if (this.chosen) this.#showDetail(this.chosen);
    else if (this.openFirst && first && this.record.has(first.position)) this.#choose(first);
    this.#showLegend();
    return true;
  }

  // Paints all tokens again, after another block was chosen.
  repaint() {
    for (const token of this.tokens) this.#paint(token);
    this.#showLegend();
  }

  // Marks the experts again, after the routing was changed.
  markRouting() {
    for (const root of [this.chips, this.detail, this.legend]) {
      for (const badge of root?.querySelectorAll("button.badge") ?? []) this.#mark(badge);
    }
  }

  // Returns the tokens for a table: one row for each expert that a token's row selected, or one row
  // without an expert if the token's experts are unknown.
  table() {
    const head = ["position", "kind", "token", "logprob", "layer", "block", "sub_token", "expert",
      "weight"];
    const rows = this.tokens.flatMap(({ text, position, generated, logprob }) => {
      const facts = [position, generated ? "generated" : "prompt", text, logprob ?? ""];
      if (!this.record.has(position)) return [[...facts, "", "", "", "", ""]];
      return this.layout.blocks.flatMap((block) =>
        this.record.rowsOf(position, block).flatMap((row, r) => row.map(({ expert, weight }) =>
          [...facts, block.layer, block.block, r, expert, Number.isFinite(weight) ? weight : ""])));
    });
    return [head, ...rows];
  }

  #block() {
    return this.layout?.blocks.find((one) => blockKey(one) === this.blockName());
  }

  #rows(token) {
    const block = this.#block();
    return block ? this.record.rowsOf(token.position, block) : null;
  }

  // Shows the experts that a token selected in the chosen block, as far as they are known.
  #paint(token) {
    const rows = this.#rows(token);
    const experts = rows ? summarize(rows) : [];
    token.bar.replaceChildren(...segments(experts));
    token.dominant = experts[0]?.expert;
    token.chip.classList.toggle("tinted", experts.length > 0);
    if (experts.length > 0) token.chip.style.setProperty("--tint", expertColor(token.dominant));
    token.chip.title = experts.map(({ expert, weight }) =>
      `expert ${expert}${Number.isFinite(weight) ? `: ${decimal(weight)}` : ""}`).join("\n");
    const names = experts.map(({ expert }) => expert);
    token.chip.setAttribute("aria-label", `${visible(token.text)}, ` +
      (rows ? `experts ${names.join(", ")}` : "experts unknown"));
    token.chip.dataset.experts = names.join(" ");
    if (token.subTokens) this.#unfold(token);
  }

  // Shows which experts have given the tokens their colours, the most frequent ones first.
  #showLegend() {
    const block = this.#block();
    if (!this.legend || !block) return;
    const counts = new Map();
    for (const { dominant } of this.tokens) {
      if (dominant !== undefined) counts.set(dominant, (counts.get(dominant) ?? 0) + 1);
    }
    const sorted = [...counts].sort(([a, n], [b, m]) => m - n || a - b);
    const more = sorted.length - maxLegend;
    this.legend.replaceChildren(...sorted.slice(0, maxLegend).map(([expert, tokens]) =>
      el("li", {}, this.#badge(block, expert, `${tokens}`))),
    ...(more > 0 ? [el("li", { class: "muted" }, `and ${more} more`)] : []));
  }

  // Returns an expert's mark: its colour, its number and `note`.
  #badge(block, expert, note) {
    const content = [swatch(expert), el("b", {}, `${expert}`),
      note ? el("span", { class: "muted" }, note) : null];
    const attributes = { class: "badge", "data-expert": expert, "data-of": blockKey(block) };
    if (!this.routing) return el("span", attributes, ...content);
    const badge = el("button", { type: "button", ...attributes,
      onclick: () => this.routing.toggle(block, expert) }, ...content);
    this.#mark(badge);
    return badge;
  }

  #mark(badge) {
    const { expert, of } = badge.dataset;
    const [layer, block] = of.split("/");
    const kind = this.routing.kindOf({ layer, block }, Number(expert));
    badge.className = `badge ${kind}`;
    badge.setAttribute("aria-pressed", String(kind !== ""));
    badge.title = kind ? `Leave expert ${expert} as it is`
      : `Mask expert ${expert} and answer again`;
  }

  #badges(block, row) {
    return row.map(({ expert, weight }) =>
      this.#badge(block, expert, Number.isFinite(weight) ? decimal(weight) : ""));
  }

  #toggle(token) {
    this.#choose(token);
    this.detail.dataset.pinned = true; // the pointer can pass over other tokens on its way to it
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
    const rows = this.#rows(token);
    if (rows) {
      token.subTokens = el("span", { class: "sub-tokens", role: "list" },
        rows.map((row, r) => el("span", { class: "sub-token", role: "listitem",
          "data-experts": row.map(({ expert }) => expert).join(" ") },
          el("span", { class: "muted" }, rows.length > 1 ? `sub-token ${r}` : "experts"),
          this.#badges(this.#block(), row))));
      token.node.append(token.subTokens);
    }
    token.chip.setAttribute("aria-expanded", String(Boolean(rows)));
  }

  #choose(token) {
    if (this.chosen === token) return;
    this.onChoose();
    this.forgetChoice();
    this.chosen = token;
    token.chip.classList.add("chosen");
    this.#showDetail(token);
  }

  forgetChoice() {
    this.chosen?.chip.classList.remove("chosen");
    this.chosen = null;
    delete this.detail.dataset.pinned;
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
      this.detail.replaceChildren(head, el("p", { class: "muted" },
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
            this.#badges(block, row))))));
    this.detail.replaceChildren(head, el("table", { class: "detail-table" },
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Block"),
        el("th", { scope: "col" }, "Experts and weights"))),
      el("tbody", {}, rows)));
  }

  // The Tab key reaches one token: the one that was focused last.
  #onFocus(token) {
    this.reachable.chip.tabIndex = -1;
    this.reachable = token;
    token.chip.tabIndex = 0;
    this.#choose(token);
  }

  // Arrow keys, Home and End move between tokens; Tab leaves the list of tokens.
  #onKey(event) {
    const at = this.tokens.findIndex((token) => token.chip === event.target);
    if (at < 0) return;
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0,
      End: this.tokens.length - 1 }[event.key];
    const next = this.tokens[to];
    if (!next || hasModifier(event)) return;
    event.preventDefault();
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

// The experts whose routing a request changes: masked, or with a bias added to their scores.
import { swatch } from "../charts/marks.js";
import { el } from "../dom.js";
import { blockKey, blockTitle } from "../format.js";

const maxOverrides = 256;
const firstBias = 2;
const maxBias = 1000;
// "1/feed_forward/3" masks an expert, "1/feed_forward/3:-2.5" gives it a bias.
const spelled = /^(\d{1,6})\/(feed_forward|attention)\/(\d{1,9})(?::(-?\d{1,4}(?:\.\d{1,6})?))?$/;

export class RoutingOverrides {
  // Fills `list`, a <ul>. `onChange` is called after every change, also by set().
  constructor(list, onChange) {
    this.list = list;
    this.onChange = onChange;
    this.items = []; // {layer, block, expert, kind, bias, node}; kind and bias are form controls
  }

  get size() {
    return this.items.length;
  }

  // Returns "", "masked" or "biased". `block`: {layer, block}.
  kindOf(block, expert) {
    return this.#find(block, expert)?.kind.value ?? "";
  }

  // Masks the expert, or ends the change of an expert whose routing is changed.
  toggle(block, expert) {
    const item = this.#find(block, expert);
    if (item) this.#remove(item);
    else this.#append(block, expert);
    this.onChange();
  }

  clear() {
    this.set("");
  }

  // Drops the experts that the model does not have. `blocks`: those of a layout.
  keepThoseOf(blocks) {
    const lost = this.items.filter((item) => !blocks.some((block) =>
      blockKey(block) === blockKey(item) && item.expert < block.experts));
    lost.forEach((item) => this.#remove(item));
    if (lost.length > 0) this.onChange();
  }

  // Returns the field of a request.
  value() {
    const out = { masked_experts: [], biased_experts: [] };
    for (const { layer, block, expert, kind, bias } of this.items) {
      const place = { layer, block };
      if (kind.value === "masked") out.masked_experts.push({ ...place, experts: [expert] });
      else out.biased_experts.push({ ...place, expert, bias: bias.valueAsNumber });
    }
    return out;
  }

  // Returns the changes as the address has them.
  text() {
    return this.items.map(({ layer, block, expert, kind, bias }) =>
      `${layer}/${block}/${expert}${kind.value === "masked" ? "" : `:${bias.value}`}`).join(",");
  }

  // Sets the changes that text() has returned. Leaves out what is none.
  set(text) {
    this.items = [];
    this.list.replaceChildren();
    for (const part of text.split(",")) {
      const match = spelled.exec(part);
      if (!match) continue;
      const place = { layer: Number(match[1]), block: match[2] };
      if (this.#find(place, Number(match[3]))) continue;
      this.#append(place, Number(match[3]), match[4]);
    }
    this.onChange();
  }

  #find(block, expert) {
    return this.items.find((item) => item.expert === expert && blockKey(item) === blockKey(block));
  }

  // `bias`: a text, undefined to mask the expert.
  #append({ layer, block }, expert, bias) {
    if (this.items.length >= maxOverrides) return;
    const name = `${blockTitle({ layer, block })}, expert ${expert}`;
    const item = { layer, block, expert };
    item.kind = el("select", { "aria-label": `Change of ${name}`, onchange: () => this.#show(item) },
      el("option", { value: "masked" }, "is masked"),
      el("option", { value: "biased" }, "gets a bias of"));
    item.bias = el("input", { type: "number", min: -maxBias, max: maxBias, step: "any",
      value: bias ?? firstBias, required: true, "aria-label": `Bias of ${name}`,
      onchange: () => item.bias.checkValidity() && this.onChange() });
    if (bias !== undefined) item.kind.value = "biased";
    item.bias.hidden = bias === undefined;
    item.node = el("li", { class: "override" }, el("span", {}, swatch(expert), name), item.kind,
      item.bias, el("button", { type: "button", class: "small", "aria-label": `Leave ${name} as it is`,
        onclick: () => this.toggle(item, expert) }, "Remove"));
    this.items.push(item);
    this.list.append(item.node);
  }

  #show(item) {
    item.bias.hidden = item.kind.value === "masked";
    this.onChange();
  }

  #remove(item) {
    this.items.splice(this.items.indexOf(item), 1);
    item.node.remove();
  }
}

// The fields for a request's limits and sampling, which the playground and the comparison share.
import { el } from "../dom.js";

// Returns the stop strings that a text gives, one per line. The escapes \n, \r, \t and \\ stand for
// characters that a line cannot contain, or for the backslash.
export function parseStops(text) {
  const escapes = { n: "\n", r: "\r", t: "\t", "\\": "\\" };
  return text.split("\n").filter((line) => line !== "")
    .map((line) => line.replace(/\\([nrt\\])/g, (_, letter) => escapes[letter]));
}

export class SamplingOptions {
  // Appends the number fields to `host` and the field of the stop strings to `more`. The ids of the
  // fields begin with `prefix`.
  constructor({ host, more, prefix = "", minTokens = 1, maxTokens }) {
    const number = (name, title, attributes) => {
      this[name] = el("input", { type: "number", ...attributes });
      host.append(el("label", {}, `${title} `, this[name]));
    };
    number("maxTokens", "Tokens", { id: `${prefix}max-tokens`, min: minTokens, max: 2048,
      value: maxTokens, required: true });
    number("temperature", "Temperature", { id: `${prefix}temperature`, min: 0, max: 2, step: 0.05,
      value: 0.7, required: true });
    number("topP", "Top-p", { id: `${prefix}top-p`, min: 0.01, max: 1, step: 0.01, value: 0.9,
      required: true });
    number("seed", "Seed", { id: `${prefix}seed`, min: 0, max: Number.MAX_SAFE_INTEGER,
      placeholder: "random" });
    this.stop = el("textarea", { id: `${prefix}stop`, rows: 2, spellcheck: "false",
      maxlength: 2000 });
    more.append(el("label", { class: "block", for: `${prefix}stop` },
      "Stop strings, one per line (\\n is a line break)"), this.stop);
  }

  // Returns the fields of a request.
  fields() {
    const out = {
      max_tokens: this.maxTokens.valueAsNumber,
      temperature: this.temperature.valueAsNumber,
      top_p: this.topP.valueAsNumber,
    };
    if (Number.isInteger(this.seed.valueAsNumber)) out.seed = this.seed.valueAsNumber;
    const stop = parseStops(this.stop.value);
    if (stop.length > 0) out.stop = stop;
    return out;
  }

  // Returns the controls by their names in the address.
  controls() {
    return { max_tokens: this.maxTokens, temperature: this.temperature, top_p: this.topP,
      seed: this.seed, stop: this.stop };
  }
}

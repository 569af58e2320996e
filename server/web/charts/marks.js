// Small marks within texts and tables.
import { el } from "../dom.js";
import { expertColor } from "../theme.js";

// A bar that is `share` (0 to 1) of its track long. Decoration: the number stands next to it.
export function bar(share) {
  const fill = el("span", { class: "bar-fill" });
  fill.style.width = `${(100 * share).toFixed(1)}%`;
  return el("span", { class: "bar-track", "aria-hidden": "true" }, fill);
}

// A square in the colour of an expert.
export function swatch(expert) {
  const node = el("span", { class: "swatch", "aria-hidden": "true" });
  node.style.background = expertColor(expert);
  return node;
}

// A bar chart with two bars for each expert: its shares in two distributions.
import { labelStep, onWidth } from "./charts.js";
import { el, svg } from "../dom.js";
import { ExtentNote } from "./extent_note.js";
import { percent } from "../format.js";

const margin = { left: 44, right: 4, top: 8, bottom: 20 };
const height = 120;
const minPairWidth = 3;

export class PairedBars {
  constructor(title) {
    this.title = title;
    this.plot = svg("svg", { class: "plot", role: "img", "aria-label": title, height });
    this.facts = el("span", { class: "muted" });
    const scroller = el("div", { class: "scroll", tabindex: 0, role: "region",
      "aria-label": `Bars of ${title}` }, this.plot);
    this.slot = 0; // width of a pair in CSS pixels
    this.extent = new ExtentNote(scroller, () =>
      ({ left: margin.left, width: this.slot, count: this.a.length }));
    this.node = el("figure", { class: "chart paired" },
      el("figcaption", {}, title, " ", this.facts), scroller, this.extent.node);
    onWidth(this.node, () => this.draw());
  }

  // `a` and `b`: shares by expert. `top`: the share at the upper end of the axis. `facts`: a text
  // about both, shown and spoken.
  set({ a, b, top, facts }) {
    Object.assign(this, { a, b, top });
    this.facts.textContent = facts;
    const gaps = a.map((share, i) => Math.abs(share - b[i]));
    const most = gaps.indexOf(Math.max(...gaps));
    this.plot.setAttribute("aria-label", `${this.title}: ${facts}; largest difference at expert ` +
      `${most}, ${percent(a[most])} in A and ${percent(b[most])} in B`);
    this.plot.style.minWidth = `${a.length * minPairWidth + margin.left + margin.right}px`;
    this.draw();
  }

  draw() {
    const width = this.plot.clientWidth;
    if (width === 0 || !this.a) return;
    const slot = this.slot = (width - margin.left - margin.right) / this.a.length;
    const base = height - margin.bottom;
    const y = (share) => base - (base - margin.top) * (share / this.top);
    const parts = [0, 0.5, 1].flatMap((part) => [
      svg("line", { class: "grid", x1: margin.left, x2: width - margin.right,
        y1: y(part * this.top), y2: y(part * this.top) }),
      svg("text", { class: "tick", x: margin.left - 6, y: y(part * this.top) + 4,
        "text-anchor": "end" }, `${Number((100 * part * this.top).toPrecision(3))} %`)]);
    const every = labelStep(slot, 26);
    const bar = Math.min(slot * 0.4, 22);
    this.a.forEach((share, expert) => {
      const middle = margin.left + (expert + 0.5) * slot;
      [["a", share, middle - bar], ["b", this.b[expert], middle]].forEach(([name, value, x]) => {
        // The border of an outlined bar lies inside its rectangle.
        const inset = name === "b" && bar > 4 ? 1 : 0;
        parts.push(svg("rect", { class: `pair-${name}`, x: x + inset, width: bar - 2 * inset,
          y: y(value) + inset, height: Math.max(0, base - y(value) - inset), "data-expert": expert,
          "data-share": value },
        svg("title", {}, `expert ${expert}: ${percent(value)} in ${name.toUpperCase()}`)));
      });
      if (expert % every === 0) {
        parts.push(svg("text", { class: "tick", x: middle, y: height - 5,
          "text-anchor": "middle" }, String(expert)));
      }
    });
    this.plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.plot.replaceChildren(...parts);
    this.extent.update();
  }
}

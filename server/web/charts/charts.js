// Small SVG charts: lines over time, and bars.
import { el, svg } from "../dom.js";
import { none, percent, wholePercent } from "../format.js";

// Returns the smallest number not below `value` that is 1, 2 or 5 times a power of ten.
export function niceCeiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  const step = [1, 2, 5, 10].find((s) => s * power >= value * (1 - 1e-9));
  return step * power;
}

// Returns of how many columns of `width` pixels one gets a label that takes `room` pixels: a power of
// two.
export const labelStep = (width, room) => 2 ** Math.max(0, Math.ceil(Math.log2(room / width)));

// The time axis spans 60, 120 or 300 seconds: the shortest span that covers the oldest point.
const spans = [60, 120, 300];
const maxSpan = spans.at(-1);
// Points that are further apart are not joined by a line, because nothing was measured meanwhile.
const maxGapSeconds = 10;

const margin = { left: 52, right: 10, top: 8, bottom: 22 };
const height = 150;

// Calls `draw(width)` whenever the width of `host` changes.
export function onWidth(host, draw) {
  let last = 0;
  new ResizeObserver(([entry]) => {
    const width = Math.round(entry.contentRect.width);
    if (width === last) return;
    // Hidden elements have no width, and what is set meanwhile is drawn when they are shown again.
    last = width;
    if (width > 0) draw(width);
  }).observe(host);
}

// A line chart of the last minutes. `series` is a list of {name}; its lines differ in colour and
// dashes. The newest value of each series is shown next to its name.
export class LineChart {
  constructor({ title, series, format, floor = 0 }) {
    Object.assign(this, { title, series, format, floor });
    this.points = []; // {time, values}; times in seconds
    this.width = 0;
    this.plot = svg("svg", { class: "plot", role: "img", "aria-label": title, height });
    this.values = series.map(() => el("span", { class: "value" }, none));
    const legend = el("ul", { class: "legend" }, series.map(({ name }, i) =>
      el("li", {}, sampleLine(i), el("span", {}, name), this.values[i])));
    this.node = el("figure", { class: "card chart" },
      el("figcaption", {}, title), this.plot, legend);
    onWidth(this.node, () => this.draw());
  }

  // Removes all points.
  clear() {
    this.points = [];
  }

  // `values` has one number per series, NaN if the series has no value at this time. With `draw`
  // false, the chart changes only with the next point.
  add(time, values, draw = true) {
    this.points.push({ time, values });
    while (this.points.length > 0 && this.points[0].time < time - maxSpan - maxGapSeconds) {
      this.points.shift();
    }
    if (!draw) return;
    values.forEach((value, i) => (this.values[i].textContent = this.format(value)));
    const spoken = this.series.map(({ name }, i) => `${name} ${this.format(values[i])}`);
    this.plot.setAttribute("aria-label", `${this.title}: now ${spoken.join(", ")}`);
    this.draw();
  }

  draw() {
    const width = this.plot.clientWidth;
    if (width === 0) return;
    const now = this.points.at(-1)?.time ?? 0;
    const age = now - (this.points[0]?.time ?? 0);
    const span = spans.find((seconds) => seconds >= age) ?? maxSpan;
    const seen = this.points.flatMap(({ values }) => values.filter(Number.isFinite));
    const top = niceCeiling(Math.max(this.floor, ...seen));
    const x = (time) => margin.left +
      (width - margin.left - margin.right) * (1 - (now - time) / span);
    const y = (value) => height - margin.bottom -
      (height - margin.top - margin.bottom) * Math.min(value / top, 1);
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const at = y(share * top);
      parts.push(svg("line", { class: "grid", x1: margin.left, x2: width - margin.right,
        y1: at, y2: at }));
      parts.push(svg("text", { class: "tick", x: margin.left - 6, y: at + 4,
        "text-anchor": "end" }, this.format(share * top).replace(/\.0+(?= |$)/, "")));
    }
    parts.push(svg("text", { class: "tick", x: margin.left, y: height - 5 }, `−${span / 60} min`));
    parts.push(svg("text", { class: "tick", x: width - margin.right, y: height - 5,
      "text-anchor": "end" }, "now"));
    this.series.forEach((_, i) => {
      parts.push(svg("path", { class: `line line-${i}`, d: this.#path(i, x, y) }));
      const last = this.points.at(-1);
      if (last && Number.isFinite(last.values[i])) {
        parts.push(svg("circle", { class: `dot line-${i}`, r: 2.5, cx: x(last.time),
          cy: y(last.values[i]) }));
      }
    });
    this.plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.plot.replaceChildren(...parts);
  }

  // Returns the SVG path of one series. The path has a gap where values are missing.
  #path(series, x, y) {
    let path = "";
    let pen = "M";
    let last = -Infinity;
    for (const { time, values } of this.points) {
      if (time - last > maxGapSeconds) pen = "M";
      last = time;
      if (!Number.isFinite(values[series]) || x(time) < margin.left) {
        pen = "M";
        continue;
      }
      path += `${pen}${x(time).toFixed(1)} ${y(values[series]).toFixed(1)}`;
      // A single point between two gaps would be invisible without this short line.
      if (pen === "M") path += "h.01";
      pen = "L";
    }
    return path;
  }
}

const sampleLine = (i) =>
  svg("svg", { class: "sample", width: 26, height: 10, "aria-hidden": "true" },
    svg("path", { class: `line line-${i}`, d: "M1 5H25" }));

const maxBars = 40;

// A bar chart for a histogram of integers: the value n occurred `counts[n]` times.
export class BarChart {
  constructor({ label, unit }) {
    Object.assign(this, { label, unit });
    this.counts = [];
    this.plot = svg("svg", { class: "plot", role: "img", "aria-label": label, height });
    this.node = el("div", { class: "chart" }, this.plot);
    onWidth(this.node, () => this.draw());
  }

  set(counts) {
    this.counts = counts;
    this.draw();
  }

  // Returns the bars as [{from, to, count}]. If there are too many values, adjacent values share a
  // bar.
  bars() {
    const last = this.counts.findLastIndex((value) => value > 0);
    const first = Math.max(0, this.counts.findIndex((value) => value > 0) - 1);
    if (last < 0) return [];
    const step = Math.ceil((last + 1 - first) / maxBars);
    const out = [];
    for (let from = first; from <= last; from += step) {
      const to = Math.min(from + step - 1, last);
      out.push({ from, to, count: this.counts.slice(from, to + 1).reduce((a, b) => a + b, 0) });
    }
    return out;
  }

  draw() {
    const width = this.plot.clientWidth;
    if (width === 0) return;
    const bars = this.bars();
    const total = bars.reduce((sum, bar) => sum + bar.count, 0);
    const top = Math.max(...bars.map((bar) => bar.count), 1);
    const left = 8;
    const slot = Math.min((width - 2 * left) / Math.max(bars.length, 1), 64);
    const start = (width - slot * bars.length) / 2;
    const base = height - margin.bottom;
    const every = Math.ceil(26 / slot);
    const parts = [svg("line", { class: "grid", x1: left, x2: width - left, y1: base, y2: base })];
    bars.forEach((bar, i) => {
      const size = ((base - 22) * bar.count) / top;
      const share = percent(bar.count / total);
      const range = bar.from === bar.to ? `${bar.from}` : `${bar.from}–${bar.to}`;
      const x = start + i * slot;
      parts.push(svg("rect", { class: "bar", x: x + slot * 0.1, width: slot * 0.8, y: base - size,
        height: size, rx: Math.min(3, slot * 0.15), "data-from": bar.from,
        "data-count": bar.count }, svg("title", {}, `${range} ${this.unit}: ${share}`)));
      if (slot > 34 && bar.count > 0) {
        parts.push(svg("text", { class: "tick", x: x + slot / 2, y: base - size - 5,
          "text-anchor": "middle" }, wholePercent(bar.count / total)));
      }
      if (i % every === 0) {
        parts.push(svg("text", { class: "tick", x: x + slot / 2, y: height - 6,
          "text-anchor": "middle" }, range));
      }
    });
    const most = bars.reduce((a, b) => (b.count > a.count ? b : a), bars[0]);
    this.plot.setAttribute("aria-label",
      most ? `${this.label}; most often ${most.from} ${this.unit}` : `${this.label}: no data`);
    this.plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.plot.replaceChildren(...parts);
  }
}

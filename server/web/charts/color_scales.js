// The colour scales of heatmaps: what colour a value gets, and the legend that explains it.
import { niceCeiling } from "./charts.js";
import { el, svg } from "../dom.js";
import { divergingColor, sequentialColor } from "../theme.js";

// The position of an even share on the colour scale, 0 to 1, however high the loads are.
const evenPlace = 0.45;
// All loads above this multiple of an even share get the last colour of the scale, so that one very
// busy expert does not make all other experts look alike.
const maxTop = 16;
const barWidth = 160;
const barHeight = 12;
const barSteps = 32;

const largest = (rows, size) =>
  rows.reduce((top, { values }) => values.reduce((a, b) => Math.max(a, size(b)), top), 0);

// `color(place)`: the colour at a place from 0 to 1.
function colorBar(color) {
  const step = barWidth / barSteps;
  return svg("svg", { width: barWidth, height: barHeight,
    viewBox: `0 0 ${barWidth} ${barHeight}`, "aria-hidden": "true" },
  Array.from({ length: barSteps }, (_, i) => svg("rect", { x: i * step, y: 0, width: step + 0.2,
    height: barHeight, fill: color(i / (barSteps - 1)) })));
}

// Loads relative to an even share: from 0, with the even share at a fixed place.
export class LoadScale {
  constructor() {
    this.marksZero = true; // a very small load has almost the same colour as none
    this.top = 2; // the load that gets the last colour
    this.clipped = false; // whether a load exceeds `top`
  }

  // Fits the scale to the rows of a heatmap.
  fit(rows) {
    const highest = largest(rows, (value) => value);
    // A power of two, so that colours rarely change their meaning from one update to the next.
    this.top = Math.min(Math.max(2, 2 ** Math.ceil(Math.log2(Math.max(highest, 1)))), maxTop);
    this.clipped = highest > maxTop;
  }

  color(value) {
    return sequentialColor((value / this.top) ** (Math.log(evenPlace) / Math.log(1 / this.top)));
  }

  // Returns the nodes of the legend.
  legend() {
    const bar = colorBar(sequentialColor);
    bar.append(svg("path", { class: "even", d: `M${evenPlace * barWidth} 0V${barHeight}` }));
    const top = `${this.top}${this.clipped ? "+" : ""}`;
    return [el("span", {}, "0"), bar, el("span", {}, top),
      el("span", { class: "muted" }, "times an even share, which the line marks")];
  }
}

// Differences of two shares, B below 0 and A above.
export class DifferenceScale {
  constructor() {
    this.marksZero = false;
    this.top = 1; // the difference that gets the last colour
  }

  fit(rows) {
    this.top = niceCeiling(largest(rows, Math.abs));
  }

  // Small differences are spread by a square root, because most experts differ little.
  color(value) {
    return divergingColor(Math.sign(value) * Math.sqrt(Math.abs(value) / this.top));
  }

  legend() {
    const top = `+${Number((100 * this.top).toPrecision(3))} %`;
    return [el("span", {}, `B ${top}`), colorBar((place) => divergingColor(2 * place - 1)),
      el("span", {}, `A ${top}`)];
  }
}

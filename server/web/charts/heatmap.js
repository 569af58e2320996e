// A heatmap of values by layer and expert. It is drawn on a canvas, which stays fast with thousands
// of cells. A cursor, moved by pointer, touch or arrow keys, selects one cell.
import { labelStep } from "./charts.js";
import { el, hasModifier } from "../dom.js";
import { ExtentNote } from "./extent_note.js";
import { onThemeChange, wantsMotion } from "../theme.js";

const labelWidth = 104;
const axisHeight = 20;
const gap = 1;
const moveMilliseconds = 450;
// Narrower cells cannot be told apart. 256 of them fit in a window of 700 pixels.
const minCellWidth = 2;
// Browsers draw nothing on a canvas that is wider.
export const maxCanvasSide = 32000;

export class Heatmap {
  // Calls `onCursor(row, column, moved)` when the cursor moves and when the values of its cell
  // change (`moved` is false), and `onCursor(null, null, true)` when the cursor leaves. Calls
  // `onChoose(row, column)` for a cell that is clicked, or chosen with the Enter key. `scale`: one
  // of color_scales.js.
  constructor({ label, describedBy, scale, onCursor, onChoose = () => {} }) {
    this.rows = []; // [{label, values}]
    this.scale = scale;
    this.shown = []; // the values drawn now, during an animation between two updates
    this.cursor = null;
    this.pinned = false; // true after keyboard use: the cursor stays when the pointer leaves
    this.onCursor = onCursor;
    this.onChoose = onChoose;
    this.canvas = el("canvas", { "aria-hidden": "true" });
    this.node = el("div", {
      class: "heatmap", tabindex: 0, role: "application", "aria-roledescription": "heatmap",
      "aria-label": `${label}. Arrow keys move between experts and layers.`,
      "aria-describedby": describedBy,
      onkeydown: (event) => this.#onKey(event),
      onfocus: () => this.cursor ?? this.#move(0, 0, true),
      onblur: () => this.#move(null),
      onpointermove: (event) => this.#onPointer(event),
      onpointerdown: (event) => this.#onPointer(event),
      onpointerleave: () => this.pinned || this.#move(null),
      onclick: () => this.#choose(),
    }, this.canvas);
    this.extent = new ExtentNote(this.node, () => this.#columns());
    this.legend = el("div", { class: "heatmap-legend" });
    new ResizeObserver(() => this.draw()).observe(this.node);
    onThemeChange(() => {
      this.draw();
      this.#drawLegend();
    });
  }

  set(rows) {
    const same = rows.length === this.rows.length &&
      rows.every((row, r) => row.values.length === this.rows[r].values.length);
    this.scale.fit(rows);
    this.rows = rows;
    if (!same) {
      this.cursor = null;
      this.shown = rows.map((row) => Float64Array.from(row.values));
      this.draw();
    } else {
      this.#moveTo(rows);
    }
    this.#drawLegend();
    if (this.cursor) this.onCursor(this.cursor.row, this.cursor.column, false);
  }

  #moveTo(rows) {
    cancelAnimationFrame(this.frame);
    const from = this.shown.map((values) => Float64Array.from(values));
    const begin = performance.now();
    const step = (now) => {
      const t = wantsMotion() ? Math.min(Math.max((now - begin) / moveMilliseconds, 0), 1) : 1;
      const eased = t * (2 - t);
      this.shown.forEach((values, r) => {
        for (let e = 0; e < values.length; ++e) {
          values[e] = from[r][e] + (rows[r].values[e] - from[r][e]) * eased;
        }
      });
      this.draw();
      if (t < 1) this.frame = requestAnimationFrame(step);
    };
    step(begin + (wantsMotion() ? 0 : moveMilliseconds));
  }

  // Returns position and size of a cell in CSS pixels, relative to the heatmap's content.
  cell(row, column) {
    const columns = this.rows[row].values.length;
    const width = this.inner / columns;
    return { x: labelWidth + column * width, y: row * this.rowHeight, width,
      height: this.rowHeight };
  }

  // Returns where the columns are: see ExtentNote.
  #columns() {
    const count = Math.max(...this.rows.map((row) => row.values.length), 1);
    return { left: labelWidth, width: (this.inner ?? 0) / count, count };
  }

  draw() {
    const available = this.node.clientWidth;
    if (available === 0 || this.rows.length === 0) return;
    const columns = this.#columns().count;
    // A cell needs a visible width. If the map becomes wider than the element that contains it,
    // that element scrolls.
    const scale = window.devicePixelRatio || 1;
    this.inner = Math.min(Math.max(available - labelWidth, columns * minCellWidth),
      Math.floor(maxCanvasSide / scale) - labelWidth);
    this.rowHeight = this.rows.length > 24 ? 14 : this.rows.length > 12 ? 20 : 30;
    const width = labelWidth + this.inner;
    const height = this.rows.length * this.rowHeight + axisHeight;
    const { canvas } = this;
    const size = [Math.round(width * scale), Math.round(height * scale)];
    if (canvas.width !== size[0] || canvas.height !== size[1]) {
      [canvas.width, canvas.height] = size;
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, width, height);
    const style = getComputedStyle(this.node);
    const muted = style.color;
    context.font = `12px ${style.fontFamily}`;
    context.textBaseline = "middle";
    this.rows.forEach((row, r) => this.#drawRow(context, row, r, muted));
    this.#drawAxis(context, columns, muted);
    if (this.cursor) this.#drawCursor(context, getComputedStyle(document.body).color);
    this.extent.update();
  }

  #drawRow(context, row, r, muted) {
    context.fillStyle = muted;
    context.textAlign = "left";
    context.fillText(row.label, 0, (r + 0.5) * this.rowHeight, labelWidth - 8);
    row.values.forEach((value, e) => {
      const { x, y, width, height } = this.cell(r, e);
      const inset = width > 7 ? gap : Math.min(0.25, width / 4);
      context.fillStyle = this.scale.color(this.shown[r][e]);
      context.fillRect(x, y + gap, width - inset, height - 2 * gap);
      if (value === 0 && width > 6 && this.scale.marksZero) {
        context.fillStyle = muted;
        const size = Math.min(2, width / 4);
        context.fillRect(x + (width - inset - size) / 2, y + (height - size) / 2, size, size);
      }
    });
  }

  #drawAxis(context, columns, muted) {
    const width = this.inner / columns;
    const step = labelStep(width, 30);
    const y = this.rows.length * this.rowHeight + axisHeight / 2 + 2;
    context.fillStyle = muted;
    context.textAlign = "left";
    context.fillText("expert", 0, y);
    // Blocks can differ in their number of experts; then they have no common axis.
    if (this.rows.some((row) => row.values.length !== columns)) return;
    context.textAlign = "center";
    for (let e = 0; e < columns; e += step) {
      context.fillText(String(e), labelWidth + (e + 0.5) * width, y);
    }
  }

  #drawCursor(context, color) {
    const { x, y, width, height } = this.cell(this.cursor.row, this.cursor.column);
    context.strokeStyle = color;
    context.lineWidth = 2;
    context.strokeRect(x - 1, y, width + 1, height);
  }

  #drawLegend() {
    this.legend.replaceChildren(...this.scale.legend());
  }

  #move(row, column = 0, pinned = false) {
    this.pinned = pinned;
    this.cursor = row === null || this.rows.length === 0 ? null : { row, column };
    this.draw();
    this.onCursor(this.cursor?.row ?? null, this.cursor?.column ?? null, true);
  }

  #onPointer(event) {
    const box = this.canvas.getBoundingClientRect();
    const row = Math.floor((event.clientY - box.top) / this.rowHeight);
    const x = event.clientX - box.left - labelWidth;
    if (row < 0 || row >= this.rows.length || x < 0) return;
    const columns = this.rows[row].values.length;
    const column = Math.min(Math.floor((x / this.inner) * columns), columns - 1);
    if (this.cursor?.row !== row || this.cursor?.column !== column) this.#move(row, column);
  }

  #choose() {
    if (this.cursor) this.onChoose(this.cursor.row, this.cursor.column);
  }

  #onKey(event) {
    if (event.key === "Enter" && !hasModifier(event)) return this.#choose();
    const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0],
      Home: [0, -Infinity], End: [0, Infinity] };
    const step = steps[event.key];
    if (!step || this.rows.length === 0 || hasModifier(event)) return;
    event.preventDefault();
    const { row, column } = this.cursor ?? { row: 0, column: 0 };
    const clamp = (value, size) => Math.min(Math.max(value, 0), size - 1);
    const newRow = clamp(row + step[0], this.rows.length);
    this.#move(newRow, clamp(column + step[1], this.rows[newRow].values.length), true);
    this.#scrollToCursor();
  }

  #scrollToCursor() {
    const { x, width } = this.cell(this.cursor.row, this.cursor.column);
    const { scrollLeft, clientWidth } = this.node;
    if (x < scrollLeft) this.node.scrollLeft = x - labelWidth;
    if (x + width > scrollLeft + clientWidth) this.node.scrollLeft = x + width - clientWidth;
  }
}

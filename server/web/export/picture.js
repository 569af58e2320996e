// Draws elements of the page on a canvas, as they look now. The page's security policy forbids
// images of other origins, data: and blob: URLs, so the markup cannot be drawn as an image.
import { maxCanvasSide } from "../charts/heatmap.js";

const maxPixels = 32e6;
const padding = 12;

// Returns a canvas with `node` on the page's background, with all of its content, even where the
// page scrolls. Leaves out elements in a [data-export] group.
export function draw(node) {
  node.classList.add("exporting");
  try {
    const box = node.getBoundingClientRect();
    const width = Math.max(box.width, node.scrollWidth) + 2 * padding;
    const height = Math.max(box.height, node.scrollHeight) + 2 * padding;
    const canvas = document.createElement("canvas");
    const scale = Math.min(2, Math.sqrt(maxPixels / (width * height)), maxCanvasSide / width,
      maxCanvasSide / height);
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    context.fillStyle = getComputedStyle(document.body).backgroundColor;
    context.fillRect(0, 0, width, height);
    context.translate(padding - box.left, padding - box.top);
    drawElement(context, node);
    return canvas;
  } finally {
    node.classList.remove("exporting");
  }
}

function drawElement(context, node) {
  if (node.dataset?.export !== undefined || !node.checkVisibility()) return;
  if (node instanceof SVGSVGElement) return drawSvg(context, node);
  const style = getComputedStyle(node);
  drawBox(context, node.getBoundingClientRect(), style);
  if (node instanceof HTMLCanvasElement) {
    const { left, top, width, height } = node.getBoundingClientRect();
    if (node.width > 0 && node.height > 0) context.drawImage(node, left, top, width, height);
  } else if (node instanceof HTMLSelectElement) {
    drawLine(context, node.selectedOptions[0]?.text ?? "", node.getBoundingClientRect(), style, 9);
  } else if (node instanceof HTMLInputElement || node instanceof HTMLTextAreaElement) {
    if (/^(number|text|textarea)$/.test(node.type)) {
      drawLine(context, node.value, node.getBoundingClientRect(), style, 9);
    }
  } else {
    for (const child of node.childNodes) {
      if (child instanceof Element) drawElement(context, child);
      else if (child instanceof Text) drawText(context, child, style);
    }
  }
}

function drawBox(context, { left, top, width, height }, style) {
  const radius = Math.min(parseFloat(style.borderTopLeftRadius) || 0, width / 2, height / 2);
  context.beginPath();
  context.roundRect(left, top, width, height, radius);
  context.fillStyle = style.backgroundColor;
  context.fill();
  const widths = ["Top", "Right", "Bottom", "Left"].map((side) =>
    (style[`border${side}Style`] === "none" ? 0 : parseFloat(style[`border${side}Width`])));
  if (widths.every((one) => one > 0 && one === widths[0])) {
    const border = widths[0];
    context.beginPath();
    context.roundRect(left + border / 2, top + border / 2, width - border, height - border, radius);
    context.strokeStyle = style.borderTopColor;
    context.lineWidth = border;
    context.stroke();
  } else if (widths[2] > 0) {
    context.fillStyle = style.borderBottomColor;
    context.fillRect(left, top + height - widths[2], width, widths[2]);
  }
}

function setFont(context, style) {
  context.font = `${style.fontStyle} ${style.fontWeight} ${style.fontSize} ${style.fontFamily}`;
}

function drawLine(context, text, { left, top, width, height }, style, inset = 0) {
  setFont(context, style);
  context.fillStyle = style.color;
  context.textAlign = "left";
  context.textBaseline = "middle";
  // Without a limit on the width: the metrics of the page's text differ a little.
  context.fillText(text, left + inset, top + height / 2, inset ? width - 2 * inset : undefined);
}

// Draws a text in the lines in which the page shows it.
function drawText(context, node, style) {
  const text = node.data;
  if (text.trim() === "") return;
  const range = document.createRange();
  const boxOf = (from, to) => {
    range.setStart(node, from);
    range.setEnd(node, to);
    return range.getClientRects();
  };
  const boxes = boxOf(0, text.length);
  if (boxes.length === 1) return drawLine(context, text.trim(), boxes[0], style);
  let line = null;
  for (let at = 0; at < text.length;) {
    const size = text.codePointAt(at) > 0xffff ? 2 : 1;
    const [box] = boxOf(at, at + size);
    const character = text.slice(at, at + size);
    at += size;
    if (!box || box.width === 0) continue;
    if (line && Math.abs(box.top - line.box.top) < box.height / 2) {
      line.text += character;
      continue;
    }
    if (line) drawLine(context, line.text, line.box, style);
    line = { text: character, box };
  }
  if (line) drawLine(context, line.text, line.box, style);
}

// ---- SVG: the shapes that charts.js, paired_bars.js and heatmap.js make.

function drawSvg(context, root) {
  const matrix = root.getScreenCTM();
  if (!matrix) return;
  context.save();
  const { a, b, c, d, e, f } = matrix;
  context.transform(a, b, c, d, e, f);
  for (const shape of root.querySelectorAll("line, rect, path, circle, text")) {
    drawShape(context, shape);
  }
  context.restore();
}

function outline(node) {
  const number = (name) => Number(node.getAttribute(name) ?? 0);
  const path = new Path2D(node.tagName === "path" ? node.getAttribute("d") : undefined);
  if (node.tagName === "line") {
    path.moveTo(number("x1"), number("y1"));
    path.lineTo(number("x2"), number("y2"));
  } else if (node.tagName === "rect") {
    path.roundRect(number("x"), number("y"), number("width"), number("height"), number("rx"));
  } else if (node.tagName === "circle") {
    path.arc(number("cx"), number("cy"), number("r"), 0, 2 * Math.PI);
  }
  return path;
}

function drawShape(context, node) {
  const style = getComputedStyle(node);
  context.save();
  if (style.mixBlendMode !== "normal") context.globalCompositeOperation = style.mixBlendMode;
  if (node.tagName === "text") {
    setFont(context, style);
    context.fillStyle = style.fill;
    context.textBaseline = "alphabetic";
    context.textAlign = { middle: "center", end: "right" }[style.textAnchor] ?? "left";
    const [x, y] = ["x", "y"].map((name) => Number(node.getAttribute(name)));
    context.fillText(node.textContent, x, y);
  } else {
    const path = outline(node);
    if (style.fill !== "none") {
      context.fillStyle = style.fill;
      context.fill(path);
    }
    if (style.stroke !== "none") {
      context.strokeStyle = style.stroke;
      context.lineWidth = parseFloat(style.strokeWidth);
      context.lineJoin = style.strokeLinejoin;
      context.lineCap = style.strokeLinecap;
      context.setLineDash(style.strokeDasharray === "none" ? []
        : style.strokeDasharray.split(",").map(parseFloat));
      context.stroke(path);
    }
  }
  context.restore();
}

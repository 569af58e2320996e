// Buttons that save a part of the page as a picture (PNG) and as a table (CSV).
import { download, toCsv } from "./csv.js";
import { el } from "../dom.js";
import { draw } from "./picture.js";

// With the time in milliseconds, so that files of the same kind get different names.
const fileName = (name, type) =>
  `moeserve-${name}-${new Date().toISOString().replace(/[:.Z]/g, "")}.${type}`;

// Returns the buttons. `what` completes "Save … as PNG". `name` is part of the file's name.
// `node()` returns the element to draw, `rows()` the table, as lists of cells with a first one of
// names.
export function exportButtons({ what, name, node, rows }) {
  const savePng = () => draw(node()).toBlob((blob) => {
    // Without a blob, the browser had no memory for the picture.
    if (blob) download(blob, fileName(name, "png"));
  });
  const saveCsv = () =>
    download(new Blob([toCsv(rows())], { type: "text/csv;charset=utf-8" }), fileName(name, "csv"));
  const button = (type, onclick) => el("button", { type: "button", class: "small", onclick,
    "aria-label": `Save ${what} as ${type}`, title: `Save ${what} as ${type}` }, type);
  return el("span", { class: "exports", "data-export": true },
    button("PNG", savePng), button("CSV", saveCsv));
}

// Creates DOM elements without parsing HTML, so that text from the server is never interpreted as
// markup.

// Creates an element: el("p", {class: "note", onclick: f, "aria-label": "x"}, "text", child, ...).
// An attribute whose value is a function becomes a listener; false and null leave the attribute
// out. Children may be null.
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") {
      node.addEventListener(name.slice(2), value);
    } else if (value !== false && value !== null && value !== undefined) {
      node.setAttribute(name, value === true ? "" : String(value));
    }
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

// Returns whether a key is pressed together with one that makes it a shortcut of the browser.
export const hasModifier = (event) => event.altKey || event.ctrlKey || event.metaKey;

export const byId = (id) => document.getElementById(id);

// Sets the text only if it differs, so that text selections and ARIA live regions are not
// disturbed.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Sets the options of `select` to the [value, text] pairs. Selects the value in data-wanted, which
// was asked for before the options were known, else keeps the selected value, if among them.
export function setOptions(select, pairs) {
  const key = JSON.stringify(pairs);
  if (select.dataset.options === key) return;
  const chosen = select.dataset.wanted ?? select.value;
  delete select.dataset.wanted;
  select.replaceChildren(...pairs.map(([value, text]) => el("option", { value }, text)));
  if (pairs.some(([value]) => String(value) === chosen)) select.value = chosen;
  select.dataset.options = key;
}

export function debounce(action, milliseconds) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...args), milliseconds);
  };
}

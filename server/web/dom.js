// Elements without markup: text only ever becomes text.

// el("p", {class: "note", onclick: f, "aria-label": "x"}, "text", child, ...). Properties that are
// functions become listeners, false and null leave an attribute out; children may be null.
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

export const byId = (id) => document.getElementById(id);

// Sets text only where it changes, so that selections and live regions are left alone.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

// Gives `select` these [value, text] pairs and keeps what is chosen, if it is still there.
export function setOptions(select, pairs) {
  const key = JSON.stringify(pairs);
  if (select.dataset.options === key) return;
  const chosen = select.value;
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

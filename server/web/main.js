// The page: its tabs, the dialog for the API key, and the state of the connection.
import { formatAddress, parseAddress } from "./address.js";
import { getJson, key, setUnauthorizedHandler } from "./api.js";
import { CompareView } from "./views/compare_view.js";
import { byId, debounce, hasModifier, setText } from "./dom.js";
import { ExpertsView } from "./views/experts_view.js";
import { setUpLinkButton } from "./link_button.js";
import { ModelPicker } from "./model_picker.js";
import { PlaygroundView } from "./views/playground_view.js";
import { RequestsView } from "./views/requests_view.js";
import { setUpTheme } from "./theme.js";
import { TokensView } from "./views/tokens_view.js";

const names = ["experts", "tokens", "requests", "playground", "compare"];
const updateMilliseconds = 300;
let current = null;
let views = {};
let restoring = false; // whether the options are being set to those of the address

// State and functions that all views share.
const page = {
  // Views call this with the name of the model whose data they show. Models can be replaced.
  noteModel(name) {
    if (name !== this.model) picker.expire();
    this.model = name;
  },
  setState(error) {
    // Another server may answer next, or the chosen model may have been unloaded.
    if (error) picker.expire();
    const state = byId("state");
    state.dataset.state = !error ? "ok" : error.status === 503 ? "wait" : "bad";
    setText(state, !error ? "live" : error.status === 401 ? "key needed" : error.message);
    // An address may name a stack that the model lacks.
    if (!error || error.code === "model_not_found" || error.status === 400) showIdentity();
  },
};

// Called after the user or the address has chosen another model.
function onModel() {
  for (const view of Object.values(views)) view.reset?.();
  if (!current || restoring) return;
  views[current].hide();
  views[current].show();
  updateAddress();
}

const picker = new ModelPicker(onModel);

async function showIdentity() {
  try {
    if (!await picker.refresh()) return;
    byId("requests-of").hidden = picker.isAlone;
    document.title = `${picker.name} · moeserve`;
    const version = await getJson("version");
    const length = picker.contextLength;
    byId("about").replaceChildren(`moeserve ${version.version} on ${version.backend}`,
      length ? ` · context ${length} tokens` : "");
  } catch {
    picker.expire();
  }
}

function show(name, { focus = false } = {}) {
  if (!names.includes(name)) name = names[0];
  if (name === current) return;
  for (const other of names) {
    const tab = byId(`tab-${other}`);
    const chosen = other === name;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    byId(other).hidden = !chosen;
    if (chosen && focus) tab.focus();
    // In a narrow window, the row of tabs scrolls.
    if (chosen) tab.scrollIntoView({ block: "nearest", inline: "nearest" });
  }
  if (current) views[current].hide();
  current = name;
  views[name].show();
  if (parseAddress(location.hash).name !== name) updateAddress();
}

// The view's name follows "#/" in the URL. With the slash, the fragment is not the id of an
// element, so the browser neither scrolls nor moves the focus. Returns the names of the options
// that are too long for the address.
function updateAddress() {
  const { fragment, omitted } = formatAddress(current, [...picker.changed(),
    ...(views[current].options?.changed() ?? [])]);
  if (location.hash !== fragment) history.replaceState(null, "", fragment);
  return omitted;
}

// Shows the view that the address names, with its options. Sends no request for tokens.
function openAddress() {
  const { name, params } = parseAddress(location.hash);
  if (current && !names.includes(name)) return;
  let other = false; // whether a view that is shown already must ask for another model
  restoring = true;
  try {
    other = picker.choose(params.get("model") ?? "", params.get("stack") ?? "");
    views[name]?.options?.restore(params);
  } finally {
    restoring = false;
  }
  if (other && current === name) {
    views[name].hide();
    views[name].show();
  }
  show(name);
}

function setUpAddress() {
  const update = debounce(updateAddress, updateMilliseconds);
  // "toggle" does not bubble.
  for (const type of ["input", "change", "toggle"]) {
    byId("main").addEventListener(type, () => restoring || update(), { capture: true });
  }
  addEventListener("hashchange", openAddress);
  setUpLinkButton(byId("link-button"), byId("link-status"), updateAddress);
}

function setUpTabs() {
  for (const name of names) byId(`tab-${name}`).addEventListener("click", () => show(name));
  document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
    const at = names.indexOf(current);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: names.length - 1 }[event.key];
    if (to === undefined || hasModifier(event)) return;
    event.preventDefault();
    show(names.at(to % names.length), { focus: true });
  });
}

function setUpKey() {
  const dialog = byId("key-dialog");
  const button = byId("key-button");
  const open = () => {
    button.hidden = false;
    if (dialog.open) return;
    setText(byId("key-error"), key.get() ? "The server does not know that key." : "");
    byId("key-input").value = "";
    dialog.showModal();
  };
  button.hidden = !key.get();
  button.addEventListener("click", open);
  byId("key-cancel").addEventListener("click", () => dialog.close());
  byId("key-form").addEventListener("submit", () => {
    key.set(byId("key-input").value.trim());
    byId("key-input").value = "";
    views[current].hide();
    views[current].show();
  });
  // The page asks once for a key that is missing or was refused, not after every poll.
  let asked = null;
  setUnauthorizedHandler(() => {
    button.hidden = false;
    if (asked === key.get()) return;
    asked = key.get();
    open();
  });
}

setUpTheme(byId("theme-button"));
views = {
  experts: new ExpertsView(page),
  tokens: new TokensView(page),
  requests: new RequestsView(page),
  playground: new PlaygroundView(page),
  compare: new CompareView(page),
};
setUpTabs();
setUpKey();
setUpAddress();
openAddress();

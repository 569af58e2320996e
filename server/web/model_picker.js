// The header's picker for the model whose data the page shows.
import { getJson, model } from "./api.js";
import { byId, setOptions, setText } from "./dom.js";

// Models can be loaded and unloaded while the page is open.
const maxAgeMilliseconds = 10000;
const maxNameLength = 500;

export class ModelPicker {
  // `onChoice()` is called after another model was chosen.
  constructor(onChoice) {
    this.onChoice = onChoice;
    this.models = []; // as /v1/models lists them
    // A name in the query of the page's URL is chosen as long as the address has no other one.
    const named = new URLSearchParams(location.search).get("model") ?? "";
    this.initial = named.slice(0, maxNameLength);
    this.asked = -Infinity;
    model.set(this.initial);
    byId("model-picker").addEventListener("change", () => this.choose(byId("model-picker").value));
  }

  get name() {
    return model.get() || this.models[0]?.id;
  }

  // Whether the server has one model only, so that there is nothing to choose.
  get isAlone() {
    return this.models.length < 2;
  }

  get contextLength() {
    return this.models.find(({ id }) => id === this.name)?.max_model_len;
  }

  // Returns the choice as an option of the address.
  changed() {
    const initial = this.initial || this.models[0]?.id || "";
    return model.get() === "" || model.get() === initial ? [] : [["model", model.get()]];
  }

  // Chooses a model, "" for the initial one. Returns whether it is another one than before.
  choose(name) {
    const chosen = name.slice(0, maxNameLength) || this.initial || this.#default();
    if (chosen === model.get()) return false;
    model.set(chosen);
    this.#show();
    this.onChoice();
    return true;
  }

  // Makes the next refresh() ask the server.
  expire() {
    this.asked = -Infinity;
  }

  // Asks which models there are, if that was long ago. Returns whether it was.
  async refresh() {
    const now = performance.now();
    if (now - this.asked < maxAgeMilliseconds) return false;
    this.asked = now;
    this.models = (await getJson("v1/models")).data;
    // With several models, every request names the one that it is for.
    if (model.get() === "") model.set(this.#default());
    this.#show();
    return true;
  }

  #default() {
    return this.isAlone ? "" : this.models[0].id;
  }

  #show() {
    const names = this.models.map(({ id }) => id);
    // The picker also leads away from a model that the server does not have.
    const lost = model.get() !== "" && names.length > 0 && !names.includes(model.get());
    const single = this.isAlone && !lost;
    byId("model").hidden = !single;
    byId("model-picker").hidden = single;
    setText(byId("model"), this.name ?? "–");
    if (single) return;
    setOptions(byId("model-picker"), [...names.map((name) => [name, name]),
      ...(lost ? [[model.get(), `${model.get()} (not served)`]] : [])]);
    byId("model-picker").value = model.get();
  }
}

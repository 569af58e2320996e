// The header's pickers for the model and for the stack of its layers whose data the page shows.
import { getJson, model, stack } from "./api.js";
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
    byId("stack-picker").addEventListener("change", () => {
      stack.set(byId("stack-picker").value);
      this.onChoice();
    });
  }

  get name() {
    return model.get() || this.models[0]?.id;
  }

  // Whether the server has one model only, so that there is nothing to choose.
  get isAlone() {
    return this.models.length < 2;
  }

  get contextLength() {
    return this.#card()?.max_model_len;
  }

  // What the model computes, as /v1/models lists it; nothing if that is unknown.
  get tasks() {
    return this.#card()?.tasks;
  }

  // Returns the choices as options of the address.
  changed() {
    const initial = this.initial || this.models[0]?.id || "";
    return [
      ...(model.get() === "" || model.get() === initial ? [] : [["model", model.get()]]),
      ...(stack.get() === "encoder" ? [["stack", "encoder"]] : []),
    ];
  }

  // Chooses a model, "" for the initial one, and a stack, "" for the decoder. Returns whether they
  // are others than before.
  choose(name, ofStack = "") {
    const chosen = name.slice(0, maxNameLength) || this.initial || this.#default();
    const wanted = ofStack === "encoder" ? ofStack : "";
    const sameStack = wanted === (stack.get() === "encoder" ? "encoder" : "");
    if (chosen === model.get() && sameStack) return false;
    model.set(chosen);
    stack.set(wanted);
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

  #card() {
    return this.models.find(({ id }) => id === this.name);
  }

  // Shows the picker of stacks if the model has several.
  #showStacks() {
    const stacks = this.#card()?.stacks ?? [];
    byId("stack-picker").hidden = stacks.length < 2;
    if (stacks.length < 2) {
      // Until the models are known, the address may have chosen a stack.
      const unfit = this.models.length > 0 && stack.get() !== "";
      if (unfit) stack.set("");
      if (unfit) this.onChoice();
      return;
    }
    if (!stacks.includes(stack.get())) stack.set("decoder");
    setOptions(byId("stack-picker"), stacks.map((name) => [name, `${name} experts`]));
    byId("stack-picker").value = stack.get();
  }

  #default() {
    return this.isAlone ? "" : this.models[0].id;
  }

  #show() {
    const names = this.models.map(({ id }) => id);
    // The picker also leads away from a model that the server does not have.
    const lost = model.get() !== "" && names.length > 0 && !names.includes(model.get());
    const single = this.isAlone && !lost;
    this.#showStacks();
    byId("model").hidden = !single;
    byId("model-picker").hidden = single;
    setText(byId("model"), this.name ?? "–");
    if (single) return;
    setOptions(byId("model-picker"), [...names.map((name) => [name, name]),
      ...(lost ? [[model.get(), `${model.get()} (not served)`]] : [])]);
    byId("model-picker").value = model.get();
  }
}

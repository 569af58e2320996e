// A second answer to the request of the playground, with changed routing.
import { ChatAnswer } from "./chat_answer.js";
import { byId, debounce, setText } from "../dom.js";
import { exportButtons } from "../export/export_buttons.js";
import { RoutingOverrides } from "./routing_overrides.js";
import { RunForm } from "./run_form.js";

const startMilliseconds = 250;

export class ChangedAnswer {
  // `first`: the panel of the answer without changes, `panel`: the one of this answer. `run(request,
  // panel, answer, signal)` sends a request and fills both, as PlaygroundView does for the first
  // answer; it returns a sentence about the answer. `onOverrides` is called after every change of
  // the routing.
  constructor({ first, panel, run, onOverrides }) {
    Object.assign(this, { first, panel, run, onOverrides });
    this.request = null; // the request of the first answer
    this.answer = new ChatAnswer(byId("changed-chat"));
    this.overrides = new RoutingOverrides(byId("overrides"), () => this.#onChange());
    this.form = new RunForm({ form: byId("changed-form"), button: byId("changed-run"),
      run: (controller) => this.#run(controller.signal) });
    this.start = debounce(() => {
      if (this.request && this.overrides.size > 0) this.form.start();
    }, startMilliseconds);
    byId("overrides-clear").addEventListener("click", () => this.overrides.clear());
    byId("changed-exports").replaceWith(exportButtons({ what: "the answer with changed routing",
      name: "changed-routing", node: () => byId("changed-card"), rows: () => this.panel.table() }));
  }

  // Forgets the answer, because another first answer begins.
  reset() {
    this.form.stop();
    this.request = null;
    this.#clear();
  }

  // Sets the request of the complete first answer. Sends it again if the routing is changed.
  setRequest(request) {
    this.request = request;
    if (this.overrides.size > 0) this.form.start();
  }

  #onChange() {
    byId("changed-card").hidden = this.overrides.size === 0;
    byId("overrides").dispatchEvent(new Event("change", { bubbles: true }));
    this.onOverrides();
    this.form.stop();
    this.start();
  }

  #clear() {
    this.panel.clear(this.request?.layout ?? this.first.layout);
    this.answer.clear();
    this.#note("");
    setText(byId("changed-summary"), "");
  }

  #note(text) {
    byId("changed-note").hidden = !text;
    setText(byId("changed-note"), text);
  }

  async #run(signal) {
    if (!this.request) {
      this.#note("Generate an answer first.");
      return;
    }
    this.#clear();
    const { body } = this.request;
    const request = { ...this.request,
      body: { ...body, routing_control: this.overrides.value() } };
    try {
      const summary = await this.run(request, this.panel, this.answer, signal);
      setText(byId("changed-summary"), `${this.#compare()} ${summary}`);
    } catch (error) {
      if (error.name === "AbortError") return;
      this.#note(error.code === "not_enabled"
        ? "No second answer: start the server with --routing-control to let requests change their " +
          `routing (${error.message}).`
        : `No second answer: ${error.message}.`);
    }
  }

  // Marks the tokens from the first one that differs, and returns a sentence about it.
  #compare() {
    const [one, other] = [this.first.tokens, this.panel.tokens];
    const same = other.findIndex((token, i) => token.text !== one[i]?.text);
    if (same < 0) {
      return other.length === one.length ? "The same tokens as without the changes."
        : `The same tokens as without the changes up to position ${other.length - 1}, then the end.`;
    }
    for (const { chip } of other.slice(same)) chip.classList.add("differs");
    return `Differs from position ${other[same].position} on (underlined).`;
  }
}

// The "Playground" view: a prompt or a chat, its streamed answer, and the experts that computed
// each token.
import { model, postJson } from "../api.js";
import { ChangedAnswer } from "./changed_answer.js";
import { ChatAnswer } from "./chat_answer.js";
import { ChatMessages } from "./chat_messages.js";
import { byId, hasModifier, setOptions, setText } from "../dom.js";
import { exportButtons } from "../export/export_buttons.js";
import { blockKey, blockTitle } from "../format.js";
import { generate } from "../generation.js";
import { parseJson, parseTools } from "../json_check.js";
import { LinkedOptions, linkRadios } from "../linked_options.js";
import { LayoutWatch } from "./layout_watch.js";
import { RunForm } from "./run_form.js";
import { SamplingOptions } from "./sampling_options.js";
import { TokenPanel } from "./token_panel.js";
import { tokenTexts } from "../token_text.js";

const firstMessages = [{ role: "user", content: "rose: a shrub of" }];

export class PlaygroundView {
  constructor(page) {
    this.recordsRefused = false; // true if the server keeps no routing records
    this.sampling = new SamplingOptions({ host: byId("sampling"), more: byId("more-fields"),
      maxTokens: 48 });
    this.#makePanels();
    this.messages = new ChatMessages({ list: byId("messages"), addButton: byId("add-message"),
      onChange: () => byId("prompt-form").dispatchEvent(new Event("change", { bubbles: true })) });
    this.messages.set(firstMessages);
    this.answer = new ChatAnswer(byId("chat-answer"));
    this.layouts = new LayoutWatch((layout) => this.#showBlocks(layout), page.setState);
    this.form = new RunForm({ form: byId("prompt-form"), button: byId("generate"),
      run: (controller) => this.#generate(controller.signal) });
    this.#listen();
    this.#listenToComposer();
    this.#showMode();
    byId("answer-exports").replaceWith(exportButtons({ what: "the answer", name: "playground",
      node: () => byId("answer-cards"), rows: () => this.panel.table() }));
    const chatOnly = ["messages", "tools", "tool_choice", "template"];
    this.options = new LinkedOptions({
      mode: linkRadios("mode"), ...this.sampling.controls(), show_prompt: byId("show-prompt"),
      block: byId("color-block"), prompt: byId("prompt"), messages: this.#messagesLink(),
      tools: byId("tools"), tool_choice: byId("tool-choice"), template: byId("chat-template"),
      change: { get: () => this.changed.overrides.text(),
        set: (value) => this.changed.overrides.set(value) },
    }, (name) => name !== "prompt" && !chatOnly.includes(name) ||
      (name === "prompt") !== this.#isChat());
  }

  // The panels of the answer and of the one with changed routing, which share the details.
  #makePanels() {
    const shared = { detail: byId("detail-body"), blockName: () => byId("color-block").value,
      routing: { toggle: (block, expert) => this.changed.overrides.toggle(block, expert),
        kindOf: (block, expert) => this.changed.overrides.kindOf(block, expert) } };
    this.panel = new TokenPanel({ ...shared, chips: byId("chips"), legend: byId("expert-legend"),
      openFirst: true, onChoose: () => this.changed.panel.forgetChoice() });
    this.changed = new ChangedAnswer({ first: this.panel,
      panel: new TokenPanel({ ...shared, chips: byId("changed-chips"),
        onChoose: () => this.panel.forgetChoice() }),
      run: (...request) => this.#run(...request),
      onOverrides: () => this.#panels().forEach((panel) => panel.markRouting()) });
  }

  #panels() {
    return [this.panel, this.changed.panel];
  }

  #messagesLink() {
    const get = () => JSON.stringify(this.messages.value());
    const initial = get();
    return {
      get: () => (get() === initial ? "" : get()),
      set: (value) => this.messages.set(parseJson(value || initial).value ?? firstMessages),
    };
  }

  show() {
    this.layouts.start();
  }

  hide() {
    this.layouts.stop();
  }

  // Forgets what another model has answered.
  reset() {
    this.form.stop();
    this.changed.reset();
    this.panel.clear(null);
    this.answer.clear();
    for (const id of ["answer-note", "playground-note"]) setText(byId(id), "");
    byId("playground-note").hidden = true;
  }

  #listen() {
    for (const input of document.getElementsByName("mode")) {
      input.addEventListener("change", () => this.#showMode());
    }
    byId("tools").addEventListener("change", () => this.#checkTools());
    for (const id of ["stop", "tools", "chat-template"]) {
      byId(id).addEventListener("change", () => byId(id).value && (byId("more").open = true));
    }
    byId("color-block").addEventListener("change", () =>
      this.#panels().forEach((panel) => panel.repaint()));
  }

  // Sends the text of the composer with the Enter key, as chats do.
  #listenToComposer() {
    byId("chat-input").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || hasModifier(event)) return;
      event.preventDefault();
      byId("prompt-form").requestSubmit(byId("generate"));
    });
  }

  // Appends what the user has written to the messages.
  #takeInput() {
    const text = byId("chat-input").value;
    if (text.trim() === "") return;
    byId("chat-input").value = "";
    this.messages.add({ role: "user", content: text });
  }

  #isChat() {
    return document.querySelector("[name=mode]:checked").value === "chat";
  }

  #showMode() {
    byId("text-fields").hidden = this.#isChat();
    for (const id of ["chat-fields", "more-chat"]) byId(id).hidden = !this.#isChat();
    byId(this.#isChat() ? "composer" : "prompt-tools").append(byId("generate"));
    this.form.rename(this.#isChat() ? "Send" : "Generate");
  }

  #showBlocks({ blocks }) {
    setOptions(byId("color-block"), blocks.map((block) => [blockKey(block), blockTitle(block)]));
    byId("color-label").hidden = blocks.length === 0;
    byId("expert-hints").hidden = blocks.length === 0;
    this.changed.reset();
    this.changed.overrides.keepThoseOf(blocks);
  }

  #note(text) {
    byId("playground-note").hidden = !text;
    setText(byId("playground-note"), text);
  }

  // Returns the tools, null if there are none, or undefined after showing what is wrong with them.
  #checkTools() {
    const { value, error } = parseTools(byId("tools").value);
    setText(byId("tools-error"), error ? `Tools: ${error}.` : "");
    byId("tools").setAttribute("aria-invalid", String(Boolean(error)));
    return error ? undefined : value;
  }

  #request({ blocks }) {
    // With a known seed, the same request can be sent again with changed routing.
    const body = { seed: crypto.getRandomValues(new Uint32Array(1))[0],
      ...model.field(), ...this.sampling.fields(), return_token_ids: true,
      stream_options: { include_usage: true } };
    if (!this.recordsRefused && blocks.length > 0) body.return_routing = true;
    if (!this.#isChat()) {
      return Object.assign(body, { prompt: byId("prompt").value, logprobs: 0,
        echo: byId("show-prompt").checked });
    }
    const tools = this.#checkTools();
    if (tools === undefined) return null;
    this.#takeInput();
    Object.assign(body, { messages: this.messages.value(), logprobs: true });
    if (tools) Object.assign(body, { tools, tool_choice: byId("tool-choice").value });
    const template = byId("chat-template").value;
    if (template.trim() !== "") body.chat_template = template;
    return body;
  }

  async #generate(signal) {
    this.#note("");
    try {
      const layout = await this.layouts.load(signal);
      const body = this.#request(layout);
      if (!body) {
        byId("more").open = true;
        byId("tools").focus();
        return;
      }
      this.changed.reset();
      const request = { layout, body };
      try {
        await this.#answer(request, signal);
      } catch (error) {
        if (error.code !== "not_enabled") throw error;
        delete body.return_routing;
        this.recordsRefused = true;
        this.#note("Tokens without their experts: start the server with --routing-records to see " +
          `them (${error.message}).`);
        await this.#answer(request, signal);
      }
    } catch (error) {
      if (error.name !== "AbortError") this.#note(`No answer: ${error.message}.`);
    }
  }

  async #answer(request, signal) {
    const { body, layout } = request;
    this.panel.clear(layout);
    this.answer.clear();
    setText(byId("answer-note"), "");
    request.prompt = body.messages && byId("show-prompt").checked
      ? await promptTokens(body, signal) : null;
    const summary = await this.#run(request, this.panel, this.answer, signal);
    setText(byId("answer-note"), `${summary} Seed ${body.seed}.`);
    if (body.messages) {
      this.messages.add(this.answer.message(), this.answer.reasoning);
      byId("chat-answer").hidden = true; // the message shows it
    }
    this.changed.setRequest(request);
  }

  // Sends a request and fills `panel`, and `answer` with what a chat answers. `prompt`: the known
  // tokens of a chat's prompt, or null if they are not to be shown. Returns a sentence about the
  // answer.
  async #run({ body, prompt }, panel, answer, signal) {
    const chat = Boolean(body.messages);
    const { fits, summary } = await generate({
      path: chat ? "v1/chat/completions" : "v1/completions", body, panel, signal,
      onStart: (ids) => prompt && addPrompt(panel, ids, prompt),
      onChoice: (choice) => chat && answer.add(choice.delta),
    });
    if (!fits) this.#note("A routing record of the answer does not fit this model.");
    return summary;
  }
}

// `ids`: the prompt's tokens as the model read them. Their texts are known if the template of the
// server made the same tokens.
function addPrompt(panel, ids, { ids: known, texts }) {
  const same = ids.length === known.length && ids.every((id, i) => id === known[i]);
  ids.forEach((id, position) => panel.add({ text: same ? texts[position] : `#${id}`, position,
    generated: false }));
}

// Returns {ids, texts} of a chat's prompt, both empty if the server cannot tell.
async function promptTokens({ model: name, messages, tools }, signal) {
  try {
    const { tokens, token_strs: spellings } = await postJson("tokenize",
      { ...(name ? { model: name } : {}), messages, ...(tools ? { tools } : {}),
        return_token_strs: true }, signal);
    return { ids: tokens, texts: tokenTexts(spellings) };
  } catch (error) {
    if (error.name === "AbortError") throw error;
    return { ids: [], texts: [] };
  }
}

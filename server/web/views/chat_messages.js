// The messages of a chat, as bubbles whose texts and roles the user can edit.
import { indented } from "./chat_answer.js";
import { el } from "../dom.js";

const roles = ["system", "user", "assistant", "tool"];
const maxMessages = 200;
const maxCharacters = 20000;

// Links can contain anything in place of a name.
const shown = (text) => (typeof text === "string" ? text : "?");

export class ChatMessages {
  // Fills `list`, an <ol>. `addButton` appends a message. `onChange` is called after every change
  // that is not an input event of a field.
  constructor({ list, addButton, onChange }) {
    this.list = list;
    this.addButton = addButton;
    this.onChange = onChange;
    this.items = []; // {role, text, callId, calls, node, remove}
    addButton.addEventListener("click", () => {
      const item = this.#append({ role: this.items.at(-1)?.role.value === "user" ? "assistant"
        : "user", content: "" });
      item?.text.focus();
      this.onChange();
    });
  }

  // Returns the messages as a request has them.
  value() {
    return this.items.map(({ role, text, callId, calls }) => {
      const message = { role: role.value, content: text.value };
      if (message.role === "tool") message.tool_call_id = callId.value;
      if (message.role === "assistant" && calls.length > 0) message.tool_calls = calls;
      return message;
    });
  }

  // Replaces the messages. Leaves out what is not a message.
  set(messages) {
    this.items = [];
    this.list.replaceChildren();
    for (const message of Array.isArray(messages) ? messages : []) {
      if (roles.includes(message?.role)) this.#append(message);
    }
  }

  // `reasoning`: shown with the message, but not sent with it.
  add(message, reasoning = "") {
    this.#append(message, reasoning);
    this.onChange();
  }

  #append({ role, content, tool_call_id: id, tool_calls: calls }, reasoning = "") {
    if (this.items.length >= maxMessages) return null;
    const item = {
      role: el("select", {}, roles.map((name) => el("option", { value: name }, name))),
      text: el("textarea", { rows: 1, spellcheck: "false", maxlength: maxCharacters }),
      callId: el("input", { type: "text", maxlength: 200 }),
      calls: Array.isArray(calls) ? calls : [],
      remove: el("button", { type: "button", title: "Remove", onclick: () => this.#remove(item) },
        "✕"),
    };
    item.role.value = role;
    item.text.value = typeof content === "string" ? content : "";
    item.callId.value = typeof id === "string" ? id : "";
    item.idLabel = el("label", {}, "Call ", item.callId);
    item.called = el("div", {}, item.calls.flatMap((call) => [
      el("p", { class: "muted" }, `Calls ${shown(call?.function?.name)} (${shown(call?.id)}):`),
      el("pre", { class: "answer-text" }, indented(shown(call?.function?.arguments)))]));
    item.node = el("li", { class: "message" },
      el("div", { class: "message-head" }, item.role, item.idLabel, el("span", { class: "spring" }),
        item.remove),
      reasoning ? el("details", {}, el("summary", {}, "Reasoning"),
        el("p", { class: "answer-text muted", dir: "auto" }, reasoning)) : null,
      item.text, item.called);
    item.role.addEventListener("change", () => this.#showRole(item));
    this.#showRole(item);
    this.items.push(item);
    this.list.append(item.node);
    this.#number();
    return item;
  }

  #showRole({ role, idLabel, called, calls, node }) {
    node.dataset.role = role.value;
    idLabel.hidden = role.value !== "tool";
    called.hidden = role.value !== "assistant" || calls.length === 0;
  }

  #remove(item) {
    const at = this.items.indexOf(item);
    this.items.splice(at, 1);
    item.node.remove();
    this.#number();
    (this.items[Math.min(at, this.items.length - 1)]?.remove ?? this.addButton).focus();
    this.onChange();
  }

  #number() {
    this.items.forEach(({ role, text, callId, remove }, i) => {
      role.setAttribute("aria-label", `Role of message ${i + 1}`);
      text.setAttribute("aria-label", `Text of message ${i + 1}`);
      callId.setAttribute("aria-label", `Id of the call that message ${i + 1} answers`);
      remove.setAttribute("aria-label", `Remove message ${i + 1}`);
    });
  }
}

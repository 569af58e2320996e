// The answer of a chat, joined from the events of its stream: reasoning, text and calls of tools.
import { el } from "../dom.js";

export class ChatAnswer {
  // Shows the answer in `host`, which is hidden while there is nothing to show.
  constructor(host) {
    this.host = host;
    this.clear();
  }

  clear() {
    this.content = "";
    this.reasoning = "";
    this.calls = []; // {id, type, function: {name, arguments}}
    this.host.replaceChildren();
    this.host.hidden = true;
    this.nodes = {};
  }

  add(delta) {
    if (!delta) return;
    if (typeof delta.content === "string") this.content += delta.content;
    const reasoning = delta.reasoning_content ?? delta.reasoning;
    if (typeof reasoning === "string") this.reasoning += reasoning;
    for (const piece of delta.tool_calls ?? []) {
      const call = (this.calls[piece.index] ??= { id: "", type: "function",
        function: { name: "", arguments: "" } });
      call.id ||= piece.id ?? "";
      call.function.name += piece.function?.name ?? "";
      call.function.arguments += piece.function?.arguments ?? "";
    }
    this.#show();
  }

  // Returns the answer as a message of the chat.
  message() {
    const calls = this.calls.filter(Boolean);
    const message = { role: "assistant", content: this.content };
    if (calls.length > 0) message.tool_calls = calls;
    return message;
  }

  #show() {
    this.#section("reasoning", "Reasoning", this.reasoning);
    this.#section("content", "Answer", this.content);
    this.calls.forEach(({ function: { name, arguments: text } }, i) => {
      this.#section(`call-${i}`, `Call of ${name}`, indented(text));
    });
  }

  #section(name, title, text) {
    if (text === "" && !this.nodes[name]) return;
    this.host.hidden = false;
    if (!this.nodes[name]) {
      const [heading, body] = [el("h3", {}), el("p", { class: "answer-text", dir: "auto" })];
      this.nodes[name] = { heading, body };
      this.host.append(el("section", { "data-part": name }, heading, body));
    }
    this.nodes[name].heading.textContent = title;
    this.nodes[name].body.textContent = text;
  }
}

// Returns a call's arguments in lines, or as they are while they are incomplete.
export function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

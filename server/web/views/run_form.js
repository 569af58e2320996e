// A form that starts a run, and stops it while it goes on.
import { setText } from "../dom.js";

export class RunForm {
  // `button` submits `form`. `run(controller)` returns a promise and ends early when the controller
  // is aborted. Ctrl+Enter and Cmd+Enter press the button.
  constructor({ form, button, run }) {
    this.button = button;
    this.title = button.textContent;
    this.run = run;
    this.controller = null;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.controller) this.controller.abort();
      else this.#start();
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        form.requestSubmit(button);
      }
    });
  }

  async #start() {
    this.controller = new AbortController();
    setText(this.button, "Stop");
    // A field that is being changed must not prevent a stop.
    this.button.formNoValidate = true;
    try {
      await this.run(this.controller);
    } finally {
      this.controller = null;
      setText(this.button, this.title);
      this.button.formNoValidate = false;
    }
  }
}

// A form that starts a run, and stops it while it goes on.
import { setText } from "../dom.js";

export class RunForm {
  // `button` submits `form`. `run(controller)` returns a promise and ends early when the controller
  // is aborted. Ctrl+Enter and Cmd+Enter press the button. Pressing it during a run stops the run.
  constructor({ form, button, run }) {
    this.button = button;
    this.title = button.textContent;
    this.run = run;
    this.controller = null;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.controller) this.stop();
      else this.start();
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        form.requestSubmit(button);
      }
    });
  }

  // Changes the text of the button.
  rename(title) {
    this.title = title;
    if (!this.controller) setText(this.button, title);
  }

  stop() {
    this.controller?.abort();
  }

  // Runs, in place of a run that has not ended.
  async start() {
    this.stop();
    const controller = new AbortController();
    this.controller = controller;
    setText(this.button, "Stop");
    // A field that is being changed must not prevent a stop.
    this.button.formNoValidate = true;
    try {
      await this.run(controller);
    } finally {
      if (this.controller === controller) {
        this.controller = null;
        setText(this.button, this.title);
        this.button.formNoValidate = false;
      }
    }
  }
}

// Keeps the layout of the model's routed blocks while a view is shown: another model or version can
// be loaded at any time.
import { getOfModel } from "../api.js";
import { Poller } from "../poller.js";
import { makeLayout } from "../routing_record.js";

const pollMilliseconds = 4000;

export class LayoutWatch {
  // Calls `onChange(layout)` with the first layout and with each that differs from the one before.
  // `onState` is called after every request, as by Poller.
  constructor(onChange, onState) {
    this.onChange = onChange;
    this.layout = null; // as makeLayout() returns it
    this.text = "";
    this.poller = new Poller((signal) => this.load(signal), pollMilliseconds, onState);
  }

  start() {
    this.poller.start();
  }

  stop() {
    this.poller.stop();
  }

  // Requests the layout now, and returns it.
  async load(signal) {
    const answer = await getOfModel("v1/experts/layout", {}, signal);
    const text = JSON.stringify(answer);
    if (text !== this.text) {
      this.layout = makeLayout(answer);
      this.text = text;
      this.onChange(this.layout);
    }
    return this.layout;
  }
}

// Repeats a request while the page is visible.
import { ApiError } from "./api.js";

const maxRequestMilliseconds = 30000;
const maxPauseMilliseconds = 30000;

export class Poller {
  // `ask(signal)` fetches data and shows it. `onState` is called with null after every success,
  // else with the error. The pause before the next request is `interval` milliseconds, doubled by
  // each failure in a row (at most four times), and at least 15 times the duration of the last
  // request, but for its duration at most half a minute. A request without an answer fails after
  // half a minute.
  constructor(ask, interval, onState = () => {}) {
    this.ask = ask;
    this.interval = interval;
    this.onState = onState;
    this.active = false;
    this.timer = 0;
    this.failures = 0;
    this.controller = null;
    document.addEventListener("visibilitychange", () => this.refresh());
  }

  start() {
    this.active = true;
    this.refresh();
  }

  stop() {
    this.active = false;
    clearTimeout(this.timer);
    this.controller?.abort();
  }

  // Sends the request now. Aborts a request that is still running.
  refresh() {
    clearTimeout(this.timer);
    this.controller?.abort();
    if (this.active && !document.hidden) this.#run();
  }

  async #run() {
    const controller = new AbortController();
    this.controller = controller;
    const begin = performance.now();
    let late = false;
    const limit = setTimeout(() => {
      late = true;
      controller.abort();
    }, maxRequestMilliseconds);
    try {
      await this.ask(controller.signal);
      if (controller.signal.aborted && !late) return;
      this.failures = 0;
      this.onState(null);
    } catch (error) {
      if (controller.signal.aborted && !late) return;
      this.failures = Math.min(this.failures + 1, 4);
      this.onState(late ? new ApiError(0, "the server does not answer") : error);
    } finally {
      clearTimeout(limit);
    }
    if (!this.active) return;
    const took = performance.now() - begin;
    const pause = Math.max(this.interval * 2 ** this.failures,
      Math.min(15 * took, maxPauseMilliseconds));
    this.timer = setTimeout(() => this.refresh(), pause);
  }
}

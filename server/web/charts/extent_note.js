// A sentence that says which experts a chart shows, while its scrolling element is too narrow for
// all of them.
import { el, setText } from "../dom.js";

export class ExtentNote {
  // `scroller`: the element that scrolls sideways. `columns()` returns {left, width, count}: where
  // the first column begins and how wide a column is, in CSS pixels of the scrolled content, and how
  // many there are. Call update() when they change.
  constructor(scroller, columns) {
    this.scroller = scroller;
    this.columns = columns;
    // An exported picture has all columns.
    this.node = el("p", { class: "muted extent", "data-export": true, hidden: true });
    scroller.addEventListener("scroll", () => this.update(), { passive: true });
  }

  update() {
    const { left, width, count } = this.columns();
    const { scrollLeft, clientWidth } = this.scroller;
    const at = (x) => Math.min(Math.max(Math.floor((x - left) / width), 0), count - 1);
    const first = at(scrollLeft + width / 2);
    const last = at(scrollLeft + clientWidth - width / 2);
    this.node.hidden = !(width > 0) || (first === 0 && last === count - 1);
    if (!this.node.hidden) {
      setText(this.node, `Experts ${first}–${last} of ${count}: scroll sideways for the others.`);
    }
  }
}

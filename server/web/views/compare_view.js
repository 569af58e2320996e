// The "Compare" view: the experts that two prompts use, side by side.
import { model } from "../api.js";
import { niceCeiling } from "../charts/charts.js";
import { DifferenceScale } from "../charts/color_scales.js";
import { byId, el, setOptions, setText } from "../dom.js";
import { exportButtons } from "../export/export_buttons.js";
import { blockKey, blockLabel, blockTitle, decimal, percent } from "../format.js";
import { generate } from "../generation.js";
import { Heatmap } from "../charts/heatmap.js";
import { LinkedOptions } from "../linked_options.js";
import { PairedBars } from "../charts/paired_bars.js";
import { LayoutWatch } from "./layout_watch.js";
import { expertShares, jensenShannonDistance, overlap } from "../routing_shares.js";
import { RunForm } from "./run_form.js";
import { SamplingOptions } from "./sampling_options.js";
import { TokenPanel } from "./token_panel.js";

const sides = ["a", "b"];
// Bars of more blocks, or of blocks with more experts, are shown for one block at a time.
const maxBlocksOfBars = 12;
const maxExpertsOfHalf = 64;

export class CompareView {
  constructor(page) {
    this.measured = null; // the layout of the model whose answers are compared
    this.results = []; // {block, a, b, overlap, distance} of each routed block
    this.charts = []; // {block, bars} of the blocks whose bars are shown
    this.map = new Heatmap({ label: "Differences of the shares by layer and expert",
      describedBy: "compare-readout", scale: new DifferenceScale(),
      onCursor: (row, column) => this.#showCursor(row, column),
      onChoose: (row) => this.#chooseBlock(row) });
    byId("compare-map").replaceWith(this.map.node, this.map.extent.node);
    byId("compare-legend").replaceWith(this.map.legend);
    this.#showCursor(null);
    this.sampling = new SamplingOptions({ host: byId("compare-sampling"),
      more: byId("compare-more"), prefix: "compare-", minTokens: 0, maxTokens: 24 });
    this.panels = {};
    for (const side of sides) {
      this.panels[side] = new TokenPanel({ chips: byId(`chips-${side}`),
        detail: byId("compare-detail"), blockName: () => byId("compare-color").value,
        onChoose: () => this.panels[side === "a" ? "b" : "a"].forgetChoice() });
    }
    this.layouts = new LayoutWatch((layout) => this.#showBlocks(layout), page.setState);
    this.form = new RunForm({ form: byId("compare-form"), button: byId("compare-run"),
      run: (controller) => this.#run(controller) });
    this.#listen();
    byId("compare-exports").replaceWith(exportButtons({ what: "the comparison",
      name: "comparison", node: () => byId("compare-results"), rows: () => this.#rows() }));
    for (const side of sides) {
      byId(`exports-${side}`).replaceWith(exportButtons({
        what: `the tokens of ${side.toUpperCase()}`, name: `tokens-${side}`,
        node: () => byId(`card-${side}`), rows: () => this.panels[side].table() }));
    }
    this.options = new LinkedOptions({ a: byId("compare-a"), b: byId("compare-b"),
      ...this.sampling.controls(), count: byId("compare-count"), block: byId("compare-color") });
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
    for (const side of sides) {
      this.panels[side].clear(null);
      setText(byId(`summary-${side}`), "");
    }
    this.measured = null;
    byId("compare-results").hidden = true;
  }

  #listen() {
    byId("compare-color").addEventListener("change", () => {
      for (const side of sides) this.panels[side].repaint();
    });
    byId("compare-stop").addEventListener("change", () =>
      byId("compare-stop").value && (byId("compare-more-options").open = true));
    byId("compare-count").addEventListener("change", () => this.#measure());
    byId("compare-block").addEventListener("change", () => this.#showTable());
    byId("compare-bars").addEventListener("change", () => this.#showCharts());
    byId("compare-table-details").addEventListener("toggle", () => this.#showTable());
  }

  #showBlocks({ blocks }) {
    const options = blocks.map((block) => [blockKey(block), blockTitle(block)]);
    setOptions(byId("compare-color"), options);
    setOptions(byId("compare-block"), options);
    // The results of another model are of no use.
    byId("compare-results").hidden = true;
    this.results = [];
    this.measured = null;
    setOptions(byId("compare-bars"), options);
    const wide = blocks.some(({ experts }) => experts > maxExpertsOfHalf);
    byId("compare-charts").classList.toggle("halves", !wide);
    byId("compare-bars-label").hidden = !wide && blocks.length <= maxBlocksOfBars;
    this.charts = [];
    byId("compare-color-label").hidden = blocks.length === 0;
    this.#note(blocks.length === 0 ? "This model has no routed blocks: it is dense." : "");
  }

  #note(text) {
    byId("compare-note").hidden = !text;
    setText(byId("compare-note"), text);
  }

  async #run(controller) {
    byId("compare-results").hidden = true;
    this.measured = null;
    try {
      const layout = await this.layouts.load(controller.signal);
      if (layout.blocks.length > 0) this.#note("");
      const answers = await Promise.all(
        sides.map((side) => this.#ask(side, layout, controller.signal)));
      if (answers.some(({ fits }) => !fits)) {
        this.#note("A routing record of an answer does not fit this model.");
      }
      // Another model may have been loaded meanwhile.
      if (layout === this.layouts.layout) this.measured = layout;
      this.#measure();
    } catch (error) {
      // Without this prompt's result, the other one is of no use.
      controller.abort();
      if (error.name !== "AbortError") this.#note(`No comparison: ${error.message}.`);
    }
  }

  async #ask(side, layout, signal) {
    const panel = this.panels[side];
    panel.clear(layout);
    setText(byId(`summary-${side}`), "");
    const body = { ...model.field(), ...this.sampling.fields(), prompt: byId(`compare-${side}`).value, echo: true,
      logprobs: 0, return_token_ids: true, stream_options: { include_usage: true } };
    if (layout.blocks.length > 0) body.return_routing = true;
    const answer = await generate({ path: "v1/completions", body, panel, signal });
    setText(byId(`summary-${side}`), answer.summary);
    return answer;
  }

  // Compares the tokens that are to be counted.
  #measure() {
    if (!this.measured) return;
    const { blocks } = this.measured;
    const kind = byId("compare-count").value;
    const counted = (panel) => panel.tokens.filter(({ generated }) =>
      kind === "" || generated === (kind === "generated"));
    const { a, b } = this.panels;
    if (!a.record || !b.record) return;
    const lists = [counted(a), counted(b)];
    const measured = blocks.map((block) => ({ block,
      a: expertShares(a.record, lists[0], block), b: expertShares(b.record, lists[1], block) }));
    const known = measured.every((result) => result.a && result.b);
    this.results = known ? measured.map((result) => ({ ...result,
      overlap: overlap(result.a, result.b),
      distance: jensenShannonDistance(result.a, result.b) })) : [];
    byId("compare-results").hidden = blocks.length === 0;
    for (const part of ["map", "bars"]) byId(`compare-${part}-parts`).hidden = !known;
    byId("compare-table-details").hidden = !known;
    this.#showResults();
  }

  #showResults() {
    const { results } = this;
    if (results.length === 0) {
      setText(byId("compare-summary"), "No experts of these tokens are known for both prompts.");
      return;
    }
    const mean = (name) => results.reduce((sum, one) => sum + one[name], 0) / results.length;
    setText(byId("compare-summary"), `Mean over ${results.length} blocks: overlap ` +
      `${percent(mean("overlap"))}, Jensen–Shannon distance ${decimal(mean("distance"))}.`);
    this.map.set(results.map(({ block, a, b }) =>
      ({ label: blockLabel(block), values: a.map((share, expert) => share - b[expert]) })));
    this.#showCharts();
    this.#showTable();
  }

  // Shows the bars of all blocks, or of the chosen one.
  #showCharts() {
    const single = !byId("compare-bars-label").hidden;
    const shown = this.results.filter(({ block }) =>
      !single || blockKey(block) === byId("compare-bars").value);
    if (shown.length !== this.charts.length ||
        shown.some(({ block }, i) => block !== this.charts[i].block)) {
      this.charts = shown.map(({ block }) => ({ block, bars: new PairedBars(blockTitle(block)) }));
      byId("compare-charts").replaceChildren(...this.charts.map(({ bars }) => bars.node));
    }
    // All blocks have the same axis, so that their bars can be compared.
    const highest = this.results.reduce((top, { a, b }) => Math.max(top, ...a, ...b), 0);
    shown.forEach(({ a, b, overlap: common, distance }, i) => this.charts[i].bars.set({ a, b,
      top: highest > 0.1 ? Math.ceil(10 * highest) / 10 : niceCeiling(highest),
      facts: `overlap ${percent(common)}, Jensen–Shannon distance ${decimal(distance)}` }));
  }

  // Shows a block's bars and shares, after one of its cells was chosen.
  #chooseBlock(row) {
    const key = blockKey(this.results[row].block);
    for (const id of ["compare-bars", "compare-block"]) byId(id).value = key;
    this.#showCharts();
    this.#showTable();
  }

  #showCursor(row, expert) {
    const result = row === null ? null : this.results[row];
    if (!result) {
      setText(byId("compare-readout"), "Point at a cell, or focus the map and use the arrow keys. " +
        "Choose a cell for the bars of its block.");
      return;
    }
    const { block, a, b } = result;
    setText(byId("compare-readout"), `${blockTitle(block)}, expert ${expert}: ` +
      `${percent(a[expert])} in A, ${percent(b[expert])} in B`);
  }

  #rows() {
    const head = ["layer", "block", "expert", "share_a", "share_b", "block_overlap",
      "block_jensen_shannon_distance"];
    return [head, ...this.results.flatMap(({ block, a, b, overlap: common, distance }) =>
      a.map((share, e) => [block.layer, block.block, e, share, b[e], common, distance]))];
  }

  #showTable() {
    if (!byId("compare-table-details").open) return;
    const key = byId("compare-block").value;
    const result = this.results.find(({ block }) => blockKey(block) === key);
    if (!result) return;
    byId("compare-table").tBodies[0].replaceChildren(...result.a.map((share, expert) =>
      el("tr", {}, el("th", { scope: "row" }, String(expert)),
        ...[percent(share), percent(result.b[expert]),
          percent(Math.min(share, result.b[expert]))].map((text) =>
          el("td", { class: "number" }, text)))));
  }
}

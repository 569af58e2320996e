// Formats numbers, names and token texts for display.

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const two = new Intl.NumberFormat("en", { maximumFractionDigits: 2, minimumFractionDigits: 2 });

export const none = "–";
const known = (value) => typeof value === "number" && Number.isFinite(value);

export const count = (value) => (known(value) ? whole.format(value) : none);
export const compact = (value) => (known(value) ? short.format(value) : none);
export const decimal = (value) => (known(value) ? two.format(value) : none);

// Sums of shares differ from 1 by rounding errors below this.
const rounding = 1e-11;

// Neither form of a percentage rounds a part up to the whole, or down to nothing.
export function percent(ratio) {
  if (!known(ratio)) return none;
  const value = 100 * ratio;
  if (value >= 99.95) return ratio < 1 - rounding ? ">99.9 %" : `${value.toFixed(0)} %`;
  if (value > 0 && value < 0.005) return "<0.01 %";
  return `${value.toFixed(value === 0 ? 0 : value >= 10 ? 1 : 2)} %`;
}

export function wholePercent(ratio) {
  if (!known(ratio)) return none;
  const value = 100 * ratio;
  if (value >= 99.5 && ratio < 1 - rounding) return ">99 %";
  return value > 0 && value < 0.5 ? "<1 %" : `${value.toFixed(0)} %`;
}

export function seconds(value) {
  if (!known(value)) return none;
  if (value === 0) return "0 s";
  if (value < 0.01) return `${(1000 * value).toPrecision(2)} ms`;
  if (value < 1) return `${Math.round(1000 * value)} ms`;
  return `${value < 10 ? value.toFixed(2) : value.toFixed(1)} s`;
}

export const blockLabel = ({ layer, block }) => `${layer} ${block.replace("_", "-")}`;
export const blockTitle = ({ layer, block }) => `Layer ${layer}, ${block.replace("_", "-")}`;
export const blockKey = ({ layer, block }) => `${layer}/${block}`;

const marks = new Map([["\n", "⏎"], ["\t", "⇥"], [" ", "·"]]);
// Characters that could move, hide or reorder other text: control and format characters (including
// those that change the text direction), unusual spaces, lone surrogates, private-use and
// unassigned characters.
const unsafe = /[\p{Cc}\p{Cf}\p{Z}\p{Cs}\p{Co}\p{Cn}]/u;
const mark = /\p{M}/u;
const maxMarksInRow = 3;

function escape(character) {
  const code = character.codePointAt(0);
  return code < 0x100 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u{${code.toString(16)}}`;
}

// Returns a token's text in one line in which every character is visible. Returns at most `limit`
// characters.
export function visible(text, limit = 60) {
  const characters = [...String(text)];
  let out = "";
  let marksInRow = 0;
  for (const character of characters.slice(0, limit)) {
    marksInRow = mark.test(character) ? marksInRow + 1 : 0;
    const hidden = unsafe.test(character) || marksInRow > maxMarksInRow;
    out += marks.get(character) ?? (hidden ? escape(character) : character);
  }
  if (out === "") return "∅";
  return characters.length > limit ? `${out}…` : out;
}

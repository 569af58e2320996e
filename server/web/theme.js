// Light and dark mode, and the colours that have a meaning.
import { ofBrowser } from "./storage.js";

const storageName = "moeserve-theme";
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
const listeners = new Set();

export const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : prefersDark.matches;
};
export const wantsMotion = () => !reducedMotion.matches;

export function onThemeChange(listener) {
  listeners.add(listener);
}

function apply(theme) {
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
  for (const listener of listeners) listener();
}

// Makes `button` switch between light and dark mode. The initial mode is the system's.
export function setUpTheme(button) {
  const show = () => {
    button.textContent = isDark() ? "Light mode" : "Dark mode";
  };
  listeners.add(show);
  prefersDark.addEventListener("change", () => apply(document.documentElement.dataset.theme));
  button.addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    ofBrowser.set(storageName, theme);
    apply(theme);
  });
  const stored = ofBrowser.get(storageName);
  apply(stored === "light" || stored === "dark" ? stored : undefined);
}

// The lightness changes monotonically and the hue in one direction: readable with every kind of
// colour vision, and in greyscale.
const ramps = {
  light: ["#eef2f6", "#cfe1f0", "#9cc5e3", "#5b9fcf", "#2474b4", "#0d4a86", "#07284f"],
  dark: ["#1b2530", "#173c5e", "#1c5d8c", "#2f86b0", "#5db3bd", "#a9d8b5", "#f7efb2"],
};

// Both directions of differences begin at the same neutral colour.
const differences = {
  light: { below: ["#eef2f6", "#f3cfae", "#dc9450", "#b45309", "#6b2e02"],
    above: ["#eef2f6", "#b9d4ec", "#5b9fcf", "#0b63b6", "#07284f"] },
  dark: { below: ["#1b2530", "#5a3a17", "#a3661f", "#f0b45a", "#fbe3bd"],
    above: ["#1b2530", "#173c5e", "#2f78ad", "#6fb8ff", "#d3e9ff"] },
};

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

// Returns the colour at `value` of a ramp, from 0 to 1.
function colorAt(ramp, value) {
  const at = Math.min(Math.max(value, 0), 1) * (ramp.length - 1);
  const low = Math.min(Math.floor(at), ramp.length - 2);
  const [from, to] = [channels(ramp[low]), channels(ramp[low + 1])];
  const mixed = from.map((c, i) => Math.round(c + (to[i] - c) * (at - low)));
  return `rgb(${mixed.join(", ")})`;
}

// Returns the colour for `value`, from 0 to 1.
export const sequentialColor = (value) => colorAt(isDark() ? ramps.dark : ramps.light, value);

// Returns the colour for a difference `value`, from -1 to 1.
export function divergingColor(value) {
  const { below, above } = isDark() ? differences.dark : differences.light;
  return colorAt(value < 0 ? below : above, Math.abs(value));
}

// Returns the colour of an expert. Consecutive experts differ much in hue and in lightness. The
// page never identifies experts by colour alone: their numbers are always shown, too.
export function expertColor(expert) {
  const hue = (expert * 137.508 + 25) % 360;
  const lightness = [0.66, 0.78, 0.54][expert % 3];
  return `oklch(${lightness} 0.13 ${hue.toFixed(1)})`;
}

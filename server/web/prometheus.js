// Parses the parts of Prometheus' text format that the charts need.

const sample = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$/;
const label = /(\w+)="((?:[^"\\]|\\.)*)"/g;

// Returns the samples of the families in `wanted` (names without the prefix "moeserve_"): a map
// from a name to a list of {labels, value}. The samples of a histogram have the family's name with
// _bucket, _sum or _count.
export function parseMetrics(text, wanted) {
  const families = new Map();
  const names = new Set();
  for (const name of wanted) {
    for (const suffix of ["", "_bucket", "_sum", "_count"]) names.add(`moeserve_${name}${suffix}`);
  }
  for (const line of text.split("\n")) {
    if (line.startsWith("#")) continue;
    const end = line.search(/[{ ]/);
    if (end < 0 || !names.has(line.slice(0, end))) continue;
    const match = sample.exec(line);
    if (!match) continue;
    const name = match[1].slice("moeserve_".length);
    const labels = {};
    for (const [, key, value] of (match[2] ?? "").matchAll(label)) labels[key] = value;
    if (!families.has(name)) families.set(name, []);
    families.get(name).push({ labels, value: number(match[3]) });
  }
  return families;
}

const number = (text) => (text === "+Inf" ? Infinity : text === "-Inf" ? -Infinity : Number(text));

// Returns the families without the samples of other models than `name`. Samples without a model
// are those of all models.
export function ofModel(families, name) {
  return new Map([...families].map(([family, samples]) =>
    [family, samples.filter(({ labels }) => (labels.model ?? name) === name)]));
}

// Returns the value of a family that has one sample, the sum if it has several, and NaN if it has
// none.
export function valueOf(families, name) {
  const samples = families.get(name);
  return samples?.length > 0 ? samples.reduce((sum, { value }) => sum + value, 0) : NaN;
}

// Returns the families of a reading of /v1/metrics/history as parseMetrics() does. `bounds`: the
// upper bounds of each histogram's buckets.
export function familiesOf(reading, bounds) {
  const families = new Map();
  for (const [name, value] of Object.entries(reading)) {
    if (!Array.isArray(value)) {
      families.set(name, [{ labels: {}, value }]);
      continue;
    }
    let sum = 0;
    families.set(`${name}_bucket`, value.map((count, i) =>
      ({ labels: { le: String(bounds[name]?.[i] ?? "+Inf") }, value: (sum += count) })));
  }
  return families;
}

// Returns the [bound, cumulative count] pairs of a histogram, by ascending bound. Adds the counts of
// series that differ in other labels, such as those of several models.
export function buckets(families, name) {
  const counts = new Map();
  for (const { labels, value } of families.get(`${name}_bucket`) ?? []) {
    const bound = number(labels.le);
    counts.set(bound, (counts.get(bound) ?? 0) + value);
  }
  return [...counts].sort(([a], [b]) => a - b);
}

// Returns the observations between two readings of the same histogram.
export function bucketDelta(later, earlier) {
  const before = new Map(earlier);
  return later.map(([bound, value]) => [bound, Math.max(0, value - (before.get(bound) ?? 0))]);
}

// Returns the q-quantile of a histogram, interpolated linearly within a bucket; NaN without
// observations. If the quantile lies above the last finite bound, returns that bound.
export function quantile(cumulative, q) {
  const total = cumulative.length > 0 ? cumulative[cumulative.length - 1][1] : 0;
  if (!(total > 0)) return NaN;
  const rank = q * total;
  let lower = 0;
  let below = 0;
  for (const [bound, value] of cumulative) {
    if (value >= rank && value > below) {
      if (bound === Infinity) return lower;
      return lower + ((bound - lower) * (rank - below)) / (value - below);
    }
    lower = bound;
    below = value;
  }
  return lower;
}

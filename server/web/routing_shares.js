// How often tokens select each expert of a block, and how much two such distributions differ.

// Returns the share of each expert in the selections of the tokens in a block, or null if none of
// them is known. `tokens` is a list of {position}.
export function expertShares(record, tokens, block) {
  const counts = new Array(block.experts).fill(0);
  let total = 0;
  for (const { position } of tokens) {
    for (const row of record.rowsOf(position, block) ?? []) {
      for (const { expert } of row) {
        if (!(expert in counts)) continue;
        ++counts[expert];
        ++total;
      }
    }
  }
  return total > 0 ? counts.map((n) => n / total) : null;
}

// Returns the sum of the minima of two distributions: 1 if they are equal, 0 if they share nothing.
export const overlap = (a, b) => a.reduce((sum, share, i) => sum + Math.min(share, b[i]), 0);

// Returns the Jensen-Shannon distance of two distributions, with logarithms to base 2: 0 if they
// are equal, 1 if they share nothing.
export function jensenShannonDistance(a, b) {
  let divergence = 0;
  for (let i = 0; i < a.length; ++i) {
    const mean = (a[i] + b[i]) / 2;
    for (const share of [a[i], b[i]]) {
      if (share > 0) divergence += (share / 2) * Math.log2(share / mean);
    }
  }
  return Math.sqrt(Math.max(0, divergence));
}

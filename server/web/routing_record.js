// Joins the routing records in the events of a stream: which experts computed which token.

// Returns where the rows of a token are, from the response of /v1/experts/layout.
export function makeLayout({ rows_per_token: rowsPerToken, blocks }) {
  return {
    rowsPerToken,
    blocks: blocks.map(({ layer, block, experts, sub_tokens: subTokens, first_row: firstRow }) =>
      ({ layer, block, experts, subTokens, firstRow })),
  };
}

export class RoutingRecord {
  constructor(layout) {
    this.layout = layout;
    this.rows = new Map(); // position -> one list of {expert, weight} per row of the token
  }

  // Adds one routing record of the stream. Returns false if the record does not fit the layout.
  add(piece) {
    const { rowsPerToken } = this.layout;
    const { first_position: first, tokens, offsets, experts, weights } = piece ?? {};
    if (!Number.isInteger(first) || !Number.isInteger(tokens)) return false;
    if (!Array.isArray(offsets) || !Array.isArray(experts)) return false;
    if (offsets.length !== tokens * rowsPerToken + 1) return false;
    for (let t = 0; t < tokens; ++t) {
      const rows = [];
      for (let r = 0; r < rowsPerToken; ++r) {
        const at = t * rowsPerToken + r;
        const row = [];
        for (let i = offsets[at]; i < offsets[at + 1]; ++i) {
          row.push({ expert: experts[i], weight: weights?.[i] ?? NaN });
        }
        rows.push(row);
      }
      this.rows.set(first + t, rows);
    }
    return true;
  }

  has(position) {
    return this.rows.has(position);
  }

  // Returns a token's rows in a block: one row, or one row per sub-token. Returns null if the rows
  // are unknown.
  rowsOf(position, block) {
    const rows = this.rows.get(position);
    return rows ? rows.slice(block.firstRow, block.firstRow + block.subTokens) : null;
  }
}

// Returns the experts of several rows as one list, with weights averaged over the rows, in
// descending order of weight.
export function summarize(rows) {
  const sums = new Map();
  for (const row of rows) {
    for (const { expert, weight } of row) sums.set(expert, (sums.get(expert) ?? 0) + weight);
  }
  return [...sums]
    .map(([expert, sum]) => ({ expert, weight: sum / rows.length }))
    .sort((a, b) => b.weight - a.weight || a.expert - b.expert);
}

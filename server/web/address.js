// The page's address: "#/VIEW?NAME=VALUE&…" holds a view and those of its options that differ from
// their initial values.

// Limit on the fragment's length in characters, so that links pass through mail and chat programs.
const maxFragment = 8000;
// Longer fragments, which this page does not write, are cut.
const maxParsed = 65536;

// Returns the name of the view and its options, as URLSearchParams.
export function parseAddress(hash) {
  const [, name, query] = /^#\/?([^?]*)\??(.*)$/s.exec(hash.slice(0, maxParsed)) ?? ["", "", ""];
  return { name, params: new URLSearchParams(query) };
}

// Returns the fragment for a view with options [[name, value], …], and the names of those options
// that were left out because the fragment would become too long.
export function formatAddress(name, options) {
  const omitted = [];
  let fragment = `#/${name}`;
  for (const pair of options) {
    // A slash may stand in a fragment as it is, and blocks have one in their names.
    const text = new URLSearchParams([pair]).toString().replaceAll("%2F", "/");
    const next = `${fragment}${fragment.includes("?") ? "&" : "?"}${text}`;
    if (next.length > maxFragment) omitted.push(pair[0]);
    else fragment = next;
  }
  return { fragment, omitted };
}

// Finds where a text stops being JSON. Browsers report this differently, some without a place.

const space = /[ \t\n\r]*/y;
const number = /-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?/y;
const string = /"(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"/y;
const word = /true|false|null/y;
const maxDepth = 200;

class Scanner {
  constructor(text) {
    this.text = text;
    this.at = 0;
  }

  fail(expected) {
    throw { at: this.at, expected };
  }

  take(pattern) {
    pattern.lastIndex = this.at;
    const match = pattern.exec(this.text);
    if (match) this.at = pattern.lastIndex;
    return Boolean(match);
  }

  skip() {
    this.take(space);
    return this.text[this.at];
  }

  value(depth = 0) {
    const next = this.skip();
    if (depth > maxDepth) this.fail("less deeply nested values");
    if (next === "{") this.list("}", () => this.member(depth));
    else if (next === "[") this.list("]", () => this.value(depth + 1));
    else if (next === "\"") this.take(string) || this.fail("a string that ends in its line");
    else this.take(word) || this.take(number) || this.fail("a value");
  }

  list(end, item) {
    ++this.at;
    if (this.skip() === end) return void ++this.at;
    while (true) {
      item();
      const next = this.skip();
      if (next !== "," && next !== end) this.fail(`"," or "${end}"`);
      ++this.at;
      if (next === end) return;
    }
  }

  member(depth) {
    this.skip();
    if (!this.take(string)) this.fail("a name in double quotes");
    if (this.skip() !== ":") this.fail("\":\"");
    ++this.at;
    this.value(depth + 1);
  }
}

// Returns {value}, or {error}: a sentence that tells line, column and what was expected there.
export function parseJson(text) {
  const scanner = new Scanner(text);
  try {
    scanner.value();
    if (scanner.skip() !== undefined) scanner.fail("the end");
  } catch ({ at, expected }) {
    const lines = text.slice(0, at).split("\n");
    const found = at < text.length ? `found "${[...text.slice(at, at + 2)][0]}"` : "found the end";
    return { error: `line ${lines.length}, column ${lines.at(-1).length + 1}: ` +
      `expected ${expected}, ${found}` };
  }
  return { value: JSON.parse(text) };
}

// Returns {value: the tools of a chat}, {value: null} for an empty text, or {error}.
export function parseTools(text) {
  if (text.trim() === "") return { value: null };
  const { value, error } = parseJson(text);
  if (error) return { error };
  if (!Array.isArray(value)) return { error: "expected a list of tools: [{…}, …]" };
  for (const [i, tool] of value.entries()) {
    const where = `tool ${i + 1}`;
    if (tool?.type !== "function") return { error: `${where}: "type" must be "function"` };
    if (typeof tool.function?.name !== "string" || tool.function.name === "") {
      return { error: `${where}: "function" must be an object with a "name"` };
    }
  }
  return { value };
}

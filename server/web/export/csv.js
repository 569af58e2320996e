// Writes tables as CSV (RFC 4180), and gives files to the user.

const isNumber = (text) => /^[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?$/.test(text);

// Spreadsheets run a cell as a formula if it begins with one of these characters, some also after a
// tab or a line break. A leading apostrophe makes it a text; numbers need none.
function cell(value) {
  let text = value === null || value === undefined ? "" : String(value);
  if (/^[=+\-@\t\r\n]/.test(text) && !isNumber(text)) text = `'${text}`;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll("\"", "\"\"")}"` : text;
}

// `rows`: lists of cells, the first one with the names of the columns.
export const toCsv = (rows) => rows.map((row) => `${row.map(cell).join(",")}\r\n`).join("");

export function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  // The browser reads the file after this call.
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
}

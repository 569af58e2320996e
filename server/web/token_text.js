// The texts of a prompt's tokens from the spelling that a tokenizer's vocabulary has for them.

// Byte-level vocabularies write each byte as one character: printable Latin-1 characters stand for
// themselves, the other 68 bytes for the characters from U+0100.
const byteOf = new Map();
for (let byte = 0, other = 0x100; byte < 256; ++byte) {
  const printable = (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte !== 0xad);
  byteOf.set(String.fromCodePoint(printable ? byte : other++), byte);
}

const decoder = new TextDecoder();
const strictDecoder = new TextDecoder("utf-8", { fatal: true });

// Returns the bytes of a spelling, or null if it has a character that stands for none.
function bytesOf(spelling) {
  const bytes = [...spelling].map((character) => byteOf.get(character));
  return bytes.includes(undefined) ? null : bytes;
}

// Returns whether the spellings are those of a byte-level vocabulary. Only these write a space or a
// line break as U+0120 or U+010A, and only the others write a space as U+2581. Where there is
// neither, the bytes of a whole prompt are UTF-8: in other vocabularies, a letter such as U+00E9
// would be a byte that is not.
function isByteLevel(spellings) {
  if (spellings.some((text) => /[\u0120\u010a]/.test(text))) return true;
  if (spellings.some((text) => text.includes("\u2581"))) return false;
  try {
    strictDecoder.decode(Uint8Array.from(spellings.flatMap((text) => bytesOf(text) ?? [])));
    return true;
  } catch {
    return false;
  }
}

// Returns the texts of the tokens of one prompt. A token that ends within a character has U+FFFD in
// its text.
export function tokenTexts(spellings) {
  if (!isByteLevel(spellings)) return spellings.map((text) => text.replaceAll("\u2581", " "));
  return spellings.map((text) => {
    const bytes = bytesOf(text);
    // Special tokens are spelled as they are.
    return bytes ? decoder.decode(Uint8Array.from(bytes)) : text;
  });
}

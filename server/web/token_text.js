// The texts of a prompt's tokens from the spelling that a tokenizer's vocabulary has for them.

// Byte-level vocabularies write each byte as one character: printable Latin-1 characters stand for
// themselves, the other 68 bytes for the characters from U+0100.
const byteOf = new Map();
for (let byte = 0, other = 0x100; byte < 256; ++byte) {
  const printable = (byte > 0x20 && byte < 0x7f) || (byte > 0xa0 && byte !== 0xad);
  byteOf.set(String.fromCodePoint(printable ? byte : other++), byte);
}

const decoder = new TextDecoder();

// Returns the texts of the tokens of one prompt. A token that ends within a character has U+FFFD in
// its text.
export function tokenTexts(spellings) {
  // Only byte-level vocabularies write a space or a line break as these characters.
  if (!spellings.some((text) => /[\u0120\u010a]/.test(text))) {
    return spellings.map((text) => text.replaceAll("\u2581", " "));
  }
  return spellings.map((text) => {
    const bytes = [...text].map((character) => byteOf.get(character));
    // Special tokens are spelled as they are.
    return bytes.includes(undefined) ? text : decoder.decode(Uint8Array.from(bytes));
  });
}

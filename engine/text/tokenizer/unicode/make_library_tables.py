"""Writes library_tables.cc beside this file.

The tables hold what Hugging Face's library does with single characters: its crates use several
versions of Unicode, so the tables are read off the library itself. Needs the packages tokenizers
(0.23) and regex; the latter only proposes candidates for the classes of grapheme clusters, which the
library confirms or rejects.
"""

import pathlib
import struct
import textwrap

import regex
from tokenizers import normalizers, pre_tokenizers

CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
ALL = "".join(map(chr, CODE_POINTS))


def ranges(pairs):
    """[(code point, value)] in ascending order -> [(first, last, value)]."""
    out = []
    for c, value in pairs:
        if out and out[-1][1] == c - 1 and out[-1][2] == value:
            out[-1][1] = c
        else:
            out.append([c, c, value])
    return [tuple(r) for r in out]


def table(kind, name, rows):
    body = textwrap.fill(", ".join(rows) + ",", 100, initial_indent="    ", subsequent_indent="    ")
    return "constexpr %s k%s[] = {\n%s\n};\n\n" % (kind, name, body)


def code_points(name, members):
    return table("CodePointRange", name, ["{0x%X,0x%X}" % r[:2] for r in ranges((c, 0) for c in sorted(members))])


def lower_case(lower=normalizers.Lowercase()):
    """Returns the rows of the table of lower-case forms that have one character."""
    changes = []
    for c in CODE_POINTS:
        form = lower.normalize_str(chr(c))
        if len(form) == 1 and form != chr(c):
            changes.append((c, ord(form) - c))
        else:
            assert len(form) == 1 or (c == 0x130 and form == "i\u0307"), hex(c)
    rows = []
    for c, delta in changes:  # a row covers every second code point or each one
        if rows and rows[-1][3] == delta and rows[-1][2] in (0, c - rows[-1][1]) and c - rows[-1][1] <= 2:
            rows[-1][2] = c - rows[-1][1]
            rows[-1][1] = c
        else:
            rows.append([c, c, 0, delta])
    return ["{0x%X,0x%X,%d,%d}" % (a, b, max(step, 1), delta) for a, b, step, delta in rows]


def compatibility(nfkd=normalizers.NFKD(), nfd=normalizers.NFD()):
    forms = [(c, nfkd.normalize_str(chr(c))) for c in CODE_POINTS]
    forms = [(c, form) for c, form in forms if form != nfd.normalize_str(chr(c))]
    sizes = ranges((c, len(form)) for c, form in forms)
    return ["{0x%X,0x%X,%d}" % r for r in sizes], ["0x%X" % ord(c) for _, form in forms for c in form]


def double_array(keys):
    """Builds a double-array trie in the format of SentencePiece's character maps."""
    trie = {}
    for key, value in keys.items():
        node = trie
        for byte in key:
            node = node.setdefault(byte, {})
        node[None] = value
    units, used = [], []

    def grow(size):
        while len(units) < size:
            units.extend([0] * 256)
            used.extend([False] * 256)

    grow(1)
    used[0] = True
    waiting = [(trie, 0)]
    start = 1
    while waiting:
        node, at = waiting.pop()
        labels = [0 if byte is None else byte for byte in node]
        base = start
        while True:
            grow((at ^ base | 255) + 1)
            if all(not used[at ^ base ^ label] for label in labels):
                break
            base += 1
        assert base < 1 << 21
        units[at] |= base << 10 | (None in node) << 8
        for label, child in zip(labels, node.values()):
            used[at ^ base ^ label] = True
            if isinstance(child, dict):
                units[at ^ base ^ label] = label
                waiting.append((child, at ^ base ^ label))
            else:
                units[at ^ base ^ label] = 1 << 31 | child
    return struct.pack("<%dI" % len(units), *units)


def precompiled(rules):
    """Returns the normalizer that replaces the keys of `rules` by their values."""
    keys, text = {}, b""
    for key, value in rules.items():
        keys[key.encode()] = len(text)
        text += value.encode() + b"\0"
    array = double_array(keys)
    return normalizers.Precompiled(struct.pack("<I", len(array)) + array + text).normalize_str


def grapheme_classes():
    """Returns {code point: name of its class} for the classes that the library tells apart.

    In a grapheme cluster of less than 6 bytes, the library replaces the whole cluster when a prefix of
    it has a rule. That shows where clusters end.
    """
    proposed = lambda name: set(map(ord, regex.findall(r"\p{%s}" % name, ALL)))
    classes = {}
    after_a = precompiled({"a": "A"})
    spacing = proposed("GCB=SpacingMark")
    for c in CODE_POINTS:
        if c != 0x200D and after_a("a" + chr(c)) == "A":
            classes[c] = "SpacingMark" if c in spacing else "Extend"
    prefixes = {c: chr(c) for c in sorted(proposed("GCB=Prepend")) if len(chr(c).encode()) < 5}
    before = precompiled({text: "A" for text in prefixes.values()})
    classes.update({c: "Prepend" for c, text in prefixes.items() if before(text + "a") == "A"})
    assert classes[0x600] == "Prepend"
    for c in CODE_POINTS[: CODE_POINTS.index(0xFFFF)]:
        if before("\u0600" + chr(c)) == "A" + chr(c) and c not in (0x0A, 0x0D):
            classes[c] = "Control"
    emoji = precompiled({"\u00a9": "A"})
    for c in CODE_POINTS:
        if c not in classes and emoji("\u00a9\u200d" + chr(c)) == "A\u200d" + chr(c):
            classes[c] = "Pictographic"
    consonants = sorted(proposed("InCB=Consonant"))
    conjunct = precompiled({chr(c): "A" for c in consonants})
    linked = {c for c in consonants if conjunct("\u0915\u094d%s\u0301" % chr(c)).endswith("A\u0301")}
    classes.update({c: "Consonant" for c in linked})
    for c in [c for c, name in classes.items() if name == "Extend"]:
        if conjunct("\u0915%s\u0915\u0301" % chr(c)).endswith("A\u0301"):
            classes[c] = "Linker"
        elif not conjunct("\u0915%s\u094d\u0915\u0301" % chr(c)).endswith("A\u0301"):
            classes[c] = "ExtendNoConjunct"
    return classes


def main():
    bert = lambda **on: normalizers.BertNormalizer(
        **{"clean_text": False, "handle_chinese_chars": False, "strip_accents": False, "lowercase": False, **on}
    ).normalize_str
    nfd = normalizers.NFD().normalize_str
    accents, strip_accents, clean = normalizers.StripAccents().normalize_str, bert(strip_accents=True), bert(clean_text=True)
    split = pre_tokenizers.Punctuation().pre_tokenize_str
    rows, text = compatibility()
    names = ["Control", "Extend", "ExtendNoConjunct", "Linker", "SpacingMark", "Prepend", "Pictographic", "Consonant"]
    clusters = grapheme_classes()
    assert set(clusters.values()) <= set(names)
    body = (
        table("DecompositionRange", "Compatibility", rows)
        + table("char32_t", "CompatibilityText", text)
        + table("LowerCase", "LowerCase", lower_case())
        + code_points("CombiningMarks", [c for c in CODE_POINTS if not accents(chr(c))])
        + code_points("NonspacingMarks", [c for c in CODE_POINTS if nfd(chr(c)) == chr(c) and not strip_accents(chr(c))])
        + code_points("Other", [c for c in CODE_POINTS if not clean(chr(c))])
        + code_points("Punctuation", [c for c in CODE_POINTS if len(split("a%sa" % chr(c))) == 3])
        + "".join(code_points("Grapheme" + name, [c for c in clusters if clusters[c] == name]) for name in names)
        + table("GraphemeMembers", "GraphemeClasses", ["{GraphemeClass::k%s,kGrapheme%s}" % (name, name) for name in names])
    )
    functions = "".join(
        "std::span<const %s> %s() { return k%s; }\n" % (kind, function, name)
        for kind, function, name in [
            ("LowerCase", "LowerCaseRanges", "LowerCase"),
            ("CodePointRange", "CombiningMarkRanges", "CombiningMarks"),
            ("CodePointRange", "NonspacingMarkRanges", "NonspacingMarks"),
            ("CodePointRange", "OtherRanges", "Other"),
            ("CodePointRange", "PunctuationRanges", "Punctuation"),
            ("GraphemeMembers", "GraphemeClasses", "GraphemeClasses"),
        ]
    )
    (pathlib.Path(__file__).parent / "library_tables.cc").write_text(
        "// Written by make_library_tables.py from the behaviour of Hugging Face's library.\n"
        '#include "engine/text/tokenizer/unicode/library_tables.h"\n\nnamespace moeserve {\nnamespace {\n\n'
        "// clang-format off\n" + body + "// clang-format on\n\n}  // namespace\n\n"
        "Decompositions CompatibilityDecompositions() { return {kCompatibility, kCompatibilityText}; }\n"
        + functions + "\n}  // namespace moeserve\n"
    )


if __name__ == "__main__":
    main()

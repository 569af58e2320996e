"""Writes unicode_tables.cc and normalization_tables.cc beside this file.

Needs CPython 3.11 (its unicodedata is Unicode 14, the version of PCRE2 10.42), unicodedata2 16.0.0
and Hugging Face tokenizers. That library normalises by tables older than Unicode 16, so the
normalisation tables are those of Unicode 16 without the characters that the library does not change.
"""

import pathlib
import textwrap
import unicodedata as base

import unicodedata2 as full
from tokenizers import Regex, normalizers, pre_tokenizers

assert base.unidata_version == "14.0.0" and full.unidata_version == "16.0.0"

CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]


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
    return table("CodePointRange", name, ["{0x%X,0x%X}" % r[:2] for r in ranges((c, 0) for c in members)])


def source(tables, functions):
    return (
        "// Written by make_unicode_tables.py from the Unicode character database.\n"
        '#include "engine/text/tokenizer/unicode/unicode_tables.h"\n\nnamespace moeserve {\nnamespace {\n\n'
        "// clang-format off\n" + tables + "// clang-format on\n\n}  // namespace\n\n"
        + functions + "\n}  // namespace moeserve\n"
    )


def matched(pattern):
    split = pre_tokenizers.Split(Regex(pattern), "removed", False)
    kept = set()
    for i in range(0, len(CODE_POINTS), 1 << 16):
        text = "".join(map(chr, CODE_POINTS[i : i + (1 << 16)]))
        for piece, _ in split.pre_tokenize_str(text):
            kept.update(map(ord, piece))
    return [c for c in CODE_POINTS if c not in kept]


def library_combining_class(c, nfd=normalizers.NFD()):
    """The character's combining class, or 0 if the library does not reorder it."""
    ours = full.combining(chr(c))
    if ours == 0:
        return 0
    # A class above 0 sorts against at least one of these neighbours.
    for mark in "\u0334\u0345":
        text = "a" + mark + chr(c) + mark
        if nfd.normalize_str(text) != full.normalize("NFD", text):
            return 0
    return ours


def main():
    newer = [
        (c, full.category(chr(c)))
        for c in CODE_POINTS
        if full.category(chr(c)) != base.category(chr(c))
    ]
    scripts = {name: matched(r"\p{%s}" % name) for name in ("Han", "Hiragana", "Katakana", "Hangul")}
    nfd, nfc = normalizers.NFD(), normalizers.NFC()
    decompositions, exclusions = [], []
    for c in CODE_POINTS:
        text = full.decomposition(chr(c))
        if not text or text.startswith("<") or nfd.normalize_str(chr(c)) == chr(c):
            continue
        parts = [int(x, 16) for x in text.split()]
        composes = len(parts) == 2 and nfc.normalize_str("".join(map(chr, parts))) == chr(c)
        decompositions.append((c, parts))
        if len(parts) == 2 and not composes:
            exclusions.append(c)
    classes = [(c, k) for c in CODE_POINTS if (k := library_combining_class(c))]

    here = pathlib.Path(__file__).parent
    lookup = "\n".join('  if (script == "%s") return k%s;' % (n.lower(), n) for n in scripts)
    (here / "unicode_tables.cc").write_text(
        source(
            table("NewerRange", "NewerRanges", ['{0x%X,0x%X,"%s"}' % r for r in ranges(newer)])
            + "".join(code_points(name, members) for name, members in scripts.items()),
            "std::span<const NewerRange> NewerRanges() { return kNewerRanges; }\n\n"
            "std::span<const CodePointRange> ScriptRanges(std::string_view script) {\n"
            + lookup
            + "\n  return {};\n}\n",
        )
    )
    (here / "normalization_tables.cc").write_text(
        source(
            table("CombiningClassRange", "CombiningClasses", ["{0x%X,0x%X,%d}" % r for r in ranges(classes)])
            + table(
                "DecompositionRange",
                "Decompositions",
                ["{0x%X,0x%X,%d}" % r for r in ranges((c, len(parts)) for c, parts in decompositions)],
            )
            + table("char32_t", "DecompositionText", ["0x%X" % p for _, parts in decompositions for p in parts])
            + code_points("CompositionExclusions", exclusions),
            "std::span<const CombiningClassRange> CombiningClassRanges() { return kCombiningClasses; }\n\n"
            "Decompositions CanonicalDecompositions() { return {kDecompositions, kDecompositionText}; }\n\n"
            "std::span<const CodePointRange> CompositionExclusions() { return kCompositionExclusions; }\n",
        )
    )

main()

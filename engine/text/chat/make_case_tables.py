"""Writes case_tables.cc beside this file, from the behaviour of str in CPython 3.11 (Unicode 14)."""

import pathlib
import sys
import textwrap

assert sys.version_info[:2] == (3, 11)
POINTS = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]


def table(kind, name, rows):
    body = textwrap.fill(", ".join(rows) + ",", 100, initial_indent="    ", subsequent_indent="    ")
    return "constexpr %s k%s[] = {\n%s\n};\n\n" % (kind, name, body)


def mapping_rows(function, skipped, usual=lambda s: s):
    """[[first, last, step, delta]] of the code points that the function does not map as usual."""
    rows = []
    for c in POINTS:
        if c in skipped or function(chr(c)) == usual(chr(c)):
            continue
        delta = ord(function(chr(c))) - c
        last = rows[-1] if rows else None
        if last and last[3] == delta and last[1] < c <= last[1] + 2:
            step = c - last[1]
            if last[0] == last[1] or last[2] == step:
                last[1], last[2] = c, step
                continue
        rows.append([c, c, 1, delta])
    return ["{0x%X, 0x%X, %d, %d}" % tuple(r) for r in rows]


def point_rows(test):
    rows = []
    for c in POINTS:
        if not test(c):
            continue
        if rows and rows[-1][1] == c - 1:
            rows[-1][1] = c
        else:
            rows.append([c, c])
    return ["{0x%X, 0x%X}" % tuple(r) for r in rows]


def quoted(text):
    return '"' + "".join("\\x%02x" % b for b in text.encode()) + '"'


def is_special(c):
    s = chr(c)
    return len(s.upper()) > 1 or len(s.lower()) > 1


def is_cased(c):
    # A letter after a cased character is put in lower case by title().
    return (chr(c) + "A").title()[-1:] == "a"


def is_case_ignorable(c):
    # A sigma is final if nothing but such characters stands between it and a cased one before it.
    return not is_cased(c) and ("A" + chr(c) + "\u03a3").lower()[-1] == "\u03c2"


special = [c for c in POINTS if is_special(c)]
out = (
    "// Written by make_case_tables.py from the Unicode data of CPython 3.11.\n"
    '#include "engine/text/chat/case_tables.h"\n\n#include <algorithm>\n\n'
    "namespace moeserve::chat {\nnamespace {\n\n// clang-format off\n"
    + table("CaseRange", "Upper", mapping_rows(str.upper, set(special)))
    + table("CaseRange", "Lower", mapping_rows(str.lower, set(special)))
    + table("CaseRange", "Title", mapping_rows(str.title, set(special), str.upper))
    + table("SpecialCase", "Special",
            ["{0x%X, %s, %s, %s}" % (c, quoted(chr(c).upper()), quoted(chr(c).lower()),
                                     quoted(chr(c).title())) for c in special])
    + table("PointRange", "Cased", point_rows(is_cased))
    + table("PointRange", "CaseIgnorable", point_rows(is_case_ignorable))
    + table("PointRange", "Unprintable",
            point_rows(lambda c: c > 0x7E and not chr(c).isprintable()))
    + """// clang-format on

}  // namespace

std::span<const CaseRange> UpperRanges() { return kUpper; }
std::span<const CaseRange> LowerRanges() { return kLower; }
std::span<const CaseRange> TitleRanges() { return kTitle; }
std::span<const SpecialCase> SpecialCases() { return kSpecial; }
std::span<const PointRange> CasedRanges() { return kCased; }

bool InRanges(std::span<const PointRange> ranges, char32_t c) {
  const auto it = std::upper_bound(ranges.begin(), ranges.end(), c,
                                   [](char32_t v, const PointRange& r) { return v < r.first; });
  return it != ranges.begin() && c <= std::prev(it)->last;
}

bool IsCaseIgnorable(char32_t c) { return InRanges(kCaseIgnorable, c); }
bool IsPrintable(char32_t c) { return !InRanges(kUnprintable, c); }

}  // namespace moeserve::chat
""")
pathlib.Path(__file__).with_name("case_tables.cc").write_text(out)

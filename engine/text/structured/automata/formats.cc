#include "engine/text/structured/automata/formats.h"

#include <iterator>

namespace moeserve::structured {
namespace {

// Returns a pattern for the years 0001 to 9999 with valid months and days; 29 February only in leap
// years.
std::string DatePattern() {
  const std::string year = "(?:[1-9]\\d{3}|0[1-9]\\d{2}|00[1-9]\\d|000[1-9])";
  const std::string leap_year =
      "(?:(?:[1-9]\\d|0[1-9])(?:0[48]|[2468][048]|[13579][26])|00(?:0[48]|[2468][048]|[13579][26])|"
      "(?:0[48]|[2468][048]|[13579][26])00)";
  return "(?:" + year +
         "-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\\d|30)|"
         "02-(?:0[1-9]|1\\d|2[0-8]))|" +
         leap_year + "-02-29)";
}

std::string TimePattern() {
  return "(?:[01]\\d|2[0-3]):[0-5]\\d:[0-5]\\d(?:\\.\\d{1,6})?"
         "(?:Z|[+-](?:[01]\\d|2[0-3]):[0-5]\\d)";
}

std::string HostPattern() {
  // At most 62 characters, so that four labels stay below the limit of 253.
  const std::string label = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,60}[A-Za-z0-9])?";
  return label + "(?:\\." + label + "){0,3}";
}

std::string Ipv4Pattern() {
  const std::string byte = "(?:\\d|[1-9]\\d|1\\d\\d|2[0-4]\\d|25[0-5])";
  return byte + "\\." + byte + "\\." + byte + "\\." + byte;
}

// All groups, or two colons for one or more groups that are zero.
std::string Ipv6Pattern() {
  const std::string group = "[0-9a-fA-F]{1,4}";
  std::string out = "(?:(?:" + group + ":){7}" + group;
  for (int before = 0; before <= 7; ++before) {
    out += "|";
    if (before > 0) out += group + "(?::" + group + "){" + std::to_string(before - 1) + "}";
    out += "::";
    const int after = 7 - before;
    if (after > 0) {
      out += "(?:" + group + "(?::" + group + "){0," + std::to_string(after - 1) + "})?";
    }
  }
  return out + ")";
}

// A duration of ISO 8601: weeks, or years to seconds without gaps.
std::string DurationPattern() {
  const std::string n = "\\d{1,9}";
  const std::string time =
      "T(?:" + n + "H(?:" + n + "M(?:" + n + "S)?)?|" + n + "M(?:" + n + "S)?|" + n + "S)";
  const std::string date =
      "(?:" + n + "Y(?:" + n + "M(?:" + n + "D)?)?|" + n + "M(?:" + n + "D)?|" + n + "D)";
  return "P(?:" + n + "W|" + time + "|" + date + "(?:" + time + ")?)";
}

// A URI of RFC 3986 with a host that is a name or an IPv4 address, or, if not `absolute`, a
// reference with a path of at least one segment.
std::string UriPattern(bool absolute) {
  const std::string escape = "%[0-9A-Fa-f]{2}";
  const std::string plain = "A-Za-z0-9._~!$&'()*+,;=\\-";
  const std::string character = "(?:[" + plain + ":@]|" + escape + ")";
  const std::string segments = "(?:/" + character + "*)*";
  const std::string authority = "//(?:(?:[" + plain + ":]|" + escape + ")*@)?(?:[" + plain + "]|" +
                                escape + ")*(?::\\d{0,5})?" + segments;
  const std::string rootless = character + "+" + segments;
  const std::string rooted = "/(?:" + rootless + ")?";
  const std::string rest = "(?:\\?(?:" + character + "|[/?])*)?(?:#(?:" + character + "|[/?])*)?";
  if (absolute) {
    return "[A-Za-z][A-Za-z0-9+.-]*:(?:" + authority + "|" + rooted + "|" + rootless + ")" + rest;
  }
  // The first segment of a relative path has no colon, which would end a scheme.
  const std::string no_colon = "(?:[" + plain + "@]|" + escape + ")+" + segments;
  return "(?:(?:[A-Za-z][A-Za-z0-9+.-]*:)?(?:" + authority + "|" + rooted + ")|" + no_colon + ")?" +
         rest;
}

std::string JsonPointerPattern() { return "(?:/(?:[^~/]|~[01])*)*"; }

// Regular expressions without nested groups. Every match is a valid pattern of ECMA-262.
std::string RegexPattern() {
  const std::string literal = "[^\\\\^$.*+?()\\[\\]{}|/\\u0000-\\u001f]";
  const std::string escape = "\\\\(?:[dDwWsSnrtfv^$.*+?()\\[\\]{}|/\\\\-]|x[0-9a-fA-F]{2})";
  const std::string edge = "\\\\[bB]";  // of a word; must not be repeated
  const std::string set = "\\[\\^?(?:[^\\\\\\]\\[^-]|\\\\[dDwWsSnrt\\\\\\]\\[^-])+\\]";
  const std::string atom = "(?:" + literal + "|" + escape + "|" + set + "|\\.)";
  const std::string repetition = "(?:[*+?]|\\{\\d{1,3},?\\})?";
  const std::string branch = "(?:" + atom + repetition + "|" + edge + ")*";
  const std::string group = "\\((?:\\?:)?" + branch + "(?:\\|" + branch + ")*\\)";
  const std::string item = "(?:(?:" + atom + "|" + group + ")" + repetition + "|" + edge + ")";
  const std::string sequence = "\\^?(?:" + item + ")*\\$?";
  return sequence + "(?:\\|" + sequence + ")*";
}

struct Format {
  std::string_view name;
  std::string (*pattern)();
};

std::string DateTimePattern() { return DatePattern() + "T" + TimePattern(); }
std::string UuidPattern() {
  return "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}";
}
std::string EmailPattern() {
  // The local part has at most 64 characters.
  const std::string atom = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]";
  return atom + "{1,32}(?:\\." + atom + "{1,31})?@" + HostPattern();
}

constexpr Format kFormats[] = {
    {"date", DatePattern},
    {"time", TimePattern},
    {"date-time", DateTimePattern},
    {"duration", DurationPattern},
    {"uuid", UuidPattern},
    {"email", EmailPattern},
    {"idn-email", EmailPattern},
    {"hostname", HostPattern},
    {"idn-hostname", HostPattern},
    {"ipv4", Ipv4Pattern},
    {"ipv6", Ipv6Pattern},
    {"uri", [] { return UriPattern(true); }},
    {"iri", [] { return UriPattern(true); }},
    {"uri-reference", [] { return UriPattern(false); }},
    {"iri-reference", [] { return UriPattern(false); }},
    {"json-pointer", JsonPointerPattern},
    {"relative-json-pointer",
     [] { return "(?:0|[1-9]\\d{0,8})(?:#|" + JsonPointerPattern() + ")"; }},
    {"regex", RegexPattern},
};

}  // namespace

std::optional<std::string> FormatPattern(std::string_view format) {
  for (const Format& entry : kFormats) {
    if (entry.name == format) return entry.pattern();
  }
  return std::nullopt;
}

std::string SupportedFormats() {
  std::string out;
  for (const Format& entry : kFormats) {
    if (!out.empty()) out += &entry == std::end(kFormats) - 1 ? " and " : ", ";
    out += entry.name;
  }
  return out;
}

}  // namespace moeserve::structured

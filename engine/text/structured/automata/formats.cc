#include "engine/text/structured/automata/formats.h"

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
  const std::string label = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?";
  return label + "(?:\\." + label + "){0,3}";
}

std::string Ipv4Pattern() {
  const std::string byte = "(?:\\d|[1-9]\\d|1\\d\\d|2[0-4]\\d|25[0-5])";
  return byte + "\\." + byte + "\\." + byte + "\\." + byte;
}

}  // namespace

std::optional<std::string> FormatPattern(std::string_view format) {
  if (format == "date") return DatePattern();
  if (format == "time") return TimePattern();
  if (format == "date-time") return DatePattern() + "T" + TimePattern();
  if (format == "uuid") {
    return "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}";
  }
  if (format == "email") {
    const std::string atom = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,32}";
    return atom + "(?:\\." + atom + ")?@" + HostPattern();
  }
  if (format == "hostname") return HostPattern();
  if (format == "ipv4") return Ipv4Pattern();
  return std::nullopt;
}

}  // namespace moeserve::structured

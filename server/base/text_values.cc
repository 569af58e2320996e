#include "server/base/text_values.h"

#include <charconv>
#include <cstdio>
#include <iterator>
#include <limits>
#include <utility>

#include "base/error_text.h"

namespace moeserve::server {
namespace {

char Lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; }

}  // namespace

std::string LowerCase(std::string_view text) {
  std::string out(text);
  for (char& c : out) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return out;
}

std::string_view Trimmed(std::string_view text, std::string_view blanks) {
  const size_t begin = text.find_first_not_of(blanks);
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(blanks) - begin + 1);
}

Result<int64_t> ParseBytes(std::string_view text) {
  const auto refuse = [&] {
    return absl::InvalidArgumentError(
        Concat("expected a size such as 512MiB or 2GB, found ", Quoted(text)));
  };
  int64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number);
  if (parsed.ec != std::errc() || number < 0) return refuse();
  std::string unit;
  for (const char* c = parsed.ptr; c != end; ++c) unit.push_back(Lower(*c));
  constexpr std::pair<const char*, int64_t> kUnits[] = {
      {"", 1},
      {"b", 1},
      {"kb", 1000},
      {"mb", 1000 * 1000},
      {"gb", 1000 * 1000 * 1000},
      {"tb", int64_t{1000} * 1000 * 1000 * 1000},
      {"kib", 1 << 10},
      {"mib", 1 << 20},
      {"gib", 1 << 30},
      {"tib", int64_t{1} << 40},
  };
  for (const auto& [name, factor] : kUnits) {
    if (unit != name) continue;
    if (number > std::numeric_limits<int64_t>::max() / factor) return refuse();
    return number * factor;
  }
  return refuse();
}

std::string ShowBytes(int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < std::size(kUnits)) {
    value /= 1024.0;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof(text), unit == 0 ? "%.0f %s" : "%.1f %s", value, kUnits[unit]);
  return text;
}

bool HostPort::IsLoopback() const {
  return host == "localhost" || host == "::1" || host.starts_with("127.");
}

Result<HostPort> ParseHostPort(std::string_view text) {
  const auto refuse = [&] {
    return absl::InvalidArgumentError(
        Concat("expected HOST:PORT such as 127.0.0.1:8080, found ", Quoted(text)));
  };
  const size_t colon = text.rfind(':');
  if (colon == std::string_view::npos || colon == 0) return refuse();
  std::string_view host = text.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']')) {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string_view::npos) {
    return refuse();
  }
  HostPort out;
  const char* const end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data() + colon + 1, end, out.port);
  if (parsed.ec != std::errc() || parsed.ptr != end || out.port < 0 || out.port > 65535) {
    return refuse();
  }
  out.host = std::string(host);
  return out;
}

}  // namespace moeserve::server

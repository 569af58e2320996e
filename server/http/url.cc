#include "server/http/url.h"

#include <algorithm>
#include <charconv>

#include "base/error_text.h"
#include "server/base/api_error.h"

namespace moeserve::server::http {

std::optional<std::string> PercentDecode(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    if (text[i] != '%') {
      out.push_back(text[i]);
      continue;
    }
    if (text.size() - i < 3) return std::nullopt;
    unsigned value = 0;
    const char* const end = text.data() + i + 3;
    const auto parsed = std::from_chars(text.data() + i + 1, end, value, 16);
    if (parsed.ec != std::errc() || parsed.ptr != end || value == 0) return std::nullopt;
    out.push_back(static_cast<char>(value));
    i += 2;
  }
  return out;
}

std::optional<std::string> FormDecode(std::string_view text) {
  std::string spaced(text);
  std::replace(spaced.begin(), spaced.end(), '+', ' ');
  return PercentDecode(spaced);
}

std::optional<std::string_view> QueryText(std::string_view query, std::string_view name) {
  while (!query.empty()) {
    const std::string_view pair = query.substr(0, query.find('&'));
    query.remove_prefix(std::min(query.size(), pair.size() + 1));
    const size_t equals = pair.find('=');
    if (pair.substr(0, equals) != name) continue;
    return equals == std::string_view::npos ? std::string_view() : pair.substr(equals + 1);
  }
  return std::nullopt;
}

namespace {

template <typename Number>
Result<std::optional<Number>> QueryValue(std::string_view query, std::string_view name, Number min,
                                         Number max, std::string_view kind) {
  const std::optional<std::string_view> text = QueryText(query, name);
  if (!text) return std::optional<Number>();
  Number value{};
  const char* const end = text->data() + text->size();
  const auto parsed = std::from_chars(text->data(), end, value);
  if (parsed.ec != std::errc() || parsed.ptr != end || !(value >= min && value <= max)) {
    return InvalidValue(
        name, Concat("'", name, "' is not a ", kind, " in range: ", Printable(*text, 32)));
  }
  return std::optional<Number>(value);
}

}  // namespace

Result<std::optional<double>> QueryNumber(std::string_view query, std::string_view name, double min,
                                          double max) {
  return QueryValue<double>(query, name, min, max, "number");
}

Result<std::optional<int64_t>> QueryInteger(std::string_view query, std::string_view name,
                                            int64_t min, int64_t max) {
  return QueryValue<int64_t>(query, name, min, max, "whole number");
}

}  // namespace moeserve::server::http

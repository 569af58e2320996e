#include "server/http/encoding/content_coding.h"

#include <algorithm>
#include <optional>
#include <string>

#include "server/base/text_values.h"

namespace moeserve::server::http {
namespace {

// Returns a quality in thousandths: "1", "0.5", "0.123". Nullopt for anything else.
std::optional<int> ParseQuality(std::string_view text) {
  if (text.empty() || text.size() > 5 || (text[0] != '0' && text[0] != '1')) return std::nullopt;
  int value = (text[0] - '0') * 1000;
  if (text.size() > 1 && text[1] != '.') return std::nullopt;
  int unit = 100;
  for (const char c : text.substr(std::min<size_t>(2, text.size()))) {
    if (c < '0' || c > '9') return std::nullopt;
    value += (c - '0') * unit;
    unit /= 10;
  }
  return value <= 1000 ? std::optional(value) : std::nullopt;
}

}  // namespace

ContentCoding ParseContentEncoding(std::string_view header) {
  const std::string name = LowerCase(Trimmed(header));
  if (name.empty() || name == "identity") return ContentCoding::kIdentity;
  return name == kGzip || name == "x-gzip" ? ContentCoding::kGzip : ContentCoding::kOther;
}

bool PrefersGzip(std::string_view accept_encoding) {
  std::optional<int> gzip;
  std::optional<int> any;
  int identity = 0;
  while (!accept_encoding.empty()) {
    const size_t comma = accept_encoding.find(',');
    const std::string_view item = accept_encoding.substr(0, comma);
    accept_encoding.remove_prefix(comma == std::string_view::npos ? accept_encoding.size()
                                                                  : comma + 1);
    const size_t semicolon = item.find(';');
    const std::string name = LowerCase(Trimmed(item.substr(0, semicolon)));
    int quality = 1000;
    if (semicolon != std::string_view::npos) {
      const std::string parameter = LowerCase(Trimmed(item.substr(semicolon + 1)));
      // A quality that is not well-formed counts as a refusal: plain bytes are always understood.
      quality = parameter.starts_with("q=")
                    ? ParseQuality(std::string_view(parameter).substr(2)).value_or(0)
                    : 0;
    }
    if (name == kGzip || name == "x-gzip") {
      gzip = std::max(gzip.value_or(0), quality);
    } else if (name == "*") {
      any = quality;
    } else if (name == "identity") {
      identity = quality;
    }
  }
  const int quality = gzip.value_or(any.value_or(0));
  return quality > 0 && quality >= identity;
}

bool IsCompressible(std::string_view content_type) {
  const std::string type = LowerCase(Trimmed(content_type.substr(0, content_type.find(';'))));
  return type.starts_with("text/") || type == "application/json" ||
         type == "application/openmetrics-text" || type == "image/svg+xml";
}

}  // namespace moeserve::server::http

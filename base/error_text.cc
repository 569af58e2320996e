#include "base/error_text.h"

#include <utility>

namespace moeserve {

namespace {

std::string Escaped(std::string_view text, size_t max_bytes, bool escape_quotes) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string out;
  for (const char c : text.substr(0, max_bytes)) {
    const auto byte = static_cast<unsigned char>(c);
    if (escape_quotes && (c == '"' || c == '\\')) {
      out.push_back('\\');
      out.push_back(c);
    } else if (byte >= 0x20 && byte < 0x7f) {
      out.push_back(c);
    } else {
      out.append("\\x");
      out.push_back(kHex[byte >> 4]);
      out.push_back(kHex[byte & 15]);
    }
  }
  if (text.size() > max_bytes) out.append("...");
  return out;
}

}  // namespace

std::string Printable(std::string_view text, size_t max_bytes) {
  return Escaped(text, max_bytes, /*escape_quotes=*/false);
}

std::string Quoted(std::string_view text, size_t max_bytes) {
  return Concat('"', Escaped(text, max_bytes, /*escape_quotes=*/true), '"');
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  constexpr size_t kMaxDims = 8;
  std::string out = "[";
  for (size_t i = 0; i < shape.size() && i < kMaxDims; ++i) {
    if (i > 0) out.append(", ");
    out.append(std::to_string(shape[i]));
  }
  if (shape.size() > kMaxDims) out.append(Concat(", ... ", shape.size(), " dimensions"));
  return out + "]";
}

absl::Status Prefixed(std::string_view prefix, const absl::Status& status) {
  if (status.ok()) return status;
  const absl::string_view message = status.message();
  return absl::Status(status.code(),
                      Concat(prefix, std::string_view(message.data(), message.size())));
}

void Problems::Add(std::string message) {
  if (shown_.size() < kShown) shown_.push_back(std::move(message));
  ++count_;
}

absl::Status Problems::ToStatus(std::string_view subject) const {
  if (count_ == 0) return absl::OkStatus();
  const std::string prefix = subject.empty() ? "" : Concat(subject, ": ");
  if (count_ == 1) return absl::InvalidArgumentError(prefix + shown_[0]);
  std::string text = Concat(prefix, count_, " problems");
  for (const std::string& problem : shown_) text.append(Concat("\n  ", problem));
  if (count_ > shown_.size()) text.append(Concat("\n  and ", count_ - shown_.size(), " more"));
  return absl::InvalidArgumentError(text);
}

}  // namespace moeserve

#include "server/bench/load_test/sse.h"

namespace moeserve::server {

bool SseReader::EndOfLine(std::string_view line) {
  if (line.empty()) return has_data_;
  constexpr std::string_view kData = "data";
  if (!line.starts_with(kData)) return false;
  line.remove_prefix(kData.size());
  if (!line.empty()) {
    if (line.front() != ':') return false;
    line.remove_prefix(1);
    if (line.starts_with(' ')) line.remove_prefix(1);
  }
  data_.append(line);
  data_.push_back('\n');
  has_data_ = true;
  return false;
}

}  // namespace moeserve::server

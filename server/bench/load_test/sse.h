// Incremental parser of server-sent events.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace moeserve::server {

class SseReader {
 public:
  // An event or a line longer than this is malformed.
  static constexpr size_t kMaxEventBytes = size_t{4} << 20;

  // Calls `on_data` with the joined data of each event that ends within `bytes`, and keeps an
  // unfinished event for the next call. Skips comments and other fields. Lines end in LF, CRLF or
  // CR. Returns false after an event that is too long; later bytes are ignored.
  template <typename OnData>
  bool Feed(std::string_view bytes, OnData&& on_data);

 private:
  // Handles one complete line. Returns true if data_ now holds a complete event.
  bool EndOfLine(std::string_view line);

  std::string line_;  // the beginning of an unfinished line
  std::string data_;  // data lines of the unfinished event, each with its newline
  bool has_data_ = false;
  bool skip_newline_ = false;  // the last line ended in CR
  bool failed_ = false;
};

template <typename OnData>
bool SseReader::Feed(std::string_view bytes, OnData&& on_data) {
  while (!bytes.empty() && !failed_) {
    if (skip_newline_) {
      skip_newline_ = false;
      if (bytes.front() == '\n') bytes.remove_prefix(1);
      continue;
    }
    const size_t end = bytes.find_first_of("\r\n");
    const std::string_view part = bytes.substr(0, end);
    if (line_.size() + data_.size() + part.size() > kMaxEventBytes) {
      failed_ = true;
      break;
    }
    if (end == std::string_view::npos) {
      line_.append(part);
      break;
    }
    skip_newline_ = bytes[end] == '\r';
    bytes.remove_prefix(end + 1);
    bool complete = false;
    if (line_.empty()) {
      complete = EndOfLine(part);
    } else {
      line_.append(part);
      complete = EndOfLine(line_);
      line_.clear();
    }
    if (!complete) continue;
    data_.pop_back();  // the newline of the last data line
    on_data(std::string_view(data_));
    data_.clear();
    has_data_ = false;
  }
  return !failed_;
}

}  // namespace moeserve::server

// Server-sent events, taken apart as they come in.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace moeserve::server {

class SseReader {
 public:
  // An event, or a line, of more than this is malformed.
  static constexpr size_t kMaxEventBytes = size_t{4} << 20;

  // Calls `on_data` with the joined data of each event that ends within `bytes`; a part of an event
  // is kept for the next call. Comments and other fields are skipped, line ends may be LF, CRLF or
  // CR. False: an event was too long; nothing more is read then.
  template <typename OnData>
  bool Feed(std::string_view bytes, OnData&& on_data);

 private:
  // True: an event is complete in data_.
  bool EndOfLine(std::string_view line);

  std::string line_;  // the beginning of an unfinished line
  std::string data_;  // data lines of the unfinished event, each with its newline
  bool has_data_ = false;
  bool skip_newline_ = false;  // a CR has just ended a line
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
    data_.pop_back();  // the last line's newline
    on_data(std::string_view(data_));
    data_.clear();
    has_data_ = false;
  }
  return !failed_;
}

}  // namespace moeserve::server

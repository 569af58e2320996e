#include "server/rpc/http2/frame_reader.h"

#include <algorithm>

namespace moeserve::server::rpc {
namespace {

constexpr size_t kHeaderBytes = 9;

}  // namespace

FrameReader::Event FrameReader::Next(std::string_view& bytes, std::string_view& payload) {
  if (inside_ && left_ == 0) {
    inside_ = false;
    return Event::kEnd;
  }
  if (bytes.empty()) return Event::kNone;
  if (inside_) {
    payload = bytes.substr(0, left_);
    bytes.remove_prefix(payload.size());
    left_ -= static_cast<uint32_t>(payload.size());
    return Event::kPayload;
  }
  const size_t taken = std::min(kHeaderBytes - header_.size(), bytes.size());
  header_ += bytes.substr(0, taken);
  bytes.remove_prefix(taken);
  if (header_.size() < kHeaderBytes) return Event::kNone;
  const std::string_view header = header_;
  frame_ = {.length = Number(header.substr(0, 3)),
            .type = static_cast<uint8_t>(header[3]),
            .flags = static_cast<uint8_t>(header[4]),
            .stream = Number(header.substr(5, 4)) & 0x7fffffff};
  header_.clear();
  left_ = frame_.length;
  inside_ = true;
  return Event::kBegin;
}

bool ContentReader::Begin(const FrameHeader& frame) {
  constexpr uint32_t kPriorityBytes = 5;
  read_length_ = frame.Has(kPadded);
  skip_ = frame.type == kHeaders && frame.Has(kPrioritized) ? kPriorityBytes : 0;
  padding_ = read_length_ ? 1 : 0;
  invalid_ = frame.length < padding_ + skip_;
  content_ = invalid_ ? 0 : frame.length - padding_ - skip_;
  return !invalid_;
}

std::string_view ContentReader::Next(std::string_view payload) {
  if (read_length_ && !payload.empty()) {
    const uint32_t length = static_cast<uint8_t>(payload.front());
    payload.remove_prefix(1);
    read_length_ = false;
    padding_ += length;
    invalid_ = length > content_;
    content_ -= std::min(length, content_);
  }
  const size_t skipped = std::min<size_t>(skip_, payload.size());
  payload.remove_prefix(skipped);
  skip_ -= static_cast<uint32_t>(skipped);
  const std::string_view content = payload.substr(0, content_);
  content_ -= static_cast<uint32_t>(content.size());
  return content;
}

uint32_t Number(std::string_view bytes) {
  uint32_t value = 0;
  for (const char c : bytes) value = value << 8 | static_cast<uint8_t>(c);
  return value;
}

}  // namespace moeserve::server::rpc

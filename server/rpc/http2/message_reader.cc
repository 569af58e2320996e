#include "server/rpc/http2/message_reader.h"

#include <algorithm>

#include "base/error_text.h"
#include "server/rpc/http2/frame_reader.h"
#include "server/rpc/messages/message_bytes.h"

namespace moeserve::server::rpc {
namespace {

constexpr size_t kPrefixBytes = 5;  // a flag and the length

Refusal BadFraming(std::string message) {
  return {.code = grpc::StatusCode::INTERNAL,
          .reason = "invalid_message",
          .message = std::move(message)};
}

}  // namespace

std::optional<Refusal> MessageReader::Read(std::string_view bytes) {
  while (!bytes.empty()) {
    if (left_ > 0) {
      const size_t skipped = std::min<size_t>(left_, bytes.size());
      bytes.remove_prefix(skipped);
      left_ -= static_cast<uint32_t>(skipped);
      continue;
    }
    const size_t taken = std::min(kPrefixBytes - prefix_.size(), bytes.size());
    prefix_ += bytes.substr(0, taken);
    bytes.remove_prefix(taken);
    if (prefix_.size() < kPrefixBytes) break;
    const auto flag = static_cast<uint8_t>(prefix_.front());
    left_ = size_ = Number(std::string_view(prefix_).substr(1));
    prefix_.clear();
    if (flag > 1) return BadFraming(Concat("a message begins with the unknown flag ", int{flag}));
    if (flag == 1 && !compressed_) {
      return BadFraming("a message is marked as compressed, and the call has no grpc-encoding");
    }
    if (left_ > static_cast<uint32_t>(kMaxMessageBytes)) {
      return Refusal{.code = grpc::StatusCode::RESOURCE_EXHAUSTED,
                     .reason = "request_too_large",
                     .message = Concat("a message may have ", kMaxMessageBytes,
                                       " bytes, and this one has ", left_)};
    }
  }
  return std::nullopt;
}

std::optional<Refusal> MessageReader::End() const {
  if (prefix_.empty() && left_ == 0) return std::nullopt;
  return BadFraming("the client ended the call within a message");
}

}  // namespace moeserve::server::rpc

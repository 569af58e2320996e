// Follows the messages that a client sends within one call, without keeping them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "server/rpc/http2/refusal.h"

namespace moeserve::server::rpc {

class MessageReader {
 public:
  // `compressed`: the client has named how it compresses messages.
  explicit MessageReader(bool compressed = false) : compressed_(compressed) {}

  // Reads the next bytes of the stream. Returns what is wrong with a message, if anything is; the
  // reader must then not be used any more. A message that is too long is noticed when it begins.
  std::optional<Refusal> Read(std::string_view bytes);
  // Must be called when the client has ended the stream.
  std::optional<Refusal> End() const;
  // Returns the bytes of the message that began last, without its prefix.
  uint32_t size() const { return size_; }

 private:
  bool compressed_;
  std::string prefix_;  // the part of a message's prefix that has arrived
  uint32_t size_ = 0;
  uint32_t left_ = 0;  // bytes of the message that have not arrived
};

}  // namespace moeserve::server::rpc

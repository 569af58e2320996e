// HPACK (RFC 7541): decodes the header blocks of one connection's client, and encodes fields.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"

struct nghttp2_hd_inflater;

namespace moeserve::server::rpc {

// Fields in their order, with pseudo-header fields such as ":path".
using HeaderFields = std::vector<std::pair<std::string, std::string>>;

// The blocks must be decoded in the order in which they arrive, each of them to its end. Must be
// used by one thread at a time.
class HeaderDecoder {
 public:
  // Keeps at most `max_list_bytes` of one block's fields, counted as in RFC 7540, section 6.5.2. A
  // few bytes can stand for many fields, so the length of a block does not limit them.
  explicit HeaderDecoder(size_t max_list_bytes) : max_list_bytes_(max_list_bytes) {}

  // Decodes the next bytes of a block; `last` if it ends with them. InvalidArgument if they cannot
  // be decoded; the connection is then of no use.
  absl::Status Decode(std::string_view bytes, bool last);
  // Returns whether the block had more fields than are kept.
  bool too_large() const { return list_bytes_ > max_list_bytes_; }
  // Returns the fields of a block that has ended, and prepares for the next block.
  HeaderFields Take();

 private:
  struct Delete {
    void operator()(nghttp2_hd_inflater* inflater) const;
  };
  const size_t max_list_bytes_;
  std::unique_ptr<nghttp2_hd_inflater, Delete> inflater_;  // made for the first block
  HeaderFields fields_;
  size_t list_bytes_ = 0;
};

// Appends one field in a form that leaves the receiver's table as it is, so that a block of such
// fields may be sent between the blocks of another encoder.
void AppendField(std::string_view name, std::string_view value, std::string& block);

// Returns whether `block` consists of such fields alone, so that it need not be decoded.
bool IsStateless(std::string_view block);

}  // namespace moeserve::server::rpc

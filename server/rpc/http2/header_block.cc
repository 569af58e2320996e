#include "server/rpc/http2/header_block.h"

#include <nghttp2/nghttp2.h>

#include <cstdint>
#include <new>

namespace moeserve::server::rpc {
namespace {

constexpr size_t kFieldOverhead = 32;  // RFC 7540, section 6.5.2

// Appends a string without Huffman coding (RFC 7541, section 5.2).
void AppendString(std::string_view text, std::string& block) {
  constexpr size_t kPrefixMax = 127;  // an integer with a prefix of seven bits (section 5.1)
  size_t length = text.size();
  if (length < kPrefixMax) {
    block += static_cast<char>(length);
  } else {
    block += static_cast<char>(kPrefixMax);
    for (length -= kPrefixMax; length >= 128; length /= 128) {
      block += static_cast<char>(length % 128 + 128);
    }
    block += static_cast<char>(length);
  }
  block += text;
}

std::string_view View(const uint8_t* data, size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

}  // namespace

void HeaderDecoder::Delete::operator()(nghttp2_hd_inflater* inflater) const {
  nghttp2_hd_inflate_del(inflater);
}

absl::Status HeaderDecoder::Decode(std::string_view bytes, bool last) {
  if (inflater_ == nullptr) {
    nghttp2_hd_inflater* made = nullptr;
    if (nghttp2_hd_inflate_new(&made) != 0) throw std::bad_alloc();
    inflater_.reset(made);
  }
  while (true) {
    nghttp2_nv field{};
    int flags = 0;
    const ssize_t used = nghttp2_hd_inflate_hd2(inflater_.get(), &field, &flags,
                                                reinterpret_cast<const uint8_t*>(bytes.data()),
                                                bytes.size(), last ? 1 : 0);
    if (used == NGHTTP2_ERR_NOMEM) throw std::bad_alloc();
    if (used < 0) return absl::InvalidArgumentError("a header block cannot be decoded");
    bytes.remove_prefix(static_cast<size_t>(used));
    if ((flags & NGHTTP2_HD_INFLATE_EMIT) != 0) {
      if (!too_large()) list_bytes_ += field.namelen + field.valuelen + kFieldOverhead;
      if (!too_large()) {
        fields_.emplace_back(View(field.name, field.namelen), View(field.value, field.valuelen));
      }
    }
    if ((flags & NGHTTP2_HD_INFLATE_FINAL) != 0) {
      nghttp2_hd_inflate_end_headers(inflater_.get());
      return absl::OkStatus();
    }
    if ((flags & NGHTTP2_HD_INFLATE_EMIT) == 0 && bytes.empty()) return absl::OkStatus();
  }
}

HeaderFields HeaderDecoder::Take() {
  list_bytes_ = 0;
  return std::exchange(fields_, {});
}

void AppendField(std::string_view name, std::string_view value, std::string& block) {
  block += '\0';  // literal without indexing, with a new name (RFC 7541, section 6.2.2)
  AppendString(name, block);
  AppendString(value, block);
}

bool IsStateless(std::string_view block) {
  // Longer strings do not occur in the fields that gRPC encodes in this way.
  constexpr size_t kMaxLength = 126;
  while (!block.empty()) {
    if (block.front() != 0) return false;
    block.remove_prefix(1);
    for (int i = 0; i < 2; ++i) {
      if (block.empty()) return false;
      const size_t length = static_cast<uint8_t>(block.front()) & 0x7f;  // without Huffman's bit
      if (length > kMaxLength || block.size() < 1 + length) return false;
      block.remove_prefix(1 + length);
    }
  }
  return true;
}

}  // namespace moeserve::server::rpc

#include "model_loaders/tokenizer/protobuf_reader.h"

namespace moeserve {
namespace {

// The kinds of fields as they are encoded. The others are groups, which are obsolete.
constexpr int kVarint = 0;
constexpr int kFixed64 = 1;
constexpr int kBytes = 2;
constexpr int kFixed32 = 5;

constexpr int kMaxVarintBytes = 10;

}  // namespace

bool ProtobufReader::Varint(uint64_t* value) {
  *value = 0;
  for (int i = 0; i < kMaxVarintBytes; ++i) {
    if (rest_.empty()) return Fail();
    const uint8_t byte = static_cast<uint8_t>(rest_[0]);
    rest_.remove_prefix(1);
    *value |= static_cast<uint64_t>(byte & 0x7F) << (7 * i);
    if ((byte & 0x80) == 0) return true;
  }
  return Fail();
}

bool ProtobufReader::Fixed(int size, uint64_t* value) {
  if (rest_.size() < static_cast<size_t>(size)) return Fail();
  *value = 0;
  for (int i = size - 1; i >= 0; --i) *value = *value << 8 | static_cast<uint8_t>(rest_[i]);
  rest_.remove_prefix(size);
  return true;
}

bool ProtobufReader::Next(Field* field) {
  if (damaged_ || rest_.empty()) return false;
  uint64_t tag = 0;
  if (!Varint(&tag)) return false;
  if (tag >> 3 == 0 || tag >> 3 > 0x1FFFFFFF) return Fail();
  *field = Field();
  field->number = static_cast<uint32_t>(tag >> 3);
  switch (static_cast<int>(tag & 7)) {
    case kVarint:
      return Varint(&field->value);
    case kFixed64:
      field->kind = Field::Kind::kFixed64;
      return Fixed(8, &field->value);
    case kFixed32:
      field->kind = Field::Kind::kFixed32;
      return Fixed(4, &field->value);
    case kBytes: {
      field->kind = Field::Kind::kBytes;
      uint64_t size = 0;
      if (!Varint(&size)) return false;
      if (size > rest_.size()) return Fail();
      field->bytes = rest_.substr(0, size);
      rest_.remove_prefix(size);
      return true;
    }
    default:
      return Fail();
  }
}

}  // namespace moeserve

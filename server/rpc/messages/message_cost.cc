#include "server/rpc/messages/message_cost.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

#include <algorithm>
#include <cstdint>

namespace moeserve::server::rpc {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::internal::WireFormatLite;
using google::protobuf::io::CodedInputStream;

// Memory of a field besides its contents. Arrays grow by copying, so that an element counts more
// than once.
constexpr size_t kUnknownField = 48;
constexpr size_t kString = 48;
constexpr size_t kMessage = 256;
constexpr size_t kNumber = 24;
// The deepest nesting that protobuf parses.
constexpr int kMaxDepth = 100;

enum WireType : uint32_t { kVarint, kFixed64, kLength, kGroup, kEndGroup, kFixed32 };

class Scanner {
 public:
  Scanner(google::protobuf::io::ZeroCopyInputStream& bytes, size_t most)
      : input_(&bytes), most_(most) {}

  // Reads the fields of a message or of an unknown group (`type` is null). Returns whether the
  // bytes can be parsed so far.
  bool Fields(const Descriptor* type, int depth) {
    if (depth > kMaxDepth) return false;
    while (bytes_ <= most_) {
      const uint32_t tag = input_.ReadTag();
      if (tag == 0 || (tag & 7) == kEndGroup) return true;
      const auto number = static_cast<int>(tag >> 3);
      const FieldDescriptor* field = type != nullptr ? type->FindFieldByNumber(number) : nullptr;
      if (field != nullptr && !Matches(*field, tag & 7)) field = nullptr;
      if (!Field(field, tag & 7, depth)) return false;
    }
    return false;
  }

  size_t bytes() const { return bytes_; }

 private:
  // Returns whether the parser takes this for a value of the field. Others are kept as unknown.
  static bool Matches(const FieldDescriptor& field, uint32_t wire_type) {
    const auto type = static_cast<WireFormatLite::FieldType>(field.type());
    return wire_type == static_cast<uint32_t>(WireFormatLite::WireTypeForFieldType(type)) ||
           (field.is_packable() && wire_type == kLength);
  }

  bool Field(const FieldDescriptor* field, uint32_t wire_type, int depth) {
    bytes_ += field == nullptr ? kUnknownField : field->is_repeated() ? kNumber : 0;
    uint64_t number = 0;
    switch (wire_type) {
      case kVarint:
        return input_.ReadVarint64(&number);
      case kFixed64:
        return input_.Skip(8);
      case kFixed32:
        return input_.Skip(4);
      case kGroup:
        return Fields(nullptr, depth + 1);
      case kLength:
        return Contents(field, depth);
      default:
        return false;
    }
  }

  bool Contents(const FieldDescriptor* field, int depth) {
    uint32_t length = 0;
    if (!input_.ReadVarint32(&length) || length > INT32_MAX) return false;
    const auto size = static_cast<int>(length);
    if (field != nullptr && field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
      bytes_ += kMessage;
      const CodedInputStream::Limit limit = input_.PushLimit(size);
      const bool valid = Fields(field->message_type(), depth + 1);
      const bool ended = input_.BytesUntilLimit() == 0;
      input_.PopLimit(limit);
      return valid && ended;
    }
    if (field == nullptr || field->cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
      // The bytes are taken as they arrive, so the length may lie.
      const int begin = input_.CurrentPosition();
      const bool valid = input_.Skip(size);
      bytes_ += kString + static_cast<size_t>(input_.CurrentPosition() - begin);
      return valid;
    }
    return Packed(*field, size);
  }

  // Reads packed numbers. Their array may have up to twice as many elements as are used.
  bool Packed(const FieldDescriptor& field, int size) {
    const bool fixed = WireFormatLite::WireTypeForFieldType(static_cast<WireFormatLite::FieldType>(
                           field.type())) != WireFormatLite::WIRETYPE_VARINT;
    if (fixed) {
      const int begin = input_.CurrentPosition();
      const bool valid = input_.Skip(size);
      bytes_ += 2 * static_cast<size_t>(input_.CurrentPosition() - begin);
      return valid;
    }
    const bool wide = field.cpp_type() == FieldDescriptor::CPPTYPE_INT64 ||
                      field.cpp_type() == FieldDescriptor::CPPTYPE_UINT64;
    const CodedInputStream::Limit limit = input_.PushLimit(size);
    uint64_t number = 0;
    bool valid = true;
    while (valid && bytes_ <= most_ && input_.BytesUntilLimit() > 0) {
      valid = input_.ReadVarint64(&number);
      bytes_ += 2 * (wide ? sizeof(uint64_t) : sizeof(uint32_t));
    }
    input_.PopLimit(limit);
    return valid;
  }

  CodedInputStream input_;
  const size_t most_;
  size_t bytes_ = kMessage;
};

}  // namespace

size_t ParsedBytes(const Descriptor& type, google::protobuf::io::ZeroCopyInputStream& bytes,
                   size_t most) {
  Scanner scanner(bytes, most);
  scanner.Fields(&type, 0);
  return scanner.bytes();
}

}  // namespace moeserve::server::rpc

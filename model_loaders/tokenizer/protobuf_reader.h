// Reads protocol buffer messages field by field. The bytes are untrusted: every length is checked,
// and nothing is allocated.
#pragma once

#include <cstdint>
#include <string_view>

namespace moeserve {

class ProtobufReader {
 public:
  explicit ProtobufReader(std::string_view message) : rest_(message) {}

  struct Field {
    uint32_t number = 0;
    enum class Kind { kVarint, kFixed32, kFixed64, kBytes } kind = Kind::kVarint;
    uint64_t value = 0;      // all kinds but kBytes
    std::string_view bytes;  // kBytes
  };

  // Stores the next field and returns true. Returns false at the end and if the message is damaged.
  bool Next(Field* field);
  bool damaged() const { return damaged_; }

 private:
  bool Varint(uint64_t* value);
  bool Fixed(int size, uint64_t* value);
  bool Fail() {
    damaged_ = true;
    return false;
  }

  std::string_view rest_;
  bool damaged_ = false;
};

}  // namespace moeserve

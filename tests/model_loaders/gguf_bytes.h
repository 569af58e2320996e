// Writes GGUF files for tests, also damaged and hostile ones.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model_loaders/files/gguf/gguf_file.h"

namespace moeserve::testing {

// A key of the metadata. `value` has the bytes that follow the number of the type.
struct GgufKey {
  std::string name;
  uint32_t type = 0;
  std::string value;
};

GgufKey GgufU32(std::string name, uint32_t number);
GgufKey GgufF32(std::string name, float number);
GgufKey GgufBool(std::string name, int number);
GgufKey GgufText(std::string name, std::string_view text);
GgufKey GgufTexts(std::string name, const std::vector<std::string>& texts);
GgufKey GgufInts(std::string name, const std::vector<int32_t>& numbers);
GgufKey GgufFloats(std::string name, const std::vector<float>& numbers);

// `size` bytes with the number of bytes before them.
std::string GgufString(std::string_view text);

struct GgufTensorBytes {
  std::string name;
  std::vector<uint64_t> shape;  // outermost dimension first
  uint32_t type = 0;
  std::string data;
  std::optional<uint64_t> offset = std::nullopt;  // replaces the right one
};

// The parts of a file, which a test can change.
struct GgufParts {
  std::string magic = "GGUF";
  uint32_t version = 3;
  std::optional<uint64_t> tensor_count = std::nullopt;  // replaces the right one
  std::optional<uint64_t> key_count = std::nullopt;
  uint64_t alignment = 32;
  std::vector<GgufKey> keys;
  std::vector<GgufTensorBytes> tensors;

  // Replaces the key of that name, or adds it.
  void Set(GgufKey key);
  void Remove(std::string_view key);
  GgufTensorBytes& Tensor(std::string_view name);
};

std::string GgufBytes(const GgufParts& parts);

// Takes a file apart, which must be valid.
GgufParts PartsOf(std::string_view bytes);

}  // namespace moeserve::testing

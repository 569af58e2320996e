// The tensor types of GGUF files. Most of them are blocks of small numbers with common scales,
// which are converted to f32.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "model_loaders/files/tensor_file.h"

namespace moeserve {

// One type. A row of a tensor is a sequence of blocks.
struct GgufType {
  uint32_t id = 0;        // in the file
  std::string_view name;  // "Q4_K"
  // 0 if this program cannot read the type.
  int64_t block_elements = 0;
  int64_t block_bytes = 0;
  // The type of the elements if they are stored as they are; nullopt if blocks are converted to
  // f32.
  std::optional<ElementType> plain = std::nullopt;
  // Writes the `block_elements` values of one block; null if the type is plain. The results are
  // those of the Python package `gguf` to the last bit.
  void (*convert)(const uint8_t* block, float* out) = nullptr;
};

// Returns null if the format has no type of this number.
const GgufType* FindGgufType(uint32_t id);

// Returns the names of the types that this program can read, for error messages.
std::string_view GgufTypeNames();

}  // namespace moeserve

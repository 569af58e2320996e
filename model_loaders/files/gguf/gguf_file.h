// Reads GGUF files, versions 2 and 3, little-endian: a table of typed keys (metadata), a table of
// tensors, and the data of the tensors. Independent of models.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model_loaders/files/gguf/gguf_blocks.h"
#include "model_loaders/files/mapped_file.h"
#include "model_loaders/files/tensor_file.h"

namespace moeserve {

// In the order of the numbers in the file.
enum class GgufValueType : uint8_t {
  kU8,
  kI8,
  kU16,
  kI16,
  kU32,
  kI32,
  kF32,
  kBool,
  kString,
  kArray,
  kU64,
  kI64,
  kF64,
};

// A value of the metadata, or an array of values. Refers to the bytes of the file.
struct GgufValue {
  GgufValueType type = GgufValueType::kU8;
  GgufValueType item_type = GgufValueType::kU8;  // arrays only; never kArray
  uint64_t count = 0;                            // arrays only: number of items
  // The number, the text, or the items as in the file, which were checked to be complete.
  std::string_view bytes = {};

  // Return the value, or nullopt if it has another type. Integer() also if it does not fit int64_t,
  // Real() also takes integers.
  std::optional<int64_t> Integer() const;
  std::optional<double> Real() const;
  std::optional<bool> Bool() const;
  std::optional<std::string_view> String() const;

  // Return the items of an array; nullopt if there is one of another type.
  std::optional<std::vector<int64_t>> Integers() const;
  std::optional<std::vector<double>> Reals() const;
  std::optional<std::vector<std::string_view>> Strings() const;
};

// Returns type and value for an error message, such as `5 (u32)` or "an array of 3 strings".
std::string ShowGguf(const GgufValue& value);

struct GgufTensor {
  TensorEntry entry;  // the type and the size are those that Read() returns
  const GgufType* type = nullptr;
  uint64_t offset = 0;    // in the data section
  std::string_view data;  // as in the file
};

struct GgufHeader {
  std::map<std::string_view, GgufValue> metadata;
  std::vector<GgufTensor> tensors;  // in the order of their data
};

// Parses the bytes of a whole file, to which the result refers. Besides damaged files, refuses
// those that repeat a key or a tensor, whose tensors overlap or have gaps, that have more data than
// the tensors, or that have tensors of types that GgufTypeNames() lacks. InvalidArgument with
// field, expected and found value. Memory is bounded by a small multiple of the file's tables.
Result<GgufHeader> ParseGguf(std::string_view bytes);

// A memory-mapped file, which must not be truncated while it is mapped. Immutable.
class GgufFile final : public TensorFile {
 public:
  // Error messages begin with the last component of `path`.
  static Result<std::shared_ptr<const GgufFile>> Open(const std::filesystem::path& path);

  // Returns null if there is no such key.
  const GgufValue* Find(std::string_view key) const;
  const std::map<std::string_view, GgufValue>& metadata() const { return header_.metadata; }

  Result<TensorData> Read(const TensorEntry& entry) const override;
  // Converts only the blocks that contain the part.
  Result<TensorData> ReadPart(const TensorEntry& entry, int64_t first,
                              int64_t count) const override;
  uint64_t StoredBytes(const TensorEntry& entry) const override;

 private:
  GgufFile() = default;
  const GgufTensor& TensorOf(const TensorEntry& entry) const;

  GgufHeader header_;  // entries_ are those of its tensors
};

}  // namespace moeserve

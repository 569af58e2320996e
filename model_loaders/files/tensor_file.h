// What the readers of tensor files have in common: element types, entries, and access to data.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "model_loaders/files/mapped_file.h"

namespace moeserve {

enum class ElementType : uint8_t {
  kBool,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kU16,
  kI16,
  kF16,
  kBF16,
  kU32,
  kI32,
  kF32,
  kU64,
  kI64,
  kF64,
};

// Returns the name in safetensors files, such as "BF16" or "F8_E4M3".
std::string_view Name(ElementType type);
std::optional<ElementType> ElementTypeFromName(std::string_view name);
int64_t SizeOf(ElementType type);

inline constexpr size_t kMaxDimensions = 32;

// Returns the bytes of a tensor without gaps; nullopt if the number does not fit int64_t.
std::optional<int64_t> ByteCount(const std::vector<int64_t>& shape, ElementType type);

struct TensorEntry {
  std::string name;
  ElementType type = ElementType::kF32;
  std::vector<int64_t> shape;  // [] for a scalar
  // end - begin is the tensor's number of bytes. In a safetensors file, these are offsets in the
  // data section; elsewhere, begin is 0.
  uint64_t begin = 0;
  uint64_t end = 0;
  // The name of the smaller form in which the file stores the tensor, such as "Q4_K", from which it
  // is converted to `type`; empty if the file stores it as it is.
  std::string_view converted_from = {};
};

// The elements of a tensor in row-major order without gaps, at any alignment.
struct TensorData {
  std::string_view bytes;
  std::shared_ptr<const void> owner;  // keeps `bytes` valid
};

// An open file of tensors. Immutable; every function can be called by several threads.
class TensorFile {
 public:
  virtual ~TensorFile() = default;

  // Returns the last component of the path.
  const std::string& file_name() const { return file_name_; }
  const FileStamp& stamp() const { return file_->stamp(); }
  const std::shared_ptr<const MappedFile>& mapped() const { return file_; }
  const std::vector<TensorEntry>& tensors() const { return entries_; }

  // Returns the data of one of tensors(). A format that stores it without gaps returns a view of
  // the mapped file. ResourceExhausted if a copy does not fit in memory.
  virtual Result<TensorData> Read(const TensorEntry& entry) const = 0;

  // Returns `count` elements of one of tensors(), from element `first` on. They must lie inside.
  // Otherwise as Read().
  virtual Result<TensorData> ReadPart(const TensorEntry& entry, int64_t first, int64_t count) const;

  // Returns the bytes that the file takes for the data of one of tensors().
  virtual uint64_t StoredBytes(const TensorEntry& entry) const { return entry.end - entry.begin; }

 protected:
  TensorFile() = default;

  std::string file_name_;
  std::shared_ptr<const MappedFile> file_;
  std::vector<TensorEntry> entries_;
};

}  // namespace moeserve

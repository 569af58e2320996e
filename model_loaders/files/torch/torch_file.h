// Reads files of PyTorch's torch.save(): zip archives with a pickle, which describes values and
// tensors, and the raw data of the tensors (PyTorch 1.6 and later).
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/mutex.h"
#include "base/status.h"
#include "model_loaders/files/mapped_file.h"
#include "model_loaders/files/tensor_file.h"
#include "model_loaders/files/torch/pickle.h"
#include "model_loaders/files/torch/zip_file.h"

namespace moeserve {

// A tensor in a file: a view of a storage, which several tensors may share. Element (i, j, ...) is
// number first + i * strides[0] + j * strides[1] + ... of the storage. All elements lie inside.
struct TorchTensor {
  ElementType type = ElementType::kF32;
  std::vector<int64_t> shape;    // [] for a scalar
  std::vector<int64_t> strides;  // in elements, at least 0; 0 repeats elements
  std::string_view storage;      // all bytes of the storage
  int64_t first = 0;

  // Returns whether the elements are in row-major order without gaps.
  bool IsContiguous() const;
};

// A memory-mapped file, which must not be truncated while it is mapped. Immutable. Nothing in the
// file is executed: pickle.h and pickle_calls.h tell what is read and what is refused.
class TorchFile {
 public:
  // Reads everything but the data of tensors. InvalidArgument, with the last component of `path`,
  // the place, expected and found value, for a file that is damaged, hostile, big-endian, a
  // TorchScript program, or of a version before 1.6; NotFound if there is no file.
  static Result<std::shared_ptr<const TorchFile>> Open(const std::filesystem::path& path);

  const std::string& file_name() const { return file_name_; }
  const std::shared_ptr<const MappedFile>& mapped() const { return file_; }

  // Returns the saved value. In it, a tensor is a call of a function that Tensor() knows.
  const PickleValue& root() const { return pickle_->root(); }

  // Returns the tensor or parameter that `value`, a part of root(), describes; nullopt if it is no
  // call of one of torch's functions that rebuild tensors. InvalidArgument, with the expected and
  // the found value but without the file, if the tensor does not lie in its storage, has a type
  // that ElementType lacks, or is of a kind that is not plain (quantized, sparse, conjugated...).
  Result<std::optional<TorchTensor>> Tensor(const PickleValue& value) const;

 private:
  TorchFile() = default;
  absl::Status Load(std::shared_ptr<const MappedFile> file);
  // Returns the bytes of a storage, which must have this many elements.
  Result<std::string_view> Storage(std::string_view key, int64_t elements,
                                   int64_t element_bytes) const;

  std::string file_name_;
  std::shared_ptr<const MappedFile> file_;
  std::optional<ZipFile> zip_;
  std::optional<PickleTree> pickle_;
  std::string folder_;  // top folder of the archive, with '/' at the end
};

// The tensors of a dict from names to tensors (a state dict) of a TorchFile. Tensors without gaps
// are views of the mapped file; Read() copies others. The latest copy is kept, so that reading a
// tensor part by part copies it once.
class TorchStateDict final : public TensorFile {
 public:
  // `dict` is a value of `file`, which the result does not need. Names that end with
  // "_extra_state", which PyTorch reserves for other values than tensors, are left out.
  // InvalidArgument, with the file and the tensor, if another value is no tensor, if
  // TorchFile::Tensor() refuses one, or if a copy of a tensor that repeats elements would be larger
  // than the file and 16 MiB.
  static Result<std::shared_ptr<const TorchStateDict>> Make(const TorchFile& file,
                                                            const PickleValue& dict);
  // Opens a file whose saved value is a state dict.
  static Result<std::shared_ptr<const TorchStateDict>> Open(const std::filesystem::path& path);

  Result<TensorData> Read(const TensorEntry& entry) const override;

 private:
  TorchStateDict() = default;

  // The TorchFile itself is not kept, because its parsed values take memory.
  std::vector<TorchTensor> tensors_;  // one for each entry

  mutable Mutex mutex_;
  mutable size_t copied_ ABSL_GUARDED_BY(mutex_) = 0;  // the tensor that copy_ contains
  mutable std::shared_ptr<const char[]> copy_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace moeserve

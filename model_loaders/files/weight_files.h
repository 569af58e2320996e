// The weight files of a folder as one set of tensors: either model.safetensors, or the shards that
// model.safetensors.index.json lists, or the same of pytorch_model.bin.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "model_loaders/files/tensor_file.h"

namespace moeserve {

// The names and the reader of one file format.
struct WeightFormat;

class WeightFiles {
 public:
  struct Location {
    std::shared_ptr<const TensorFile> file;
    const TensorEntry* entry = nullptr;  // an entry of `file`
  };

  // Returns whether the folder has one of the files that Open() looks for.
  static bool Exist(const std::filesystem::path& directory);

  // Opens every file and checks that index and shards agree on each tensor. PermissionDenied if a
  // file is a link to a place outside of the folder (CheckInsideModel()). A folder with files of
  // both formats is read from safetensors, as by Hugging Face's library. NotFound if the folder has
  // neither a whole file nor an index; InvalidArgument if it has both of one format, or if index
  // and shards disagree. Error messages contain the file and the tensor.
  static Result<WeightFiles> Open(const std::filesystem::path& directory);

  // Makes one set of the tensors of several files. `name` is that of the set. InvalidArgument if
  // two files have a tensor of the same name.
  static Result<WeightFiles> Of(std::string name,
                                std::vector<std::shared_ptr<const TensorFile>> files);

  // Returns null if there is no tensor of that name.
  const Location* Find(std::string_view name) const;

  // Returns every tensor once, in the order of the files and, within a file, of the data.
  const std::vector<Location>& tensors() const { return tensors_; }

  // Returns the one or more files that contain the tensors.
  const std::vector<std::shared_ptr<const TensorFile>>& files() const { return files_; }

  // Returns the name of the whole file, such as "model.safetensors", or of the index of shards;
  // error messages about missing tensors contain it.
  std::string_view name() const { return name_; }

  // Returns faults that do not matter, one sentence each: a wrong `total_size` of the index.
  const std::vector<std::string>& warnings() const { return warnings_; }

 private:
  // Opens the shards that the index of a format lists, and checks them against it.
  absl::Status AddShards(const std::filesystem::path& directory, const WeightFormat& format);
  absl::Status AddFile(std::shared_ptr<const TensorFile> file);

  std::string name_;
  std::vector<std::string> warnings_;
  std::vector<std::shared_ptr<const TensorFile>> files_;
  std::vector<Location> tensors_;
  // keys refer to names in the files' entries
  std::unordered_map<std::string_view, size_t> by_name_;
};

// Returns whether two tensors have the same type, shape and bytes. Reads both up to the first
// difference. Errors are those of TensorFile::Read().
Result<bool> SameData(const WeightFiles::Location& a, const WeightFiles::Location& b);

}  // namespace moeserve

// The safetensors files of a folder as one set of tensors: either model.safetensors, or the shards
// that model.safetensors.index.json lists.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "model_loaders/files/safetensors.h"

namespace moeserve {

class WeightFiles {
 public:
  struct Location {
    std::shared_ptr<const SafetensorsFile> file;
    const TensorEntry* entry = nullptr;  // an entry of `file`
  };

  // Opens every file and checks that index and shards agree on each tensor. NotFound if the folder
  // has neither model.safetensors nor an index; InvalidArgument if it has both, or if index and
  // shards disagree. Error messages contain the file and the tensor.
  static Result<WeightFiles> Open(const std::filesystem::path& directory);

  // Returns null if there is no tensor of that name.
  const Location* Find(std::string_view name) const;

  // Returns every tensor once, in the order of the files and, within a file, of the data.
  const std::vector<Location>& tensors() const { return tensors_; }

  // Returns the one or more files that contain the tensors.
  const std::vector<std::shared_ptr<const SafetensorsFile>>& files() const { return files_; }

  // Returns "model.safetensors" or, if there are shards, the name of the index; error messages
  // about missing tensors contain it.
  std::string_view name() const { return name_; }

 private:
  absl::Status AddFile(std::shared_ptr<const SafetensorsFile> file);

  std::string name_;
  std::vector<std::shared_ptr<const SafetensorsFile>> files_;
  std::vector<Location> tensors_;
  // keys refer to names in the files' entries
  std::unordered_map<std::string_view, size_t> by_name_;
};

}  // namespace moeserve

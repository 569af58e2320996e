// The safetensors files of a folder as one set of tensors: model.safetensors alone, or the shards
// that model.safetensors.index.json names.
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
    const TensorEntry* entry = nullptr;  // of *file
  };

  // Opens every file and checks that index and shards agree on each tensor. NotFound if the folder
  // has neither a single file nor an index, InvalidArgument if it has both or if index and shards
  // disagree. Messages name the file and the tensor.
  static Result<WeightFiles> Open(const std::filesystem::path& directory);

  // Null if there is no tensor of that name.
  const Location* Find(std::string_view name) const;

  // Every tensor once, in order of files and of data within a file.
  const std::vector<Location>& tensors() const { return tensors_; }

  // Files that hold the tensors; one or more.
  const std::vector<std::shared_ptr<const SafetensorsFile>>& files() const { return files_; }

  // The file that a message about a missing tensor names.
  std::string_view name() const { return name_; }

 private:
  absl::Status AddFile(std::shared_ptr<const SafetensorsFile> file);

  std::string name_;
  std::vector<std::shared_ptr<const SafetensorsFile>> files_;
  std::vector<Location> tensors_;
  std::unordered_map<std::string_view, size_t> by_name_;  // keys live in the files' entries
};

}  // namespace moeserve

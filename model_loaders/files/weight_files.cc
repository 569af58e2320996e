#include "model_loaders/files/weight_files.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "base/error_text.h"
#include "base/strict_json.h"
#include "model_loaders/files/file_kind.h"
#include "model_loaders/files/safetensors.h"
#include "model_loaders/files/torch/torch_file.h"

namespace moeserve {

namespace fs = std::filesystem;
using OpenFile = Result<std::shared_ptr<const TensorFile>>;

// As Hugging Face's library names the files.
struct WeightFormat {
  const char* single;
  const char* index;
  std::string_view shard_begin;
  std::string_view shard_end;
  OpenFile (*open)(const fs::path& path);
  // Whether a warning is given if `total_size` of the index is not the sum over all tensors. For
  // pytorch_model.bin it is not read, because writers count data that tensors share once or several
  // times.
  bool exact_total;
};

namespace {

using Json = nlohmann::json;

OpenFile OpenSafetensors(const fs::path& path) { return SafetensorsFile::Open(path); }
OpenFile OpenTorch(const fs::path& path) { return TorchStateDict::Open(path); }

// In order of preference, which is that of Hugging Face's library.
constexpr WeightFormat kFormats[] = {
    {"model.safetensors", "model.safetensors.index.json", "model-", ".safetensors", OpenSafetensors,
     true},
    {"pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-", ".bin", OpenTorch,
     false},
};

constexpr size_t kMaxShards = 10'000;  // limits open files and mappings

constexpr JsonLimits kIndexLimits = {
    .max_bytes = size_t{256} << 20, .max_depth = 8, .max_values = size_t{4} << 20};

struct Index {
  std::map<std::string, std::string> file_of;  // tensor -> shard
  std::optional<Json> total_size;              // as written; not checked
};

// Returns whether `name` is a plain file name, which cannot refer to a file outside the folder.
bool IsPlainFileName(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.size() <= 255 &&
         name.find('/') == std::string_view::npos && name.find('\\') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

Result<Index> ParseIndex(std::string_view text, const WeightFormat& format) {
  Result<Json> parsed = ParseStrictJson(text, kIndexLimits);
  if (!parsed.ok()) return Prefixed(Concat(format.index, ": "), parsed.status());
  const Json& json = *parsed;
  if (!json.is_object()) {
    return absl::InvalidArgumentError(
        Concat(format.index, ": expected an object, found ", ShowJson(json)));
  }
  Problems problems;
  for (const auto& [key, value] : json.items()) {
    if (key != "metadata" && key != "weight_map") {
      problems.Add(Concat("key ", Quoted(key), " is unknown; expected metadata and weight_map"));
    }
  }
  Index index;
  if (const auto it = json.find("metadata"); it != json.end()) {
    if (!it->is_object()) {
      problems.Add(Concat("metadata: expected an object, found ", ShowJson(*it)));
    } else if (const auto total = it->find("total_size");
               total != it->end() && format.exact_total) {
      index.total_size = *total;
    }
  }
  const auto map = json.find("weight_map");
  if (map == json.end() || !map->is_object() || map->empty()) {
    problems.Add(Concat("weight_map: expected an object from tensor to file name, found ",
                        map == json.end() ? std::string("none") : ShowJson(*map)));
    return problems.ToStatus(format.index);
  }
  for (const auto& [tensor, file] : map->items()) {
    if (!file.is_string() || !IsPlainFileName(file.get_ref<const std::string&>())) {
      problems.Add(Concat("weight_map[", Quoted(tensor),
                          "]: expected the name of a file in the same folder, found ",
                          ShowJson(file)));
      continue;
    }
    index.file_of.emplace(tensor, file.get_ref<const std::string&>());
  }
  MOESERVE_RETURN_IF_ERROR(problems.ToStatus(format.index));
  return index;
}

// Returns the files whose names are names of shards. A file that the index does not name shows that
// the folder mixes two models or two formats of one model.
std::set<std::string> ShardLikeFiles(const fs::path& directory, const WeightFormat& format) {
  std::set<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.starts_with(format.shard_begin) && name.ends_with(format.shard_end)) {
      names.insert(name);
    }
  }
  return names;
}

absl::Status CheckAgainstIndex(const WeightFiles& weights, const Index& index,
                               std::vector<std::string>& warnings) {
  Problems problems;
  for (const auto& [tensor, file] : index.file_of) {
    const WeightFiles::Location* found = weights.Find(tensor);
    if (found == nullptr) {
      problems.Add(Concat("weight_map[", Quoted(tensor), "]: expected the tensor in ", Quoted(file),
                          ", found it in no file"));
    } else if (found->file->file_name() != file) {
      problems.Add(Concat("weight_map[", Quoted(tensor), "]: expected the tensor in ", Quoted(file),
                          ", found it in ", Quoted(found->file->file_name())));
    }
  }
  uint64_t total = 0;
  for (const WeightFiles::Location& tensor : weights.tensors()) {
    total += tensor.entry->end - tensor.entry->begin;
    if (!index.file_of.contains(tensor.entry->name)) {
      problems.Add(Concat("weight_map: expected an entry for tensor ", Quoted(tensor.entry->name),
                          " of ", Quoted(tensor.file->file_name()), ", found none"));
    }
  }
  // Many published checkpoints have a wrong number here. Shards are checked byte by byte anyway.
  if (index.total_size.has_value() && *index.total_size != Json(total)) {
    warnings.push_back(Concat(weights.name(), ": metadata.total_size is ignored: expected ", total,
                              " (the bytes of all tensors), found ", ShowJson(*index.total_size)));
  }
  return problems.ToStatus(weights.name());
}

}  // namespace

absl::Status WeightFiles::AddFile(std::shared_ptr<const TensorFile> file) {
  for (const TensorEntry& entry : file->tensors()) {
    const auto [it, added] = by_name_.emplace(entry.name, tensors_.size());
    if (!added) {
      return absl::InvalidArgumentError(
          Concat(Printable(file->file_name()), ": tensor ", Quoted(entry.name),
                 ": expected it in one file, found it in ",
                 Printable(tensors_[it->second].file->file_name()), " too"));
    }
    tensors_.push_back({file, &entry});
  }
  files_.push_back(std::move(file));
  return absl::OkStatus();
}

absl::Status WeightFiles::AddShards(const fs::path& directory, const WeightFormat& format) {
  MOESERVE_ASSIGN_OR_RETURN(const std::string text,
                            ReadTextFile(directory / format.index, kIndexLimits.max_bytes));
  MOESERVE_ASSIGN_OR_RETURN(const Index index, ParseIndex(text, format));
  std::set<std::string> names;
  for (const auto& [tensor, file] : index.file_of) names.insert(file);
  if (names.size() > kMaxShards) {
    return absl::InvalidArgumentError(Concat(format.index, ": weight_map: expected at most ",
                                             kMaxShards, " files, found ", names.size()));
  }
  for (const std::string& name : names) {
    MOESERVE_RETURN_IF_ERROR(CheckInsideModel(directory, directory / name));
    OpenFile file = format.open(directory / name);
    if (absl::IsNotFound(file.status())) {
      return absl::NotFoundError(
          Concat(format.index, ": weight_map: expected the file ", Quoted(name), ", found none"));
    }
    MOESERVE_RETURN_IF_ERROR(file.status());
    MOESERVE_RETURN_IF_ERROR(AddFile(*std::move(file)));
  }
  return CheckAgainstIndex(*this, index, warnings_);
}

bool WeightFiles::Exist(const fs::path& directory) {
  return std::any_of(std::begin(kFormats), std::end(kFormats), [&](const WeightFormat& format) {
    return Exists(directory / format.single) || Exists(directory / format.index);
  });
}

Result<WeightFiles> WeightFiles::Open(const fs::path& directory) {
  bool stray_shards = false;
  for (const WeightFormat& format : kFormats) {
    const bool has_single = Exists(directory / format.single);
    const bool has_index = Exists(directory / format.index);
    if (has_single && has_index) {
      return absl::InvalidArgumentError(
          Concat("expected ", format.single, " or ", format.index, ", found both"));
    }
    std::set<std::string> unused = ShardLikeFiles(directory, format);
    stray_shards = stray_shards || !unused.empty();
    if (!has_single && !has_index) continue;

    WeightFiles weights;
    weights.name_ = has_single ? format.single : format.index;
    if (has_single) {
      MOESERVE_RETURN_IF_ERROR(CheckInsideModel(directory, directory / format.single));
      MOESERVE_ASSIGN_OR_RETURN(auto file, format.open(directory / format.single));
      MOESERVE_RETURN_IF_ERROR(weights.AddFile(std::move(file)));
    } else {
      MOESERVE_RETURN_IF_ERROR(weights.AddShards(directory, format));
      for (const auto& file : weights.files_) unused.erase(file->file_name());
    }
    if (!unused.empty()) {
      return absl::InvalidArgumentError(Concat(Printable(*unused.begin()),
                                               ": expected no weight file beside those of ",
                                               weights.name(), ", found this one"));
    }
    return weights;
  }
  return absl::NotFoundError(Concat("expected ", kFormats[0].single, ", ", kFormats[0].index, ", ",
                                    kFormats[1].single, " or ", kFormats[1].index, ", found none",
                                    stray_shards ? " (there are shards, but no index)" : ""));
}

Result<WeightFiles> WeightFiles::Of(std::string name,
                                    std::vector<std::shared_ptr<const TensorFile>> files) {
  WeightFiles weights;
  weights.name_ = std::move(name);
  for (std::shared_ptr<const TensorFile>& file : files) {
    MOESERVE_RETURN_IF_ERROR(weights.AddFile(std::move(file)));
  }
  return weights;
}

const WeightFiles::Location* WeightFiles::Find(std::string_view name) const {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : &tensors_[it->second];
}

Result<bool> SameData(const WeightFiles::Location& a, const WeightFiles::Location& b) {
  if (a.entry->type != b.entry->type || a.entry->shape != b.entry->shape) return false;
  int64_t count = 1;
  for (const int64_t dim : a.entry->shape) count *= dim;
  constexpr int64_t kPart = int64_t{4} << 20;  // elements that are compared at once
  for (int64_t first = 0; first < count; first += kPart) {
    const int64_t part = std::min(kPart, count - first);
    MOESERVE_ASSIGN_OR_RETURN(const TensorData one, a.file->ReadPart(*a.entry, first, part));
    MOESERVE_ASSIGN_OR_RETURN(const TensorData two, b.file->ReadPart(*b.entry, first, part));
    if (one.bytes.data() != two.bytes.data() && one.bytes != two.bytes) return false;
  }
  return true;
}

}  // namespace moeserve

#include "model_loaders/files/weight_files.h"

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "base/message.h"
#include "model_loaders/files/strict_json.h"

namespace moeserve {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr char kSingle[] = "model.safetensors";
constexpr char kIndex[] = "model.safetensors.index.json";
constexpr size_t kMaxShards = 10'000;  // limits open files and mappings

constexpr JsonLimits kIndexLimits = {
    .max_bytes = size_t{256} << 20, .max_depth = 8, .max_values = size_t{4} << 20};

struct Index {
  std::map<std::string, std::string> file_of;  // tensor -> shard
  std::optional<uint64_t> total_size;
};

// Returns whether `name` is a plain file name, which cannot refer to a file outside the folder.
bool IsPlainFileName(std::string_view name) {
  return !name.empty() && name != "." && name != ".." && name.size() <= 255 &&
         name.find('/') == std::string_view::npos && name.find('\\') == std::string_view::npos &&
         name.find('\0') == std::string_view::npos;
}

Result<Index> ParseIndex(std::string_view text) {
  Result<Json> parsed = ParseStrictJson(text, kIndexLimits);
  if (!parsed.ok()) return Prefixed(Concat(kIndex, ": "), parsed.status());
  const Json& json = *parsed;
  if (!json.is_object()) {
    return absl::InvalidArgumentError(
        Concat(kIndex, ": expected an object, found ", ShowJson(json)));
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
    } else if (const auto total = it->find("total_size"); total != it->end()) {
      if (total->is_number_unsigned()) {
        index.total_size = total->get<uint64_t>();
      } else {
        problems.Add(
            Concat("metadata.total_size: expected an integer >= 0, found ", ShowJson(*total)));
      }
    }
  }
  const auto map = json.find("weight_map");
  if (map == json.end() || !map->is_object() || map->empty()) {
    problems.Add(Concat("weight_map: expected an object from tensor to file name, found ",
                        map == json.end() ? std::string("none") : ShowJson(*map)));
    return problems.ToStatus(kIndex);
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
  MOESERVE_RETURN_IF_ERROR(problems.ToStatus(kIndex));
  return index;
}

// Returns the files whose names are names of shards. A file that the index does not name shows that
// the folder mixes two models or two formats of one model.
std::set<std::string> ShardLikeFiles(const fs::path& directory) {
  std::set<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.starts_with("model-") && name.ends_with(".safetensors")) names.insert(name);
  }
  return names;
}

absl::Status CheckAgainstIndex(const WeightFiles& weights, const Index& index) {
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
  if (index.total_size.has_value() && *index.total_size != total) {
    problems.Add(Concat("metadata.total_size: expected ", total,
                        " (the bytes of all tensors), found ", *index.total_size));
  }
  return problems.ToStatus(kIndex);
}

}  // namespace

absl::Status WeightFiles::AddFile(std::shared_ptr<const SafetensorsFile> file) {
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

Result<WeightFiles> WeightFiles::Open(const fs::path& directory) {
  const bool has_single = Exists(directory / kSingle);
  const bool has_index = Exists(directory / kIndex);
  if (has_single && has_index) {
    return absl::InvalidArgumentError(Concat("expected ", kSingle, " or ", kIndex, ", found both"));
  }
  std::set<std::string> unused = ShardLikeFiles(directory);
  if (!has_single && !has_index) {
    return absl::NotFoundError(Concat("expected ", kSingle, " or ", kIndex, ", found neither",
                                      unused.empty() ? "" : " (there are shards, but no index)"));
  }

  WeightFiles weights;
  if (has_single) {
    weights.name_ = kSingle;
    MOESERVE_ASSIGN_OR_RETURN(auto file, SafetensorsFile::Open(directory / kSingle));
    MOESERVE_RETURN_IF_ERROR(weights.AddFile(std::move(file)));
  } else {
    weights.name_ = kIndex;
    MOESERVE_ASSIGN_OR_RETURN(const std::string text,
                              ReadTextFile(directory / kIndex, kIndexLimits.max_bytes));
    MOESERVE_ASSIGN_OR_RETURN(const Index index, ParseIndex(text));
    std::set<std::string> names;
    for (const auto& [tensor, file] : index.file_of) names.insert(file);
    if (names.size() > kMaxShards) {
      return absl::InvalidArgumentError(Concat(kIndex, ": weight_map: expected at most ",
                                               kMaxShards, " files, found ", names.size()));
    }
    for (const std::string& name : names) {
      Result<std::shared_ptr<const SafetensorsFile>> file = SafetensorsFile::Open(directory / name);
      if (!file.ok()) {
        return absl::IsNotFound(file.status())
                   ? absl::NotFoundError(Concat(kIndex, ": weight_map: expected the file ",
                                                Quoted(name), ", found none"))
                   : file.status();
      }
      MOESERVE_RETURN_IF_ERROR(weights.AddFile(*std::move(file)));
      unused.erase(name);
    }
    MOESERVE_RETURN_IF_ERROR(CheckAgainstIndex(weights, index));
  }
  if (!unused.empty()) {
    return absl::InvalidArgumentError(Concat(Printable(*unused.begin()),
                                             ": expected no weight file beside those of ",
                                             weights.name(), ", found this one"));
  }
  return weights;
}

const WeightFiles::Location* WeightFiles::Find(std::string_view name) const {
  const auto it = by_name_.find(name);
  return it == by_name_.end() ? nullptr : &tensors_[it->second];
}

}  // namespace moeserve

#include "model_loaders/checkpoint/model_path.h"

#include <algorithm>
#include <climits>
#include <string_view>
#include <system_error>
#include <vector>

#include "base/error_text.h"
#include "model_loaders/checkpoint/checkpoint_identity.h"
#include "model_loaders/files/mapped_file.h"

namespace moeserve {
namespace {

namespace fs = std::filesystem;

// Returns whether `name` can be the name of a snapshot, and not a path that leaves the folder.
bool IsRevision(std::string_view name) {
  return !name.empty() && name.size() <= 128 && name != "." && name != ".." &&
         name.find('/') == std::string_view::npos && name.find('\0') == std::string_view::npos;
}

// Returns the folder's only snapshot.
Result<std::string> OnlySnapshot(const fs::path& folder, const std::string& shown) {
  constexpr size_t kListed = 3;
  std::vector<std::string> found;
  std::error_code error;
  for (fs::directory_iterator entry(folder / "snapshots", error), end; !error && entry != end;
       entry.increment(error)) {
    if (found.size() <= kListed) found.push_back(entry->path().filename().string());
  }
  if (found.size() == 1) return found[0];
  std::sort(found.begin(), found.end());
  std::string names;
  for (size_t i = 0; i < found.size() && i < kListed; ++i) {
    names += Concat(i == 0 ? "" : ", ", Printable(found[i], 64));
  }
  if (found.size() > kListed) names += ", ...";
  return absl::InvalidArgumentError(
      Concat(shown, "/snapshots: expected one folder, or a file refs/main that names one, found ",
             found.empty() ? "none" : names));
}

Result<ModelPath> InCache(const fs::path& folder) {
  const std::string shown = Printable(folder.string(), PATH_MAX);
  const fs::path ref = folder / "refs" / "main";
  std::string revision;
  if (Exists(ref)) {
    MOESERVE_ASSIGN_OR_RETURN(revision, ReadTextFile(ref, 1024));
    while (!revision.empty() && (revision.back() == '\n' || revision.back() == '\r')) {
      revision.pop_back();
    }
    if (!IsRevision(revision)) {
      return absl::InvalidArgumentError(
          Concat(shown, "/refs/main: expected the name of a snapshot, found ", Quoted(revision)));
    }
  } else {
    MOESERVE_ASSIGN_OR_RETURN(revision, OnlySnapshot(folder, shown));
  }
  // "models--org--name"; a name may contain "--" itself.
  std::string name = LastComponent(folder);
  constexpr std::string_view kPrefix = "models--";
  if (name.starts_with(kPrefix)) {
    name = name.substr(kPrefix.size());
    const size_t organization = name.find("--");
    if (organization != std::string::npos) name = name.substr(organization + 2);
  }
  return ModelPath{folder / "snapshots" / revision, name};
}

}  // namespace

Result<ModelPath> ResolveModelPath(const fs::path& given) {
  std::error_code error;
  if (fs::is_directory(given, error)) {
    if (!Exists(given / "config.json") && fs::is_directory(given / "snapshots", error)) {
      return InCache(given);
    }
    return ModelPath{given, LastComponent(given)};
  }
  if (!fs::is_regular_file(given, error)) return ModelPath{given, LastComponent(given)};
  const std::string file = given.filename().string();
  constexpr std::string_view kWhole[] = {"config.json", "model.safetensors",
                                         "model.safetensors.index.json", "pytorch_model.bin",
                                         "pytorch_model.bin.index.json"};
  if (std::find(std::begin(kWhole), std::end(kWhole), file) != std::end(kWhole)) {
    const fs::path folder = given.has_parent_path() ? given.parent_path() : fs::path(".");
    return ModelPath{folder, LastComponent(folder)};
  }
  if (file.ends_with(".safetensors") || file.ends_with(".bin")) {
    return absl::InvalidArgumentError(
        Concat(Printable(given.string(), PATH_MAX),
               ": expected model.safetensors, pytorch_model.bin, a .gguf file or a folder, found ",
               "a file that may be one of several"));
  }
  return ModelPath{given, LastComponent(given)};
}

}  // namespace moeserve

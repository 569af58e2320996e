#include "model_loaders/checkpoint/fairseq_files.h"

#include <algorithm>
#include <charconv>
#include <map>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/error_text.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/files/mapped_file.h"
#include "model_loaders/files/weight_files.h"

namespace moeserve {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kFairseqExtension = ".pt";
constexpr std::string_view kShared = "-shared";
constexpr std::string_view kRank = "-rank-";
constexpr std::string_view kShard = "-shard";
constexpr std::string_view kFairseqModelType = "torchscale";

// What the name of a .pt file says.
struct NameParts {
  enum class Kind { kWhole, kShared, kRank, kShard } kind = Kind::kWhole;
  std::string stem;  // what the files of a checkpoint have in common
  int rank = 0;
};
using Kind = NameParts::Kind;

// Removes a number and `before` it from the end of `text` and returns the number. Returns nullopt
// if `text` ends otherwise.
std::optional<int> TakeShardNumber(std::string_view before, std::string_view* text) {
  const size_t at = text->rfind(before);
  if (at == std::string_view::npos) return std::nullopt;
  const std::string_view digits = text->substr(at + before.size());
  int number = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  if (digits.empty() || error != std::errc() || end != digits.data() + digits.size() ||
      number < 0 || (digits.size() > 1 && digits[0] == '0')) {
    return std::nullopt;
  }
  *text = text->substr(0, at);
  return number;
}

// `name` ends with kFairseqExtension.
NameParts PartsOf(std::string_view name) {
  std::string_view stem = name.substr(0, name.size() - kFairseqExtension.size());
  NameParts parts;
  if (TakeShardNumber(kShard, &stem).has_value()) {
    parts.kind = Kind::kShard;
  } else if (const std::optional<int> rank = TakeShardNumber(kRank, &stem)) {
    parts.kind = Kind::kRank;
    parts.rank = *rank;
  } else if (stem.ends_with(kShared)) {
    stem.remove_suffix(kShared.size());
    parts.kind = Kind::kShared;
  }
  parts.stem = stem;
  return parts;
}

// The .pt files of one folder by checkpoint.
struct Group {
  std::vector<int> ranks;
  bool shared = false;
};
struct Listing {
  std::vector<std::string> whole;
  std::string shard;  // a file in shards; empty if there is none
  std::map<std::string, Group> groups;
};

Listing ListFolder(const fs::path& folder) {
  Listing listing;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    std::string name = it->path().filename().string();
    if (name.size() <= kFairseqExtension.size() || !name.ends_with(kFairseqExtension)) continue;
    const NameParts parts = PartsOf(name);
    switch (parts.kind) {
      case Kind::kWhole:
        listing.whole.push_back(std::move(name));
        break;
      case Kind::kShared:
        listing.groups[parts.stem].shared = true;
        break;
      case Kind::kRank:
        listing.groups[parts.stem].ranks.push_back(parts.rank);
        break;
      case Kind::kShard:
        if (listing.shard.empty() || name < listing.shard) listing.shard = std::move(name);
        break;
    }
  }
  std::sort(listing.whole.begin(), listing.whole.end());
  return listing;
}

std::string SharedName(const std::string& stem) { return Concat(stem, kShared, kFairseqExtension); }
std::string RankName(const std::string& stem, int rank) {
  return Concat(stem, kRank, rank, kFairseqExtension);
}

absl::Status Sharded(std::string_view name) {
  return absl::InvalidArgumentError(
      Concat(Printable(name), ": expected a file with whole tensors, found a shard of fully ",
             "sharded training. Join the shards with the tools of fairseq first"));
}

absl::Status Missing(std::string_view file, std::string_view beside) {
  return absl::NotFoundError(
      Concat("expected the file ", Printable(file), " beside ", Printable(beside), ", found none"));
}

// Returns the files of a checkpoint in parts, of which at least one exists.
Result<std::optional<FairseqFiles>> InParts(const fs::path& folder, const std::string& stem,
                                            Group group) {
  FairseqFiles files{.folder = folder, .main = SharedName(stem), .ranks = {}};
  if (group.ranks.empty()) return Missing(RankName(stem, 0), files.main);
  std::sort(group.ranks.begin(), group.ranks.end());
  if (!group.shared) return Missing(files.main, RankName(stem, group.ranks[0]));
  for (const int rank : group.ranks) {
    const int expected = static_cast<int>(files.ranks.size());
    if (rank != expected) return Missing(RankName(stem, expected), RankName(stem, rank));
    files.ranks.push_back(RankName(stem, rank));
  }
  return std::optional(std::move(files));
}

// Returns whether a folder's config.json, if it has one, is that of a fairseq checkpoint.
bool MayHaveCheckpoint(const fs::path& folder) {
  if (WeightFiles::Exist(folder)) return false;
  if (!Exists(folder / kConfigFile)) return true;
  const Result<std::string> text = ReadTextFile(folder / kConfigFile, kMaxConfigFileBytes);
  if (!text.ok()) return false;
  const Result<nlohmann::json> json = ParseConfigJson(*text);
  return json.ok() && json->is_object() && HasModelType(*json, kFairseqModelType);
}

Result<std::optional<FairseqFiles>> InFolder(const fs::path& folder) {
  Listing listing = ListFolder(folder);
  if (listing.whole.empty() && listing.groups.empty() && listing.shard.empty()) {
    return std::optional<FairseqFiles>();
  }
  if (!MayHaveCheckpoint(folder)) return std::optional<FairseqFiles>();
  if (!listing.shard.empty()) return Sharded(listing.shard);
  std::vector<std::string> names = listing.whole;
  for (const auto& [stem, unused] : listing.groups) names.push_back(SharedName(stem));
  if (names.size() > 1) {
    return absl::InvalidArgumentError(Concat(
        "expected one checkpoint of .pt files in the folder, found ", names.size(), " of them (",
        Printable(names[0]), ", ", Printable(names[1]), names.size() > 2 ? ", ..." : "",
        "); name one of these files instead of the folder"));
  }
  if (listing.whole.empty()) {
    const auto& [stem, group] = *listing.groups.begin();
    return InParts(folder, stem, group);
  }
  return std::optional(FairseqFiles{.folder = folder, .main = names[0], .ranks = {}});
}

}  // namespace

Result<std::optional<FairseqFiles>> FindFairseq(const fs::path& path) {
  std::error_code error;
  const fs::file_type type = fs::status(path, error).type();
  if (type == fs::file_type::directory) return InFolder(path);
  if (type == fs::file_type::not_found || path.extension() != kFairseqExtension) {
    return std::optional<FairseqFiles>();
  }
  const std::string name = path.filename().string();
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  const NameParts parts = PartsOf(name);
  switch (parts.kind) {
    case Kind::kShard:
      return Sharded(name);
    case Kind::kWhole:
      return std::optional(FairseqFiles{.folder = folder, .main = name, .ranks = {}});
    case Kind::kShared:
    case Kind::kRank:
      break;
  }
  Listing listing = ListFolder(folder);
  return InParts(folder, parts.stem, std::move(listing.groups[parts.stem]));
}

}  // namespace moeserve

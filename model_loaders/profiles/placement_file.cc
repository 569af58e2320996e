#include "model_loaders/profiles/placement_file.h"

#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/error_text.h"
#include "base/strict_json.h"
#include "engine/weights/place_experts.h"
#include "model_loaders/files/mapped_file.h"
#include "model_loaders/files/object_reader.h"
#include "model_loaders/profiles/profile_file.h"

namespace moeserve {
namespace {

using Json = nlohmann::json;

constexpr int kPlacementFormat = 1;
// Enough for 100 blocks of 1,024 experts on 64 ranks.
constexpr JsonLimits kPlacementLimits{
    .max_bytes = size_t{64} << 20, .max_depth = 8, .max_values = size_t{1} << 23};

const ModelSpec* StackOf(const ModelSpec& model, Stack stack) {
  for (const ModelSpec* s : {&model, model.encoder.get(), model.prediction.get()}) {
    if (s != nullptr && s->stack == stack) return s;
  }
  return nullptr;
}

const BlockSpec& BlockOf(const ModelSpec& model, std::pair<Stack, int> key) {
  return StackOf(model, key.first)->blocks[static_cast<size_t>(key.second)];
}

// Reads the holders of a block, [parameters.size()].
class HolderReader {
 public:
  HolderReader(ObjectReader& block, int ranks, Problems& problems)
      : block_(block), ranks_(ranks), problems_(problems) {}

  std::vector<HolderSet> Read(const std::vector<int64_t>& parameters) {
    const Json* const list = block_.Required("holders", "a list of lists of ranks");
    if (list == nullptr) return {};
    if (!list->is_array() || list->size() != parameters.size()) {
      block_.Fault("holders", Concat("a list of ", parameters.size(), " lists"), ShowJson(*list));
      return {};
    }
    std::vector<HolderSet> holders;
    for (size_t e = 0; e < parameters.size() && problems_.empty(); ++e) {
      holders.push_back(One((*list)[e], Concat("holders[", e, ']'), parameters[e] > 0));
    }
    return holders;
  }

 private:
  HolderSet One(const Json& ranks, const std::string& where, bool has_matrices) {
    HolderSet holders = 0;
    const std::string expected =
        has_matrices ? Concat("a list of different ranks from 0 to ", ranks_ - 1)
                     : std::string("an empty list, because this expert has no matrices");
    bool valid = ranks.is_array() && ranks.empty() != has_matrices;
    for (size_t i = 0; valid && i < ranks.size(); ++i) {
      const std::optional<int> rank = IntFrom(ranks[i]);
      valid = rank.has_value() && *rank >= 0 && *rank < ranks_ && (holders >> *rank & 1) == 0;
      if (valid) holders |= HolderSet{1} << *rank;
    }
    if (!valid) block_.Fault(where, expected, ShowJson(ranks));
    return holders;
  }

  ObjectReader& block_;
  const int ranks_;
  Problems& problems_;
};

// Reads one element of "blocks" into `blocks`.
void ReadBlock(const Json& json, size_t index, const ModelSpec& model, const ExpertSizes& sizes,
               int ranks, Problems& problems, ExpertPlacement::Blocks& blocks,
               std::set<std::pair<Stack, int>>& found) {
  ObjectReader block(json, Concat("blocks[", index, ']'), &problems);
  const std::optional<Stack> stack = block.PickKind<Stack>("stack");
  const int layer = block.Int("layer");
  std::vector<Choice<BlockKind>> names;
  for (const BlockKind kind :
       {BlockKind::kAttention, BlockKind::kFeedForward, BlockKind::kCrossAttention}) {
    names.push_back({Name(kind), kind});
  }
  const std::optional<BlockKind> kind = block.Pick("block", names);
  if (!problems.empty()) return;
  const ModelSpec* const of = StackOf(model, *stack);
  if (of == nullptr && *stack == Stack::kPrediction) return;
  const int b = of == nullptr ? -1 : of->Find(layer, *kind);
  const auto block_sizes = sizes.find({*stack, b});
  if (block_sizes == sizes.end()) {
    block.Fault("layer", "a routed block of the model",
                Concat("stack ", KindName(*stack), ", layer ", layer, ", ", Name(*kind)));
    return;
  }
  if (!found.insert(block_sizes->first).second) {
    block.Fault("layer", "each block once", Concat("layer ", layer, ", ", Name(*kind), ", again"));
    return;
  }
  blocks[block_sizes->first] = HolderReader(block, ranks, problems).Read(block_sizes->second);
  block.RefuseOthers();
}

void CheckHead(ObjectReader& file, const ModelSpec& model, int ranks, Problems& problems,
               int& version) {
  const int format = file.Int("format");
  if (problems.empty() && format != kPlacementFormat) {
    file.Fault("format", Concat(kPlacementFormat), Concat(format));
    return;
  }
  const Json* const name = file.Required("model", "a text");
  if (name != nullptr && !name->is_string()) file.Fault("model", "a text", ShowJson(*name));
  const std::string digest = PlacementDigest(model);
  const Json* const found = file.Required("model_digest", "a text");
  if (found != nullptr && (!found->is_string() || found->get_ref<const std::string&>() != digest)) {
    file.Fault("model_digest", Concat(Quoted(digest), ", that of this model"), ShowJson(*found));
  }
  const int of_ranks = file.Int("ranks");
  if (problems.empty() && of_ranks != ranks) {
    file.Fault("ranks", Concat(ranks), Concat(of_ranks));
  }
  version = file.Int("version");
  if (problems.empty() && version < 1) file.Fault("version", "at least 1", Concat(version));
}

}  // namespace

std::string EncodePlacement(const ExpertPlacement& placement, const ModelSpec& model,
                            std::string_view name) {
  const auto text = [](std::string_view value) {
    return Json(value).dump(-1, ' ', false, Json::error_handler_t::replace);
  };
  std::string out = Concat("{\n \"format\": ", kPlacementFormat, ",\n \"model\": ", text(name),
                           ",\n \"model_digest\": ", text(PlacementDigest(model)),
                           ",\n \"ranks\": ", placement.ranks(),
                           ",\n \"version\": ", placement.version(), ",\n \"blocks\": [");
  const char* before = "\n  ";
  for (const auto& [key, holders] : placement.blocks()) {
    const BlockSpec& block = BlockOf(model, key);
    Json lists = Json::array();
    for (const HolderSet& set : holders) {
      lists.push_back(Json::array());
      for (int r = 0; r < placement.ranks(); ++r) {
        if ((set >> r & 1) != 0) lists.back().push_back(r);
      }
    }
    out += Concat(before, "{\"stack\": ", text(KindName(key.first)), ", \"layer\": ", block.layer,
                  ", \"block\": ", text(Name(block.kind())), ", \"holders\": ", lists.dump(), '}');
    before = ",\n  ";
  }
  return out + "\n ]\n}\n";
}

Result<ExpertPlacement> DecodePlacement(std::string_view text, const ModelSpec& model, int ranks) {
  MOESERVE_ASSIGN_OR_RETURN(const Json json, ParseStrictJson(text, kPlacementLimits));
  Problems problems;
  ObjectReader file(json, "", &problems);
  int version = 0;
  CheckHead(file, model, ranks, problems, version);
  const Json* const list = file.Required("blocks", "a list of blocks");
  if (list != nullptr && !list->is_array()) file.Fault("blocks", "a list", ShowJson(*list));
  file.RefuseOthers();
  MOESERVE_RETURN_IF_ERROR(problems.ToStatus("no placement for this model"));
  ExpertPlacement::Blocks blocks = ExpertPlacement::Balanced(model, ranks).blocks();
  const ExpertSizes sizes = ExpertParameters(model);
  std::set<std::pair<Stack, int>> found;
  for (size_t i = 0; i < list->size() && problems.empty(); ++i) {
    ReadBlock((*list)[i], i, model, sizes, ranks, problems, blocks, found);
  }
  for (const auto& [key, of_block] : sizes) {
    if (!problems.empty() || key.first == Stack::kPrediction || found.contains(key)) continue;
    problems.Add(Concat("blocks: expected ", BlockOf(model, key).name(), ", found none"));
  }
  MOESERVE_RETURN_IF_ERROR(problems.ToStatus("no placement for this model"));
  return ExpertPlacement(ranks, std::move(blocks), static_cast<uint32_t>(version));
}

absl::Status SavePlacement(const std::filesystem::path& path, const ExpertPlacement& placement,
                           const ModelSpec& model, std::string_view name) {
  return WriteWholeFile(path, EncodePlacement(placement, model, name));
}

Result<ExpertPlacement> LoadPlacement(const std::filesystem::path& path, const ModelSpec& model,
                                      int ranks) {
  MOESERVE_ASSIGN_OR_RETURN(const auto file, MappedFile::Open(path));
  Result<ExpertPlacement> placement = DecodePlacement(file->bytes(), model, ranks);
  MOESERVE_RETURN_IF_ERROR(file->Check());
  if (placement.ok()) return placement;
  return Prefixed(Concat(Quoted(path.filename().string()), ": "), placement.status());
}

}  // namespace moeserve

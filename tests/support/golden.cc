#include "tests/support/golden.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "model_loaders/files/safetensors.h"

namespace moeserve::testing {
namespace {

template <typename T>
std::vector<T> Values(const SafetensorsFile& file, const std::string& name) {
  const TensorEntry* entry = file.Find(name);
  if (entry == nullptr) return {};
  const std::string_view bytes = file.Bytes(*entry);
  std::vector<T> values(bytes.size() / sizeof(T));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), values.size() * sizeof(T));
  return values;
}

}  // namespace

GivenRoutes Golden::Routes(int layer, BlockKind block, int p, int begin, int end, int heads) const {
  const GivenRoutes& all = routes.at({layer, block});
  const int first = (p * length + begin) * heads;
  const int last = (p * length + end) * heads;
  GivenRoutes part;
  for (int r = first; r <= last; ++r) part.offsets.push_back(all.offsets[r] - all.offsets[first]);
  part.experts.assign(all.experts.begin() + all.offsets[first],
                      all.experts.begin() + all.offsets[last]);
  part.weights.assign(all.weights.begin() + all.offsets[first],
                      all.weights.begin() + all.offsets[last]);
  return part;
}

Result<Golden> ReadGolden(const std::filesystem::path& path) {
  MOESERVE_ASSIGN_OR_RETURN(std::shared_ptr<const SafetensorsFile> file,
                            SafetensorsFile::Open(path));
  Golden g;
  const TensorEntry* prompts = file->Find("prompts");
  const TensorEntry* top = file->Find("top_ids");
  if (prompts == nullptr || top == nullptr || prompts->shape.size() != 2) {
    return absl::InvalidArgumentError(path.string() + ": not a golden file");
  }
  g.prompts = static_cast<int>(prompts->shape[0]);
  g.length = static_cast<int>(prompts->shape[1]);
  g.top = static_cast<int>(top->shape[2]);
  g.tokens = Values<int32_t>(*file, "prompts");
  g.target_logprobs = Values<float>(*file, "target_logprobs");
  g.top_ids = Values<int32_t>(*file, "top_ids");
  g.top_logprobs = Values<float>(*file, "top_logprobs");
  g.greedy = Values<int32_t>(*file, "greedy");
  g.greedy_margin = Values<float>(*file, "greedy_margin");
  g.bf16_target_logprobs = Values<float>(*file, "bf16_target_logprobs");
  g.bf16_top_logprobs = Values<float>(*file, "bf16_top_logprobs");
  g.metadata = file->metadata();
  for (const TensorEntry& entry : file->tensors()) {
    const std::string& n = entry.name;
    if (!n.starts_with("routes.") || !n.ends_with(".offsets")) continue;
    const std::string base = n.substr(0, n.size() - 8);
    const int layer = std::stoi(n.substr(7));
    const BlockKind block =
        base.ends_with("attention") ? BlockKind::kAttention : BlockKind::kFeedForward;
    g.routes[{layer, block}] = {Values<int32_t>(*file, n),
                                Values<int32_t>(*file, base + ".experts"),
                                Values<float>(*file, base + ".weights")};
  }
  return g;
}

std::filesystem::path SourcePath(const std::string& relative) {
  // tests/run-bundle.sh sets this variable.
  const char* const folder = std::getenv("MOESERVE_TEST_DATA");
  return std::filesystem::path(folder == nullptr ? MOESERVE_SOURCE_DIR : folder) / relative;
}

std::vector<GoldenModel> GoldenModels() {
  std::vector<GoldenModel> models;
  for (const auto& entry : std::filesystem::directory_iterator(SourcePath("tests/golden"))) {
    const std::string name = entry.path().filename().string();
    const std::filesystem::path golden = entry.path() / "golden.safetensors";
    if (!std::filesystem::exists(golden)) continue;
    const std::filesystem::path trained = SourcePath("deploy/models/" + name);
    const bool own = std::filesystem::exists(entry.path() / "config.json");
    models.push_back({name, own ? entry.path() : trained, golden});
  }
  std::sort(models.begin(), models.end(),
            [](const GoldenModel& a, const GoldenModel& b) { return a.name < b.name; });
  return models;
}

}  // namespace moeserve::testing

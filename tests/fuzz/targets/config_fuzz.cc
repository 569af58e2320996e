// config.json of every family.

#include "engine/spec/weights.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/architectures/registry.h"
#include "model_loaders/inspect.h"
#include "tests/fuzz/fuzz.h"

namespace moeserve::testing {
namespace {

// Of larger models, the lists of tensors take long to build.
constexpr int kMostLayers = 16;
constexpr int kMostExperts = 1000;  // of all layers together
constexpr size_t kMostTensors = 5000;

int Experts(const ModelSpec& spec) {
  int experts = 0;
  for (const BlockSpec& block : spec.blocks) {
    if (block.routing() != nullptr) experts += block.routing()->num_experts;
  }
  return experts;
}

void ReadModelConfig(std::string_view text) {
  const auto config = ReadConfig(text, {}, Architectures());
  if (!config.ok()) {
    MOESERVE_CHECK(config.status().message().find("config.json: ") == 0, "names the file");
    return;
  }
  CountAccepted();
  const ModelSpec& spec = (*config)->spec;
  MOESERVE_CHECK(Validate(spec).ok(), "an accepted model is valid");
  if (spec.num_layers() > kMostLayers || Experts(spec) > kMostExperts) return;
  const auto tensors = RequiredTensors(spec);
  if (tensors.size() > kMostTensors) return;
  for (const TensorRequirement& tensor : tensors) {
    MOESERVE_CHECK((*config)->Place(tensor).has_value(), "every tensor has a place");
  }
  MOESERVE_CHECK(!SummaryText(Summarize(spec)).empty(), "a model can be described");
}

}  // namespace
}  // namespace moeserve::testing

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  moeserve::testing::ReadModelConfig(moeserve::testing::Text(data, size));
  return 0;
}

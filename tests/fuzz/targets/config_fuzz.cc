// config.json of every family. After "\n\n\n", an input has a line for each tensor that the files
// store, "NAME DIMENSION...", because some families recognize the layout by them.

#include <charconv>
#include <vector>

#include "engine/spec/weights.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/architectures/native/write_config.h"
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

// Returns what a folder with these tensors tells the readers of its configuration.
StoredNames ReadNames(std::string_view lines) {
  StoredNames stored;
  while (!lines.empty()) {
    const Row row = TakeRow(lines);
    if (row.name.empty()) continue;
    const auto [name, added] = stored.names.emplace(row.name);
    if (added && row.numbers.size() == 3) stored.stacks.emplace(*name, row.numbers);
  }
  return stored;
}

// What is written in the native format is read as the same.
void WriteAndRead(const ModelSpec& spec) {
  const std::string written = NativeConfigJson(spec).dump();
  const auto again = ReadConfig(written, {}, Architectures());
  MOESERVE_CHECK(again.ok(), "a model that is written can be read");
  MOESERVE_CHECK(NativeConfigJson((*again)->spec).dump() == written, "the same model");
}

void ReadModelConfig(Input input) {
  const std::string_view text = input.Section();
  const auto config = ReadConfig(text, ReadNames(input.rest()), Architectures());
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
  WriteAndRead(spec);
}

}  // namespace
}  // namespace moeserve::testing

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  moeserve::testing::ReadModelConfig(moeserve::testing::Input(data, size));
  return 0;
}

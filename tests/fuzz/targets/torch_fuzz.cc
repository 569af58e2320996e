// Files of torch.save(): the pickle and its tensors in a zip archive. A mutated archive rarely has
// right checksums, so the input is the pickle alone; its archive has two storages.

#include "model_loaders/files/torch/torch_file.h"
#include "tests/fuzz/fuzz.h"
#include "tests/model_loaders/torch_bytes.h"

namespace moeserve::testing {
namespace {

void ReadTorch(std::string_view pickle) {
  const InputFile file(
      TorchBytes(std::string(pickle), {std::string(24, 'x'), std::string(16, 'y')}), ".pt");
  const auto state = TorchStateDict::Open(file.path());
  if (!state.ok()) return;
  CountAccepted();
  ReadAllTensors(**state);
}

}  // namespace
}  // namespace moeserve::testing

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  moeserve::testing::ReadTorch(moeserve::testing::Text(data, size));
  return 0;
}

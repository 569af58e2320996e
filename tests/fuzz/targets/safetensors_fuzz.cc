// Headers of safetensors files. The first two bytes are the size of the data.

#include "model_loaders/files/safetensors.h"
#include "tests/fuzz/fuzz.h"

namespace moeserve::testing {
namespace {

void ReadHeader(std::string_view input) {
  if (input.size() < 2) return;
  const uint64_t size =
      static_cast<uint8_t>(input[0]) + 256u * uint64_t{static_cast<uint8_t>(input[1])};
  const auto header = ParseSafetensorsHeader(input.substr(2), size);
  if (!header.ok()) return;
  CountAccepted();
  uint64_t covered = 0;
  for (const TensorEntry& entry : header->tensors) {
    MOESERVE_CHECK(entry.begin == covered && entry.end <= size, "no gap and no overlap");
    MOESERVE_CHECK(ByteCount(entry.shape, entry.type) == entry.end - entry.begin, "whole tensors");
    covered = entry.end;
  }
  MOESERVE_CHECK(covered == size, "no byte is left");
}

}  // namespace
}  // namespace moeserve::testing

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  moeserve::testing::ReadHeader(moeserve::testing::Text(data, size));
  return 0;
}

#include "engine/model/device_bytes.h"

#include <algorithm>
#include <vector>

#include "engine/model/model.h"
#include "engine/spec/weights.h"
#include "engine/weights/place_experts.h"

namespace moeserve {

std::pair<int64_t, int64_t> DeviceWeightBytes(const ModelSpec& spec, const ModelOptions& options,
                                              DType stored) {
  const DType type = options.compute == DType::kBF16 ? DType::kBF16 : stored;
  int64_t all = 0, of_model = 0, here = 0;
  for (const TensorRequirement& tensor : RequiredTensors(spec)) {
    int64_t values = 1;
    for (const int64_t n : tensor.shape) values *= n;
    all += values * static_cast<int64_t>(SizeOf(type));
  }
  for (const auto& [block, sizes] : ExpertBytes(spec, Quantization::kNone, type)) {
    for (const int64_t bytes : sizes) of_model += bytes;
  }
  constexpr int64_t kLargestBlock = 128;
  for (const auto& [block, sizes] : ExpertBytes(spec, options.quantization, type, kLargestBlock)) {
    const std::vector<HolderSet>* const holders =
        options.exchange == nullptr ? nullptr
                                    : &options.placement->holders(block.first, block.second);
    for (size_t e = 0; e < sizes.size(); ++e) {
      if (holders == nullptr || ((*holders)[e] >> options.exchange->rank() & 1) != 0) {
        here += sizes[e];
      }
    }
  }
  return {here, std::max<int64_t>(all - of_model, 0)};
}

}  // namespace moeserve

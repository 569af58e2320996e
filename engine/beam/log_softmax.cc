#include "engine/beam/log_softmax.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>

#include "kernels/base/sampling.h"

namespace moeserve {
namespace {

constexpr size_t kLanes = 16;
constexpr size_t kBlock = 256;  // a multiple of kLanes

// Short loops without branches, which are vectorised.
double SumOfExponentials(std::span<const float> logits, float highest) {
  std::array<double, kLanes> lanes{};
  for (size_t begin = 0; begin < logits.size(); begin += kBlock) {
    const size_t size = std::min(kBlock, logits.size() - begin);
    std::array<float, kBlock> shares{};
    for (size_t i = 0; i < size; ++i) shares[i] = SamplingExp(logits[begin + i] - highest);
    for (size_t i = 0; i < kBlock; i += kLanes) {
      for (size_t k = 0; k < kLanes; ++k) lanes[k] += static_cast<double>(shares[i + k]);
    }
  }
  double sum = 0.0;
  for (const double lane : lanes) sum += lane;
  return sum;
}

}  // namespace

void LogSoftmax(std::span<const float> logits, std::span<float> out) {
  float highest = -std::numeric_limits<float>::infinity();
  for (const float l : logits) highest = highest > l ? highest : l;
  const double log_sum =
      std::log(SumOfExponentials(logits, highest)) + static_cast<double>(highest);
  for (size_t i = 0; i < logits.size(); ++i) {
    out[i] = static_cast<float>(static_cast<double>(logits[i]) - log_sum);
  }
}

}  // namespace moeserve

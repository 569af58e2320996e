#include "engine/layers/routed/owner_sums.h"

namespace moeserve {

bool OwnersAdd(SplitChoice choice, const SumCosts& costs) {
  if (choice == SplitChoice::kOff || costs.ranks == 1) return false;
  if (choice == SplitChoice::kOn) return true;
  constexpr int64_t kBytesOfAnExchange = 64 << 10;
  const int64_t others = costs.ranks - 1;
  const int64_t less = costs.results * costs.result_bytes * others / costs.ranks;
  const int64_t more = costs.outputs_gathered ? 0 : costs.tokens * costs.sum_bytes;
  const int64_t saved = (less - more) * others / costs.ranks;
  return saved > (costs.outputs_gathered ? 0 : kBytesOfAnExchange);
}

}  // namespace moeserve

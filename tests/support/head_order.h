// Returns the kv head that a query head reads, for reference implementations of attention.
#pragma once

#include "kernels/backend.h"

namespace moeserve::testing {

constexpr int KvHeadOf(HeadOrder order, int head, int heads, int kv_heads) {
  return order == HeadOrder::kInterleave ? head / (heads / kv_heads) : head % kv_heads;
}

}  // namespace moeserve::testing

// A factor of queries that grows with the position of their token.
#pragma once

#include <cmath>

#include "kernels/base/host_device.h"

namespace moeserve {

// The query of the token at position p is multiplied by 1 + factor * log(1 + floor((p + first) /
// step)). Llama 4 and Mistral 4 keep attention sharp in long texts so.
struct PositionScale {
  double step = 1.0;  // above 0
  double factor = 0.0;
  int first = 0;

  MOESERVE_HOST_DEVICE double Of(int position) const {
    return 1.0 + factor * log(1.0 + floor((position + first) / step));
  }
};

}  // namespace moeserve

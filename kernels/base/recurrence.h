// The recurrences of linear attention with a delta rule and of state-space layers: what a head does
// with one token. The formulas are shared by the backends; RecurrenceArgs (kernels/backend.h) is
// the operation.
#pragma once

#include <cstdint>

#include "base/kinds.h"
#include "kernels/base/exp.h"
#include "kernels/base/host_device.h"

namespace moeserve {

// How a decay e^g follows from its input a, which contains its bias. `rate` is positive.
// kSoftplus: g = -rate * softplus(a). kBounded: g = bound * sigmoid(rate * a), with bound < 0.
enum class DecayForm : uint8_t { kSoftplus, kBounded };
constexpr NameTraits Traits(DecayForm k) { return NameIn({"softplus", "bounded"}, k); }

// Columns of a block of a head's state. Rows of a whole state would be so far apart that those of
// some columns fall into few sets of a cache.
inline constexpr int kRecurrentColumns = 32;

// The state of a recurrence (RecurrenceArgs): for each head a matrix [key_dim, value_dim], f32,
// zeros before a text. Head h has the queries and keys of key head floor(h / (heads / key_heads)).
struct RecurrentShape {
  int heads = 0;  // 0: the block has no recurrence
  int key_heads = 1;
  int key_dim = 1;
  int value_dim = 1;
  bool decays_keys = false;  // each row of a head's state has a factor of its own
  bool delta = false;        // RecurrenceSettings::delta

  MOESERVE_HOST_DEVICE int key_width() const { return key_heads * key_dim; }
  MOESERVE_HOST_DEVICE int value_width() const { return heads * value_dim; }
  MOESERVE_HOST_DEVICE int decay_width() const { return heads * (decays_keys ? key_dim : 1); }
  // A head's state is stored in blocks of kRecurrentColumns columns, one after the other, each
  // [key_dim, block_columns()]. The columns behind the last one are unspecified.
  MOESERVE_HOST_DEVICE int padded_dim() const { return (value_dim + 15) / 16 * 16; }
  MOESERVE_HOST_DEVICE int block_columns(int column) const {
    return padded_dim() - column < kRecurrentColumns ? padded_dim() - column : kRecurrentColumns;
  }
  // Returns the first float of the block that begins with `column`, and the size of a head's state.
  MOESERVE_HOST_DEVICE int64_t block_begin(int column) const { return int64_t{key_dim} * column; }
  MOESERVE_HOST_DEVICE int64_t head_floats() const { return int64_t{key_dim} * padded_dim(); }
  MOESERVE_HOST_DEVICE int64_t state_floats() const { return heads * head_floats(); }
  // Returns the size of what a token does to a state: keys, values, decays and strengths.
  MOESERVE_HOST_DEVICE int64_t input_floats() const {
    if (heads == 0) return 0;
    return int64_t{key_width()} + value_width() + decay_width() + heads;
  }
};

struct RecurrenceSettings {
  // With the delta rule, a token writes what its value differs from what the state returns for its
  // key ("Gated Delta Networks", equation 10), queries and keys have length 1, and the strength is
  // the sigmoid of its input. Without it, a token adds its value, and the strength is softplus(a),
  // limited to [step_low, step_high] ("Mamba-2", section 7).
  bool delta = false;
  DecayForm form = DecayForm::kSoftplus;
  float bound = -5.0f;  // with kBounded
  float step_low = 0.0f;
  float step_high = __builtin_inff();
};

// What is added to the sum of squares of a query or key before its length is 1.
inline constexpr float kUnitEps = 1e-6f;

// Returns log(1 + e^x) with the same bits on every backend; NaN for NaN.
MOESERVE_HOST_DEVICE static inline float ContractSoftplus(float x) {
  const float positive = x > 0.0f ? x : 0.0f;
  const float size = x < 0.0f ? x : -x;  // -|x|, or NaN
  return positive + ContractLog1p(ContractExp(size));
}

MOESERVE_HOST_DEVICE static inline float ContractSigmoid(float x) {
  return 1.0f / (1.0f + ContractExp(-x));
}

// Returns the step of a token without the delta rule, from its input with bias.
MOESERVE_HOST_DEVICE static inline float StepSize(const RecurrenceSettings& s, float a) {
  const float step = ContractSoftplus(a);
  return step < s.step_low ? s.step_low : step > s.step_high ? s.step_high : step;
}

// Returns the factor e^g of a state.
MOESERVE_HOST_DEVICE static inline float DecayFactor(const RecurrenceSettings& s, float a,
                                                     float rate) {
  if (s.form == DecayForm::kBounded) return ContractExp(s.bound * ContractSigmoid(rate * a));
  return ContractExp(-rate * StepSize(s, a));
}

}  // namespace moeserve

// Mixers of tokens with a recurrent state: linear attention with a delta rule, and state-space
// layers. Both are a short convolution and then a recurrence (kernels/backend.h).
#pragma once

#include <optional>
#include <string_view>

#include "base/kinds.h"
#include "kernels/base/activation.h"
#include "kernels/base/recurrence.h"
#include "kernels/state_storage.h"

namespace moeserve {

// What a decay multiplies: the state of a head, or one channel of its keys.
enum class DecayOf : uint8_t { kHead, kChannel };
constexpr NameTraits Traits(DecayOf k) { return NameIn({"head", "channel"}, k); }

// Linear attention with a gated delta rule: "Gated Delta Networks" (equation 10) with a decay for
// each head, "Kimi Linear" (equation 1) with one for each channel. Projections to queries, keys,
// values, a gate, strengths and decays; a convolution of the first three; the recurrence; a norm
// of each head's output, then its gate; and a projection back.
struct DeltaSpec {
  int num_heads = 1;      // heads of values, each with a state [key_dim, value_dim]
  int num_key_heads = 1;  // divides num_heads
  int key_dim = 1;
  int value_dim = 1;
  int taps = 4;  // of the convolution
  DecayOf decay = DecayOf::kHead;
  DecayForm decay_form = DecayForm::kSoftplus;
  double decay_bound = -5.0;  // with kBounded
  int decay_rank = 0;         // above 0: decays are a product of two matrices
  GateActivation gate_activation = GateActivation::kSilu;
  int gate_rank = 0;  // above 0: gates are a product of two matrices

  static constexpr std::string_view kKind = "delta";  // in files

  RecurrentShape recurrence() const {
    return {.heads = num_heads,
            .key_heads = num_key_heads,
            .key_dim = key_dim,
            .value_dim = value_dim,
            .decays_keys = decay == DecayOf::kChannel,
            .delta = true};
  }
  StateShape State(int /*hidden_size*/) const {
    const RecurrentShape shape = recurrence();
    return {taps - 1, 2 * shape.key_width() + shape.value_width(), shape};
  }

  static constexpr bool out_bias = false;
};

// A state-space layer ("Mamba-2", section 7). Projections to a gate, values x, b, c and steps; a
// convolution of x, b and c; the recurrence, whose keys are b and queries c; the gate, then a norm
// of the heads of each group together; and a projection back.
struct StateSpaceSpec {
  int num_heads = 1;
  int head_dim = 1;
  int state_dim = 1;
  int groups = 1;  // divides num_heads; heads of a group have the same b and c
  int taps = 4;    // of the convolution
  bool conv_bias = true;
  bool bias = false;  // on the projections
  // Steps are limited to this range.
  double step_low = 0.0;
  std::optional<double> step_high = std::nullopt;

  static constexpr std::string_view kKind = "ssm";  // in files

  RecurrentShape recurrence() const {
    return {.heads = num_heads,
            .key_heads = groups,
            .key_dim = state_dim,
            .value_dim = head_dim,
            .decays_keys = false,
            .delta = false};
  }
  StateShape State(int /*hidden_size*/) const {
    const RecurrentShape shape = recurrence();
    return {taps - 1, shape.value_width() + 2 * shape.key_width(), shape};
  }

  static constexpr bool out_bias = false;
};

}  // namespace moeserve

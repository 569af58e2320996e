// Rotary position embeddings ("RoFormer"): the frequencies, which all backends share, and the
// methods that change them so that a model can use longer contexts than it was trained on.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/kinds.h"

namespace moeserve {

enum class RopeScalingKind : uint8_t {
  kNone,
  kLinear,   // every frequency is divided by `factor`
  kLlama3,   // divides low frequencies, keeps high ones, interpolates between them
  kYarn,     // "YaRN: Efficient Context Window Extension", section 3.2
  kFactors,  // one divisor per frequency
  kLong      // LongRoPE: one divisor per frequency; long texts have other ones
};
constexpr NameTraits Traits(RopeScalingKind k) {
  return NameIn({"none", "linear", "llama3", "yarn", "factors", "long"}, k);
}

// Each kind uses the members that its comment names; the others keep their defaults.
struct RopeScaling {
  RopeScalingKind kind = RopeScalingKind::kNone;
  double factor = 1.0;               // linear, llama3, yarn: context length after / before
  double original_positions = 1.0;   // llama3, yarn, long: context length before, in tokens
  double low_freq_factor = 1.0;      // llama3
  double high_freq_factor = 4.0;     // llama3
  double beta_fast = 32.0;           // yarn: rotations over the original context from which on
                                     // frequencies are kept
  double beta_slow = 1.0;            // yarn: rotations up to which frequencies are divided
  bool truncate = true;              // yarn: rounds the limits between them to whole pairs
  std::vector<double> factors = {};  // factors, long: [pairs]
  // Cosines and sines are multiplied by this factor, whatever the kind.
  double magnitude = 1.0;
  // long: replace `factors` and `magnitude` in sequences that are planned to have more than
  // original_positions tokens.
  std::vector<double> long_factors = {};  // [pairs]
  double long_magnitude = 1.0;

  bool operator==(const RopeScaling&) const = default;
};

// How the queries and keys of one attention layer are rotated.
struct RopeSettings {
  int head_dim = 0;
  int dimensions = 0;  // number of dimensions of a head that are rotated, even
  double theta = 10000.0;
  // true: rotates pairs of dimensions (2 i, 2 i + 1); false: pairs (i, i + pair_distance()).
  bool interleaved = false;
  std::shared_ptr<const RopeScaling> scaling = nullptr;  // null: no scaling
  int first = 0;                                         // the first of the rotated dimensions
  // Above 0: XPOS ("A Length-Extrapolatable Transformer", section 3.2). With n = `dimensions`, the
  // pair i of a query at position p is multiplied by zeta_i^(p / xpos_base), that of a key by
  // zeta_i^(-p / xpos_base), where zeta_i = (2 i + 0.4 n) / (1.4 n).
  double xpos_base = 0.0;
  bool keys = false;  // XPOS only: the rows are keys, not queries
  int distance = 0;   // above 0: pair_distance(), at least dimensions / 2, if not interleaved
  int period = 0;     // above 0: replaces `dimensions` in the exponents of frequencies

  int pair_distance() const {
    if (interleaved) return 1;
    return distance > 0 ? distance : dimensions / 2;
  }
  double magnitude() const { return scaling == nullptr ? 1.0 : scaling->magnitude; }
  // Whether long sequences are rotated in another way.
  bool has_long() const { return scaling != nullptr && scaling->kind == RopeScalingKind::kLong; }
};

// Returns the frequencies [dimensions / 2] in radians per position: theta^(-2 i / period), where
// the period is `dimensions` unless it is set, changed by the scaling. `long_sequence`: those of
// long sequences (RopeScalingKind::kLong); other kinds of scaling have the same frequencies for all
// sequences.
std::vector<double> RopeFrequencies(const RopeSettings& settings, bool long_sequence = false);

// The smallest zeta_i of XPOS, that of the first pair, whatever the number of dimensions.
inline constexpr double kXposSmallest = 0.4 / 1.4;

// Returns the rates [dimensions / 2] of XPOS: a pair at position p is multiplied by e^(p * rate).
// Rates of queries are negative, and those of keys are their negatives. Empty without XPOS.
std::vector<double> XposRates(const RopeSettings& settings);

// Returns whether two layers have the same frequencies, magnitude and rates, so that they can share
// tables of cosines and sines.
bool SameAngles(const RopeSettings& a, const RopeSettings& b);

}  // namespace moeserve

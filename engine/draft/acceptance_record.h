// Records how often drafted tokens were right.
#pragma once

#include <array>

namespace moeserve {

// How often proposals were right, by what they rest on (Proposal::matched): a draft model, earlier
// outputs under a constraint, or 1, 2, 3, 4 to 7, 8 or more matching tokens. Earlier proposals
// count less and less.
class AcceptanceRecord {
 public:
  // Adds a proposed token that rests on `matched` tokens.
  void Add(int matched, bool right);
  // Returns the share of right tokens among those that rest on `matched` tokens. `prior` counts as
  // much as four proposals.
  double Share(int matched, double prior) const;

 private:
  static constexpr int kClasses = 7;
  static int ClassOf(int matched);

  std::array<float, kClasses> right_{};
  std::array<float, kClasses> all_{};
};

}  // namespace moeserve

#include "engine/draft/acceptance_record.h"

#include <cstddef>

namespace moeserve {
namespace {

// What is left of the weight of earlier tokens after each token. With a shorter memory, one wrong
// token in 20 would shorten the next drafts.
constexpr float kKept = 0.97f;
constexpr double kPriorWeight = 4.0;

}  // namespace

int AcceptanceRecord::ClassOf(int matched) {
  if (matched < 0) return kClasses - 1;
  return matched >= 8 ? 5 : matched >= 4 ? 4 : matched;
}

void AcceptanceRecord::Add(int matched, bool right) {
  const auto i = static_cast<size_t>(ClassOf(matched));
  right_[i] = kKept * right_[i] + (right ? 1.0f : 0.0f);
  all_[i] = kKept * all_[i] + 1.0f;
}

double AcceptanceRecord::Share(int matched, double prior) const {
  const auto i = static_cast<size_t>(ClassOf(matched));
  return (right_[i] + kPriorWeight * prior) / (all_[i] + kPriorWeight);
}

}  // namespace moeserve

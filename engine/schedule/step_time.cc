#include "engine/schedule/step_time.h"

#include <algorithm>
#include <cmath>

namespace moeserve {
namespace {

constexpr double kFading = 0.99;  // factor by which the weight of older steps falls at each step
// Ridge term: keeps a cost near its previous value if recent steps do not determine it.
constexpr double kInertia = 1e-3;
// A step's time counts as at most this many times the predicted time, to limit the effect of
// outliers.
constexpr double kMostAboveExpected = 3.0;
constexpr int kEnough = 8;    // number of observed steps before predictions are used
constexpr int kUnknown = 64;  // budget in prompt rows while costs are unknown
constexpr int kLeast = 16;    // smallest budget in prompt rows, except for probing steps
// One budget in 16 is 0, so that some steps have no prompt rows. At the start it is one in 4.
constexpr int kProbe = 16;

}  // namespace

double PromptBudget::Cost(int begin, int count) const {
  const double n = count;
  return n * per_row + per_position * (n * begin + 0.5 * n * (n + 1.0));
}

int PromptBudget::RowsFor(double cost, int begin) const {
  if (cost <= 0.0) return 0;
  const double linear = per_row + per_position * (begin + 0.5);
  double rows;
  if (per_position > 0.0) {
    // Solves the quadratic equation Cost(begin, rows) = cost, in the form without cancellation.
    rows = 2.0 * cost / (linear + std::sqrt(linear * linear + 2.0 * per_position * cost));
  } else {
    rows = linear > 0.0 ? cost / linear : 1e9;
  }
  return static_cast<int>(std::min(rows + 1e-9, 1e9));
}

StepTime::Terms StepTime::TermsOf(const StepWork& work) {
  return {1.0, static_cast<double>(work.decode_rows), static_cast<double>(work.prompt_rows),
          static_cast<double>(work.decode_context + work.prompt_context)};
}

double StepTime::Predict(const StepWork& work) const {
  const Terms terms = TermsOf(work);
  double sum = 0.0;
  for (int i = 0; i < kTerms; ++i) sum += terms[i] * cost_[i];
  return sum;
}

void StepTime::Observe(const StepWork& work, double seconds) {
  if (observed_ >= kEnough) seconds = std::min(seconds, kMostAboveExpected * Predict(work));
  ++observed_;
  const Terms terms = TermsOf(work);
  for (int i = 0; i < kTerms; ++i) {
    for (int j = 0; j < kTerms; ++j) {
      products_[i][j] = kFading * products_[i][j] + terms[i] * terms[j];
    }
    targets_[i] = kFading * targets_[i] + terms[i] * seconds;
  }
  Solve();
}

// Minimises the squared error by coordinate descent: there are few terms, the previous solution is
// a good start, and the bound cost >= 0 is a single max().
void StepTime::Solve() {
  const Terms before = cost_;
  for (int round = 0; round < 20; ++round) {
    for (int i = 0; i < kTerms; ++i) {
      const double own = products_[i][i];
      if (own == 0.0) continue;
      double rest = targets_[i] + kInertia * own * before[i];
      for (int j = 0; j < kTerms; ++j) {
        if (j != i) rest -= products_[i][j] * cost_[j];
      }
      cost_[i] = std::max(0.0, rest / (own * (1.0 + kInertia)));
    }
  }
}

PromptBudget StepTime::Budget(const StepWork& decoding, int running) {
  ++budgets_;
  if (budgets_ % (budgets_ < 2 * kProbe ? 4 : kProbe) == 0) return PromptBudget::Rows(0);
  const auto [constant, decode_row, prompt_row, position] = cost_;
  if (observed_ < kEnough || prompt_row <= 0.0) return PromptBudget::Rows(kUnknown);
  StepWork all = decoding;
  all.decode_rows = std::max(running, decoding.decode_rows);
  if (decoding.decode_rows > 0) {
    all.decode_context = decoding.decode_context * all.decode_rows / decoding.decode_rows;
  }
  PromptBudget budget{Predict(all), prompt_row, position};
  budget.total = std::max(budget.total, kLeast * prompt_row);
  return budget;
}

}  // namespace moeserve

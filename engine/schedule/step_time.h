// Learns how long steps take, to limit how much prompts delay running requests.
#pragma once

#include <array>
#include <cstdint>

namespace moeserve {

// What a step computes. The context of a row is the number of positions that it attends to.
struct StepWork {
  int decode_rows = 0;
  int64_t decode_context = 0;  // sum over all decoding rows
  int prompt_rows = 0;
  int64_t prompt_context = 0;
};

// Limits the prompt rows of a step that also has decoding rows: the sum of their costs may be at
// most `total`. A cost is in seconds, or in rows for a budget made by Rows().
struct PromptBudget {
  double total = 0.0;
  double per_row = 1.0;
  double per_position = 0.0;  // cost per position that a row attends to

  static PromptBudget Rows(int rows) { return {.total = static_cast<double>(rows)}; }

  // Returns the cost of `count` rows from position `begin` on.
  double Cost(int begin, int count) const;
  // Returns the largest number of rows from position `begin` on that costs at most `cost`.
  int RowsFor(double cost, int begin) const;
};

// Learns a step's time as a constant plus a cost per decoding row, per prompt row and per position
// attended to, by least squares over about the last hundred steps. Not thread-safe.
class StepTime {
 public:
  void Observe(const StepWork& work, double seconds);

  // Returns a budget for prompt rows: they may take as long as a step in which all `running`
  // sequences decode. So a decoding request waits at most about twice as long per token, and
  // prompts are not starved while few requests decode. `decoding` is the decoding part of the next
  // step. Every 16th budget (every 4th at the start) is 0, because the costs of decoding rows and
  // prompt rows can only be separated by steps without prompts.
  PromptBudget Budget(const StepWork& decoding, int running);

  // Returns the predicted time of a step in seconds; 0 before any step was observed.
  double Predict(const StepWork& work) const;

 private:
  static constexpr int kTerms = 4;  // the constant, decoding rows, prompt rows, context
  using Terms = std::array<double, kTerms>;

  static Terms TermsOf(const StepWork& work);
  void Solve();

  int observed_ = 0;
  int budgets_ = 0;
  std::array<Terms, kTerms> products_{};  // exponentially fading sums of terms[i] * terms[j]
  Terms targets_{};                       // exponentially fading sums of terms[i] * seconds
  Terms cost_{};                          // learned costs, none negative
};

}  // namespace moeserve

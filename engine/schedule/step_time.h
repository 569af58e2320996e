// Learns how long steps take, to bound how much prompts delay running answers.
#pragma once

#include <array>
#include <cstdint>

namespace moeserve {

// What a step computes. The context of a row is the number of positions that it attends to.
struct StepWork {
  int decode_rows = 0;
  int64_t decode_context = 0;  // of all decoding rows together
  int prompt_rows = 0;
  int64_t prompt_context = 0;
};

// How many prompt rows a step may have beside decoding ones, in units of cost.
struct PromptBudget {
  double total = 0.0;
  double per_row = 1.0;
  double per_position = 0.0;  // of a row's context

  static PromptBudget Rows(int rows) { return {.total = static_cast<double>(rows)}; }

  double Cost(int begin, int count) const;
  // Returns the largest number of rows from position `begin` on that costs at most `cost`.
  int RowsFor(double cost, int begin) const;
};

// Learns a step's time as a constant plus a cost per decoding row, per prompt row and per position
// attended to, by least squares over the last hundred steps or so. Not for use by two threads.
class StepTime {
 public:
  void Observe(const StepWork& work, double seconds);

  // Returns a budget of prompt rows that take as long as a step in which all `running` sequences
  // decode: a running answer then waits at most twice such a step, and prompts are not starved
  // while few answers run. `decoding` is the decoding part of the next step. Every 16th budget is
  // 0, because the costs of decoding and prompt rows could not be separated without such steps.
  PromptBudget Budget(const StepWork& decoding, int running);

  // Returns seconds; 0 before anything was learned.
  double Predict(const StepWork& work) const;

 private:
  static constexpr int kTerms = 4;  // constant, decoding rows, prompt rows, context
  using Terms = std::array<double, kTerms>;

  static Terms TermsOf(const StepWork& work);
  void Solve();

  int observed_ = 0;
  int budgets_ = 0;
  std::array<Terms, kTerms> products_{};  // fading sums of terms times terms
  Terms targets_{};                       // and of terms times seconds
  Terms cost_{};                          // none is negative
};

}  // namespace moeserve

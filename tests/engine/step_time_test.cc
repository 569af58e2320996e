// The engine's model of the time of a step, and the prompt budget computed from it.
#include "engine/schedule/step_time.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/support/random.h"

namespace moeserve::testing {
namespace {

struct Machine {
  double constant = 1e-3, decode_row = 2e-4, prompt_row = 1e-4, position = 1e-7;
  double Seconds(const StepWork& w) const {
    return constant + decode_row * w.decode_rows + prompt_row * w.prompt_rows +
           position * static_cast<double>(w.decode_context + w.prompt_context);
  }
};

StepWork RandomWork(Random& random) {
  StepWork work;
  work.decode_rows = random.Below(64);
  work.decode_context = work.decode_rows * random.Below(2000);
  work.prompt_rows = random.Below(3) == 0 ? 0 : random.Below(200);
  work.prompt_context = work.prompt_rows * random.Below(4000);
  return work;
}

TEST(PromptBudget, RowsForIsTheInverseOfCost) {
  for (double per_position : {0.0, 1e-3, 0.1}) {
    const PromptBudget budget{.total = 0.0, .per_row = 2.0, .per_position = per_position};
    for (int begin : {0, 1, 100, 100'000}) {
      for (double cost : {0.0, 1.9, 2.0, 57.0, 1e4, 1e6}) {
        const int rows = budget.RowsFor(cost, begin);
        EXPECT_LE(budget.Cost(begin, rows), cost * (1 + 1e-9) + 1e-6);
        EXPECT_GT(budget.Cost(begin, rows + 1), cost);
      }
    }
  }
  EXPECT_EQ(PromptBudget::Rows(64).RowsFor(64.0, 1000), 64);
}

TEST(StepTime, LearnsWhatStepsCost) {
  const Machine machine;
  StepTime time;
  Random random(1);
  for (int i = 0; i < 300; ++i) {
    const StepWork work = RandomWork(random);
    // Noise of 20 %, and every 50th step was interrupted for long.
    const double noise = 1.0 + 0.2 * (random.Below(1000) / 500.0 - 1.0);
    time.Observe(work, machine.Seconds(work) * (i % 50 == 49 ? 30.0 : noise));
  }
  double squares = 0.0, error = 0.0;
  for (int i = 0; i < 200; ++i) {
    const StepWork work = RandomWork(random);
    squares += std::pow(machine.Seconds(work), 2);
    error += std::pow(time.Predict(work) - machine.Seconds(work), 2);
  }
  EXPECT_LT(std::sqrt(error / squares), 0.15);
}

// Whatever the load, a step with the budgeted prompt rows must take about twice as long as a step
// in which all running sequences decode.
TEST(StepTime, TheBudgetDoublesAStepOfAllThatRun) {
  const Machine machine;
  for (const int running : {4, 32, 64}) {
    for (const int context : {50, 3000}) {
      StepTime time;
      StepWork work;
      int rows = 0;
      for (int i = 0; i < 400; ++i) {
        // Half of the sequences decode; the other half always has prompt rows to run.
        StepWork decoding;
        decoding.decode_rows = running / 2 + i % 3 - 1;
        decoding.decode_context = int64_t{decoding.decode_rows} * (context + i % 7);
        const PromptBudget budget = time.Budget(decoding, running);
        if (budget.total == 0.0) {
          time.Observe(decoding, machine.Seconds(decoding));
          continue;
        }
        work = decoding;
        rows = work.prompt_rows = std::min(512, budget.RowsFor(budget.total, context));
        work.prompt_context = int64_t{rows} * context + int64_t{rows} * (rows + 1) / 2;
        time.Observe(work, machine.Seconds(work));
      }
      StepWork all;
      all.decode_rows = running;
      all.decode_context = int64_t{running} * context;
      EXPECT_LT(rows, 512);
      const double ratio = machine.Seconds(work) / machine.Seconds(all);
      EXPECT_GT(ratio, 1.0) << running << " running, context " << context;
      // A few prompt rows are granted however long they take, so that prompts always make progress.
      if (rows > 16) {
        EXPECT_LT(ratio, 2.2) << running << " running, context " << context;
      }
    }
  }
}

TEST(StepTime, FollowsAMachineThatChanges) {
  StepTime time;
  Random random(2);
  for (const double slower : {1.0, 5.0, 0.5}) {
    Machine machine;
    for (double* cost :
         {&machine.constant, &machine.decode_row, &machine.prompt_row, &machine.position}) {
      *cost *= slower;
    }
    for (int i = 0; i < 600; ++i) {
      const StepWork work = RandomWork(random);
      time.Observe(work, machine.Seconds(work));
    }
    const StepWork work{.decode_rows = 20, .decode_context = 4000};
    EXPECT_NEAR(time.Predict(work) / machine.Seconds(work), 1.0, 0.1);
  }
}

TEST(StepTime, GivesPromptsALittleBeforeItKnows) {
  StepTime time;
  const PromptBudget budget = time.Budget({.decode_rows = 3, .decode_context = 9}, 8);
  EXPECT_GE(budget.RowsFor(budget.total, 0), 16);
  EXPECT_LE(budget.RowsFor(budget.total, 0), 128);
}

}  // namespace
}  // namespace moeserve::testing

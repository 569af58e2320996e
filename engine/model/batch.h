// One step's work: a ragged batch of tokens from many sequences.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engine/model/phase.h"
#include "engine/routes/routing_control.h"
#include "engine/spec/spec.h"
#include "kernels/backend.h"

namespace moeserve {

// T tokens of S sequences. The tokens of a sequence are adjacent and their positions consecutive,
// following what the cache already holds.
struct Batch {
  std::vector<int32_t> tokens;                         // [T]
  std::vector<int32_t> positions;                      // [T] first position is 0
  std::vector<int32_t> sequence;                       // [T] index into block_tables
  std::vector<Phase> phase;                            // [T] for statistics
  std::vector<std::span<const int32_t>> block_tables;  // [S] cache blocks of each sequence
  std::vector<int32_t> logit_rows;                     // rows whose logits are wanted, ascending
  // [logit_rows] what the device draws; row < 0: the host wants the logits. Empty: of all rows.
  std::vector<SampleRow> samples;
  // [S] how the routing of each sequence is changed, null: not at all. Empty: of none.
  std::vector<const RoutingControl*> controls;

  int num_tokens() const { return static_cast<int>(tokens.size()); }
};

// What is looked at of every routed block beside its plan.
struct StepLooks {
  bool scores = false;
  bool inputs = false;

  bool any() const { return scores || inputs; }
};

// Called by the model on the thread that runs Forward: while the step runs, or after it where plans
// lie on a device, for which nothing of the step then has to wait. (Prompts so long that scores and
// inputs would take much memory of the device are looked at while they run.)
class StepHooks {
 public:
  virtual ~StepHooks() = default;
  // Asked before the step: whether OnPlan() is needed even where plans do not lie on the host, from
  // which they have to be fetched. OnOutcome() tells what matters most in any case.
  virtual bool WantsPlans() const { return true; }
  // Asked before the step: what counts its plans where they lie; null: nothing.
  virtual RouteCounters* Counters() { return nullptr; }
  // When a step was issued to a device, which may run it for a while yet: the host has time.
  virtual void OnIssued() {}
  // After the step, where plans do not lie on the host.
  virtual void OnOutcome(const StepOutcome& outcome) { (void)outcome; }
  // After the plan of a routed block was made. `plan` is valid during the call.
  virtual void OnPlan(int layer, BlockKind block, const RoutingPlan& plan) {
    (void)layer, (void)block, (void)plan;
  }
  // Asked before the step and while it runs, always with the same answer within a step: whether
  // OnScores() and OnInputs() are to be called.
  virtual bool WantsScores() const { return false; }
  virtual bool WantsInputs() const { return false; }
  // After OnPlan: the router's scores [rows, E] of that plan, after bias and temperature.
  virtual void OnScores(int layer, BlockKind block, const RoutingPlan& plan,
                        std::span<const float> scores) {
    (void)layer, (void)block, (void)plan, (void)scores;
  }
  // After OnPlan: the rows [rows, c] that the router saw.
  virtual void OnInputs(int layer, BlockKind block, const RoutingPlan& plan,
                        std::span<const float> inputs) {
    (void)layer, (void)block, (void)plan, (void)inputs;
  }
  // Asked before the step: whether RoutesFor() is to be called.
  virtual bool GivesRoutes() const { return false; }
  // Routes to use instead of the router's own (parity tests); null: route normally.
  virtual const GivenRoutes* RoutesFor(int layer, BlockKind block) {
    (void)layer, (void)block;
    return nullptr;
  }
};

}  // namespace moeserve

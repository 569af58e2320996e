// Reads every step of an engine: what `moeserve score --dump` and route traces are made of.
#pragma once

#include "engine/model/batch.h"
#include "engine/model/step_report.h"

namespace moeserve {

class StepObserver {
 public:
  virtual ~StepObserver() = default;
  // What it needs of every step; the same for its whole life.
  virtual StepLooks looks() const = 0;
  // Called on the engine's thread after each step. `report` is valid during the call.
  virtual void OnStep(const Batch& batch, const StepReport& report) = 0;
};

}  // namespace moeserve

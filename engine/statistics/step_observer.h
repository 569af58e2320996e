// An interface to read every step of an engine, used by `moeserve score --dump` and route traces.
#pragma once

#include "engine/step/batch.h"
#include "engine/step/step_report.h"

namespace moeserve {

class StepObserver {
 public:
  virtual ~StepObserver() = default;
  // Returns what every step must report for this observer; constant over the observer's life.
  virtual ReportContents contents() const = 0;
  // Called on the engine thread after each step. `report` is valid during the call.
  virtual void OnStep(const Batch& batch, const StepReport& report) = 0;
};

}  // namespace moeserve

// An interface to read every step of an engine, used by `moeserve score`.
#pragma once

#include <vector>

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

// Passes every step to several observers.
class StepObservers final : public StepObserver {
 public:
  // `observer` must live as long as steps run, and be added before the first one.
  void Add(StepObserver& observer) { observers_.push_back(&observer); }
  bool empty() const { return observers_.empty(); }

  ReportContents contents() const override {
    ReportContents all;
    for (const StepObserver* observer : observers_) all = all | observer->contents();
    return all;
  }
  void OnStep(const Batch& batch, const StepReport& report) override {
    for (StepObserver* observer : observers_) observer->OnStep(batch, report);
  }

 private:
  std::vector<StepObserver*> observers_;
};

}  // namespace moeserve

// The pages of weights that the CPU reads from mapped files.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "kernels/cpu/workers.h"
#include "kernels/weight_pages.h"

namespace moeserve::cpu {

class CpuWeightPages final : public WeightPages {
 public:
  // `workers` must outlive the object.
  explicit CpuWeightPages(Workers& workers) : workers_(workers) {}

  void ExpertsOf(const RoutingPlan& plan, std::vector<int>& experts) override;
  void ForEach(int64_t count, const std::function<void(int64_t)>& run) override;
  void Advise(std::span<const char> bytes, PageAdvice advice) override;
  int64_t Resident(std::span<const char> bytes) override;
  bool Lock(std::span<const char> bytes) override;

 private:
  Workers& workers_;
  std::vector<unsigned char> resident_;  // of mincore(); grows and never shrinks
};

}  // namespace moeserve::cpu

// Weight banks and routers with random weights. The host can compute each weight without copying
// the bank from the device.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/linear/linear_bank.h"
#include "kernels/cuda/routing/router.h"
#include "tests/bench/cuda/bench.h"

namespace moeserve::bench {

// The experts of a model in a paper.
struct ExpertShape {
  std::string name;
  int width = 0;            // width of a routed row: d / h
  int heads = 1;            // h: rows per token
  std::vector<int> hidden;  // [E]
  int k = 1;
  bool gated = true;
  ActivationKind activation = ActivationKind::kSilu;
  bool cosine = false;
  // The matrices are the query and output projections of attention experts: the hidden units are
  // f32 queries, and the second product reads the bf16 outputs of attention, here random numbers.
  bool attention = false;
  // Whether the router uses top-p. p is chosen so that rows select k experts on average; one row
  // selects up to E experts.
  bool top_p = false;

  int experts() const { return static_cast<int>(hidden.size()); }
  int k_max() const { return top_p ? experts() : k; }
  DType hidden_dtype() const { return attention ? DType::kF32 : DType::kBF16; }
  // Returns the bytes of the weights of all experts.
  double bank_bytes() const;
  // Returns the expected bytes of the experts that `rows` rows select with uniform routing.
  double expected_bytes(double rows) const;
};

// Returns the shapes of the papers' models, or tiny shapes for emulated devices.
std::vector<ExpertShape> ExpertShapes(bool tiny);
// Returns the shape of that name in ExpertShapes().
ExpertShape ExpertShapeOf(const std::string& name, bool tiny);

// A bank of bf16 weights with standard deviation fan_in^-0.5.
class RandomBank {
 public:
  static Result<std::unique_ptr<RandomBank>> Create(Bench& bench, LinearBankShape shape,
                                                    uint64_t seed);
  const LinearBank& bank() const { return *bank_; }
  // Returns the element W[out][in] of an expert.
  float weight(int expert, LinearBank::Half half, int out, int in) const;
  // Returns the dot product of `row` with W[out].
  double Product(int expert, LinearBank::Half half, int out, const std::vector<float>& row) const;

 private:
  float scale(int expert) const;
  uint64_t seed(int expert, LinearBank::Half half) const {
    return seed_ + static_cast<uint64_t>(expert) * 0x51ed270b35ae5d3bULL +
           (half == LinearBank::Half::kGate ? 0x3c79ac492ba7b653ULL : 0);
  }

  std::unique_ptr<cuda::CudaLinearBank> bank_;
  uint64_t seed_ = 0;
};

double OracleActivation(ActivationKind kind, double x);

// `p` matters only if the shape uses top-p.
Result<std::unique_ptr<cuda::CudaRouter>> RandomRouter(const ExpertShape& shape, uint64_t seed,
                                                       float p);

// Returns a p with which top-p selects `shape.k` experts per row on average. `count(p)` must return
// the number of experts that `rows` rows select in total.
Result<float> SharePerRow(const ExpertShape& shape, int rows,
                          const std::function<Result<int64_t>(float)>& count);

}  // namespace moeserve::bench

// Banks of random weights and routers, whose values the host can compute one by one.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/linear/linear_bank.h"
#include "kernels/cuda/routing/router.h"
#include "tests/bench/cuda/bench.h"

namespace moeserve::bench {

// Experts as a paper has them. Attention experts are a pair of matrices as well: queries, outputs.
struct ExpertShape {
  std::string name;
  int width = 0;            // of a routed row: d / h
  int heads = 1;            // h: rows of a token
  std::vector<int> hidden;  // [E]
  int k = 1;
  bool gated = true;
  ActivationKind activation = ActivationKind::kSilu;
  bool cosine = false;
  // Top-p with as many routes per row as top-k has, on average; up to E for one row.
  bool top_p = false;

  int experts() const { return static_cast<int>(hidden.size()); }
  int k_max() const { return top_p ? experts() : k; }
  // Bytes of the experts' weights.
  double bank_bytes() const;
  // Bytes of those that `rows` rows touch, uniform routing.
  double expected_bytes(double rows) const;
};

// Papers' shapes; tiny ones for emulated devices.
std::vector<ExpertShape> ExpertShapes(bool tiny);
// By name, of that list.
ExpertShape ExpertShapeOf(const std::string& name, bool tiny);

// bf16 weights with standard deviation fan_in^-0.5.
class RandomBank {
 public:
  static Result<std::unique_ptr<RandomBank>> Create(Bench& bench, LinearBankShape shape,
                                                    uint64_t seed);
  const LinearBank& bank() const { return *bank_; }
  // W[out][in] of an expert.
  float weight(int expert, LinearBank::Half half, int out, int in) const;
  // The product of a row with W[out].
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

// `p` counts where the shape is routed by top-p.
Result<std::unique_ptr<cuda::CudaRouter>> RandomRouter(const ExpertShape& shape, uint64_t seed,
                                                       float p);

// A share p with which `shape.k` routes per row are taken on average by these rows; routes are
// counted by `count`.
Result<float> SharePerRow(const ExpertShape& shape, int rows,
                          const std::function<Result<int64_t>(float)>& count);

}  // namespace moeserve::bench

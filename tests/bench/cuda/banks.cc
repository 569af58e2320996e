#include "tests/bench/cuda/banks.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>

#include "kernels/base/host_tensor.h"

namespace moeserve::bench {
namespace {

constexpr int kCosineDim = 16;

HostTensor RandomTensor(uint64_t seed, std::vector<int64_t> shape, float scale) {
  HostTensor t;
  t.dtype = DType::kF32;
  t.shape = std::move(shape);
  auto values = std::make_shared<std::vector<float>>(static_cast<size_t>(t.size()));
  for (int64_t i = 0; i < t.size(); ++i) (*values)[i] = RandomElement(seed, i, scale);
  t.data = values->data();
  t.owner = values;
  return t;
}

std::vector<int> Equal(int experts, int hidden) {
  return std::vector<int>(static_cast<size_t>(experts), hidden);
}

std::vector<ExpertShape> TinyShapes() {
  return {
      {.name = "tiny_gated", .width = 64, .hidden = Equal(4, 64), .k = 2},
      {.name = "mhmoe_n8",
       .width = 48,
       .heads = 4,
       .hidden = Equal(8, 72),
       .k = 2,
       .gated = false,
       .activation = ActivationKind::kGelu,
       .cosine = true},
      {.name = "hmoe", .width = 64, .hidden = {24, 40, 64, 88}, .k = 2},
      {.name = "hmoe_topp", .width = 64, .hidden = {24, 40, 64, 88}, .k = 2, .top_p = true},
      {.name = "moa",
       .width = 64,
       .hidden = Equal(8, 32),
       .k = 4,
       .gated = false,
       .activation = ActivationKind::kNone,
       .attention = true},
  };
}

}  // namespace

double ExpertShape::bank_bytes() const {
  const double f = std::accumulate(hidden.begin(), hidden.end(), 0.0);
  return f * width * (gated ? 3 : 2) * 2;
}

double ExpertShape::expected_bytes(double rows) const {
  const double e = experts();
  return bank_bytes() * (1.0 - std::pow(1.0 - k / e, rows));
}

std::vector<ExpertShape> ExpertShapes(bool tiny) {
  if (tiny) return TinyShapes();
  const std::vector<int> hmoe = {2304, 2816, 3328, 3840, 4352, 4864, 5376, 5888};
  std::vector<ExpertShape> shapes = {
      {.name = "mixtral", .width = 4096, .hidden = Equal(8, 14336), .k = 2},
      {.name = "olmoe", .width = 2048, .hidden = Equal(64, 1024), .k = 8},
      {.name = "jetmoe", .width = 2048, .hidden = Equal(8, 5632), .k = 2},
      {.name = "hmoe", .width = 1024, .hidden = hmoe, .k = 2},
      {.name = "hmoe_equal", .width = 1024, .hidden = Equal(8, 4096), .k = 2},
      {.name = "hmoe_padded", .width = 1024, .hidden = Equal(8, 5888), .k = 2},
      {.name = "hmoe_topp", .width = 1024, .hidden = hmoe, .k = 2, .top_p = true},
      // Query and output projections of attention experts.
      {.name = "moa",
       .width = 512,
       .hidden = Equal(32, 256),
       .k = 16,
       .gated = false,
       .activation = ActivationKind::kNone,
       .attention = true},
      {.name = "jetmoe_heads",
       .width = 2048,
       .hidden = Equal(8, 2048),
       .k = 2,
       .gated = false,
       .activation = ActivationKind::kNone,
       .attention = true},
  };
  for (const auto& [name, experts, hidden, gated] : {std::tuple{"mhmoe_n8", 8, 3072, false},
                                                     {"mhmoe_n64", 64, 3072, false},
                                                     {"mhmoe_n256", 256, 3072, false},
                                                     {"mhmoe_wide", 8, 12288, false},
                                                     {"mhmoe_gated", 8, 3024, true}}) {
    shapes.push_back({.name = name,
                      .width = 192,
                      .heads = 4,
                      .hidden = Equal(experts, hidden),
                      .k = 2,
                      .gated = gated,
                      .activation = gated ? ActivationKind::kSilu : ActivationKind::kGelu,
                      .cosine = !gated});
  }
  return shapes;
}

ExpertShape ExpertShapeOf(const std::string& name, bool tiny) {
  for (const ExpertShape& s : ExpertShapes(tiny)) {
    if (s.name == name) return s;
  }
  std::abort();
}

Result<std::unique_ptr<RandomBank>> RandomBank::Create(Bench& bench, LinearBankShape shape,
                                                       uint64_t seed) {
  auto random = std::make_unique<RandomBank>();
  random->seed_ = seed;
  shape.weight_dtype = DType::kBF16;
  MOESERVE_ASSIGN_OR_RETURN(random->bank_, cuda::CudaLinearBank::Create(std::move(shape)));
  const cuda::CudaLinearBank& bank = *random->bank_;
  const LinearBankShape& s = bank.shape();
  int64_t largest = 0;
  for (int e = 0; e < bank.num_experts(); ++e) {
    largest = std::max(largest, int64_t{s.in_features_of(e)} * s.out_features[e]);
  }
  MOESERVE_ASSIGN_OR_RETURN(const cuda::DeviceMemory source,
                            cuda::DeviceMemory::Allocate(static_cast<size_t>(largest) * 2));
  for (int e = 0; e < bank.num_experts(); ++e) {
    const cuda::LinearBankEntry& entry = bank.entry(e);
    for (const LinearBank::Half half : {LinearBank::Half::kMain, LinearBank::Half::kGate}) {
      const bool gate = half == LinearBank::Half::kGate;
      if (gate && !s.gated) continue;
      LaunchFill(source.data(), DType::kBF16, int64_t{entry.in_features} * entry.out_features,
                 random->seed(e, half), random->scale(e), bench.stream());
      cuda::internal::LaunchPackRows({.source = source.data(),
                                      .source_dtype = DType::kBF16,
                                      .image = const_cast<char*>(bank.weights()) + entry.weights,
                                      .image_dtype = DType::kBF16,
                                      .k_blocks = entry.k_blocks,
                                      .in_features = entry.in_features,
                                      .first_row = 0,
                                      .rows = entry.out_features,
                                      .gated = s.gated,
                                      .gate_half = gate},
                                     bench.stream());
    }
  }
  MOESERVE_RETURN_IF_ERROR(bench.Synchronize());
  return random;
}

float RandomBank::scale(int expert) const {
  return 1.0f / std::sqrt(static_cast<float>(bank_->shape().in_features_of(expert)));
}

float RandomBank::weight(int expert, LinearBank::Half half, int out, int in) const {
  const int64_t width = bank_->shape().in_features_of(expert);
  return RandomRounded(seed(expert, half), out * width + in, scale(expert), DType::kBF16);
}

double RandomBank::Product(int expert, LinearBank::Half half, int out,
                           const std::vector<float>& row) const {
  double sum = 0;
  for (int i = 0; i < bank_->shape().in_features_of(expert); ++i) {
    sum += static_cast<double>(weight(expert, half, out, i)) * row[i];
  }
  return sum;
}

double OracleActivation(ActivationKind kind, double x) {
  switch (kind) {
    case ActivationKind::kSilu:
      return x / (1.0 + std::exp(-x));
    case ActivationKind::kGelu:
      return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case ActivationKind::kGeluTanh:
      return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
    case ActivationKind::kRelu:
      return std::max(x, 0.0);
    case ActivationKind::kTanh:
      return std::tanh(x);
    case ActivationKind::kRelu2:
      return x > 0.0 ? x * x : 0.0;
    case ActivationKind::kNone:
      break;
  }
  return x;
}

Result<std::unique_ptr<cuda::CudaRouter>> RandomRouter(const ExpertShape& shape, uint64_t seed,
                                                       float p) {
  RouteSettings settings;
  settings.num_experts = shape.experts();
  settings.input_width = shape.width;
  settings.k = shape.k_max();
  settings.select = shape.top_p ? SelectKind::kTopP : SelectKind::kTopK;
  settings.p = p;
  settings.renormalize = !shape.top_p;
  const float scale = 1.0f / std::sqrt(static_cast<float>(shape.width));
  RouterTensors tensors;
  if (shape.cosine) {
    settings.score = ScoreKind::kCosine;
    settings.dim = kCosineDim;
    settings.temperature = TemperatureKind::kDivide;
    tensors.temperature = 0.3f;
    tensors.projection = RandomTensor(seed, {kCosineDim, shape.width}, scale);
    tensors.weight = RandomTensor(seed + 1, {shape.experts(), kCosineDim}, 0.25f);
  } else {
    tensors.weight = RandomTensor(seed, {shape.experts(), shape.width}, scale);
  }
  return cuda::CudaRouter::Create(settings, tensors);
}

Result<float> SharePerRow(const ExpertShape& shape, int rows,
                          const std::function<Result<int64_t>(float)>& count) {
  const int64_t wanted = int64_t{rows} * shape.k;
  float low = 0.0f, high = 1.0f, best = 0.5f;
  int64_t distance = INT64_MAX;
  for (int i = 0; i < 20; ++i) {
    const float p = 0.5f * (low + high);
    MOESERVE_ASSIGN_OR_RETURN(const int64_t routes, count(p));
    if (std::abs(routes - wanted) < distance) {
      distance = std::abs(routes - wanted);
      best = p;
    }
    (routes < wanted ? low : high) = p;
  }
  return best;
}

}  // namespace moeserve::bench

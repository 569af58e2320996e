#include "engine/layers/load.h"

#include <limits>

namespace moeserve {
namespace {

// The stored type that holds every tensor of a product without loss, or the run's own.
DType StoredType(const LoadContext& load, const std::vector<HostTensor>& tensors) {
  if (load.compute == DType::kBF16) return DType::kBF16;
  for (const HostTensor& t : tensors) {
    if (t.dtype != tensors.front().dtype) return DType::kF32;
  }
  return tensors.front().dtype;
}

}  // namespace

Result<std::unique_ptr<LinearBank>> LoadLinear(LoadContext& load, int in_features,
                                               const std::vector<LinearPart>& parts) {
  std::vector<HostTensor> weights;
  int total = 0;
  bool bias = false;
  for (const LinearPart& p : parts) {
    MOESERVE_ASSIGN_OR_RETURN(HostTensor t,
                              load.source.Get(p.prefix + ".weight", {p.out_features, in_features}));
    weights.push_back(std::move(t));
    total += p.out_features;
    bias = bias || p.bias;
  }
  MOESERVE_ASSIGN_OR_RETURN(
      std::unique_ptr<LinearBank> bank,
      load.backend.NewLinearBank({{in_features}, {total}, false, bias, StoredType(load, weights)}));
  int row = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    bank->LoadWeight(0, LinearBank::Half::kMain, row, weights[i]);
    if (parts[i].bias) {
      MOESERVE_ASSIGN_OR_RETURN(
          HostTensor b, load.source.Get(parts[i].prefix + ".bias", {parts[i].out_features}));
      bank->LoadBias(0, LinearBank::Half::kMain, row, b);
    }
    row += parts[i].out_features;
  }
  return bank;
}

Result<std::unique_ptr<LinearBank>> LoadBank(LoadContext& load, const std::vector<int>& in_features,
                                             const std::vector<int>& out_features,
                                             const BankNames& names, bool bias) {
  const bool gated = names.gate.has_value();
  const size_t experts = names.prefixes.size();
  std::vector<HostTensor> weights;  // main of every expert, then gate of every expert
  for (const std::string* part : {&names.main, gated ? &*names.gate : nullptr}) {
    if (part == nullptr) continue;
    for (size_t e = 0; e < experts; ++e) {
      MOESERVE_ASSIGN_OR_RETURN(
          HostTensor t, load.source.Get(names.prefixes[e] + "." + *part + ".weight",
                                        {out_features[e], in_features[e % in_features.size()]}));
      weights.push_back(std::move(t));
    }
  }
  MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<LinearBank> bank,
                            load.backend.NewLinearBank({in_features, out_features, gated, bias,
                                                        StoredType(load, weights)}));
  for (size_t i = 0; i < weights.size(); ++i) {
    const size_t e = i % experts;
    const bool gate = i >= experts;
    const LinearBank::Half half = gate ? LinearBank::Half::kGate : LinearBank::Half::kMain;
    bank->LoadWeight(static_cast<int>(e), half, 0, weights[i]);
    if (bias) {
      MOESERVE_ASSIGN_OR_RETURN(
          HostTensor b,
          load.source.Get(names.prefixes[e] + "." + (gate ? *names.gate : names.main) + ".bias",
                          {out_features[e]}));
      bank->LoadBias(static_cast<int>(e), half, 0, b);
    }
  }
  return bank;
}

Result<std::unique_ptr<NormBank>> LoadNorm(LoadContext& load,
                                           const std::vector<std::string>& prefixes,
                                           const std::vector<int>& widths) {
  const bool layer = load.norm.kind == NormKind::kLayer;
  std::vector<HostTensor> scales, shifts;
  for (size_t g = 0; g < prefixes.size(); ++g) {
    MOESERVE_ASSIGN_OR_RETURN(HostTensor scale,
                              load.source.Get(prefixes[g] + ".weight", {widths[g]}));
    scales.push_back(std::move(scale));
    if (layer) {
      MOESERVE_ASSIGN_OR_RETURN(HostTensor shift,
                                load.source.Get(prefixes[g] + ".bias", {widths[g]}));
      shifts.push_back(std::move(shift));
    }
  }
  return load.backend.NewNormBank({layer, load.norm.eps}, scales, shifts);
}

Result<std::unique_ptr<NormBank>> LoadRmsNorm(LoadContext& load, const std::string& prefix,
                                              int width) {
  MOESERVE_ASSIGN_OR_RETURN(HostTensor scale, load.source.Get(prefix + ".weight", {width}));
  return load.backend.NewNormBank({false, load.norm.eps}, {&scale, 1}, {});
}

Result<std::unique_ptr<Router>> LoadRouter(LoadContext& load, const std::string& prefix,
                                           const RoutedLayerSpec& spec, int input_width) {
  RouteSettings s;
  RouterTensors tensors;
  s.num_experts = spec.num_experts;
  s.input_width = input_width;
  if (spec.score.kind == ScoreKind::kDot) {
    s.score = RouteSettings::Score::kDot;
    MOESERVE_ASSIGN_OR_RETURN(tensors.weight,
                              load.source.Get(prefix + ".weight", {spec.num_experts, input_width}));
    if (spec.score.bias) {
      MOESERVE_ASSIGN_OR_RETURN(tensors.bias,
                                load.source.Get(prefix + ".bias", {spec.num_experts}));
    }
  } else {
    s.score = RouteSettings::Score::kCosine;
    s.dim = spec.score.dim;
    s.normalize_row = spec.score.normalize_row;
    s.normalize_expert = spec.score.normalize_expert;
    s.eps = static_cast<float>(spec.score.eps);
    MOESERVE_ASSIGN_OR_RETURN(tensors.projection,
                              load.source.Get(prefix + ".projection.weight", {s.dim, input_width}));
    MOESERVE_ASSIGN_OR_RETURN(
        tensors.weight, load.source.Get(prefix + ".experts.weight", {spec.num_experts, s.dim}));
    if (spec.score.bias) {
      MOESERVE_ASSIGN_OR_RETURN(tensors.bias,
                                load.source.Get(prefix + ".projection.bias", {s.dim}));
    }
    if (spec.score.temperature != TemperatureKind::kNone) {
      s.temperature = spec.score.temperature == TemperatureKind::kDivide
                          ? RouteSettings::Temperature::kDivide
                          : RouteSettings::Temperature::kLogScale;
      MOESERVE_ASSIGN_OR_RETURN(HostTensor t, load.source.Get(prefix + ".temperature", {1}));
      tensors.temperature = ElementAsF32(t, 0);
    }
  }
  switch (spec.gate) {
    case GateKind::kSoftmax:
      s.gate = RouteSettings::Gate::kSoftmax;
      break;
    case GateKind::kSigmoid:
      s.gate = RouteSettings::Gate::kSigmoid;
      break;
    case GateKind::kSoftmaxSelected:
      s.gate = RouteSettings::Gate::kSoftmaxSelected;
      break;
  }
  s.top_p = spec.select.kind == SelectKind::kTopP;
  s.k = spec.select.MaxSelected();
  s.p = static_cast<float>(spec.select.p);
  s.strict = spec.select.compare == TopPCompare::kGt;
  s.renormalize = spec.renormalize;
  s.scale = static_cast<float>(spec.scale);
  return load.backend.NewRouter(s, tensors);
}

}  // namespace moeserve

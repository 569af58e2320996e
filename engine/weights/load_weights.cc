#include "engine/weights/load_weights.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "base/error_text.h"
#include "engine/tiers/expert_tiers.h"
#include "engine/weights/expert_placement.h"

namespace moeserve {
namespace {

// Returns the type to store a product's weights in: bf16 if the run computes in bf16, otherwise the
// tensors' common type, or f32 if their types differ.
DType StoredType(const LoadContext& load, const std::vector<HostTensor>& tensors) {
  if (load.compute == DType::kBF16) return DType::kBF16;
  if (tensors.empty()) return DType::kF32;  // a rank that has no expert of the block
  for (const HostTensor& t : tensors) {
    if (t.dtype != tensors.front().dtype) return DType::kF32;
  }
  return tensors.front().dtype;
}

// Returns the bank for `key` from the packed cache. If the cache lacks it, loads it with `load_it`
// and, if it has all experts, stores it in the cache. `routed` is that of LoadBank().
template <typename LoadIt>
Result<std::unique_ptr<LinearBank>> FindOrLoad(LoadContext& load, const PackedBankKey& key,
                                               const RoutedExperts* routed, const LoadIt& load_it) {
  if (load.packed_cache == nullptr) return load_it();
  const bool later = routed != nullptr && load.tiers != nullptr;
  const std::vector<bool> here = routed != nullptr ? routed->here : std::vector<bool>();
  if (CachedBank found = load.packed_cache->Find(key, !later, here); found.bank != nullptr) {
    if (load.files_in_use != nullptr) load.files_in_use->Add(found.experts->owner()->data());
    if (later) {
      load.tiers->Add(found.bank.get(), std::move(found.experts), here);
    } else if (load.tiers != nullptr) {
      load.tiers->AddDense(std::move(found.experts));
    }
    return std::move(found.bank);
  }
  MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<LinearBank> bank, load_it());
  MOESERVE_RETURN_IF_ERROR(load.source.Check());  // zeros of a damaged file must not be kept
  if (here.empty()) load.packed_cache->Store(key, *bank);
  return bank;
}

// Returns the part [first, first + count) of the first dimension.
HostTensor RowsOf(const HostTensor& tensor, int64_t first, int64_t count) {
  HostTensor part = tensor;
  const int64_t row = tensor.size() / tensor.shape[0] * static_cast<int64_t>(SizeOf(tensor.dtype));
  part.data = static_cast<const char*>(tensor.data) + first * row;
  part.shape[0] = count;
  return part;
}

// One matrix to be loaded into a bank, as integers with scales or as floating-point numbers.
struct Weight {
  int expert;
  LinearBank::Half half;
  int row_begin;
  std::optional<QuantizedMatrix> integers;
  HostTensor numbers;
};

// Fetches tensor `name` [out_features, in_features] for a bank with this quantization.
absl::Status Fetch(LoadContext& load, const std::string& name, int out_features, int in_features,
                   Quantization quantization, Weight& weight) {
  const std::vector<int64_t> shape = {out_features, in_features};
  if (quantization != Quantization::kNone) {
    MOESERVE_ASSIGN_OR_RETURN(weight.integers, load.source.GetQuantized(name, shape, quantization));
    if (weight.integers.has_value()) return absl::OkStatus();
  }
  MOESERVE_ASSIGN_OR_RETURN(weight.numbers, load.source.Get(name, shape));
  return absl::OkStatus();
}

// Makes a bank; `routed` is that of LoadBank().
Result<std::unique_ptr<LinearBank>> NewBank(LoadContext& load, LinearBankShape shape, bool routed) {
  if (routed && load.tiers != nullptr) return load.tiers->NewBank(load.backend, std::move(shape));
  return load.backend.NewLinearBank(std::move(shape));
}

Result<std::unique_ptr<LinearBank>> FilledBank(LoadContext& load, LinearBankShape shape,
                                               const std::vector<Weight>& weights, bool routed) {
  MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<LinearBank> bank,
                            NewBank(load, std::move(shape), routed));
  for (const Weight& w : weights) {
    if (bank->shape().is_absent(w.expert)) continue;
    if (w.integers.has_value()) {
      bank->LoadQuantized(w.expert, w.half, w.row_begin, *w.integers);
    } else {
      bank->LoadWeight(w.expert, w.half, w.row_begin, w.numbers);
    }
  }
  return bank;
}

// `bf16_rows`: a run in bf16 multiplies no f32 rows by the bank. Weights of absent experts are not
// loaded, but their types count.
Result<std::unique_ptr<LinearBank>> BankOf(LoadContext& load, LinearBankShape shape,
                                           const std::vector<Weight>& weights, bool bf16_rows,
                                           bool routed = false) {
  if (shape.quantization != Quantization::kNone) {
    shape.weight_dtype = DType::kBF16;
  } else {
    std::vector<HostTensor> tensors;
    for (const Weight& w : weights) tensors.push_back(w.numbers);
    shape.weight_dtype = StoredType(load, tensors);
  }
  const auto is_mxfp4 = [](const Weight& w) { return w.numbers.mxfp4; };
  if (bf16_rows && load.compute == DType::kBF16 && load.backend.stores_mxfp4() &&
      std::all_of(weights.begin(), weights.end(), is_mxfp4)) {
    shape.mxfp4 = true;
    MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<LinearBank> bank,
                              FilledBank(load, shape, weights, routed));
    if (bank->holds_weights()) return bank;
    shape.mxfp4 = false;
  }
  return FilledBank(load, std::move(shape), weights, routed);
}

// One matrix of a bank: the expert, whether it is the gate, and its place in the expert's outputs.
struct BankMatrix {
  size_t expert;
  bool gate;
  std::string name;  // of its tensors, without ".weight" or ".bias"
  int row_begin = 0;
  std::optional<int> rows = {};  // empty: all outputs of the expert

  LinearBank::Half half() const { return gate ? LinearBank::Half::kGate : LinearBank::Half::kMain; }
};

// Returns a bank of FP8 with those of the matrices whose experts are here; null if the run or the
// files do not permit it for all of them, because the bits of results depend on it.
Result<std::unique_ptr<LinearBank>> Fp8Bank(LoadContext& load, LinearBankShape shape,
                                            const std::vector<BankMatrix>& matrices, bool routed) {
  if (!load.keep_fp8 || load.compute != DType::kBF16 || !load.backend.stores_fp8() ||
      shape.quantization != Quantization::kNone || matrices.empty()) {
    return std::unique_ptr<LinearBank>();
  }
  const LinearBankShape layer = shape.layer();
  bool some_absent = false;
  std::vector<std::optional<Fp8Matrix>> numbers;
  for (const BankMatrix& m : matrices) {
    const int e = static_cast<int>(m.expert);
    MOESERVE_ASSIGN_OR_RETURN(
        std::optional<Fp8Matrix> matrix,
        load.source.GetFp8(m.name + ".weight", {m.rows.value_or(layer.out_features[m.expert]),
                                                layer.in_features_of(e)}));
    if (!matrix.has_value()) return std::unique_ptr<LinearBank>();
    some_absent = some_absent || shape.is_absent(e);
    if (shape.is_absent(e)) matrix.reset();
    numbers.push_back(std::move(matrix));
  }
  shape.weight_dtype = DType::kBF16;
  shape.fp8 = true;
  MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<LinearBank> bank,
                            NewBank(load, std::move(shape), routed));
  for (size_t i = 0; i < matrices.size(); ++i) {
    if (!numbers[i].has_value()) continue;
    bank->LoadFp8(static_cast<int>(matrices[i].expert), matrices[i].half(), matrices[i].row_begin,
                  *numbers[i]);
  }
  if (bank->holds_weights()) return bank;
  // Other ranks do not know that this one has found a NaN.
  if (some_absent) {
    return absl::FailedPreconditionError(
        Concat("tensor \"", matrices.front().name,
               ".weight\" or those of other experts of its layer: expected numbers, found a NaN of "
               "FP8, which several ranks cannot widen to bf16"));
  }
  bank.reset();
  return bank;
}

}  // namespace

std::vector<int> RoutedExperts::WidthsHere(std::vector<int> widths) const {
  for (size_t e = 0; e < widths.size(); ++e) {
    if (!IsHere(e)) widths[e] = 0;
  }
  return widths;
}

RoutedExperts LoadContext::ExpertsOf(const ModelSpec& model, int block) const {
  RoutedExperts experts;
  if (ranks == nullptr) return experts;
  const int places = static_cast<int>(ranks->placement->holders(model.stack, block).size());
  for (int e = 0; e < places; ++e) experts.here.push_back(ranks->Holds(model.stack, block, e));
  return experts;
}

Result<std::unique_ptr<LinearBank>> LoadLinear(LoadContext& load, int in_features,
                                               const std::vector<LinearPart>& parts,
                                               bool bf16_rows) {
  const Quantization quantization = QuantizationOf(
      parts[0].prefix + ".weight", {parts[0].out_features, in_features}, load.quantization);
  int total = 0;
  PackedBankKey key;
  key.compute = load.compute;
  LinearBankShape& shape = key.shape;
  shape.in_features = {in_features};
  shape.quantization = quantization;
  for (const LinearPart& p : parts) {
    key.tensors.push_back(p.prefix + ".weight");
    if (p.bias) key.tensors.push_back(p.bias_name());
    total += p.out_features;
    shape.bias = shape.bias || p.bias;
  }
  shape.out_features = {total};
  return FindOrLoad(load, key, nullptr, [&]() -> Result<std::unique_ptr<LinearBank>> {
    std::vector<BankMatrix> matrices;
    int row = 0;
    for (const LinearPart& p : parts) {
      matrices.push_back({0, false, p.prefix, row, p.out_features});
      row += p.out_features;
    }
    std::unique_ptr<LinearBank> bank;
    if (bf16_rows) {
      MOESERVE_ASSIGN_OR_RETURN(bank, Fp8Bank(load, key.shape, matrices, /*routed=*/false));
    }
    if (bank == nullptr) {
      std::vector<Weight> weights;
      for (const BankMatrix& m : matrices) {
        Weight w{0, LinearBank::Half::kMain, m.row_begin, std::nullopt, {}};
        MOESERVE_RETURN_IF_ERROR(
            Fetch(load, m.name + ".weight", *m.rows, in_features, quantization, w));
        weights.push_back(std::move(w));
      }
      MOESERVE_ASSIGN_OR_RETURN(bank, BankOf(load, key.shape, weights, false));
    }
    for (size_t i = 0; i < parts.size(); ++i) {
      if (!parts[i].bias) continue;
      MOESERVE_ASSIGN_OR_RETURN(HostTensor b,
                                load.source.Get(parts[i].bias_name(), {parts[i].out_features}));
      bank->LoadBias(0, LinearBank::Half::kMain, matrices[i].row_begin, b);
    }
    return bank;
  });
}

Result<std::unique_ptr<LinearBank>> LoadLinearOutputs(LoadContext& load, int in_features,
                                                      const LinearPart& part, int first,
                                                      int count) {
  const std::string name = part.prefix + ".weight";
  LinearBankShape shape{.in_features = {in_features}, .out_features = {count}, .bias = part.bias};
  shape.quantization = QuantizationOf(name, {part.out_features, in_features}, load.quantization);
  Weight weight{0, LinearBank::Half::kMain, 0, std::nullopt, {}};
  MOESERVE_RETURN_IF_ERROR(
      Fetch(load, name, part.out_features, in_features, shape.quantization, weight));
  if (weight.integers.has_value()) {
    QuantizedMatrix& matrix = *weight.integers;
    matrix.values += first * QuantRowBytes(matrix.type, matrix.columns);
    matrix.scales += first * QuantScales(matrix.type, matrix.columns);
    matrix.rows = count;
  } else {
    weight.numbers = RowsOf(weight.numbers, first, count);
  }
  MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<LinearBank> bank, BankOf(load, shape, {weight}, false));
  if (part.bias) {
    MOESERVE_ASSIGN_OR_RETURN(const HostTensor bias,
                              load.source.Get(part.bias_name(), {part.out_features}));
    bank->LoadBias(0, LinearBank::Half::kMain, 0, RowsOf(bias, first, count));
  }
  return bank;
}

Result<StackedLinear> StackedLinear::Load(LoadContext& load, int in_features,
                                          const std::vector<LinearPart>& parts, bool bf16_rows) {
  const auto type_of = [&](const LinearPart& part) {
    return QuantizationOf(part.prefix + ".weight", {part.out_features, in_features},
                          load.quantization);
  };
  StackedLinear linear;
  int column = 0;
  for (size_t begin = 0; begin < parts.size();) {
    std::vector<LinearPart> run;
    int columns = 0;
    size_t end = begin;
    for (; end < parts.size() && type_of(parts[end]) == type_of(parts[begin]); ++end) {
      run.push_back(parts[end]);
      columns += parts[end].out_features;
    }
    MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<LinearBank> bank,
                              LoadLinear(load, in_features, run, bf16_rows));
    linear.products_.push_back({std::move(bank), column, columns});
    column += columns;
    begin = end;
  }
  return linear;
}

void StackedLinear::Run(Backend& backend, const RowsView& input, const RowsView& output,
                        const AddNormArgs* norm) const {
  for (const Product& p : products_) {
    backend.Linear({.bank = p.bank.get(),
                    .input = input,
                    .output = output.Columns(p.first_column, p.columns),
                    .norm = norm});
    norm = nullptr;
  }
}

Result<std::unique_ptr<LinearBank>> LoadBank(LoadContext& load, const std::vector<int>& in_features,
                                             const std::vector<int>& out_features,
                                             const BankNames& names, bool bias,
                                             const RoutedExperts* routed) {
  const bool gated = names.gate.has_value();
  const size_t experts = names.prefixes.size();
  const auto tensor = [&](size_t e, bool gate) {
    return names.prefixes[e] + "." + (gate ? *names.gate : names.main);
  };
  // Which tensors are stored as integers does not depend on the expert, if it has matrices.
  const size_t some =
      static_cast<size_t>(std::ranges::max_element(out_features) - out_features.begin());
  const Quantization quantization = QuantizationOf(
      tensor(some, false) + ".weight", {out_features[some], in_features[some % in_features.size()]},
      load.quantization);
  // The experts and halves of the matrices: `main` of every expert, then `gate` of every expert.
  std::vector<BankMatrix> matrices;
  for (const bool gate : {false, true}) {
    for (size_t e = 0; e < experts && (gated || !gate); ++e) {
      if (out_features[e] > 0) matrices.push_back({e, gate, tensor(e, gate)});
    }
  }
  PackedBankKey key;
  key.compute = load.compute;
  key.shape.in_features = in_features;
  key.shape.out_features = out_features;
  key.shape.gated = gated;
  key.shape.bias = bias;
  key.shape.quantization = quantization;
  for (const BankMatrix& m : matrices) key.tensors.push_back(m.name + ".weight");
  // An expert is loaded at once: a device may pack one after the other.
  std::ranges::stable_sort(matrices, {}, &BankMatrix::expert);
  return FindOrLoad(load, key, routed, [&]() -> Result<std::unique_ptr<LinearBank>> {
    LinearBankShape shape = key.shape;
    if (routed != nullptr) {
      shape.layer_in_features = in_features;
      shape.layer_out_features = out_features;
      shape.out_features = routed->WidthsHere(out_features);
      if (in_features.size() > 1) shape.in_features = routed->WidthsHere(in_features);
    }
    MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<LinearBank> bank,
                              Fp8Bank(load, shape, matrices, routed != nullptr));
    const auto is_absent = [&out = shape.out_features](const BankMatrix& m) {
      return out[m.expert] == 0;
    };
    // In a run in f32, the type of a bank is that of all tensors, and a device may multiply rows by
    // weights of each type in another order. So it must not depend on what a rank has.
    if (load.compute == DType::kBF16) std::erase_if(matrices, is_absent);
    if (bank == nullptr) {
      std::vector<Weight> weights;
      for (const BankMatrix& m : matrices) {
        Weight w{static_cast<int>(m.expert), m.half(), 0, std::nullopt, {}};
        MOESERVE_RETURN_IF_ERROR(Fetch(load, m.name + ".weight", out_features[m.expert],
                                       in_features[m.expert % in_features.size()], quantization,
                                       w));
        if (is_absent(m)) w.numbers.owner = nullptr;
        weights.push_back(std::move(w));
      }
      MOESERVE_ASSIGN_OR_RETURN(bank, BankOf(load, shape, weights, true, routed != nullptr));
    }
    for (const BankMatrix& m : matrices) {
      if (!bias || is_absent(m)) continue;
      MOESERVE_ASSIGN_OR_RETURN(HostTensor b,
                                load.source.Get(m.name + ".bias", {out_features[m.expert]}));
      bank->LoadBias(static_cast<int>(m.expert), m.half(), 0, b);
    }
    return bank;
  });
}

namespace {

Result<std::unique_ptr<NormBank>> LoadNormOf(LoadContext& load,
                                             const std::vector<std::string>& prefixes,
                                             const std::vector<int>& widths, int parts) {
  const bool layer = load.norm.kind == NormKind::kLayer;
  const std::vector<float> zeros(
      layer && !load.norm.HasBias() ? static_cast<size_t>(*std::ranges::max_element(widths)) : 0);
  std::vector<HostTensor> scales, shifts;
  for (size_t g = 0; g < prefixes.size(); ++g) {
    if (widths[g] == 0) {
      scales.push_back({zeros.data(), DType::kF32, {0}, nullptr});
      if (layer) shifts.push_back(scales.back());
      continue;
    }
    MOESERVE_ASSIGN_OR_RETURN(HostTensor scale,
                              load.source.Get(prefixes[g] + ".weight", {widths[g]}));
    scales.push_back(std::move(scale));
    if (layer && !load.norm.HasBias()) {
      shifts.push_back({zeros.data(), DType::kF32, {widths[g]}, nullptr});
    } else if (layer) {
      MOESERVE_ASSIGN_OR_RETURN(HostTensor shift,
                                load.source.Get(prefixes[g] + ".bias", {widths[g]}));
      shifts.push_back(std::move(shift));
    }
  }
  return load.backend.NewNormBank({layer, load.norm.eps, parts}, scales, shifts);
}

}  // namespace

Result<std::unique_ptr<NormBank>> LoadNorm(LoadContext& load,
                                           const std::vector<std::string>& prefixes,
                                           const std::vector<int>& widths) {
  return LoadNormOf(load, prefixes, widths, 1);
}

Result<std::unique_ptr<NormBank>> LoadRowNorm(LoadContext& load, const std::string& prefix,
                                              int width) {
  return LoadNormOf(load, {prefix}, {width}, load.norm.groups);
}

Result<std::unique_ptr<NormBank>> LoadRmsNorm(LoadContext& load, const std::string& prefix,
                                              int width, int parts) {
  MOESERVE_ASSIGN_OR_RETURN(HostTensor scale, load.source.Get(prefix + ".weight", {width}));
  return load.backend.NewNormBank({false, load.norm.eps, parts}, {&scale, 1}, {});
}

Result<std::unique_ptr<NormBank>> NewPlainNorm(LoadContext& load, int width) {
  const std::vector<float> ones(static_cast<size_t>(width), 1.0f);
  const HostTensor scale{ones.data(), DType::kF32, {width}, nullptr};
  return load.backend.NewNormBank({false, load.norm.eps}, {&scale, 1}, {});
}

PositionScale ScaleOf(const QueryScaleSpec& spec) {
  return {.step = spec.step, .factor = spec.factor, .first = spec.first};
}

Result<std::unique_ptr<DeviceBuffer>> LoadVector(LoadContext& load, const std::string& name,
                                                 int width) {
  MOESERVE_ASSIGN_OR_RETURN(const HostTensor tensor, load.source.Get(name, {width}));
  std::vector<float> values;
  for (int i = 0; i < width; ++i) values.push_back(ElementAsF32(tensor, i));
  return load.backend.Upload(values);
}

Result<RelativeBiases> LoadRelativeBiases(LoadContext& load, const ModelSpec& spec,
                                          std::optional<int> layer) {
  const AttentionSpec& first = *FirstAttention(spec);
  const int heads = first.num_heads;
  MOESERVE_ASSIGN_OR_RETURN(
      const HostTensor table,
      load.source.Get(RelativeBiasName(spec, layer), {spec.relative_bias->buckets, heads}));
  const int positions = spec.max_position_embeddings;
  const std::vector<int> buckets = IsCausal(spec, first)
                                       ? BucketsOfDistances(*spec.relative_bias, positions)
                                       : BucketsOfSignedDistances(*spec.relative_bias, positions);
  std::vector<float> values;
  values.reserve(static_cast<size_t>(heads) * buckets.size());
  for (int h = 0; h < heads; ++h) {
    for (const int bucket : buckets) {
      values.push_back(ElementAsF32(table, int64_t{bucket} * heads + h));
    }
  }
  RelativeBiases biases;
  const auto size = static_cast<int>(buckets.size());
  biases.distances = IsCausal(spec, first) ? size : (size + 1) / 2;
  MOESERVE_ASSIGN_OR_RETURN(biases.values, load.backend.Upload(values));
  return biases;
}

namespace {

// Loads the router's tensors; `bias` and the settings `s` determine which ones there are.
// `vocabulary` is the number of rows of a table.
Result<RouterTensors> LoadRouterTensors(LoadContext& load, const std::string& prefix, bool bias,
                                        const RouteSettings& s, int vocabulary) {
  RouterTensors tensors;
  if (s.choice_bias) {
    MOESERVE_ASSIGN_OR_RETURN(tensors.choice_bias,
                              load.source.Get(prefix + ".choice_bias", {s.num_experts}));
  }
  if (s.row_norm == RowNorm::kRmsWeight) {
    MOESERVE_ASSIGN_OR_RETURN(tensors.row_weight,
                              load.source.Get(prefix + ".norm.weight", {s.input_width}));
  }
  if (s.expert_scale) {
    MOESERVE_ASSIGN_OR_RETURN(tensors.expert_scale,
                              load.source.Get(prefix + ".expert_scale", {s.num_experts}));
  }
  if (s.select == SelectKind::kTable) {
    const std::string table = prefix + ".table";
    MOESERVE_ASSIGN_OR_RETURN(tensors.table, load.source.GetIds(table, {vocabulary, s.k}));
    MOESERVE_RETURN_IF_ERROR(CheckExpertIds(table, tensors.table, s.k, s.num_experts));
  }
  switch (s.score) {
    case ScoreKind::kDot: {
      MOESERVE_ASSIGN_OR_RETURN(
          tensors.weight, load.source.Get(prefix + ".weight", {s.num_experts, s.input_width}));
      if (bias) {
        MOESERVE_ASSIGN_OR_RETURN(tensors.bias, load.source.Get(prefix + ".bias", {s.num_experts}));
      }
      break;
    }
    case ScoreKind::kCosine: {
      MOESERVE_ASSIGN_OR_RETURN(tensors.projection, load.source.Get(prefix + ".projection.weight",
                                                                    {s.dim, s.input_width}));
      MOESERVE_ASSIGN_OR_RETURN(
          tensors.weight, load.source.Get(prefix + ".experts.weight", {s.num_experts, s.dim}));
      if (bias) {
        MOESERVE_ASSIGN_OR_RETURN(tensors.bias,
                                  load.source.Get(prefix + ".projection.bias", {s.dim}));
      }
      if (s.temperature != TemperatureKind::kNone) {
        MOESERVE_ASSIGN_OR_RETURN(HostTensor t, load.source.Get(prefix + ".temperature", {1}));
        tensors.temperature = ElementAsF32(t, 0);
      }
      break;
    }
  }
  return tensors;
}

RouteSettings SettingsOf(const RoutedLayerSpec& spec, int input_width, float norm_eps) {
  RouteSettings s;
  s.num_experts = spec.num_experts;
  s.input_width = input_width;
  s.row_norm = spec.score.norm;
  s.norm_eps = norm_eps;
  s.row_scale = static_cast<float>(spec.score.row_scale);
  s.score = spec.score.kind;
  if (spec.score.kind == ScoreKind::kCosine) {
    s.dim = spec.score.dim;
    s.normalize_row = spec.score.normalize_row;
    s.normalize_expert = spec.score.normalize_expert;
    s.eps = static_cast<float>(spec.score.eps);
    s.temperature = spec.score.temperature;
  }
  s.gate = spec.gate;
  s.mixer_limit = static_cast<float>(spec.mixer_limit);
  s.select = spec.select.kind;
  s.k = spec.select.MaxSelected();
  s.p = static_cast<float>(spec.select.p);
  s.compare = spec.select.compare;
  s.choice_bias = spec.select.bias;
  s.groups = spec.select.groups;
  s.best_groups = spec.select.best_groups;
  s.group_score = spec.select.group_score;
  s.group_mask = spec.select.group_mask;
  s.renormalize = spec.renormalize;
  s.scale = static_cast<float>(spec.scale);
  s.expert_scale = spec.expert_scale;
  return s;
}

}  // namespace

Result<std::unique_ptr<Router>> LoadRouter(LoadContext& load, const std::string& prefix,
                                           const RoutedLayerSpec& spec, int input_width) {
  const RouteSettings settings = SettingsOf(spec, input_width, load.norm.eps);
  MOESERVE_ASSIGN_OR_RETURN(
      const RouterTensors tensors,
      LoadRouterTensors(load, prefix, spec.score.bias, settings, load.vocabulary));
  return load.backend.NewRouter(settings, tensors);
}

}  // namespace moeserve

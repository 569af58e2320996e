#include "tests/support/model_runner.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace moeserve::testing {
namespace {

// A matrix rounded to FP8, with what the numbers stand for.
struct RoundedFp8 {
  std::vector<uint8_t> codes;
  std::vector<float> values;
  Fp8Matrix matrix;
};

std::shared_ptr<RoundedFp8> RoundToFp8(const HostTensor& t) {
  auto rounded = std::make_shared<RoundedFp8>();
  const int64_t columns = t.shape[1];
  for (int64_t i = 0; i < t.size(); i += std::min(kFp8ScaleInputs + 0L, columns - i % columns)) {
    const int64_t group = std::min(kFp8ScaleInputs + 0L, columns - i % columns);
    float largest = 1e-6f;
    for (int64_t k = i; k < i + group; ++k) {
      largest = std::max(largest, std::abs(ElementAsF32(t, k)));
    }
    const float scale = largest / 448.0f;
    for (int64_t k = i; k < i + group; ++k) {
      const float x = ElementAsF32(t, k) / scale;
      int best = 0;
      for (int code = 0; code < 127; ++code) {
        if (std::abs(std::abs(x) - Fp8AsF32(code)) < std::abs(std::abs(x) - Fp8AsF32(best))) {
          best = code;
        }
      }
      rounded->codes.push_back(static_cast<uint8_t>(x < 0.0f ? best + 128 : best));
      rounded->values.push_back(Fp8AsF32(rounded->codes.back()) * scale);
    }
    rounded->matrix.scales.push_back(scale);
  }
  rounded->matrix.rows = t.shape[0];
  rounded->matrix.columns = rounded->matrix.row_stride = columns;
  rounded->matrix.values = rounded->codes.data();
  return rounded;
}

// The weights of `source`, with RunnerOptions::mxfp4 and round_to_fp8.
class RunnerWeights : public WeightSource {
 public:
  RunnerWeights(WeightSource& source, const RunnerOptions& options)
      : source_(source), mxfp4_(options.mxfp4), round_to_fp8_(options.round_to_fp8) {}
  Result<HostTensor> Get(std::string_view name, const std::vector<int64_t>& shape) override {
    Result<HostTensor> tensor = source_.Get(name, shape);
    if (tensor.ok() && Rounds(name, shape)) {
      const std::shared_ptr<RoundedFp8> rounded = RoundToFp8(*tensor);
      return HostTensor{rounded->values.data(), DType::kF32, shape, rounded};
    }
    if (tensor.ok() && mxfp4_.has_value()) tensor->mxfp4 = *mxfp4_;
    return tensor;
  }
  Result<std::optional<QuantizedMatrix>> GetQuantized(std::string_view name,
                                                      const std::vector<int64_t>& shape,
                                                      Quantization type) override {
    return source_.GetQuantized(name, shape, type);
  }
  Result<std::optional<Fp8Matrix>> GetFp8(std::string_view name,
                                          const std::vector<int64_t>& shape) override {
    if (!Rounds(name, shape)) return source_.GetFp8(name, shape);
    MOESERVE_ASSIGN_OR_RETURN(const HostTensor tensor, source_.Get(name, shape));
    const std::shared_ptr<RoundedFp8> rounded = RoundToFp8(tensor);
    std::optional<Fp8Matrix> matrix = rounded->matrix;
    matrix->owner = rounded;
    return matrix;
  }
  Result<std::vector<int32_t>> GetIds(std::string_view name,
                                      const std::vector<int64_t>& shape) override {
    return source_.GetIds(name, shape);
  }
  Quantization StoredQuantization() const override { return source_.StoredQuantization(); }
  absl::Status Check() const override { return source_.Check(); }
  DType DominantDType() const override { return source_.DominantDType(); }

 private:
  bool Rounds(std::string_view name, const std::vector<int64_t>& shape) const {
    const auto has = [name](std::string_view part) {
      return name.find(part) != std::string_view::npos;
    };
    return round_to_fp8_ && shape.size() == 2 && (has(".experts.") || has(".attention.")) &&
           name.ends_with(".weight");
  }

  WeightSource& source_;
  const std::optional<bool> mxfp4_;
  const bool round_to_fp8_;
};

}  // namespace

float Fp8AsF32(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(mantissa), -9)
                              : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return code < 128 ? magnitude : -magnitude;
}

Result<std::unique_ptr<ModelRunner>> ModelRunner::Load(const std::filesystem::path& path,
                                                       const RunnerOptions& options) {
  auto runner = std::make_unique<ModelRunner>();
  MOESERVE_ASSIGN_OR_RETURN(Checkpoint checkpoint, LoadCheckpoint(path, options.load));
  MOESERVE_ASSIGN_OR_RETURN(runner->backend_, CreateBackend({.device = options.device,
                                                             .threads = options.threads,
                                                             .cpu_isa = options.isa}));
  ModelOptions model{.compute = options.compute,
                     .quantization = options.quantization,
                     .keep_fp8 = options.keep_fp8,
                     .tiers = options.tiers};
  if (options.exchange != nullptr) {
    runner->placement_ = options.placement(checkpoint.spec, options.exchange->ranks());
    model.exchange = options.exchange;
    model.placement = &runner->placement_;
    model.split_rows = options.split_rows;
    model.split_head = options.split_head;
    model.owner_sums = options.owner_sums;
  }
  RunnerWeights weights(*checkpoint.weights, options);
  std::unique_ptr<PackedCache> packed;
  if (!options.packed_folder.empty()) {
    PackedCacheOptions cache{.folder = options.packed_folder,
                             .place = checkpoint.identity.place,
                             .state = checkpoint.identity.state,
                             .warn = {}};
    MOESERVE_ASSIGN_OR_RETURN(packed, PackedCache::Open(std::move(cache), *runner->backend_));
  }
  MOESERVE_ASSIGN_OR_RETURN(runner->model_, Model::Create(checkpoint.spec, model, weights,
                                                          *runner->backend_, packed.get()));
  if (packed != nullptr) runner->packed_found_ = packed->found();
  const std::vector<KvLayerShape> shapes = CacheShapes(checkpoint.spec);
  const int64_t blocks = options.cache_tokens / kPageTokens;
  MOESERVE_ASSIGN_OR_RETURN(
      runner->cache_,
      runner->backend_->NewKvCache(shapes, options.cache.value_or(KvCacheTypeOf(options.compute)),
                                   {blocks}));
  if (checkpoint.spec.prediction != nullptr) {
    MOESERVE_ASSIGN_OR_RETURN(
        runner->predicted_, runner->backend_->NewKvCache(
                                CacheShapes(*checkpoint.spec.prediction),
                                options.cache.value_or(KvCacheTypeOf(options.compute)), {blocks}));
  }
  // Consecutive cache blocks belong to different sequences, so that a kernel which reads a wrong
  // block returns wrong results.
  const int slots = static_cast<int>(options.cache_tokens / kTokensPerSlot);
  runner->tables_.resize(static_cast<size_t>(slots));
  if (std::vector<StateShape> states = StateShapes(checkpoint.spec); !states.empty()) {
    MOESERVE_ASSIGN_OR_RETURN(runner->states_,
                              runner->backend_->NewStates(std::move(states), slots, 0));
    runner->state_tokens_.resize(static_cast<size_t>(slots));
  }
  for (int64_t b = 0; b < blocks; ++b) {
    runner->tables_[b % slots].push_back(static_cast<int32_t>(b));
  }
  return runner;
}

std::vector<float> ModelRunner::Run(const std::vector<int32_t>& tokens, int chunk, int begin,
                                    const StepSetup& setup, int slot) {
  std::vector<float> logits;
  for (size_t at = 0; at < tokens.size(); at += static_cast<size_t>(chunk)) {
    const size_t end = std::min(tokens.size(), at + static_cast<size_t>(chunk));
    const std::vector<float> part = RunTogether(
        {{slot,
          begin + static_cast<int>(at),
          {tokens.begin() + static_cast<int64_t>(at), tokens.begin() + static_cast<int64_t>(end)}}},
        setup);
    logits.insert(logits.end(), part.begin(), part.end());
  }
  return logits;
}

void ModelRunner::AddStates(const Part& part, BatchStates& states) {
  if (part.begin == 0) states_->Clear(part.slot);
  int& covered = state_tokens_[static_cast<size_t>(part.slot)];
  MOESERVE_CHECK(part.begin == 0 || part.begin == covered, "the state before the part");
  covered = part.begin + static_cast<int>(part.tokens.size());
  states.Add(*states_, part.slot, static_cast<int>(part.tokens.size()));
}

void ModelRunner::AddTexts(const std::vector<Part>& parts, Batch& batch,
                           std::vector<float>& texts) const {
  int32_t begin = 0;
  for (const Part& p : parts) {
    const int32_t end = begin + static_cast<int32_t>(p.tokens.size());
    const PoolingKind kind = spec().pooling->kind;
    if (PoolsAll(kind)) {
      batch.pool_ranges.push_back({begin, end});
    } else {
      batch.text_rows.push_back(kind == PoolingKind::kFirst ? begin : end - 1);
    }
    begin = end;
  }
  texts.resize(parts.size() * static_cast<size_t>(TextOutputs(spec())));
}

std::vector<float> ModelRunner::RunTogether(const std::vector<Part>& parts,
                                            const StepSetup& setup) {
  Batch batch;
  const std::optional<double> long_from = LongSequencesFrom(spec());
  const auto tokens_of = [](const Part& part) { return static_cast<double>(part.tokens.size()); };
  for (const Part& p : parts) {
    const int index = static_cast<int>(batch.page_tables.size());
    batch.page_tables.emplace_back(tables_[p.slot]);
    if (states_ != nullptr) AddStates(p, batch.states);
    const bool is_long = long_from.has_value() && p.begin + tokens_of(p) > *long_from;
    batch.token_types.resize(batch.tokens.size());
    batch.token_types.insert(batch.token_types.end(), p.types.begin(), p.types.end());
    for (size_t i = 0; i < p.tokens.size(); ++i) {
      batch.logit_rows.push_back(batch.num_tokens());
      batch.tokens.push_back(p.tokens[i]);
      batch.positions.push_back(p.begin + static_cast<int32_t>(i));
      batch.sequence.push_back(index);
      batch.long_sequence.push_back(is_long ? 1 : 0);
      batch.phase.push_back(Phase::kPrefill);
    }
  }
  batch.token_types.resize(batch.tokens.size());
  if (RowOutputs(spec()) == 0) batch.logit_rows.clear();
  if (spec().kind == ModelKind::kEncoder) {
    for (const Part& p : parts) batch.lengths.push_back(static_cast<int32_t>(p.tokens.size()));
  }
  if (setup.texts != nullptr) AddTexts(parts, batch, *setup.texts);
  std::vector<float> logits(batch.logit_rows.size() * static_cast<size_t>(RowOutputs(spec())));
  batch.given = setup.given;
  StepResults results{.logits = logits};
  if (setup.texts != nullptr) results.texts = *setup.texts;
  const StepReport report = model_->Forward(batch, *cache_, setup.options, results);
  if (setup.report) setup.report(report);
  return logits;
}

std::vector<float> ModelRunner::Predict(const std::vector<int32_t>& next, int begin, int source,
                                        bool predicted, int slot) {
  Batch batch;
  batch.page_tables.emplace_back(tables_[slot]);
  std::vector<int32_t> sources;
  for (size_t i = 0; i < next.size(); ++i) {
    batch.logit_rows.push_back(batch.num_tokens());
    batch.tokens.push_back(next[i]);
    batch.positions.push_back(begin + static_cast<int32_t>(i));
    batch.sequence.push_back(0);
    batch.phase.push_back(Phase::kDecode);
    sources.push_back(source + static_cast<int32_t>(i));
  }
  std::vector<float> logits(next.size() * static_cast<size_t>(vocab()));
  model_->Predict(batch, {.rows = sources, .predicted = predicted}, *predicted_,
                  {.logits = logits});
  return logits;
}

double LogSoftmaxAt(const float* logits, int vocab, int token) {
  const double highest = *std::max_element(logits, logits + vocab);
  double sum = 0.0;
  for (int i = 0; i < vocab; ++i) sum += std::exp(logits[i] - highest);
  return logits[token] - highest - std::log(sum);
}

}  // namespace moeserve::testing

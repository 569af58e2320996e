#include "engine/model/model.h"

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <stop_token>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/error_text.h"
#include "engine/model/block_stack.h"
#include "engine/model/output_head.h"
#include "engine/model/prediction_stack.h"
#include "engine/step/report_buffer.h"
#include "engine/step/workspace.h"
#include "kernels/rank_ops.h"

namespace moeserve {
namespace {

// Rows f32 in device memory that outlive a step.
class KeptRows {
 public:
  // Returns the first rows, which the caller writes. If there is not enough memory, the process
  // stops with a message, as with memory for activations. `moved` is called before memory is
  // replaced; then the rows are lost.
  RowsView First(Backend& backend, int64_t rows, int64_t cols, const std::function<void()>& moved) {
    const auto bytes = static_cast<size_t>(rows * cols) * sizeof(float);
    if (buffer_ == nullptr || buffer_->bytes() < bytes) {
      moved();
      buffer_.reset();
      Result<std::unique_ptr<DeviceBuffer>> buffer = backend.Allocate(bytes);
      MOESERVE_CHECK(buffer.ok(), "memory for the rows that prediction layers continue");
      buffer_ = *std::move(buffer);
    }
    return {buffer_->data(), DType::kF32, rows, cols, cols};
  }

  // Returns all rows for which there is memory.
  RowsView All(int64_t cols) const {
    const auto rows = static_cast<int64_t>(buffer_->bytes() / sizeof(float)) / cols;
    return {buffer_->data(), DType::kF32, rows, cols, cols};
  }

 private:
  std::unique_ptr<DeviceBuffer> buffer_;
};

bool DividesHead(const ModelSpec& spec, const ModelOptions& options) {
  if (options.exchange == nullptr || !HasVocabulary(spec.head.kind)) return false;
  if (options.split_head != SplitChoice::kAuto) return options.split_head == SplitChoice::kOn;
  return options.exchange->ranks() > 1 && !spec.tie_word_embeddings;
}

}  // namespace

class Model::Impl {
 public:
  Impl(const ModelSpec& s, const ModelOptions& o, Backend& b)
      : spec(s),
        options(o),
        backend(b),
        divides_head(DividesHead(s, o)),
        workspace(b),
        has_states_(!StateShapes(s).empty()),
        tiers_(b.weight_pages(), o.tiers),
        stack_(spec, o.compute) {
    if (spec.encoder != nullptr) encoder_ = std::make_unique<BlockStack>(*spec.encoder, o.compute);
    if (spec.prediction != nullptr) {
      prediction_ = std::make_unique<PredictionStack>(*spec.prediction, o.compute);
    }
  }
  ~Impl() { ForgetSteps(); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  absl::Status Load(WeightSource& source, PackedCache* packed_cache);
  absl::Status Reserve(int tokens, int logit_rows, KvCacheType cache_type,
                       const RoutingControl* widest, ReportContents contents);
  StepReport Forward(const Batch& batch, KvCacheStorage& cache, const StepOptions& step,
                     const StepResults& results);
  void WriteInBackground(std::unique_ptr<PackedCache> packed_cache);
  StepReport EncodeSources(const Batch& batch, KvCacheStorage& cache, const StepOptions& step);
  void Predict(const Batch& batch, const PredictionSources& sources, KvCacheStorage& cache,
               const StepResults& results);
  TierCounts tier_counts() const { return tiers_.counts(); }
  const ReportBuffer& reported() { return stack_.reported(); }
  absl::Status CheckFiles() {
    MOESERVE_RETURN_IF_ERROR(CheckWeights());
    return listener_status_;
  }

  const ModelSpec spec;
  const ModelOptions options;
  Backend& backend;
  const bool divides_head;
  Workspace workspace;

 private:
  // Issues the operations of a step with the residual stream `x`, up to the logits [outputs,
  // RowOutputs()] and the outputs of texts [texts, TextOutputs()].
  void Issue(StepContext& ctx, const RowsView& x, const RowsView& logits, const RowsView& texts);

  // The same for a step of the prediction layers, whose rows go to `x`.
  void IssuePrediction(StepContext& ctx, bool predicted, const RowsView& x, const RowsView& logits);

  // Returns memory for the rows of a step, which prediction layers may continue after it.
  RowsView Kept(KeptRows& kept, int64_t tokens) {
    return kept.First(backend, tokens, spec.hidden_size, [this] { ForgetSteps(); });
  }
  // Forgets recorded steps.
  void ForgetSteps() {
    backend.ForgetSteps(this);
    backend.ForgetSteps(&predicted_rows_);
  }

  void ReadOutputs(const Batch& batch, const RowsView& scores, std::span<float> logits,
                   std::span<SampleResult> samples);

  // Returns what a step of the stack on the batch begins with.
  StepInputs InputsOf(const Batch& batch, const KvCacheStorage& cache,
                      const StepOptions& step) const;
  // Begins a step that reports what `step` asks for, and runs `issue` with its context.
  StepReport RunStep(BlockStack& stack, const Batch& batch, KvCacheStorage& cache,
                     const StepOptions& step, int64_t tokens,
                     const std::function<void(StepContext&)>& issue,
                     const std::function<void()>& read);

  StepDivision DivisionOf(const Batch& batch) const;
  // Whether this rank has logits after a step.
  bool WritesLogits() const { return !divides_head || options.exchange->rank() == 0; }

  void BeforeStep(StepKind kind, const Batch& batch, KvCacheStorage& cache,
                  const PredictionSources& sources = {}) {
    if (options.listener == nullptr) return;
    options.listener->BeforeStep(kind, batch, cache, sources, DivisionOf(batch));
  }
  // `x`: the residual stream of the step.
  void AfterStep(const RowsView& x) {
    if (options.listener == nullptr) return;
    listener_status_ = options.listener->AfterStep(backend.rank_ops()->Checksum(x), CheckWeights());
  }
  // Returns the first error of the files from which weights are read.
  absl::Status CheckWeights() {
    MOESERVE_RETURN_IF_ERROR(files_in_use_.Check());
    return tiers_.status();
  }

  std::unique_ptr<OutputHead> head_;
  absl::Status listener_status_;
  const bool has_states_;
  std::vector<int32_t> output_rows_;  // of the current step
  RankShare share_;
  WatchedMappings files_in_use_;                 // kept alive by the members below
  ExpertTiers tiers_;                            // outlives the stacks
  BlockStack stack_;                             // the decoder's, if there is an encoder beside it
  std::unique_ptr<BlockStack> encoder_;          // null if there is only one stack
  std::unique_ptr<PredictionStack> prediction_;  // null if there is none
  KeptRows rows_, predicted_rows_;               // the last steps' streams, before the final norm
  std::jthread writer_;                          // reads the members above
};

void Model::Impl::WriteInBackground(std::unique_ptr<PackedCache> packed_cache) {
  if (!packed_cache->has_deferred()) return;
  writer_ = std::jthread([cache = std::move(packed_cache)](const std::stop_token& stop) {
    pthread_setname_np(pthread_self(), "packed-writer");
    setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), 19);
    cache->WriteDeferred([&stop] { return stop.stop_requested(); });
  });
}

absl::Status Model::Impl::Load(WeightSource& source, PackedCache* packed_cache) {
  LoadContext load{source,       backend,        options.compute, spec.norm, options.quantization,
                   packed_cache, spec.vocab_size};
  share_ = {options.exchange, options.placement, divides_head};
  if (share_.exchange != nullptr) load.ranks = &share_;
  load.files_in_use = &files_in_use_;
  load.tiers = &tiers_;
  load.keep_fp8 = options.keep_fp8;
  MOESERVE_ASSIGN_OR_RETURN(head_, OutputHead::Load(load, spec));
  const LinearBank* const tied = spec.tie_word_embeddings ? head_->vocabulary() : nullptr;
  MOESERVE_RETURN_IF_ERROR(stack_.Load(load, tied, nullptr));
  if (prediction_ != nullptr) {
    MOESERVE_RETURN_IF_ERROR(prediction_->Load(load, stack_.tokens()));
  }
  if (encoder_ != nullptr) {
    load.first_cache_layer = FirstEncoderLayer(spec);
    load.vocabulary = spec.encoder->vocab_size;
    MOESERVE_RETURN_IF_ERROR(
        encoder_->Load(load, nullptr, spec.share_embeddings ? &stack_.tokens() : nullptr));
  }
  tiers_.FinishLoading(backend.weight_bytes());
  return absl::OkStatus();
}

StepDivision Model::Impl::DivisionOf(const Batch& batch) const {
  if (options.exchange == nullptr) return {};
  const int ranks = options.exchange->ranks();
  const bool worth = ranks > 1 && batch.num_tokens() >= ModelOptions::kRowsToDivide * ranks;
  const bool chosen =
      options.split_rows == SplitChoice::kAuto ? worth : options.split_rows == SplitChoice::kOn;
  return {.rows = batch.divide_rows.value_or(chosen), .head = divides_head};
}

StepReport Model::Impl::Forward(const Batch& batch, KvCacheStorage& cache, const StepOptions& step,
                                const StepResults& results) {
  MOESERVE_CHECK(!WritesLogits() || !batch.samples.empty() ||
                     std::ssize(results.logits) >= std::ssize(batch.logit_rows) * RowOutputs(spec),
                 "room for the logits");
  const int64_t num_texts = batch.num_texts();
  MOESERVE_CHECK(std::ssize(results.texts) >= num_texts * TextOutputs(spec),
                 "room for the outputs of texts");
  if (batch.num_tokens() == 0) return {};
  BeforeStep(StepKind::kForward, batch, cache);
  MOESERVE_CHECK(has_states_ == (batch.states.storage != nullptr), "states if the model has them");
  const Workspace::Scope scope(workspace);
  output_rows_ = batch.logit_rows;
  output_rows_.insert(output_rows_.end(), batch.text_rows.begin(), batch.text_rows.end());
  const bool replayable = batch.given.empty() && batch.controls.empty() && batch.lengths.empty() &&
                          num_texts == 0 && options.exchange == nullptr;
  StepInputs inputs = InputsOf(batch, cache, step);
  inputs.output_rows = output_rows_;
  inputs.pool_ranges = batch.pool_ranges;
  inputs.samples = batch.samples;
  const StepRows rows = backend.BeginStep(inputs, this, replayable);
  const RowsView scores =
      workspace.TakeDense(rows.outputs - std::ssize(batch.text_rows),
                          WritesLogits() ? std::max(RowOutputs(spec), 1) : 1, DType::kF32);
  const RowsView texts =
      workspace.TakeDense(num_texts, std::max(TextOutputs(spec), 1), DType::kF32);
  const RowsView x = prediction_ != nullptr
                         ? Kept(rows_, rows.tokens)
                         : workspace.TakeDense(rows.tokens, spec.hidden_size, DType::kF32);
  return RunStep(
      stack_, batch, cache, step, rows.tokens,
      [&](StepContext& ctx) { Issue(ctx, x, scores, texts); },
      [&] {
        ReadOutputs(batch, scores, results.logits, results.samples);
        if (num_texts > 0) backend.CopyToHost(texts, results.texts.first(num_texts * texts.cols));
        AfterStep(x);
      });
}

StepInputs Model::Impl::InputsOf(const Batch& batch, const KvCacheStorage& cache,
                                 const StepOptions& step) const {
  const std::span<const uint8_t> kind(reinterpret_cast<const uint8_t*>(batch.phase.data()),
                                      batch.phase.size());
  return {.token_ids = batch.tokens,
          .position = batch.positions,
          .sequence = batch.sequence,
          .page_tables = batch.page_tables,
          .lengths = batch.lengths,
          .long_sequence = batch.long_sequence,
          .token_types = batch.token_types,
          .cache = &cache,
          .state_storage = batch.states.storage,
          .states = batch.states.view(),
          .counters = step.counters,
          .kind = kind,
          .count_later = step.count_later,
          .variant = step.report.scores + 2 * step.report.inputs};
}

StepReport Model::Impl::RunStep(BlockStack& stack, const Batch& batch, KvCacheStorage& cache,
                                const StepOptions& step, int64_t tokens,
                                const std::function<void(StepContext&)>& issue,
                                const std::function<void()>& read) {
  ReportBuffer& reported = stack.reported();
  RowsView kept;
  if (const int64_t floats = reported.Floats(tokens, step.report); floats > 0) {
    kept = workspace.TakeDense(1, floats, DType::kF32);
  }
  reported.Place(tokens, step.report, kept);
  StepContext ctx{backend, workspace, options.compute, batch, cache, reported, {}, {}, {}};
  if (DivisionOf(batch).rows) ctx.division = RowDivision(tokens, *options.exchange);
  tiers_.BeginStep();
  backend.RunStep([&] { issue(ctx); });
  if (step.meanwhile) step.meanwhile();
  read();
  tiers_.EndStep();
  const StepOutcome outcome = backend.FinishStep();
  StepReport report{.failed = outcome.failed, .routes = outcome.routes, .blocks = {}};
  if (step.report.any()) report.blocks = reported.Report(backend, step.report);
  return report;
}

StepReport Model::Impl::EncodeSources(const Batch& batch, KvCacheStorage& cache,
                                      const StepOptions& step) {
  MOESERVE_CHECK(encoder_ != nullptr, "an encoder");
  BeforeStep(StepKind::kEncodeSources, batch, cache);
  const Workspace::Scope scope(workspace);
  const StepRows rows = backend.BeginStep(InputsOf(batch, cache, step), this, false);
  uint64_t checksum = 0;
  return RunStep(
      *encoder_, batch, cache, step, rows.tokens,
      [&](StepContext& ctx) {
        const Workspace::Scope inner(workspace);
        const RowsView x = workspace.TakeDense(rows.tokens, spec.hidden_size, DType::kF32);
        encoder_->Run(ctx, x);
        const RowsView source = workspace.TakeDense(rows.tokens, spec.hidden_size, options.compute);
        encoder_->Finish(backend, x, source);
        stack_.RememberSource(ctx, source);
        if (options.listener != nullptr) checksum = backend.rank_ops()->Checksum(x);
      },
      [&] {
        if (options.listener == nullptr) return;
        listener_status_ = options.listener->AfterStep(checksum, CheckWeights());
      });
}

void Model::Impl::Predict(const Batch& batch, const PredictionSources& sources,
                          KvCacheStorage& cache, const StepResults& results) {
  MOESERVE_CHECK(prediction_ != nullptr, "prediction layers");
  MOESERVE_CHECK(std::ssize(sources.rows) == batch.num_tokens(), "a source of each row");
  if (batch.num_tokens() == 0) return;
  BeforeStep(StepKind::kPredict, batch, cache, sources);
  const Workspace::Scope scope(workspace);
  StepInputs inputs = InputsOf(batch, cache, {});
  inputs.output_rows = batch.logit_rows;
  inputs.source_rows = sources.rows;
  inputs.samples = batch.samples;
  inputs.variant = sources.predicted ? 1 : 0;
  const StepRows rows =
      backend.BeginStep(inputs, &predicted_rows_, /*replayable=*/options.exchange == nullptr);
  const RowsView logits =
      workspace.TakeDense(rows.outputs, WritesLogits() ? spec.vocab_size : 1, DType::kF32);
  const RowsView x = Kept(predicted_rows_, rows.tokens);
  RunStep(
      prediction_->blocks(), batch, cache, {}, rows.tokens,
      [&](StepContext& ctx) { IssuePrediction(ctx, sources.predicted, x, logits); },
      [&] {
        ReadOutputs(batch, logits, results.logits, results.samples);
        AfterStep(x);
      });
}

void Model::Impl::IssuePrediction(StepContext& ctx, bool predicted, const RowsView& x,
                                  const RowsView& logits) {
  const Workspace::Scope scope(workspace);
  const RowsView hidden = workspace.TakeDense(x.rows, x.cols, DType::kF32);
  const auto normalize = [&](bool of_prediction, const RowsView& rows) {
    if (of_prediction) {
      prediction_->Normalize(backend, rows, rows);
    } else {
      head_->Normalize(backend, rows, rows);
    }
  };
  backend.GatherSourceRows((predicted ? predicted_rows_ : rows_).All(x.cols), hidden);
  normalize(predicted, hidden);
  prediction_->Run(ctx, hidden, x);
  if (logits.rows == 0) return;
  const RowsView rows = workspace.TakeDense(logits.rows, x.cols, DType::kF32);
  backend.GatherOutputRows(x, rows);
  normalize(true, rows);
  head_->RunHead(backend, workspace, rows, logits);
  if (backend.samples_on_device()) backend.Sample(logits);
}

void Model::Impl::ReadOutputs(const Batch& batch, const RowsView& scores, std::span<float> logits,
                              std::span<SampleResult> samples) {
  if (!WritesLogits()) return;
  const size_t rows = batch.logit_rows.size();
  const auto wanted = [&](size_t row) {
    return batch.samples.empty() || batch.samples[row].row < 0;
  };
  bool sampled = false;
  for (size_t begin = 0; begin < rows;) {
    if (!wanted(begin)) {
      sampled = true;
      ++begin;
      continue;
    }
    size_t end = begin;
    while (end < rows && wanted(end)) ++end;
    RowsView part = scores;
    part.data = scores.row(static_cast<int64_t>(begin));
    part.rows = static_cast<int64_t>(end - begin);
    const auto width = static_cast<size_t>(RowOutputs(spec));
    backend.CopyToHost(part, logits.subspan(begin * width, (end - begin) * width));
    begin = end;
  }
  if (sampled) backend.ReadSamples(samples);
}

void Model::Impl::Issue(StepContext& ctx, const RowsView& x, const RowsView& logits,
                        const RowsView& texts) {
  // A backend may issue a step twice; this scope releases the buffers of each issue at its end.
  const Workspace::Scope scope(workspace);
  stack_.Run(ctx, x);
  RowsView rows;  // the rows of `logits`, then those of `texts` that need no pooling
  const int64_t text_rows = std::ssize(ctx.batch.text_rows);
  if (logits.rows + text_rows > 0) {
    rows = workspace.TakeDense(logits.rows + text_rows, spec.hidden_size, DType::kF32);
    backend.GatherOutputRows(x, rows);
  }
  if (texts.rows > 0) {
    RowsView of_texts = rows;
    if (text_rows > 0) of_texts.data = rows.row(logits.rows);
    of_texts.rows = text_rows;
    head_->RunTexts(backend, workspace, of_texts, x, texts);
  }
  if (logits.rows == 0) return;
  rows.rows = logits.rows;
  head_->RunRows(backend, workspace, rows, logits);
  if (backend.samples_on_device() && HasVocabulary(spec.head.kind)) backend.Sample(logits);
}

absl::Status Model::Impl::Reserve(int tokens, int logit_rows, KvCacheType cache_type,
                                  const RoutingControl* widest, ReportContents contents) {
  std::vector<int64_t> pages(spec.encoder != nullptr ? kEncoderTable + 1 : 1, 1);
  MOESERVE_ASSIGN_OR_RETURN(const std::unique_ptr<KvCacheStorage> cache,
                            backend.NewKvCache(CacheShapes(spec), cache_type, pages));
  // Negative sequence ids have no states, but the operations refer to a storage.
  std::unique_ptr<StateStorage> states;
  if (std::vector<StateShape> shapes = StateShapes(spec); !shapes.empty()) {
    MOESERVE_ASSIGN_OR_RETURN(states, backend.NewStates(std::move(shapes), 1, 0));
  }
  Batch batch;
  batch.states.storage = states.get();
  batch.tokens.assign(static_cast<size_t>(tokens), 0);
  batch.positions = batch.tokens;
  batch.phase.assign(batch.tokens.size(), Phase::kPrefill);
  for (int row = 0; row < std::min(tokens, logit_rows); ++row) batch.logit_rows.push_back(row);
  // Requests a sampled token for every row. Forward() then needs no buffer for logits.
  SampleRow greedy{};
  greedy.logprobs = -1;
  batch.samples.assign(batch.logit_rows.size(), greedy);
  std::vector<SampleResult> results(batch.samples.size());
  // With negative sequence ids nothing is read from or written to the cache. Adjacent rows have
  // different ids, so that they count as decoding rows, for which attention takes scratch memory;
  // adjacent rows of one prompt would take none.
  for (int t = 0; t < tokens; ++t) batch.sequence.push_back(-1 - t % 2);
  backend.BeginTuning();
  Forward(batch, *cache, {.report = contents}, {.samples = results});
  if (widest != nullptr) {
    batch.controls = {widest};
    Forward(batch, *cache, {.report = contents}, {.samples = results});
  }
  if (spec.encoder != nullptr) {
    batch.logit_rows.clear();
    batch.samples.clear();
    EncodeSources(batch, *cache, {.report = contents});
  }
  std::unique_ptr<KvCacheStorage> predicted;
  if (prediction_ != nullptr) {
    MOESERVE_ASSIGN_OR_RETURN(predicted,
                              backend.NewKvCache(CacheShapes(*spec.prediction), cache_type, {1}));
    batch.controls.clear();
    batch.states = {};
    const std::vector<int32_t> sources(batch.tokens.size(), 0);
    Predict(batch, {.rows = sources}, *predicted, {.samples = results});
  }
  MOESERVE_RETURN_IF_ERROR(backend.EndTuning());
  ForgetSteps();  // captured graphs refer to the caches, which are destroyed here
  return absl::OkStatus();
}

Model::Model(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Model::~Model() = default;

Result<std::unique_ptr<Model>> Model::Create(const ModelSpec& spec, const ModelOptions& options,
                                             WeightSource& source, Backend& backend,
                                             PackedCache* packed_cache) {
  MOESERVE_RETURN_IF_ERROR(Validate(spec));
  if (options.compute == DType::kF16) {
    return absl::InvalidArgumentError("arithmetic type: expected f32 or bf16, found f16");
  }
  if (options.quantization != Quantization::kNone && options.compute != DType::kBF16) {
    return absl::InvalidArgumentError(
        "arithmetic type: expected bf16 beside quantized weights, "
        "found " +
        std::string(Name(options.compute)));
  }
  if (options.exchange != nullptr) {
    MOESERVE_CHECK(options.placement != nullptr, "a placement of the experts on the ranks");
    if (backend.rank_ops() == nullptr) {
      return absl::UnimplementedError(Concat("ranks: expected device cpu, found ", backend.name()));
    }
  }
  auto impl = std::make_unique<Impl>(spec, options, backend);
  const absl::Status loaded = impl->Load(source, packed_cache);
  MOESERVE_RETURN_IF_ERROR(source.Check());  // explains any error of a tensor that became zeros
  MOESERVE_RETURN_IF_ERROR(loaded);
  return std::unique_ptr<Model>(new Model(std::move(impl)));
}

StepReport Model::Forward(const Batch& batch, KvCacheStorage& cache, const StepOptions& options,
                          const StepResults& results) {
  return impl_->Forward(batch, cache, options, results);
}

void Model::Predict(const Batch& batch, const PredictionSources& sources, KvCacheStorage& cache,
                    const StepResults& results) {
  impl_->Predict(batch, sources, cache, results);
}

StepReport Model::EncodeSources(const Batch& batch, KvCacheStorage& cache,
                                const StepOptions& options) {
  return impl_->EncodeSources(batch, cache, options);
}

std::span<const TokenRoutes> Model::CountStep(std::span<const Phase> phase) {
  return impl_->backend.CountStep({reinterpret_cast<const uint8_t*>(phase.data()), phase.size()});
}

void Model::WriteInBackground(std::unique_ptr<PackedCache> packed_cache) {
  impl_->WriteInBackground(std::move(packed_cache));
}

absl::Status Model::CheckFiles() { return impl_->CheckFiles(); }

TierCounts Model::tier_counts() const { return impl_->tier_counts(); }

int64_t Model::ReportFloatsPerToken(ReportContents contents) const {
  return impl_->reported().Floats(1, contents);
}

absl::Status Model::Reserve(int tokens, int logit_rows, KvCacheType cache_type,
                            const RoutingControl* widest, ReportContents contents) {
  if (!impl_->backend.needs_reservation()) return absl::OkStatus();
  return impl_->Reserve(tokens, logit_rows, cache_type, widest, contents);
}

const ModelSpec& Model::spec() const { return impl_->spec; }
const ModelOptions& Model::options() const { return impl_->options; }
bool Model::divides_head() const { return impl_->divides_head; }
Backend& Model::backend() const { return impl_->backend; }
int64_t Model::weight_bytes() const { return impl_->backend.weight_bytes(); }

}  // namespace moeserve

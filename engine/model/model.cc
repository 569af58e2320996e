#include "engine/model/model.h"

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <stop_token>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/error_text.h"
#include "engine/model/block_stack.h"
#include "engine/model/device_bytes.h"
#include "engine/model/output_head.h"
#include "engine/model/prediction_stack.h"
#include "engine/model/step_watch.h"
#include "engine/spec/weights.h"
#include "engine/step/report_buffer.h"
#include "engine/step/workspace.h"
#include "kernels/expert_slots.h"
#include "kernels/movable_experts.h"
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

// Returns null if the device cannot move experts.
MovableExperts* Movable(LinearBank* bank) { return dynamic_cast<MovableExperts*>(bank); }

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
  const std::shared_ptr<const ExpertPlacement>& placement() const { return placement_; }
  ExpertPlacement::Blocks MissingExperts(const ExpertPlacement& placement) const;
  // Returns the banks of a routed block.
  std::vector<LinearBank*> BanksOf(std::pair<Stack, int> block) const;
  void UsePlacement(std::shared_ptr<const ExpertPlacement> placement, LoadedExperts loaded);
  std::vector<std::shared_ptr<const void>> DropExperts();
  absl::Status CheckFiles(bool now) {
    const absl::Status weights = CheckWeights(now);
    if (weights.ok()) return listener_status_;
    if (options.exchange != nullptr) {
      options.exchange->Lose(options.exchange->rank(), std::string(weights.message()));
    }
    return weights;
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
  // Whether steps may be replayable: the host decides nothing in the middle of them.
  bool CanReplay() const { return options.exchange == nullptr && !tiers_.uses_slots(); }
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
  // What ranks compare of a residual stream.
  uint64_t RankChecksum(const RowsView& x) {
    return options.rank_checksums ? backend.rank_ops()->Checksum(x) : 0;
  }
  // `x`: the residual stream of the step.
  void AfterStep(const RowsView& x) {
    if (options.listener == nullptr) return;
    listener_status_ = options.listener->AfterStep(RankChecksum(x), CheckWeights());
  }
  StepWatch Watch() {
    return {options.listener, options.exchange, listener_status_,
            [this] { return CheckWeights(); }};
  }
  // Returns the first error of the files from which weights are read.
  absl::Status CheckWeights(bool now = false) {
    // A file that was just cut short may be why ranks do not agree.
    now = now || (options.exchange != nullptr && !options.exchange->status().ok());
    MOESERVE_RETURN_IF_ERROR(files_in_use_.Check(now));
    return tiers_.status();
  }

  std::unique_ptr<OutputHead> head_;
  absl::Status listener_status_;
  const bool has_states_;
  std::vector<int32_t> output_rows_;                  // of the current step
  std::shared_ptr<const ExpertPlacement> placement_;  // null without ranks
  RankShare share_;
  // What was loaded with the experts of the last UsePlacement(), until DropExperts().
  std::shared_ptr<const void> leftovers_;
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
  if (options.exchange != nullptr) {
    placement_ = {std::shared_ptr<const void>(), options.placement};
  }
  share_ = {.exchange = options.exchange,
            .placement = options.placement,
            .watch = options.load_watch,
            .divide_head = divides_head,
            .owner_sums = options.owner_sums};
  if (share_.exchange != nullptr) load.ranks = &share_;
  load.files_in_use = &files_in_use_;
  load.tiers = &tiers_;
  load.keep_fp8 = options.keep_fp8;
  if (auto* const device = dynamic_cast<ExpertSlotsDevice*>(&backend); device != nullptr) {
    const auto [experts, dense] = DeviceWeightBytes(spec, options, source.DominantDType());
    tiers_.UseSlotsOf(*device, experts, dense);
  }
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
  return tiers_.FinishLoading(backend.weight_bytes());
}

StepDivision Model::Impl::DivisionOf(const Batch& batch) const {
  if (options.exchange == nullptr) return {};
  const int ranks = options.exchange->ranks();
  const bool worth = ranks > 1 && batch.num_tokens() >= ModelOptions::kRowsToDivide * ranks;
  const bool chosen =
      options.split_rows == SplitChoice::kAuto ? worth : options.split_rows == SplitChoice::kOn;
  return {.rows = batch.divide_rows.value_or(chosen), .head = divides_head};
}

std::vector<LinearBank*> Model::Impl::BanksOf(std::pair<Stack, int> block) const {
  const BlockStack* const encoder = encoder_.get();
  const BlockStack* const prediction = prediction_ == nullptr ? nullptr : &prediction_->blocks();
  for (const BlockStack* stack : {&stack_, encoder, prediction}) {
    if (stack != nullptr && stack->spec().stack == block.first) {
      return stack->routed(block.second)->body().banks();
    }
  }
  MOESERVE_CHECK(false, "a block of the model");
  return {};
}

ExpertPlacement::Blocks Model::Impl::MissingExperts(const ExpertPlacement& placement) const {
  ExpertPlacement::Blocks missing;
  const HolderSet here = HolderSet{1} << options.exchange->rank();
  for (const auto& [key, holders] : placement.blocks()) {
    const std::vector<LinearBank*> banks = BanksOf(key);
    std::vector<HolderSet> lacking(holders.size());
    bool any = false;
    for (size_t e = 0; e < holders.size(); ++e) {
      const auto lacks = [&](const LinearBank* bank) { return bank->shape().out_features[e] == 0; };
      if ((holders[e] & here) == 0 || std::ranges::none_of(banks, lacks)) continue;
      lacking[e] = here;
      any = true;
    }
    if (any) missing[key] = std::move(lacking);
  }
  return missing;
}

void Model::Impl::UsePlacement(std::shared_ptr<const ExpertPlacement> placement,
                               LoadedExperts loaded) {
  for (const auto& [key, branch] : loaded.branches()) {
    const std::vector<LinearBank*> from = branch->routed()->body().banks();
    const std::vector<LinearBank*> to = BanksOf(key);
    for (size_t i = 0; i < to.size(); ++i) Movable(to[i])->TakeExperts(*from[i]);
  }
  leftovers_ = std::make_shared<LoadedExperts>(std::move(loaded));
  placement_ = std::move(placement);
  share_.placement = placement_.get();
  MOESERVE_CHECK(MissingExperts(*placement_).empty(), "all experts that this rank holds");
}

std::vector<std::shared_ptr<const void>> Model::Impl::DropExperts() {
  std::vector<std::shared_ptr<const void>> dropped;
  if (leftovers_ != nullptr) dropped.push_back(std::exchange(leftovers_, nullptr));
  for (const auto& [key, holders] : placement_->blocks()) {
    const std::vector<LinearBank*> banks = BanksOf(key);
    for (size_t e = 0; e < holders.size(); ++e) {
      if (share_.Holds(key.first, key.second, static_cast<int>(e))) continue;
      for (LinearBank* const bank : banks) {
        if (Movable(bank) == nullptr) continue;
        auto memory = Movable(bank)->DropExpert(static_cast<int>(e));
        if (memory != nullptr) dropped.push_back(std::move(memory));
      }
    }
  }
  return dropped;
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
  const StepWatch watch = Watch();
  BeforeStep(StepKind::kForward, batch, cache);
  MOESERVE_CHECK(has_states_ == (batch.states.storage != nullptr), "states if the model has them");
  const Workspace::Scope scope(workspace);
  output_rows_ = batch.logit_rows;
  output_rows_.insert(output_rows_.end(), batch.text_rows.begin(), batch.text_rows.end());
  const bool replayable = batch.given.empty() && batch.controls.empty() && batch.lengths.empty() &&
                          num_texts == 0 && CanReplay();
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
  ctx.times = step.times;
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
  const StepWatch watch = Watch();
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
        if (options.listener != nullptr) checksum = RankChecksum(x);
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
  const StepWatch watch = Watch();
  BeforeStep(StepKind::kPredict, batch, cache, sources);
  const Workspace::Scope scope(workspace);
  StepInputs inputs = InputsOf(batch, cache, {});
  inputs.output_rows = batch.logit_rows;
  inputs.source_rows = sources.rows;
  inputs.samples = batch.samples;
  inputs.variant = sources.predicted ? 1 : 0;
  const StepRows rows = backend.BeginStep(inputs, &predicted_rows_, CanReplay());
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
  head_->RunRows(backend, workspace, rows, logits, ctx.times);
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
      return absl::UnimplementedError(Concat(
          "ranks: expected a device that computes a part of the experts (cpu, or cuda without "
          "--cuda-dense cublaslt), found ",
          backend.description()));
    }
  }
  auto impl = std::make_unique<Impl>(spec, options, backend);
  const absl::Status loaded = impl->Load(source, packed_cache);
  MOESERVE_RETURN_IF_ERROR(source.Check());  // explains any error of a tensor that became zeros
  MOESERVE_RETURN_IF_ERROR(loaded);
  std::unique_ptr<Model> model(new Model(std::move(impl)));
  if (options.listener != nullptr) options.listener->Loaded(*model);
  return model;
}

std::shared_ptr<const ExpertPlacement> Model::placement() const { return impl_->placement(); }

ExpertPlacement::Blocks Model::MissingExperts(const ExpertPlacement& placement) const {
  return impl_->MissingExperts(placement);
}

absl::Status Model::CheckTaking(const ExpertPlacement::Blocks& missing) const {
  for (const auto& [key, holders] : missing) {
    for (LinearBank* const bank : impl_->BanksOf(key)) {
      if (Movable(bank) != nullptr && Movable(bank)->CanTake()) continue;
      return absl::FailedPreconditionError(
          Concat("block ", key.second, ": experts cannot be moved here, because ",
                 Movable(bank) == nullptr
                     ? "the device cannot take them"
                     : "the block's experts are read from mapped files or copied into slots"));
    }
  }
  return absl::OkStatus();
}

absl::Status Model::CheckExperts(const LoadedExperts& experts) const {
  for (const auto& [key, branch] : experts.branches()) {
    const std::vector<LinearBank*> from = branch->routed()->body().banks();
    const std::vector<LinearBank*> to = impl_->BanksOf(key);
    for (size_t i = 0; i < to.size(); ++i) {
      if (Movable(to[i]) != nullptr && Movable(to[i])->TakesFrom(*from[i])) continue;
      return absl::FailedPreconditionError(
          Concat("block ", key.second, ": expected experts with weights of type ",
                 Name(to[i]->shape().weight_dtype), ", found ", Name(from[i]->shape().weight_dtype),
                 "; they cannot move"));
    }
  }
  return absl::OkStatus();
}

void Model::UsePlacement(std::shared_ptr<const ExpertPlacement> placement, LoadedExperts loaded) {
  impl_->UsePlacement(std::move(placement), std::move(loaded));
}

std::vector<std::shared_ptr<const void>> Model::DropExperts() { return impl_->DropExperts(); }

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

absl::Status Model::CheckFiles(bool now) { return impl_->CheckFiles(now); }

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

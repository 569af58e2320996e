#include "engine/model/model.h"

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <stop_token>
#include <thread>
#include <utility>

#include "base/check.h"
#include "base/error_text.h"
#include "engine/layers/attention.h"
#include "engine/layers/branch.h"
#include "engine/layers/feed_forward.h"
#include "engine/layers/latent_attention.h"
#include "engine/layers/short_convolution.h"
#include "engine/model/output_head.h"
#include "engine/routes/route_layout.h"
#include "engine/step/report_buffer.h"
#include "engine/step/workspace.h"

namespace moeserve {
namespace {

// One block: a norm, a branch, and the addition of the branch's output to the residual stream.
struct Block {
  // Applied to the branch's input, or to the sum; null if the placement says so.
  std::unique_ptr<NormBank> norm;
  std::unique_ptr<NormBank> output_norm;  // applied to the branch's output; null if there is none
  std::unique_ptr<Branch> branch;
  bool post = false;      // `norm` is applied to the sum
  bool parallel = false;  // ResidualSpec::parallel
  float scale = 1.0f;     // factor of the branch's output

  // Returns the norm of the branch's input; null if there is none.
  const NormBank* input_norm() const { return post ? nullptr : norm.get(); }
};

// Every type of mixer has a branch that computes it.
Result<std::unique_ptr<Branch>> LoadBranch(LoadContext& load, const ModelSpec& spec, int block) {
  struct Loader {
    LoadContext& load;
    const ModelSpec& spec;
    int block;
    Result<std::unique_ptr<Branch>> operator()(const AttentionSpec& attention) const {
      if (attention.latent.has_value()) return LatentAttention::Load(load, spec, block);
      return Attention::Load(load, spec, block);
    }
    Result<std::unique_ptr<Branch>> operator()(const FeedForwardSpec& /*spec*/) const {
      return FeedForward::Load(load, spec, block);
    }
    Result<std::unique_ptr<Branch>> operator()(const ShortConvolutionSpec& /*spec*/) const {
      return ShortConvolution::Load(load, spec, block);
    }
  };
  return std::visit(Loader{load, spec, block}, spec.blocks[static_cast<size_t>(block)].mixer);
}

}  // namespace

class Model::Impl {
 public:
  Impl(const ModelSpec& s, const ModelOptions& o, Backend& b)
      : spec(s),
        options(o),
        backend(b),
        workspace(b),
        has_states_(!StateShapes(s).empty()),
        reported_(RouteLayout(s), s.hidden_size) {}
  ~Impl() { backend.ForgetSteps(this); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  absl::Status Load(WeightSource& source, PackedCache* packed_cache);
  absl::Status Reserve(int tokens, int logit_rows, KvCacheType cache_type,
                       const RoutingControl* widest, ReportContents contents);
  StepReport Forward(const Batch& batch, KvCacheStorage& cache, const StepOptions& step,
                     const StepResults& results);
  void WriteInBackground(std::unique_ptr<PackedCache> packed_cache);
  const ReportBuffer& reported() const { return reported_; }
  absl::Status CheckFiles() { return files_in_use_.Check(); }

  const ModelSpec spec;
  const ModelOptions options;
  Backend& backend;
  Workspace workspace;

 private:
  // Issues the operations of a step with `tokens` rows, up to the logits [outputs, RowOutputs()]
  // and the outputs of texts [texts, TextOutputs()].
  void Issue(StepContext& ctx, int64_t tokens, const RowsView& logits, const RowsView& texts);

  void ReadOutputs(const Batch& batch, const RowsView& scores, std::span<float> logits,
                   std::span<SampleResult> samples);

  // Loads the norms of a block, and how it joins the residual stream.
  absl::Status LoadResidual(LoadContext& load, const BlockSpec& block_spec, Block& block);
  // Writes the input of the block to `input`: the residual stream `x`, normalized if the block
  // normalizes its input.
  void ReadStream(const RowsView& x, const RowsView& input, const Block& block);

  // Runs the branch of `block` on `input`, adds the branch's output to the residual stream `x` and
  // writes the next block's input to `input`. `next` is null after the last block.
  void RunBlock(StepContext& ctx, const RowsView& x, const RowsView& input, const Block& block,
                const Block* next);

  std::unique_ptr<OutputHead> head_;
  const bool has_states_;
  std::unique_ptr<EmbeddingTable> embedding_;
  std::unique_ptr<EmbeddingTable> learned_positions_;
  std::unique_ptr<EmbeddingTable> token_types_;  // null if there are none
  std::unique_ptr<NormBank> embedding_norm_;     // null if there is none
  RelativeBiases relative_biases_;               // empty if there are none
  std::vector<Block> blocks_;                    // in execution order
  std::vector<int32_t> output_rows_;             // of the current step
  WatchedMappings files_in_use_;                 // kept alive by the members above
  ReportBuffer reported_;
  std::jthread writer_;  // reads the members above
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
  load.files_in_use = &files_in_use_;
  const int d = spec.hidden_size;
  MOESERVE_ASSIGN_OR_RETURN(head_, OutputHead::Load(load, spec));
  const auto load_table = [&](const char* name, int rows,
                              std::unique_ptr<EmbeddingTable>& to) -> absl::Status {
    MOESERVE_ASSIGN_OR_RETURN(HostTensor table, source.Get(name, {rows, d}));
    MOESERVE_ASSIGN_OR_RETURN(to, backend.NewEmbeddingTable(table));
    files_in_use_.Add(to->read_in_place());
    return absl::OkStatus();
  };
  if (spec.tie_word_embeddings) {
    MOESERVE_ASSIGN_OR_RETURN(embedding_, backend.NewTiedEmbeddingTable(*head_->vocabulary()));
  } else {
    MOESERVE_RETURN_IF_ERROR(load_table("embed.weight", spec.vocab_size, embedding_));
  }
  if (spec.position.kind == PositionKind::kLearned) {
    MOESERVE_RETURN_IF_ERROR(
        load_table("embed_position.weight", spec.max_position_embeddings, learned_positions_));
  }
  if (spec.token_types > 0) {
    MOESERVE_RETURN_IF_ERROR(load_table("embed_type.weight", spec.token_types, token_types_));
  }
  if (spec.embedding_norm) {
    MOESERVE_ASSIGN_OR_RETURN(embedding_norm_, LoadNorm(load, {"embed_norm"}, {d}));
  }
  if (spec.relative_bias.has_value()) {
    MOESERVE_ASSIGN_OR_RETURN(relative_biases_, LoadRelativeBiases(load, spec));
    load.relative_biases = &relative_biases_;
  }
  for (int b = 0; b < spec.num_blocks(); ++b) {
    Block block;
    MOESERVE_RETURN_IF_ERROR(LoadResidual(load, spec.blocks[static_cast<size_t>(b)], block));
    MOESERVE_ASSIGN_OR_RETURN(block.branch, LoadBranch(load, spec, b));
    blocks_.push_back(std::move(block));
  }
  return absl::OkStatus();
}

absl::Status Model::Impl::LoadResidual(LoadContext& load, const BlockSpec& block_spec,
                                       Block& block) {
  const std::string prefix = block_spec.name();
  const NormPlacement placement = NormPlacementOf(spec, block_spec);
  block.post = placement == NormPlacement::kPost;
  block.parallel = block_spec.residual.parallel;
  block.scale = static_cast<float>(ResidualScaleOf(spec, block_spec));
  if (HasNorm(placement)) {
    MOESERVE_ASSIGN_OR_RETURN(block.norm, LoadNorm(load, {prefix + ".norm"}, {spec.hidden_size}));
  }
  if (NormsOutput(placement)) {
    MOESERVE_ASSIGN_OR_RETURN(block.output_norm,
                              LoadNorm(load, {prefix + ".output_norm"}, {spec.hidden_size}));
  }
  return absl::OkStatus();
}

void Model::Impl::ReadStream(const RowsView& x, const RowsView& input, const Block& block) {
  if (block.input_norm() != nullptr) {
    backend.Norm({.bank = block.input_norm(), .input = x, .output = input});
  } else if (input.data != x.data) {
    backend.Convert(x, input);
  }
}

void Model::Impl::RunBlock(StepContext& ctx, const RowsView& x, const RowsView& input,
                           const Block& block, const Block* next) {
  const Workspace::Scope scope(workspace);
  const RowsView output = workspace.TakeDense(x.rows, x.cols, DType::kF32);
  block.branch->Forward(ctx, input, output);
  if (block.output_norm != nullptr) {
    backend.Norm({.bank = block.output_norm.get(), .input = output, .output = output});
  }
  const bool parallel = next != nullptr && next->parallel;
  if (parallel) ReadStream(x, input, *next);
  const float* const bias = block.branch->out_bias();
  const NormBank* const sum_norm = block.post                     ? block.norm.get()
                                   : next != nullptr && !parallel ? next->input_norm()
                                                                  : nullptr;
  if (sum_norm == nullptr) {
    backend.AddScaled(x, output, bias, block.scale);
  } else {
    backend.AddNorm({.x = x,
                     .branch = output,
                     .bias = bias,
                     .scale = block.scale,
                     .norm = sum_norm,
                     .output = block.post ? x : input});
  }
  const bool read = parallel || (!block.post && sum_norm != nullptr);
  if (next != nullptr && !read) ReadStream(x, input, *next);
}

StepReport Model::Impl::Forward(const Batch& batch, KvCacheStorage& cache, const StepOptions& step,
                                const StepResults& results) {
  MOESERVE_CHECK(!batch.samples.empty() ||
                     std::ssize(results.logits) >= std::ssize(batch.logit_rows) * RowOutputs(spec),
                 "room for the logits");
  const int64_t num_texts = batch.num_texts();
  MOESERVE_CHECK(std::ssize(results.texts) >= num_texts * TextOutputs(spec),
                 "room for the outputs of texts");
  if (batch.num_tokens() == 0) return {};
  MOESERVE_CHECK(has_states_ == (batch.states.storage != nullptr), "states if the model has them");
  const Workspace::Scope scope(workspace);
  const std::span<const uint8_t> kind(reinterpret_cast<const uint8_t*>(batch.phase.data()),
                                      batch.phase.size());
  const bool replayable =
      batch.given.empty() && batch.controls.empty() && batch.lengths.empty() && num_texts == 0;
  output_rows_ = batch.logit_rows;
  output_rows_.insert(output_rows_.end(), batch.text_rows.begin(), batch.text_rows.end());
  const StepRows rows = backend.BeginStep({.token_ids = batch.tokens,
                                           .position = batch.positions,
                                           .sequence = batch.sequence,
                                           .page_tables = batch.page_tables,
                                           .lengths = batch.lengths,
                                           .long_sequence = batch.long_sequence,
                                           .token_types = batch.token_types,
                                           .cache = &cache,
                                           .state_storage = batch.states.storage,
                                           .states = batch.states.view(),
                                           .output_rows = output_rows_,
                                           .pool_ranges = batch.pool_ranges,
                                           .samples = batch.samples,
                                           .counters = step.counters,
                                           .kind = kind,
                                           .count_later = step.count_later,
                                           .variant = step.report.scores + 2 * step.report.inputs},
                                          this, replayable);
  const RowsView scores = workspace.TakeDense(rows.outputs - std::ssize(batch.text_rows),
                                              std::max(RowOutputs(spec), 1), DType::kF32);
  const RowsView texts =
      workspace.TakeDense(num_texts, std::max(TextOutputs(spec), 1), DType::kF32);
  RowsView kept;
  if (const int64_t floats = reported_.Floats(rows.tokens, step.report); floats > 0) {
    kept = workspace.TakeDense(1, floats, DType::kF32);
  }
  reported_.Place(rows.tokens, step.report, kept);
  StepContext ctx{backend, workspace, options.compute, batch, cache, reported_, {}};
  backend.RunStep([&] { Issue(ctx, rows.tokens, scores, texts); });
  if (step.meanwhile) step.meanwhile();
  ReadOutputs(batch, scores, results.logits, results.samples);
  if (num_texts > 0) backend.CopyToHost(texts, results.texts.first(num_texts * texts.cols));
  const StepOutcome outcome = backend.FinishStep();
  StepReport report{.failed = outcome.failed, .routes = outcome.routes, .blocks = {}};
  if (step.report.any()) report.blocks = reported_.Report(backend, step.report);
  return report;
}

void Model::Impl::ReadOutputs(const Batch& batch, const RowsView& scores, std::span<float> logits,
                              std::span<SampleResult> samples) {
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

void Model::Impl::Issue(StepContext& ctx, int64_t tokens, const RowsView& logits,
                        const RowsView& texts) {
  // A backend may issue a step twice; this scope releases the buffers of each issue at its end.
  const Workspace::Scope scope(workspace);
  const RowsView x = workspace.TakeDense(tokens, spec.hidden_size, DType::kF32);
  backend.Embed({.tokens = embedding_.get(),
                 .types = token_types_.get(),
                 .positions = learned_positions_.get(),
                 .sinusoidal = spec.position.kind == PositionKind::kSinusoidal,
                 .half_spacing = spec.position.spacing == SinusoidSpacing::kHalf,
                 .first_position = spec.position.first,
                 .scale = static_cast<float>(spec.embedding_scale),
                 .output = x});
  if (embedding_norm_ != nullptr) {
    backend.Norm({.bank = embedding_norm_.get(), .input = x, .output = x});
  }
  ctx.stream = x;
  // Blocks that neither normalise their input nor run beside another one read the stream itself.
  const bool copies = std::ranges::any_of(
      blocks_, [](const Block& b) { return b.input_norm() != nullptr || b.parallel; });
  const RowsView input = copies || options.compute != DType::kF32
                             ? workspace.TakeDense(tokens, spec.hidden_size, options.compute)
                             : x;
  ReadStream(x, input, blocks_.front());
  for (size_t b = 0; b < blocks_.size(); ++b) {
    const Block* const next = b + 1 < blocks_.size() ? &blocks_[b + 1] : nullptr;
    RunBlock(ctx, x, input, blocks_[b], next);
  }
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
  MOESERVE_ASSIGN_OR_RETURN(const std::unique_ptr<KvCacheStorage> cache,
                            backend.NewKvCache(CacheShapes(spec), cache_type, {1}));
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
  Forward(batch, *cache, {.report = contents}, {.samples = results});
  if (widest != nullptr) {
    batch.controls = {widest};
    Forward(batch, *cache, {.report = contents}, {.samples = results});
  }
  backend.ForgetSteps(this);  // captured graphs refer to the cache, which is destroyed here
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

std::span<const TokenRoutes> Model::CountStep(std::span<const Phase> phase) {
  return impl_->backend.CountStep({reinterpret_cast<const uint8_t*>(phase.data()), phase.size()});
}

void Model::WriteInBackground(std::unique_ptr<PackedCache> packed_cache) {
  impl_->WriteInBackground(std::move(packed_cache));
}

absl::Status Model::CheckFiles() { return impl_->CheckFiles(); }

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
Backend& Model::backend() const { return impl_->backend; }
int64_t Model::weight_bytes() const { return impl_->backend.weight_bytes(); }

}  // namespace moeserve

#include "engine/model/model.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "engine/layers/attention.h"
#include "engine/layers/feed_forward.h"
#include "engine/layers/workspace.h"

namespace moeserve {
namespace {

// Most that is kept of a step for hooks that look at it afterwards, in floats: 32 MiB.
constexpr int64_t kMostKept = int64_t{8} << 20;

// One pre-norm or post-norm layer: two branches, each added to the residual stream.
struct DecoderLayer {
  std::unique_ptr<NormBank> attention_norm, feed_forward_norm;
  std::unique_ptr<Attention> attention;
  std::unique_ptr<FeedForward> feed_forward;
};

}  // namespace

class Model::Impl {
 public:
  Impl(const ModelSpec& s, const ModelOptions& o, Backend& b)
      : spec(s), options(o), backend(b), workspace(b) {}
  ~Impl() { backend.ForgetSteps(this); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  absl::Status Load(WeightSource& source, PackedCache* packed_cache);
  absl::Status Reserve(int tokens, int logit_rows, KvCacheType cache_type,
                       const RoutingControl* widest, StepLooks looks);
  // `reserved`: floats that are taken but not used, as if something were kept.
  void Forward(const Batch& batch, KvCacheStorage& cache, StepHooks* hooks, std::span<float> logits,
               std::span<SampleResult> samples, int64_t reserved = 0);

  const ModelSpec spec;
  const ModelOptions options;
  Backend& backend;
  Workspace workspace;

 private:
  // Issues the operations of a step of so many tokens, up to the logits [outputs, V].
  void Issue(StepContext& ctx, int64_t tokens, const RowsView& logits);

  void ReadOutputs(const Batch& batch, const RowsView& scores, std::span<float> logits,
                   std::span<SampleResult> samples);

  // Places in kept_ what hooks look at of all blocks, as RoutedLayer::LayOutKept() does of one.
  int64_t LayOutKept(int64_t tokens, StepLooks looks, float* memory);
  // Tells of every block, after the step; `kept` is its memory (kept_), empty: nothing was kept.
  void TellHooks(StepHooks& hooks, const RowsView& kept);

  // Adds the result of `branch` of `input` to the residual stream `x`, and makes the input of the
  // next branch, which `next` normalises; null: there is none.
  template <typename Branch>
  void RunBranch(StepContext& ctx, const RowsView& x, const RowsView& input, const Branch& branch,
                 const float* bias, const NormBank& own, const NormBank* next);

  std::unique_ptr<LinearBank> head_;
  std::unique_ptr<EmbeddingTable> embedding_;
  std::unique_ptr<EmbeddingTable> learned_positions_;
  std::unique_ptr<NormBank> final_norm_;  // null: post-norm
  std::vector<DecoderLayer> layers_;
  std::vector<const RoutedLayer*> routed_;  // of all layers, in order
  std::vector<KeptRows> kept_;              // by PlanSlot()
  std::vector<float> kept_on_host_;
};

absl::Status Model::Impl::Load(WeightSource& source, PackedCache* packed_cache) {
  LoadContext load{source, backend, options.compute, spec.norm, options.quantization, packed_cache};
  const int d = spec.hidden_size;
  const std::string head_name = spec.tie_word_embeddings ? "embed" : "head";
  MOESERVE_ASSIGN_OR_RETURN(head_, LoadLinear(load, d, {{head_name, spec.vocab_size, false}}));
  if (spec.tie_word_embeddings) {
    MOESERVE_ASSIGN_OR_RETURN(embedding_, backend.NewTiedEmbeddingTable(*head_));
  } else {
    MOESERVE_ASSIGN_OR_RETURN(HostTensor table, source.Get("embed.weight", {spec.vocab_size, d}));
    MOESERVE_ASSIGN_OR_RETURN(embedding_, backend.NewEmbeddingTable(table));
  }
  if (spec.position.kind == PositionKind::kLearned) {
    MOESERVE_ASSIGN_OR_RETURN(
        HostTensor table, source.Get("embed_position.weight", {spec.max_position_embeddings, d}));
    MOESERVE_ASSIGN_OR_RETURN(learned_positions_, backend.NewEmbeddingTable(table));
  }
  if (spec.norm.placement == NormPlacement::kPre) {
    MOESERVE_ASSIGN_OR_RETURN(final_norm_, LoadNorm(load, {"norm"}, {d}));
  }
  for (int l = 0; l < spec.num_layers(); ++l) {
    const std::string prefix = "blocks." + std::to_string(l);
    DecoderLayer layer;
    MOESERVE_ASSIGN_OR_RETURN(layer.attention_norm,
                              LoadNorm(load, {prefix + ".attention.norm"}, {d}));
    MOESERVE_ASSIGN_OR_RETURN(layer.attention, Attention::Load(load, l, spec));
    MOESERVE_ASSIGN_OR_RETURN(layer.feed_forward_norm,
                              LoadNorm(load, {prefix + ".feed_forward.norm"}, {d}));
    MOESERVE_ASSIGN_OR_RETURN(layer.feed_forward, FeedForward::Load(load, l, spec));
    for (const RoutedLayer* routed : {layer.attention->routed(), layer.feed_forward->routed()}) {
      if (routed != nullptr) routed_.push_back(routed);
    }
    layers_.push_back(std::move(layer));
  }
  return absl::OkStatus();
}

template <typename Branch>
void Model::Impl::RunBranch(StepContext& ctx, const RowsView& x, const RowsView& input,
                            const Branch& branch, const float* bias, const NormBank& own,
                            const NormBank* next) {
  const Workspace::Scope scope(workspace);
  const RowsView output = workspace.TakeDense(x.rows, x.cols, DType::kF32);
  branch.Forward(ctx, input, output);
  const bool pre = spec.norm.placement == NormPlacement::kPre;
  const auto scale = static_cast<float>(spec.residual_scale);
  if (pre && next == nullptr) {
    backend.AddScaled(x, output, bias, scale);
    return;
  }
  backend.AddNorm({.x = x,
                   .branch = output,
                   .bias = bias,
                   .scale = scale,
                   .norm = pre ? next : &own,
                   .output = pre ? input : x});
  if (!pre && next != nullptr && input.data != x.data) backend.Convert(x, input);
}

void Model::Impl::Forward(const Batch& batch, KvCacheStorage& cache, StepHooks* hooks,
                          std::span<float> logits, std::span<SampleResult> samples,
                          int64_t reserved) {
  const int64_t tokens = batch.num_tokens();
  MOESERVE_CHECK(
      !batch.samples.empty() || static_cast<int64_t>(logits.size()) >=
                                    static_cast<int64_t>(batch.logit_rows.size()) * spec.vocab_size,
      "room for the logits");
  if (tokens == 0) return;
  const Workspace::Scope scope(workspace);
  StepLooks looks;
  if (hooks != nullptr) looks = {hooks->WantsScores(), hooks->WantsInputs()};
  const bool given = hooks != nullptr && hooks->GivesRoutes();
  // A device does not wait for hooks, but where they bring routes along or want to see too much.
  const bool at_once =
      backend.plans_on_host() || given || LayOutKept(tokens, looks, nullptr) > kMostKept;
  const bool interrupted = at_once && (given || looks.any());
  const bool keeps = !at_once && looks.any();
  RouteCounters* const counters = hooks == nullptr ? nullptr : hooks->Counters();
  const std::span<const uint8_t> kind(reinterpret_cast<const uint8_t*>(batch.phase.data()),
                                      batch.phase.size());
  const StepRows rows = backend.BeginStep({.token_ids = batch.tokens,
                                           .position = batch.positions,
                                           .sequence = batch.sequence,
                                           .block_tables = batch.block_tables,
                                           .cache = &cache,
                                           .output_rows = batch.logit_rows,
                                           .samples = batch.samples,
                                           .counters = counters,
                                           .kind = kind,
                                           .variant = keeps ? looks.scores + 2 * looks.inputs : 0},
                                          this, !interrupted && batch.controls.empty());
  const RowsView scores = workspace.TakeDense(rows.outputs, spec.vocab_size, DType::kF32);
  RowsView kept;
  if (keeps) reserved = LayOutKept(rows.tokens, looks, nullptr);
  if (reserved > 0) kept = workspace.TakeDense(1, reserved, DType::kF32);
  if (keeps) LayOutKept(rows.tokens, looks, static_cast<float*>(kept.data));
  StepContext ctx{backend, workspace, options.compute, batch, cache, hooks, at_once, {}};
  if (keeps) ctx.kept = kept_;
  backend.RunStep([&] { Issue(ctx, rows.tokens, scores); });
  if (hooks != nullptr && !backend.plans_on_host()) hooks->OnIssued();
  ReadOutputs(batch, scores, logits, samples);
  if (hooks == nullptr || backend.plans_on_host()) return;
  hooks->OnOutcome(backend.Outcome());
  if (!at_once && (keeps || hooks->WantsPlans())) TellHooks(*hooks, kept);
}

int64_t Model::Impl::LayOutKept(int64_t tokens, StepLooks looks, float* memory) {
  kept_.assign(2 * layers_.size(), {});
  int64_t end = 0;
  for (const RoutedLayer* routed : routed_) {
    end += routed->LayOutKept(tokens, looks, memory == nullptr ? nullptr : memory + end,
                              kept_[static_cast<size_t>(routed->slot())]);
  }
  return end;
}

void Model::Impl::TellHooks(StepHooks& hooks, const RowsView& kept) {
  // One copy brings what was kept of all blocks, another one all plans.
  kept_on_host_.resize(static_cast<size_t>(kept.cols));
  if (kept.data != nullptr) backend.CopyToHost(kept, kept_on_host_);
  const auto on_host = [&](const RowsView& view) -> std::span<const float> {
    if (kept.data == nullptr || view.data == nullptr) return {};
    const auto begin = static_cast<const float*>(view.data) - static_cast<const float*>(kept.data);
    return std::span<const float>(kept_on_host_)
        .subspan(static_cast<size_t>(begin), static_cast<size_t>(view.rows * view.cols));
  };
  for (const RoutedLayer* routed : routed_) {
    const KeptRows& rows = kept_[static_cast<size_t>(routed->slot())];
    routed->Tell(backend, hooks, on_host(rows.scores), on_host(rows.inputs));
  }
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
    const auto vocab = static_cast<size_t>(spec.vocab_size);
    backend.CopyToHost(part, logits.subspan(begin * vocab, (end - begin) * vocab));
    begin = end;
  }
  if (sampled) backend.ReadSamples(samples);
}

void Model::Impl::Issue(StepContext& ctx, int64_t tokens, const RowsView& logits) {
  const Workspace::Scope scope(workspace);  // of its own: a backend may issue a step twice
  const RowsView x = workspace.TakeDense(tokens, spec.hidden_size, DType::kF32);
  backend.Embed({.tokens = embedding_.get(),
                 .positions = learned_positions_.get(),
                 .sinusoidal = spec.position.kind == PositionKind::kSinusoidal,
                 .scale = static_cast<float>(spec.embedding_scale),
                 .output = x});
  RowsView input = x;
  if (spec.norm.placement == NormPlacement::kPre) {
    input = workspace.TakeDense(tokens, spec.hidden_size, options.compute);
    backend.Norm({.bank = layers_.front().attention_norm.get(), .input = x, .output = input});
  } else if (options.compute != DType::kF32) {
    input = workspace.TakeDense(tokens, spec.hidden_size, options.compute);
    backend.Convert(x, input);
  }
  for (size_t l = 0; l < layers_.size(); ++l) {
    const DecoderLayer& layer = layers_[l];
    RunBranch(ctx, x, input, *layer.attention, layer.attention->out_bias(), *layer.attention_norm,
              layer.feed_forward_norm.get());
    RunBranch(ctx, x, input, *layer.feed_forward, nullptr, *layer.feed_forward_norm,
              l + 1 < layers_.size() ? layers_[l + 1].attention_norm.get() : nullptr);
  }
  if (logits.rows == 0) return;
  const RowsView last = workspace.TakeDense(logits.rows, spec.hidden_size, DType::kF32);
  backend.GatherOutputRows(x, last);
  // The head's input stays f32 in every run: rounding it would cost as much accuracy as a whole
  // layer does, and few rows reach the head.
  if (final_norm_ != nullptr) {
    backend.Norm({.bank = final_norm_.get(), .input = last, .output = last});
  }
  backend.Linear({.bank = head_.get(), .input = last, .output = logits});
  if (spec.logit_scale != 1.0) backend.Scale(logits, static_cast<float>(spec.logit_scale));
  if (backend.samples_on_device()) backend.Sample(logits);
}

absl::Status Model::Impl::Reserve(int tokens, int logit_rows, KvCacheType cache_type,
                                  const RoutingControl* widest, StepLooks looks) {
  std::vector<KvLayerShape> shapes;
  for (const LayerSpec& l : spec.layers) {
    shapes.push_back({l.attention.num_kv_heads, l.attention.head_dim});
  }
  MOESERVE_ASSIGN_OR_RETURN(const std::unique_ptr<KvCacheStorage> cache,
                            backend.NewKvCache(shapes, cache_type, 1));
  Batch batch;
  batch.tokens.assign(static_cast<size_t>(tokens), 0);
  batch.positions = batch.tokens;
  batch.phase.assign(batch.tokens.size(), Phase::kPrefill);
  for (int row = 0; row < std::min(tokens, logit_rows); ++row) batch.logit_rows.push_back(row);
  // All rows are drawn from, so that no logits are copied.
  SampleRow greedy{};
  greedy.logprobs = -1;
  batch.samples.assign(batch.logit_rows.size(), greedy);
  std::vector<SampleResult> results(batch.samples.size());
  // Of no sequence: nothing is read from the cache or written to it. But of different ones: tokens
  // that decode take memory for attention, neighbours of a prompt none.
  for (int t = 0; t < tokens; ++t) batch.sequence.push_back(-1 - t % 2);
  const int64_t kept = std::min(kMostKept, LayOutKept(tokens, looks, nullptr));
  Forward(batch, *cache, nullptr, {}, results, kept);
  if (widest != nullptr) {
    batch.controls = {widest};
    Forward(batch, *cache, nullptr, {}, results, kept);
  }
  backend.ForgetSteps(this);  // they know a cache that goes now
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
  MOESERVE_RETURN_IF_ERROR(impl->Load(source, packed_cache));
  return std::unique_ptr<Model>(new Model(std::move(impl)));
}

void Model::Forward(const Batch& batch, KvCacheStorage& cache, StepHooks* hooks,
                    std::span<float> logits, std::span<SampleResult> samples) {
  impl_->Forward(batch, cache, hooks, logits, samples);
}

absl::Status Model::Reserve(int tokens, int logit_rows, KvCacheType cache_type,
                            const RoutingControl* widest, StepLooks looks) {
  // Host memory grows as it is needed.
  if (impl_->backend.plans_on_host()) return absl::OkStatus();
  return impl_->Reserve(tokens, logit_rows, cache_type, widest, looks);
}

const ModelSpec& Model::spec() const { return impl_->spec; }
const ModelOptions& Model::options() const { return impl_->options; }
Backend& Model::backend() const { return impl_->backend; }
int64_t Model::weight_bytes() const { return impl_->backend.weight_bytes(); }

}  // namespace moeserve

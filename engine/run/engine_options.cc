#include "engine/run/engine_options.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "absl/numeric/int128.h"
#include "base/error_text.h"

namespace moeserve {
namespace {

// Largest memory for the router scores and router inputs that a step reports. This memory is
// taken from the device before the KV cache. If a step of max_step_tokens rows would need more,
// max_step_tokens is lowered, but not below max_num_seqs.
constexpr int64_t kMaxReportBytes = int64_t{256} << 20;

}  // namespace

Result<EngineOptions> Resolved(const EngineOptions& options, const ModelSpec& spec,
                               int device_step_rows, int device_draft_tokens,
                               int64_t report_floats) {
  EngineOptions o = options;
  if (o.max_model_len == 0) o.max_model_len = spec.max_position_embeddings;
  if (o.max_model_len < 1 || o.max_model_len > spec.max_position_embeddings) {
    return absl::InvalidArgumentError(
        "max-model-len: expected 1 to " + std::to_string(spec.max_position_embeddings) + " (" +
        (o.context_reason.empty() ? "max_position_embeddings" : o.context_reason) + "), found " +
        std::to_string(options.max_model_len));
  }
  if (o.max_model_len < spec.max_position_embeddings) o.context_reason.clear();
  if (o.max_num_seqs < 1 || o.max_num_seqs > 65536) {
    return absl::InvalidArgumentError("max-num-seqs: expected 1 to 65536, found " +
                                      std::to_string(o.max_num_seqs));
  }
  if (o.routing_records && !o.expert_stats) {
    return absl::InvalidArgumentError("routing-records: expert statistics are switched off");
  }
  if (o.kv_cache_type == KvCacheType::kInt8 && HasXpos(spec)) {
    return absl::InvalidArgumentError(
        "kv-cache-dtype: expected f32 or bf16, found int8 (the elements of an int8 key have one "
        "scale, but position.xpos_base scales them by very different factors)");
  }
  if (o.draft.max_tokens == kDefaultDraftTokens) o.draft.max_tokens = device_draft_tokens;
  if (o.draft.max_tokens < 0 || o.draft.max_tokens > kMostDraftTokens) {
    return absl::InvalidArgumentError("draft-tokens: expected 0 to " +
                                      std::to_string(kMostDraftTokens) + ", found " +
                                      std::to_string(o.draft.max_tokens));
  }
  if (spec.kind == ModelKind::kEncoder) {
    // Nothing is kept of a text after its step.
    o.prefix_cache = false;
    o.window_pages = false;
  }
  if (o.snapshots == -1) o.snapshots = o.max_num_seqs;
  if (!o.prefix_cache) o.snapshots = 0;
  if (o.snapshots < 0 || o.snapshots > kMostSnapshots) {
    return absl::InvalidArgumentError(
        Concat("snapshots: expected 0 to ", kMostSnapshots, ", found ", options.snapshots));
  }
  if (o.snapshot_interval < kPageTokens || o.snapshot_interval % kPageTokens != 0) {
    return absl::InvalidArgumentError(Concat("snapshot-interval: expected a multiple of ",
                                             kPageTokens, ", found ", o.snapshot_interval));
  }
  if (o.max_step_tokens == 0) o.max_step_tokens = device_step_rows;
  if (report_floats > 0) {
    const int64_t fitting = kMaxReportBytes / (report_floats * static_cast<int64_t>(sizeof(float)));
    o.max_step_tokens = static_cast<int>(std::min<int64_t>(o.max_step_tokens, fitting));
  }
  if (o.max_step_tokens < o.max_num_seqs) o.max_step_tokens = o.max_num_seqs;
  return o;
}

std::vector<KvLayerShape> CacheLayers(const EngineOptions& options, const ModelSpec& spec) {
  std::vector<KvLayerShape> layers = CacheShapes(spec);
  if (spec.encoder != nullptr) return layers;
  std::vector<bool> windowed;
  for (const BlockSpec& block : spec.blocks) {
    const AttentionSpec* attention = block.attention();
    if (attention == nullptr || attention->kv_layer.has_value()) continue;
    windowed.push_back(attention->window.has_value() && *attention->window < options.max_model_len);
  }
  // The layers of an encoder share theirs.
  if (!options.window_pages || std::ranges::find(windowed, false) == windowed.end()) return layers;
  for (size_t i = 0; i < layers.size(); ++i) layers[i].table = windowed[i] ? 1 : 0;
  return layers;
}

std::vector<PageUse> PageUseOf(const EngineOptions& options, const ModelSpec& spec,
                               bool draft_model) {
  const std::vector<KvLayerShape> layers = CacheLayers(options, spec);
  std::vector<PageUse> uses;
  const PageUse all{.window = std::nullopt, .step_tokens = options.max_step_tokens};
  if (layers.empty() || spec.kind == ModelKind::kEncoder) return {all};
  if (spec.encoder != nullptr) {
    std::vector<PageUse> of_pair(3, all);
    of_pair[kSourceTable].holds = PageUse::Holds::kSource;
    of_pair[kEncoderTable].holds = PageUse::Holds::kStep;
    return of_pair;
  }
  for (size_t layer = 0, block = 0; layer < layers.size(); ++block) {
    const AttentionSpec* attention = spec.blocks[block].attention();
    if (attention == nullptr || attention->kv_layer.has_value()) continue;
    const auto table = static_cast<size_t>(layers[layer++].table);
    const size_t known = uses.size();
    if (table >= known) {
      uses.resize(table + 1, {.window = 0, .step_tokens = options.max_step_tokens});
    }
    std::optional<int>& window = uses[table].window;
    if (!attention->window.has_value()) {
      window.reset();
    } else if (window.has_value()) {
      window = std::max(*window, *attention->window);
    }
  }
  // Routes are kept with the pages of the first table, and a draft model, which may be behind, uses
  // the same pages.
  if (options.routing_records || draft_model || !options.window_pages) uses[0].window.reset();
  return uses;
}

std::vector<int64_t> PageBytesOf(const Backend& backend, std::span<const KvLayerShape> layers,
                                 KvCacheType type, size_t tables) {
  std::vector<int64_t> bytes(tables, 0);
  for (const KvLayerShape& layer : layers) {
    bytes[static_cast<size_t>(layer.table)] += backend.PageBytes({&layer, 1}, type);
  }
  return bytes;
}

namespace {

// Returns how many pages of each table `sequences` sequences of `tokens` tokens hold, or one of
// max_model_len tokens if those are more.
std::vector<int64_t> PagesOf(const EngineOptions& options, std::span<const PageUse> use,
                             int64_t sequences, int64_t tokens) {
  std::vector<int64_t> pages;
  for (const PageUse& u : use) {
    if (u.holds == PageUse::Holds::kStep) {
      const int rows = std::max(u.step_tokens, options.max_model_len);
      pages.push_back(PagesFor(rows) + options.max_num_seqs);
      continue;
    }
    pages.push_back(std::max(sequences * u.MostPages(tokens), u.MostPages(options.max_model_len)));
  }
  return pages;
}

int64_t BytesOf(std::span<const int64_t> pages, std::span<const int64_t> page_bytes) {
  return std::inner_product(pages.begin(), pages.end(), page_bytes.begin(), int64_t{0});
}

}  // namespace

Result<std::vector<int64_t>> CachePages(const EngineOptions& options, std::span<const PageUse> use,
                                        std::span<const int64_t> page_bytes) {
  const int64_t all = options.max_num_seqs;
  const int64_t least = BytesOf(PagesOf(options, use, 1, 0), page_bytes);
  std::vector<int64_t> pages = PagesOf(options, use, all, std::min(options.max_model_len, 2048));
  // Pages without layers, in models without attention, take no memory.
  if (const int64_t budget = options.kv_cache_bytes; budget > 0 && least > 0) {
    if (budget < least) {
      return absl::ResourceExhaustedError(Concat("kv-cache-memory: one sequence of max-model-len ",
                                                 options.max_model_len, " tokens needs ", least,
                                                 " bytes, found ", budget));
    }
    // The longest equal sequences that fit, in whole pages.
    int64_t fits = 0, beyond = PagesFor(options.max_model_len) + 1;
    while (beyond - fits > 1) {
      const int64_t middle = fits + (beyond - fits) / 2;
      const std::vector<int64_t> needed = PagesOf(options, use, all, middle * kPageTokens);
      (BytesOf(needed, page_bytes) <= budget ? fits : beyond) = middle;
    }
    pages = PagesOf(options, use, all, fits * kPageTokens);
    // The rest serves the prefix cache. It is divided like what the sequences need.
    const int64_t needed = BytesOf(pages, page_bytes);
    for (int64_t& count : pages) {
      count = static_cast<int64_t>(absl::int128(count) * budget / needed);
    }
    pages[0] += (budget - BytesOf(pages, page_bytes)) / page_bytes[0];
  }
  const int64_t bytes = BytesOf(pages, page_bytes);
  if (options.max_kv_cache_bytes > 0 && bytes > options.max_kv_cache_bytes) {
    return absl::ResourceExhaustedError(Concat(
        "the KV cache needs ", bytes, " bytes, expected at most ", options.max_kv_cache_bytes));
  }
  return pages;
}

RecorderOptions RecorderSettings(const EngineOptions& options) {
  RecorderOptions recorder = options.recorder;
  recorder.any_selection = options.routing_control.enabled;
  if (!options.expert_stats) {
    recorder.token_counts_bytes = 0;
    recorder.hidden_samples = 0;
  }
  return recorder;
}

}  // namespace moeserve

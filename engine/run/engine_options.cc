#include "engine/run/engine_options.h"

#include <algorithm>
#include <string>

#include "base/message.h"

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
        "max-model-len: expected 1 to " + std::to_string(spec.max_position_embeddings) +
        " (max_position_embeddings), found " + std::to_string(options.max_model_len));
  }
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

PageUse PageUseOf(const EngineOptions& options, const ModelSpec& spec, bool draft_model) {
  PageUse use{.window = std::nullopt, .step_tokens = options.max_step_tokens};
  // Routes are kept with the pages, and a draft model, which may be behind, uses the same pages.
  if (options.routing_records || draft_model) return use;
  int widest = 0;
  for (const BlockSpec& block : spec.blocks) {
    const AttentionSpec* attention = block.attention();
    if (attention == nullptr) continue;
    if (!attention->window.has_value()) return use;
    widest = std::max(widest, *attention->window);
  }
  use.window = widest;
  return use;
}

Result<int64_t> CachePages(const EngineOptions& options, const PageUse& use, int64_t page_bytes) {
  const int64_t longest = use.MostPages(options.max_model_len);
  int64_t pages = options.kv_cache_bytes / page_bytes;
  if (options.kv_cache_bytes == 0) {
    pages = std::max(options.max_num_seqs * use.MostPages(std::min(options.max_model_len, 2048)),
                     longest);
  }
  if (pages < longest) {
    return absl::ResourceExhaustedError("kv-cache-memory: one sequence of max-model-len " +
                                        std::to_string(options.max_model_len) + " tokens needs " +
                                        std::to_string(longest * page_bytes) + " bytes, found " +
                                        std::to_string(options.kv_cache_bytes));
  }
  if (options.max_kv_cache_bytes > 0 && pages > options.max_kv_cache_bytes / page_bytes) {
    return absl::ResourceExhaustedError("the KV cache needs " + std::to_string(pages * page_bytes) +
                                        " bytes, expected at most " +
                                        std::to_string(options.max_kv_cache_bytes));
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

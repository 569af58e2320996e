#include "server/bench/bench_plan.h"

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <vector>

#include "base/error_text.h"
#include "engine/run/engine_options.h"
#include "engine/spec/weights.h"
#include "model_loaders/inspect.h"
#include "server/base/text_values.h"

namespace moeserve::server {
namespace {

// "1 sequence", "4 sequences"
std::string Counted(int64_t count, const char* noun) {
  return Concat(count, ' ', noun, count == 1 ? "" : "s");
}

std::string Decimal(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  return text;
}

std::string RangeText(const LengthRange& range) {
  return range.min == range.max ? Concat(range.min) : Concat(range.min, " to ", range.max);
}

}  // namespace

std::string ModelPlan(std::string_view name, const ModelSpec& spec) {
  const std::string summary = SummaryText(Summarize(spec));
  // The rest of the summary is about types that this run does not use.
  return Concat("model: ", name, '\n', summary.substr(0, summary.find("weights: ")));
}

int64_t PlannedWeightBytes(const ModelSpec& spec, const ModelOptions& types) {
  const ModelSummary summary = Summarize(spec);
  for (const auto& [type, bytes] : summary.quantized_bytes) {
    if (type == types.quantization) return bytes;
  }
  return summary.WeightBytes(types.compute);
}

std::string MemoryPlan(const ModelSpec& spec, const ModelOptions& types, int64_t cache_bytes,
                       std::string_view cache_text, int64_t probe_bytes) {
  const std::string_view type =
      types.quantization == Quantization::kNone ? Name(types.compute) : Name(types.quantization);
  std::string text = Concat("memory: about ", ShowBytes(PlannedWeightBytes(spec, types)),
                            " for weights in ", type);
  if (cache_bytes > 0) {
    text += Concat(", ", ShowBytes(cache_bytes), " for the KV cache", cache_text);
  }
  if (probe_bytes > 0) {
    text += Concat(", ", ShowBytes(probe_bytes), " while the machine's speed is measured");
  }
  return text + "\n";
}

std::optional<int64_t> PlannedCacheBytes(const EngineOptions& options, const ModelSpec& spec,
                                         const Backend& backend, KvCacheType type) {
  const auto resolved = Resolved(options, spec, backend.preferred_step_rows(), 0, 0);
  if (!resolved.ok()) return std::nullopt;
  const std::vector<KvLayerShape> layers = CacheLayers(*resolved, spec);
  const std::vector<PageUse> use = PageUseOf(*resolved, spec, false);
  const std::vector<int64_t> page_bytes = PageBytesOf(backend, layers, type, use.size());
  const auto pages = CachePages(*resolved, use, page_bytes);
  if (!pages.ok()) return std::nullopt;
  return std::inner_product(pages->begin(), pages->end(), page_bytes.begin(), int64_t{0});
}

std::string CasesPlan(const CaseSettings& settings) {
  std::string text = "to measure:";
  if (settings.prompt > 0) {
    text += Concat(" a prompt of ", Counted(settings.prompt, "token"), " in steps of ",
                   settings.chunk, ";");
  }
  text += Concat(" ", Counted(settings.tokens, "decode step"), " of ");
  for (size_t i = 0; i < settings.batches.size(); ++i) {
    const char* between = i + 1 < settings.batches.size() ? ", " : " and ";
    text += Concat(i == 0 ? "" : between, settings.batches[i]);
  }
  const bool one = settings.batches.size() == 1 && settings.batches[0] == 1;
  text += Concat(one ? " sequence" : " sequences", " after a context of ",
                 Counted(settings.context, "token"), "; a warm-up and ",
                 Counted(settings.rounds, "round"), "\n");
  return text;
}

std::string LoadPlan(const LoadOptions& load, const Workload& workload, int64_t warmup) {
  const WorkloadOptions& work = workload.options();
  std::string text = "to measure: ";
  if (load.requests > 0) text += Counted(load.requests, "request");
  if (load.requests > 0 && load.seconds > 0.0) text += ", at most ";
  if (load.seconds > 0.0) text += Concat(Decimal(load.seconds), " s of requests");
  text += load.clients > 0 ? Concat(" by ", Counted(load.clients, "client"))
                           : Concat(", ", Decimal(load.rate), " each second");
  if (warmup > 0) text += Concat(", after ", warmup, " to warm up");
  text += "\nrequests: ";
  if (work.texts.empty()) {
    text += Concat("prompts of ", RangeText(work.prompt), " tokens");
    if (work.long_share > 0.0) {
      text += Concat(" (", Decimal(100.0 * work.long_share), " % of ", RangeText(work.long_prompt),
                     ")");
    }
    if (work.prefix_tokens > 0) {
      text += Concat(", ", Decimal(100.0 * work.prefix_share), " % behind ", work.prefix_tokens,
                     " shared tokens");
    }
  } else {
    text += Counted(static_cast<int64_t>(work.texts.size()), "text prompt");
  }
  text += Concat("; outputs of ", RangeText(work.output), " tokens");
  if (load.requests > 0 && work.texts.empty()) {
    // The requests depend on their number only, so the sum is exact; long runs are scaled up.
    const int64_t drawn = std::min<int64_t>(load.requests, 10'000);
    double prompt = 0.0;
    double output = 0.0;
    for (int64_t i = 0; i < drawn; ++i) {
      const LoadRequest request = workload.Make(i);
      prompt += static_cast<double>(request.prompt.size());
      output += request.output_tokens;
    }
    const double scale = static_cast<double>(load.requests) / static_cast<double>(drawn);
    text += Concat("; in all ", drawn < load.requests ? "about " : "",
                   static_cast<int64_t>(prompt * scale), " and ",
                   static_cast<int64_t>(output * scale), " tokens");
  }
  return text + "\n";
}

}  // namespace moeserve::server

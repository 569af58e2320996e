#include "server/metrics/metrics_compat.h"

#include <map>
#include <tuple>
#include <utility>

#include "base/error_text.h"

namespace moeserve::server {
namespace {

double Share(double part, double whole) { return whole > 0.0 ? part / whole : 0.0; }

double CacheUsage(const EngineStats& stats) {
  return Share(static_cast<double>(stats.kv_blocks_used),
               static_cast<double>(stats.kv_blocks_total));
}

uint64_t Finished(const EngineStats& stats) {
  return stats.finished_stop + stats.finished_length + stats.finished_abort + stats.finished_error;
}

// Writes families that have one sample each, all with the same labels.
class Writer {
 public:
  Writer(PrometheusText& text, std::string prefix, std::string model, bool has_engine)
      : text_(text),
        prefix_(std::move(prefix)),
        model_(std::move(model)),
        has_engine_(has_engine) {}

  void Gauge(const char* name, const char* help, double value) {
    Family(name, "gauge", help);
    WithLabels([&](auto labels) { text_.Sample(labels, value); });
  }
  void Counter(const char* name, const char* help, uint64_t value) {
    Family(name, "counter", help);
    WithLabels([&](auto labels) { text_.Sample(labels, value); });
  }
  template <typename Counts>
  void Distribution(const char* name, const char* help, const Counts& counts) {
    Family(name, "histogram", help);
    WithLabels([&](auto labels) { text_.HistogramSamples(labels, counts); });
  }
  void Family(const char* name, const char* type, const char* help) {
    text_.ForeignFamily(prefix_ + name, type, help);
  }

 private:
  template <typename Write>
  void WithLabels(Write&& write) {
    using Labels = std::initializer_list<Label>;
    if (has_engine_) {
      write(Labels{{"model_name", model_}, {"engine", "0"}});
    } else {
      write(Labels{{"model_name", model_}});
    }
  }

  PrometheusText& text_;
  const std::string prefix_;
  const std::string model_;
  const bool has_engine_;
};

}  // namespace

void WriteHttpRequests(PrometheusText& text, const Metrics& metrics) {
  std::map<std::tuple<std::string, std::string, std::string>, uint64_t> grouped;
  for (const auto& [key, count] : metrics.HttpRequests()) {
    const auto& [endpoint, method, code] = key;
    grouped[{endpoint, method, Concat(code / 100, "xx")}] += count;
  }
  text.ForeignFamily("http_requests_total", "counter", "Answered HTTP requests.");
  for (const auto& [key, count] : grouped) {
    const auto& [handler, method, status] = key;
    text.Sample({{"handler", handler}, {"method", method}, {"status", status}}, count);
  }
}

Result<MetricsCompat> ParseMetricsCompat(const std::vector<std::string>& words) {
  MetricsCompat compat;
  for (const std::string& word : words) {
    if (word == "vllm") {
      compat.vllm = true;
    } else if (word == "sglang") {
      compat.sglang = true;
    } else {
      return absl::InvalidArgumentError(
          Concat("--metrics-compat: expected vllm or sglang, found ", Printable(word, 32)));
    }
  }
  return compat;
}

void WriteVllmNames(PrometheusText& text, const RequestMetrics& metrics, const EngineStats& stats,
                    const std::string& model) {
  Writer write(text, "vllm:", model, true);
  write.Gauge("num_requests_running", "Sequences in the running batch.", stats.running);
  write.Gauge("num_requests_waiting", "Sequences in the queue.", stats.waiting);
  for (const char* name : {"kv_cache_usage_perc", "gpu_cache_usage_perc"}) {
    write.Gauge(name, "Used share of the KV cache, 1 for all of it.", CacheUsage(stats));
  }
  write.Counter("num_preemptions_total", "Sequences that began again.", stats.preemptions);
  write.Counter("prefix_cache_queries_total", "Prompt tokens looked for in the prefix cache.",
                stats.prefix_queried_tokens);
  write.Counter("prefix_cache_hits_total", "Prompt tokens found in the prefix cache.",
                stats.prefix_hit_tokens);
  write.Counter("spec_decode_num_draft_tokens_total", "Drafted tokens that were computed.",
                stats.drafted_tokens);
  write.Counter("spec_decode_num_accepted_tokens_total", "Drafted tokens that the model then drew.",
                stats.accepted_tokens);
  write.Counter("prompt_tokens_total", "Prompt tokens processed.", stats.prompt_tokens);
  write.Counter("generation_tokens_total", "Tokens generated.", stats.generation_tokens);
  write.Family("request_success_total", "counter", "Sequences that ended, by reason.");
  const std::pair<const char*, uint64_t> reasons[] = {{"stop", stats.finished_stop},
                                                      {"length", stats.finished_length},
                                                      {"abort", stats.finished_abort},
                                                      {"error", stats.finished_error}};
  for (const auto& [reason, count] : reasons) {
    text.Sample({{"model_name", model}, {"engine", "0"}, {"finished_reason", reason}}, count);
  }
  write.Distribution("time_to_first_token_seconds", "Time to the first token.",
                     metrics.time_to_first_token);
  for (const char* name : {"inter_token_latency_seconds", "time_per_output_token_seconds"}) {
    write.Distribution(name, "Time between tokens.", metrics.inter_token_latency);
  }
  write.Distribution("request_time_per_output_token_seconds",
                     "Mean time between the tokens of a request.",
                     metrics.request_time_per_output_token);
  write.Distribution("e2e_request_latency_seconds", "Time from submission to the end.",
                     metrics.request_duration);
  const EngineHistograms& engine = stats.histograms;
  write.Distribution("request_queue_time_seconds", "Time in the queue.", engine.queue_seconds);
  write.Distribution("request_prefill_time_seconds", "Time from admission to the first token.",
                     engine.prefill_seconds);
  write.Distribution("request_decode_time_seconds", "Time from the first token to the end.",
                     engine.decode_seconds);
  write.Distribution("request_inference_time_seconds", "Time from admission to the end.",
                     engine.inference_seconds);
  write.Distribution("request_prompt_tokens", "Prompt tokens of a request.",
                     metrics.request_prompt_tokens);
  write.Distribution("request_generation_tokens", "Tokens generated for a request.",
                     metrics.request_generation_tokens);
  write.Distribution("request_params_max_tokens", "Most tokens that a request may generate.",
                     metrics.request_max_tokens);
  write.Distribution("request_params_n", "Samples that a request asks for.", metrics.request_n);
  write.Distribution("iteration_tokens_total", "Tokens of a step.", engine.step_tokens);
  write.Family("cache_config_info", "gauge", "Shape of the KV cache.");
  text.Sample({{"engine", "0"},
               {"block_size", std::to_string(stats.kv_block_tokens)},
               {"num_gpu_blocks", std::to_string(stats.kv_blocks_total)},
               {"enable_prefix_caching", stats.prefix_cache ? "True" : "False"}},
              1.0);
}

void WriteSglangNames(PrometheusText& text, const RequestMetrics& metrics, const EngineStats& stats,
                      const std::string& model) {
  Writer write(text, "sglang:", model, false);
  const double block_tokens = stats.kv_block_tokens;
  const double used = static_cast<double>(stats.kv_blocks_used) * block_tokens;
  const double evictable = static_cast<double>(stats.kv_blocks_evictable) * block_tokens;
  const double total = static_cast<double>(stats.kv_blocks_total) * block_tokens;
  write.Gauge("num_running_reqs", "Sequences in the running batch.", stats.running);
  write.Gauge("num_queue_reqs", "Sequences in the queue.", stats.waiting);
  write.Gauge("num_retracted_reqs", "Preemptions since start.",
              static_cast<double>(stats.preemptions));
  write.Gauge("token_usage", "Used share of the KV cache.", CacheUsage(stats));
  for (const char* name : {"num_used_tokens", "kv_used_tokens"}) {
    write.Gauge(name, "Tokens of the KV cache in use.", used);
  }
  write.Gauge("kv_available_tokens", "Tokens of the KV cache that are empty.",
              total - used - evictable);
  write.Gauge("kv_evictable_tokens", "Tokens that only the prefix cache holds.", evictable);
  write.Gauge("cache_hit_rate", "Share of prompt tokens found in the prefix cache, since start.",
              Share(static_cast<double>(stats.prefix_hit_tokens),
                    static_cast<double>(stats.prefix_queried_tokens)));
  write.Family("cached_tokens_total", "counter", "Prompt tokens found in the prefix cache.");
  text.Sample({{"model_name", model}, {"cache_source", "device"}}, stats.prefix_hit_tokens);
  write.Counter("prompt_tokens_total", "Prompt tokens processed.", stats.prompt_tokens);
  write.Counter("generation_tokens_total", "Tokens generated.", stats.generation_tokens);
  write.Counter("num_requests_total", "Sequences that ended.", Finished(stats));
  write.Counter("num_aborted_requests_total", "Sequences that were cancelled or ran out of time.",
                stats.finished_abort);
  write.Distribution("time_to_first_token_seconds", "Time to the first token.",
                     metrics.time_to_first_token);
  write.Distribution("inter_token_latency_seconds", "Time between tokens.",
                     metrics.inter_token_latency);
  write.Distribution("e2e_request_latency_seconds", "Time from submission to the end.",
                     metrics.request_duration);
  write.Distribution("prompt_tokens_histogram", "Prompt tokens of a request.",
                     metrics.request_prompt_tokens);
  write.Distribution("generation_tokens_histogram", "Tokens generated for a request.",
                     metrics.request_generation_tokens);
}

}  // namespace moeserve::server

#include "server/metrics/metrics.h"

#include <dirent.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <sstream>
#include <utility>
#include <vector>

#include "server/base/version.h"
#include "server/logging/logging.h"

namespace moeserve::server {
namespace {

std::vector<double> CallBounds() {
  return {.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600};
}

int CountOpenFiles() {
  DIR* directory = opendir("/proc/self/fd");
  if (directory == nullptr) return 0;
  int count = -3;  // excludes ".", ".." and the descriptor of this listing
  while (readdir(directory) != nullptr) ++count;
  closedir(directory);
  return count;
}

void WriteHistograms(PrometheusText& text, const EngineHistograms& histograms) {
  struct Row {
    const char* name;
    const char* help;
    const BucketCounts& counts;
  };
  const Row rows[] = {
      {"request_queue_seconds",
       "From submission until a sequence is admitted for the first time or given up.",
       histograms.queue_seconds},
      {"request_prefill_seconds",
       "From admission to the first token, of every sequence that came so far.",
       histograms.prefill_seconds},
      {"request_decode_seconds",
       "From the first token to the end, of sequences that ended by stop or length.",
       histograms.decode_seconds},
      {"request_inference_seconds",
       "From admission to the end, of sequences that ended by stop or length.",
       histograms.inference_seconds},
      {"step_tokens", "Tokens run in a step.", histograms.step_tokens},
      {"step_sequences", "Sequences run in a step.", histograms.step_sequences},
  };
  for (const auto& [name, help, counts] : rows) {
    text.Family(name, "histogram", help);
    text.HistogramSamples({}, counts);
  }
  text.Family("step_duration_seconds", "histogram",
              "Time of a step; of phase decode if it ran nothing but new tokens of answers.");
  text.HistogramSamples({{"phase", "prefill"}}, histograms.prefill_step_seconds);
  text.HistogramSamples({{"phase", "decode"}}, histograms.decode_step_seconds);
}

}  // namespace

Metrics::Metrics() : http_duration_(CallBounds()), grpc_duration_(CallBounds()) {}

void Metrics::DeclareHttp(std::string_view endpoint, std::string_view method) {
  MutexLock lock(mutex_);
  for (const int code : {200, 500}) {
    http_requests_.try_emplace({std::string(endpoint), std::string(method), code}, 0);
  }
}

void Metrics::DeclareGrpc(std::string_view method) {
  MutexLock lock(mutex_);
  for (const char* code : {"OK", "INTERNAL"}) {
    grpc_requests_.try_emplace({std::string(method), code}, 0);
  }
}

std::map<Metrics::HttpKey, uint64_t> Metrics::HttpRequests() const {
  MutexLock lock(mutex_);
  return http_requests_;
}

void Metrics::CountHttp(std::string_view endpoint, std::string_view method, int code,
                        double seconds) {
  http_duration_.Observe(seconds);
  MutexLock lock(mutex_);
  ++http_requests_[{std::string(endpoint), std::string(method), code}];
}

void Metrics::CountGrpc(std::string_view method, std::string_view code, double seconds) {
  grpc_duration_.Observe(seconds);
  MutexLock lock(mutex_);
  ++grpc_requests_[{std::string(method), std::string(code)}];
}

void Metrics::CountRejected(Rejection reason) {
  rejected_[static_cast<size_t>(reason)].fetch_add(1, std::memory_order_relaxed);
}

void Metrics::WriteServer(PrometheusText& text) const {
  text.Family("build_info", "gauge", "What this build is.");
  text.Sample({{"version", kVersion}}, 1.0);

  text.Family("http_requests_total", "counter", "Answered HTTP requests.");
  for (const auto& [key, count] : HttpRequests()) {
    const auto& [endpoint, method, code] = key;
    text.Sample({{"endpoint", endpoint}, {"method", method}, {"code", std::to_string(code)}},
                count);
  }
  text.Family("http_request_duration_seconds", "histogram", "From request head to last byte.");
  text.HistogramSamples({}, http_duration_);
  text.Family("grpc_requests_total", "counter", "Ended gRPC calls.");
  {
    MutexLock lock(mutex_);
    for (const auto& [key, count] : grpc_requests_) {
      text.Sample({{"method", key.first}, {"code", key.second}}, count);
    }
  }
  text.Family("grpc_request_duration_seconds", "histogram", "From call to final status.");
  text.HistogramSamples({}, grpc_duration_);
  text.Family("connections_open", "gauge", "Open client connections.");
  text.Sample({{"proto", "http"}}, static_cast<double>(http_connections.load()));
  text.Sample({{"proto", "grpc"}}, static_cast<double>(grpc_connections.load()));
  text.Single("grpc_connections_dropped_total", "counter",
              "gRPC connections closed because of their client.",
              static_cast<double>(grpc_dropped.load()));
  text.Family("connections_over_limit_total", "counter",
              "Connections beyond a limit: each was refused, or replaced another one.");
  for (const auto& [proto, over] :
       {std::pair("http", &http_over_limit), std::pair("grpc", &grpc_over_limit)}) {
    text.Sample({{"proto", proto}, {"limit", "server"}}, over->server.load());
    text.Sample({{"proto", proto}, {"limit", "address"}}, over->address.load());
  }
  text.Single("ignored_fields_total", "counter", "Unknown fields of requests that were ignored.",
              static_cast<double>(ignored_fields.load()));
  text.Single("log_lines_dropped_total", "counter",
              "Log lines that standard error did not take in time.",
              static_cast<double>(LogLinesDropped()));
}

void Metrics::WriteRejected(PrometheusText& text, uint64_t queue_full,
                            uint64_t queue_timeout) const {
  text.Family("requests_rejected_total", "counter", "Requests that were not run.");
  text.Sample({{"reason", "queue_full"}}, queue_full + rejected_[2].load());
  text.Sample({{"reason", "queue_timeout"}}, queue_timeout);
  text.Sample({{"reason", "invalid"}}, rejected_[0].load());
  text.Sample({{"reason", "draining"}}, rejected_[1].load());
}

void WriteMemoryMetrics(PrometheusText& text, const MemoryBudget& memory) {
  text.Single("request_memory_bytes", "gauge", "Memory that requests hold, as estimated.",
              static_cast<double>(memory.used()));
  text.Single("request_memory_limit_bytes", "gauge", "Limit on that memory.",
              static_cast<double>(memory.capacity()));
  text.Single("request_memory_refusals_total", "counter",
              "How often the limit left no room for a request or a part of one.",
              static_cast<double>(memory.refused()));
}

void WriteEngineMetrics(PrometheusText& text, const EngineStats& stats) {
  text.Single("engine_up", "gauge", "1 while the engine can serve.", stats.healthy ? 1 : 0);
  text.Single("engine_last_step_timestamp_seconds", "gauge", "When the last step ended.",
              stats.last_step == absl::InfinitePast()
                  ? 0.0
                  : absl::ToDoubleSeconds(stats.last_step - absl::UnixEpoch()));
  text.Single("engine_steps_total", "counter", "Steps run.", static_cast<double>(stats.steps));
  text.Single("requests_running", "gauge", "Sequences in the running batch.", stats.running);
  text.Single("requests_waiting", "gauge", "Sequences in the queue.", stats.waiting);
  const int64_t total = stats.kv_blocks_total;
  const int64_t used = stats.kv_blocks_used;
  text.Single("kv_cache_usage_ratio", "gauge", "Used share of the KV cache.",
              total > 0 ? static_cast<double>(used) / static_cast<double>(total) : 0.0);
  text.Family("kv_cache_tokens", "gauge", "Capacity of the KV cache in tokens, by state.");
  text.Sample({{"state", "used"}}, static_cast<double>(used * stats.kv_block_tokens));
  const int64_t evictable = stats.kv_blocks_evictable;
  text.Sample({{"state", "free"}},
              static_cast<double>((total - used - evictable) * stats.kv_block_tokens));
  text.Sample({{"state", "evictable"}}, static_cast<double>(evictable * stats.kv_block_tokens));
  text.Family("preemptions_total", "counter",
              "Sequences that lost their cache blocks and began again.");
  text.Sample({}, stats.preemptions);
  text.Family("prefix_cache_queried_tokens_total", "counter",
              "Prompt tokens looked for in the prefix cache.");
  text.Sample({}, stats.prefix_queried_tokens);
  text.Family("prefix_cache_hit_tokens_total", "counter", "Prompt tokens found in it.");
  text.Sample({}, stats.prefix_hit_tokens);
  text.Family("draft_tokens_total", "counter",
              "Drafted tokens that were computed before the model drew them (--draft-tokens).");
  text.Sample({}, stats.drafted_tokens);
  text.Family("draft_accepted_tokens_total", "counter", "Of them, those that the model then drew.");
  text.Sample({}, stats.accepted_tokens);
  text.Family("beam_rows_total", "counter",
              "Rows that were computed for beams, without those that all beams share.");
  text.Sample({}, stats.beam_rows);
  text.Single("engine_step_seconds_total", "counter", "Time spent in steps.", stats.step_seconds);
  text.Single("engine_forward_seconds_total", "counter", "Of it, time inside the model.",
              stats.forward_seconds);
  text.Family("tier_bytes_total", "counter",
              "Bytes of chosen experts, if they do not all fit into memory (--memory): hit, in "
              "memory when their block had been routed; read, read from mapped files or copied to "
              "the device.");
  text.Sample({{"result", "hit"}}, stats.tiers.hit_bytes);
  text.Sample({{"result", "read"}}, stats.tiers.read_bytes);
  text.Single("tier_stall_seconds_total", "counter",
              "Time in which the model's thread did not run during the products of such experts "
              "that were not all in memory.",
              stats.tiers.stall_seconds);
  text.Family("tier_policy", "gauge", "1 for the policy of the next step, else 0.");
  const bool ahead = stats.tiers.policy == TierPolicy::kAhead;
  text.Sample({{"policy", "map"}}, ahead ? 0.0 : 1.0);
  text.Sample({{"policy", "ahead"}}, ahead ? 1.0 : 0.0);
  text.Family("cache_config_info", "gauge", "Shape of the KV cache.");
  text.Sample({{"block_tokens", std::to_string(stats.kv_block_tokens)},
               {"blocks", std::to_string(total)},
               {"prefix_cache", stats.prefix_cache ? "true" : "false"}},
              1.0);
  text.Family("prompt_tokens_total", "counter", "Prompt tokens processed.");
  text.Sample({}, stats.prompt_tokens);
  text.Family("generation_tokens_total", "counter", "Tokens generated.");
  text.Sample({}, stats.generation_tokens);
  text.Family("requests_finished_total", "counter", "Sequences that ended, by reason.");
  text.Sample({{"finished_reason", "stop"}}, stats.finished_stop);
  text.Sample({{"finished_reason", "length"}}, stats.finished_length);
  text.Sample({{"finished_reason", "abort"}}, stats.finished_abort);
  text.Sample({{"finished_reason", "error"}}, stats.finished_error);
  WriteHistograms(text, stats.histograms);
}

void WriteProcessMetrics(PrometheusText& text) {
  std::ifstream file("/proc/self/stat");
  std::string line;
  std::getline(file, line);
  // The command name, in parentheses, may contain spaces: split the fields after the closing
  // parenthesis.
  const size_t end = line.rfind(')');
  if (end == std::string::npos) return;
  std::istringstream fields(line.substr(end + 1));
  std::vector<std::string> values;
  for (std::string value; fields >> value;) values.push_back(value);
  if (values.size() < 22) return;
  const double ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
  const auto number = [&](int field) { return std::stod(values[field - 3]); };
  text.Single("process_cpu_seconds_total", "counter", "Processor time used.",
              (number(14) + number(15)) / ticks);
  text.Single("process_virtual_memory_bytes", "gauge", "Virtual memory.", number(23));
  text.Single("process_resident_memory_bytes", "gauge", "Resident memory.",
              number(24) * static_cast<double>(sysconf(_SC_PAGESIZE)));
  text.Single("process_open_fds", "gauge", "Open file descriptors.", CountOpenFiles());
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    text.Single("process_max_fds", "gauge", "Limit of open file descriptors.",
                static_cast<double>(limit.rlim_cur));
  }
  std::ifstream stat("/proc/stat");
  for (std::string row; std::getline(stat, row);) {
    if (!row.starts_with("btime ")) continue;
    text.Single("process_start_time_seconds", "gauge", "Start of the process, Unix time.",
                std::stod(row.substr(6)) + number(22) / ticks);
  }
}

}  // namespace moeserve::server

#include "server/bench/load_test/load_report.h"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <numeric>
#include <utility>

#include "server/base/json.h"

namespace moeserve::server {
namespace {

// Collects the latencies of one group of requests.
struct GroupSamples {
  void Add(const RequestResult& result) {
    ++requests;
    duration.push_back(result.end - result.start);
    if (result.arrivals.empty()) return;
    first_token.push_back(result.arrivals.front() - result.start);
    for (size_t i = 1; i < result.arrivals.size(); ++i) {
      inter_token.push_back(result.arrivals[i] - result.arrivals[i - 1]);
    }
    if (result.output_tokens > 1) {
      per_output_token.push_back((result.arrivals.back() - result.arrivals.front()) /
                                 static_cast<double>(result.output_tokens - 1));
    }
  }

  LatencyGroup Sum() && {
    return {requests, Summarize(std::move(first_token)), Summarize(std::move(inter_token)),
            Summarize(std::move(per_output_token)), Summarize(std::move(duration))};
  }

  int64_t requests = 0;
  std::vector<double> first_token;
  std::vector<double> inter_token;
  std::vector<double> per_output_token;
  std::vector<double> duration;
};

double Ratio(double amount, double seconds) { return seconds > 0.0 ? amount / seconds : 0.0; }

// Returns the number of output tokens that had arrived at time `moment`. Assumes that every piece
// has equally many tokens.
double TokensUntil(const RequestResult& result, double moment) {
  if (result.arrivals.empty()) return 0.0;
  const auto end = std::upper_bound(result.arrivals.begin(), result.arrivals.end(), moment);
  return static_cast<double>(result.output_tokens) *
         static_cast<double>(end - result.arrivals.begin()) /
         static_cast<double>(result.arrivals.size());
}

__attribute__((format(printf, 2, 3))) void Append(std::string& out, const char* format, ...) {
  char line[256];
  va_list arguments;
  va_start(arguments, format);
  const int size = std::vsnprintf(line, sizeof(line), format, arguments);
  va_end(arguments);
  out.append(line, static_cast<size_t>(std::clamp(size, 0, static_cast<int>(sizeof(line)) - 1)));
}

void AppendDistribution(std::string& out, const char* name, const Distribution& d) {
  if (d.count == 0) return;
  Append(out, "  %-30s %9lld %10.2f %10.2f %10.2f %10.2f %10.2f\n", name,
         static_cast<long long>(d.count), 1e3 * d.mean, 1e3 * d.p50, 1e3 * d.p90, 1e3 * d.p99,
         1e3 * d.max);
}

void AppendGroup(std::string& out, const char* name, const LatencyGroup& group) {
  if (group.requests == 0) return;
  Append(out, "%s (%lld completed)\n", name, static_cast<long long>(group.requests));
  AppendDistribution(out, "time to first token", group.first_token);
  AppendDistribution(out, "inter-token latency", group.inter_token);
  AppendDistribution(out, "time per output token", group.per_output_token);
  AppendDistribution(out, "request duration", group.duration);
}

void AppendCounter(std::string& out, const char* name, const std::optional<double>& value) {
  if (value) {
    Append(out, "  %-30s %.0f\n", name, *value);
  } else {
    Append(out, "  %-30s not reported\n", name);
  }
}

std::optional<double> Share(const std::optional<double>& part, const std::optional<double>& whole) {
  if (!part || !whole || *whole <= 0.0) return std::nullopt;
  return *part / *whole;
}

std::optional<double> HitRate(const ServerCounters& server) {
  return Share(server.prefix_hit_tokens, server.prefix_queried_tokens);
}

std::optional<double> ForwardShare(const ServerCounters& server) {
  return Share(server.forward_seconds, server.step_seconds);
}

void AppendShare(std::string& out, const char* name, const std::optional<double>& share) {
  if (share) {
    Append(out, "  %-30s %.1f %%\n", name, 100.0 * *share);
  } else {
    Append(out, "  %-30s not reported\n", name);
  }
}

void AppendServer(std::string& out, const std::optional<ServerCounters>& server) {
  if (!server) {
    out += "server's counters: not reported\n";
    return;
  }
  out += "server's counters over the run\n";
  AppendCounter(out, "prompt tokens", server->prompt_tokens);
  AppendCounter(out, "generated tokens", server->generation_tokens);
  AppendCounter(out, "steps", server->steps);
  AppendCounter(out, "preemptions", server->preemptions);
  AppendCounter(out, "rejected", server->rejected);
  AppendCounter(out, "prefix cache queried tokens", server->prefix_queried_tokens);
  AppendCounter(out, "prefix cache hit tokens", server->prefix_hit_tokens);
  AppendShare(out, "prefix cache hit rate", HitRate(*server));
  AppendShare(out, "step time inside the model", ForwardShare(*server));
}

// Returns the least time in which memory could deliver the weights that the run's steps read, as a
// share of the run's time.
std::optional<double> WeightShare(const LoadReport& report) {
  if (!report.weight_bytes || !report.read_bandwidth) return std::nullopt;
  return Ratio(*report.weight_bytes / *report.read_bandwidth, report.seconds);
}

void AppendBandwidth(std::string& out, const LoadReport& report) {
  if (!report.weight_bytes || !report.read_bandwidth) return;
  Append(out,
         "weights read: %.1f GB at %.1f GB/s of %.1f GB/s read bandwidth: %.1f %% of the bound\n",
         1e-9 * *report.weight_bytes, 1e-9 * Ratio(*report.weight_bytes, report.seconds),
         1e-9 * *report.read_bandwidth, 100.0 * *WeightShare(report));
}

void AppendIdle(std::string& out, const IdleStreamReport& idle) {
  Append(out,
         "idle streams: %d wanted, %d opened; at the release %d alive, %d complete, %d lost; "
         "%d complete in the end\n",
         idle.wanted, idle.opened, idle.alive, idle.ended_early, idle.lost, idle.completed);
  for (const auto& [error, count] : idle.not_opened) {
    Append(out, "  not opened: %d times %s\n", count, error.c_str());
  }
  for (const auto& [error, count] : idle.incomplete) {
    Append(out, "  not complete: %d times %s\n", count, error.c_str());
  }
}

OrderedJson ToJson(const Distribution& d) {
  if (d.count == 0) return {{"count", 0}};
  return {{"count", d.count}, {"mean", d.mean}, {"p50", d.p50},
          {"p90", d.p90},     {"p99", d.p99},   {"max", d.max}};
}

OrderedJson ToJson(const LatencyGroup& group) {
  return {{"requests", group.requests},
          {"time_to_first_token_seconds", ToJson(group.first_token)},
          {"inter_token_latency_seconds", ToJson(group.inter_token)},
          {"time_per_output_token_seconds", ToJson(group.per_output_token)},
          {"request_duration_seconds", ToJson(group.duration)}};
}

OrderedJson ToJson(const std::optional<double>& value) {
  return value ? OrderedJson(*value) : OrderedJson(nullptr);
}

OrderedJson ToJson(const ServerCounters& server) {
  return {{"prompt_tokens", ToJson(server.prompt_tokens)},
          {"generation_tokens", ToJson(server.generation_tokens)},
          {"steps", ToJson(server.steps)},
          {"preemptions", ToJson(server.preemptions)},
          {"rejected", ToJson(server.rejected)},
          {"prefix_cache_queried_tokens", ToJson(server.prefix_queried_tokens)},
          {"prefix_cache_hit_tokens", ToJson(server.prefix_hit_tokens)},
          {"prefix_cache_hit_rate", ToJson(HitRate(server))},
          {"forward_share_of_steps", ToJson(ForwardShare(server))}};
}

OrderedJson ToJson(const IdleStreamReport& idle) {
  return {{"wanted", idle.wanted},           {"opened", idle.opened},
          {"not_opened", idle.not_opened},   {"alive", idle.alive},
          {"ended_early", idle.ended_early}, {"lost", idle.lost},
          {"completed", idle.completed},     {"incomplete", idle.incomplete}};
}

}  // namespace

Distribution Summarize(std::vector<double> samples) {
  Distribution out;
  if (samples.empty()) return out;
  std::sort(samples.begin(), samples.end());
  const size_t count = samples.size();
  // Computed with integers, because 0.99 * 100 is not 99 in floating point.
  const auto percentile = [&](size_t percent) { return samples[(percent * count + 99) / 100 - 1]; };
  out.count = static_cast<int64_t>(count);
  out.mean = std::accumulate(samples.begin(), samples.end(), 0.0) / static_cast<double>(count);
  out.p50 = percentile(50);
  out.p90 = percentile(90);
  out.p99 = percentile(99);
  out.max = samples.back();
  return out;
}

LoadReport MakeReport(const LoadRun& run) {
  LoadReport report;
  report.started = static_cast<int64_t>(run.samples.size());
  report.unanswered = run.unanswered;
  report.answered_twice = run.answered_twice;
  report.cut_off = run.cut_off;
  report.interrupted = run.interrupted;
  report.seconds = run.end - run.begin;
  GroupSamples all, normal, long_prompt;
  std::map<std::string, std::vector<double>> errors;
  std::vector<double> refusals, retry_after;
  double input_tokens = 0.0, output_tokens = 0.0, full_load_tokens = 0.0;
  for (const LoadSample& sample : run.samples) {
    if (sample.results == 0) continue;
    const RequestResult& result = sample.result;
    report.pieces += static_cast<int64_t>(result.arrivals.size());
    output_tokens += static_cast<double>(result.output_tokens);
    full_load_tokens += TokensUntil(result, run.last_start);
    if (result.retry_after) retry_after.push_back(*result.retry_after);
    if (!result.error.empty()) {
      errors[result.error].push_back(result.end - result.start);
      if (result.refused) refusals.push_back(result.end - result.start);
      continue;
    }
    ++report.completed;
    report.wrong_length += result.output_tokens != sample.asked_output_tokens;
    input_tokens += static_cast<double>(result.prompt_tokens);
    all.Add(result);
    (sample.long_prompt ? long_prompt : normal).Add(result);
  }
  report.requests_per_second = Ratio(static_cast<double>(report.completed), report.seconds);
  report.input_tokens_per_second = Ratio(input_tokens, report.seconds);
  report.output_tokens_per_second = Ratio(output_tokens, report.seconds);
  const double full_load = run.last_start - run.begin;
  if (full_load > 0.2 * report.seconds) {
    report.full_load_output_tokens_per_second = full_load_tokens / full_load;
  }
  report.all = std::move(all).Sum();
  report.normal = std::move(normal).Sum();
  report.long_prompt = std::move(long_prompt).Sum();
  report.start_lag = Summarize(run.start_lags);
  for (auto& [error, latencies] : errors) report.errors[error] = Summarize(std::move(latencies));
  report.refusals = Summarize(std::move(refusals));
  report.retry_after = Summarize(std::move(retry_after));
  return report;
}

std::string ReportTable(const LoadReport& report) {
  std::string out;
  if (report.interrupted) out += "interrupted: these are the results until then\n";
  if (report.started > 0) {
    Append(out, "requests: %lld started, %lld completed in %.2f s\n",
           static_cast<long long>(report.started), static_cast<long long>(report.completed),
           report.seconds);
    Append(out, "  unanswered %lld, answered twice %lld, of another length %lld, cut off %lld\n",
           static_cast<long long>(report.unanswered), static_cast<long long>(report.answered_twice),
           static_cast<long long>(report.wrong_length), static_cast<long long>(report.cut_off));
    Append(out, "throughput: %.2f requests/s, %.1f input tokens/s, %.1f output tokens/s\n",
           report.requests_per_second, report.input_tokens_per_second,
           report.output_tokens_per_second);
    if (report.full_load_output_tokens_per_second) {
      Append(out, "  %.1f output tokens/s while requests were being started\n",
             *report.full_load_output_tokens_per_second);
    }
    Append(out, "%-32s %9s %10s %10s %10s %10s %10s\n", "milliseconds", "samples", "mean", "p50",
           "p90", "p99", "max");
    AppendGroup(out, "all requests", report.all);
    if (report.long_prompt.requests > 0) {
      AppendGroup(out, "ordinary prompts", report.normal);
      AppendGroup(out, "long prompts", report.long_prompt);
    }
    if (!report.errors.empty()) out += "errors, time until they came\n";
    for (const auto& [error, latency] : report.errors) {
      AppendDistribution(out, error.c_str(), latency);
    }
    if (report.refusals.count > 0) {
      AppendDistribution(out, "all refusals", report.refusals);
    }
    if (report.retry_after.count > 0) {
      Append(out, "Retry-After: %lld times, p50 %.1f s, at most %.1f s\n",
             static_cast<long long>(report.retry_after.count), report.retry_after.p50,
             report.retry_after.max);
    }
    if (report.sender_cpu_seconds) {
      Append(out, "sender: %.1f %% of one core, %.2f us for each piece of output\n",
             100.0 * Ratio(*report.sender_cpu_seconds, report.seconds),
             1e6 * Ratio(*report.sender_cpu_seconds, static_cast<double>(report.pieces)));
    }
    AppendDistribution(out, "sender behind its schedule", report.start_lag);
    AppendServer(out, report.server);
    AppendBandwidth(out, report);
  }
  if (report.idle_streams) AppendIdle(out, *report.idle_streams);
  return out;
}

std::string ReportJson(const LoadReport& report, const std::string& target) {
  OrderedJson errors = OrderedJson::object();
  for (const auto& [error, latency] : report.errors) errors[error] = ToJson(latency);
  const OrderedJson json = {
      {"target", target},
      {"requests",
       {{"started", report.started},
        {"completed", report.completed},
        {"unanswered", report.unanswered},
        {"answered_twice", report.answered_twice},
        {"wrong_length", report.wrong_length},
        {"cut_off", report.cut_off}}},
      {"interrupted", report.interrupted},
      {"seconds", report.seconds},
      {"requests_per_second", report.requests_per_second},
      {"input_tokens_per_second", report.input_tokens_per_second},
      {"output_tokens_per_second", report.output_tokens_per_second},
      {"full_load_output_tokens_per_second", ToJson(report.full_load_output_tokens_per_second)},
      {"all", ToJson(report.all)},
      {"normal", ToJson(report.normal)},
      {"long_prompt", ToJson(report.long_prompt)},
      {"errors", errors},
      {"refusals", ToJson(report.refusals)},
      {"retry_after_seconds", ToJson(report.retry_after)},
      {"start_lag_seconds", ToJson(report.start_lag)},
      {"pieces", report.pieces},
      {"sender_cpu_seconds", ToJson(report.sender_cpu_seconds)},
      {"server", report.server ? ToJson(*report.server) : OrderedJson(nullptr)},
      {"weight_bytes", ToJson(report.weight_bytes)},
      {"read_bandwidth", ToJson(report.read_bandwidth)},
      {"share_of_bandwidth_bound", ToJson(WeightShare(report))},
      {"idle_streams", report.idle_streams ? ToJson(*report.idle_streams) : OrderedJson(nullptr)}};
  return json.dump(2, ' ', false, OrderedJson::error_handler_t::replace);
}

}  // namespace moeserve::server

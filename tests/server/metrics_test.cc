#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "engine/statistics/measures/load_balance.h"
#include "server/base/text_values.h"
#include "server/context.h"
#include "server/http/routes/api.h"
#include "server/metrics/metrics_compat.h"
#include "server/metrics/prometheus.h"
#include "server/reports/expert_history.h"
#include "server/reports/expert_report.h"
#include "server/rpc/server.h"
#include "tests/server/exposition.h"
#include "tests/server/fake_engine.h"

namespace moeserve::server {
namespace {

using testing::Exposition;
using testing::ReadExposition;

TEST(PrometheusText, EscapesAndFormats) {
  PrometheusText text;
  text.Family("a_total", "counter", "Line\nand \\ backslash");
  text.Sample({{"l", "q\"b\\n\n"}}, uint64_t{7});
  EXPECT_EQ(text.Take(),
            "# HELP moeserve_a_total Line\\nand \\\\ backslash\n# TYPE moeserve_a_total counter\n"
            "moeserve_a_total{l=\"q\\\"b\\\\n\\n\"} 7\n");
  EXPECT_EQ(PrometheusNumber(std::nan("")), "NaN");
  EXPECT_EQ(PrometheusNumber(std::numeric_limits<double>::infinity()), "+Inf");
  EXPECT_EQ(PrometheusNumber(0.1), "0.1");
}

TEST(Histogram, IsCumulative) {
  Histogram histogram({1, 2, 5});
  for (const double value : {0.5, 1.0, 1.5, 4.0, 100.0}) histogram.Observe(value);
  const auto snapshot = histogram.Read();
  EXPECT_EQ(snapshot.counts, (std::vector<uint64_t>{2, 1, 1, 1}));
  EXPECT_EQ(snapshot.sum, 107.0);
  PrometheusText text;
  text.Family("a", "histogram", "b");
  text.HistogramSamples({}, histogram);
  const auto samples = ReadExposition(text.Take()).samples;
  EXPECT_EQ(samples.at(R"(moeserve_a_bucket{le="1.0"})"), 2);
  EXPECT_EQ(samples.at(R"(moeserve_a_bucket{le="2.0"})"), 3);
  EXPECT_EQ(samples.at(R"(moeserve_a_bucket{le="5.0"})"), 4);
  EXPECT_EQ(samples.at(R"(moeserve_a_bucket{le="+Inf"})"), 5);
  EXPECT_EQ(samples.at("moeserve_a_count"), 5);
  EXPECT_EQ(samples.at("moeserve_a_sum"), 107.0);
}

TEST(PrometheusText, OpenMetricsNamesCountersWithoutTheirSuffix) {
  PrometheusText text(ExpositionFormat::kOpenMetrics);
  text.Family("a_total", "counter", "Says \"b\"");
  text.Sample({}, uint64_t{7});
  text.ForeignFamily("x:b_total", "histogram", "c");
  EXPECT_EQ(text.Take(),
            "# HELP moeserve_a Says \\\"b\\\"\n# TYPE moeserve_a counter\nmoeserve_a_total 7\n"
            "# HELP x:b_total c\n# TYPE x:b_total histogram\n# EOF\n");
}

TEST(PrometheusText, BoundsLookAsElsewhere) {
  const std::pair<double, const char*> bounds[] = {
      {1, "1.0"},        {0.001, "0.001"}, {2.5, "2.5"},        {7680, "7680.0"},
      {5e5, "500000.0"}, {1e6, "1e+06"},   {1.5e-7, "1.5e-07"}, {0, "0.0"}};
  for (const auto& [bound, text] : bounds) EXPECT_EQ(BucketBound(bound), text);
}

TEST(ChooseExposition, FollowsTheAcceptHeader) {
  const auto open_metrics = [](const char* accept) {
    return ChooseExposition(accept) == ExpositionFormat::kOpenMetrics;
  };
  for (const char* accept :
       {"application/openmetrics-text",
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;"
        "q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        "text/plain;q=0.5 , Application/OpenMetrics-Text ; q=0.6",
        "application/openmetrics-text;q=1,"}) {
    EXPECT_TRUE(open_metrics(accept)) << accept;
  }
  for (const char* accept :
       {"", "*/*", "text/plain", "application/openmetrics-text;q=0",
        "application/openmetrics-texts", "application/openmetrics-text;q=0.4,text/plain;q=0.5",
        "application/openmetrics-text;q=nan", "application/openmetrics-text;q=-1",
        "application/openmetrics-text;q=", ",;,;=", "x/openmetrics-text"}) {
    EXPECT_FALSE(open_metrics(accept)) << accept;
  }
}

ServerSettings Settings() {
  ServerSettings settings;
  settings.served_names = {"tiny"};
  return settings;
}

TEST(Metrics, AreAValidExposition) {
  ServerContext context(Settings());
  Exposition read = ReadExposition(context.MetricsText());
  EXPECT_EQ(read.samples.at(R"(moeserve_engine_up{model="tiny"})"), 0);
  context.SetServing(std::make_shared<testing::FakeEngine>(), {});
  context.metrics().CountHttp("/v1/completions", "POST", 200, 0.1);
  context.metrics().CountGrpc("Generate", "OK", 0.1);
  context.metrics().CountRejected(Rejection::kInvalid);
  context.models().RequestMetricsOf("tiny")->time_to_first_token.Observe(0.3);
  read = ReadExposition(context.MetricsText());
  for (const auto& [name, value] : std::initializer_list<std::pair<const char*, double>>{
           {R"(moeserve_engine_up{model="tiny"})", 1},
           {R"(moeserve_http_requests_total{endpoint="/v1/completions",method="POST",code="200"})",
            1},
           {R"(moeserve_requests_rejected_total{reason="invalid"})", 1},
           {R"(moeserve_time_to_first_token_seconds_bucket{model="tiny",le="0.25"})", 0},
           {R"(moeserve_time_to_first_token_seconds_bucket{model="tiny",le="0.5"})", 1},
           {R"(moeserve_time_to_first_token_seconds_bucket{model="tiny",le="+Inf"})", 1}}) {
    EXPECT_EQ(read.samples.at(name), value) << name;
  }
  EXPECT_GT(read.samples.at("process_resident_memory_bytes"), 0);
}

// Every counter must exist from the start: if it appeared with its first event only, an alert on
// its increase would miss that event.
TEST(Metrics, AllAreThereFromTheStart) {
  ServerContext context(Settings());
  const auto router = http::MakeRouter(context);
  rpc::GrpcServerOptions grpc_options;
  grpc_options.port = 0;
  const auto grpc_server = rpc::GrpcServer::Start(grpc_options, context);
  ASSERT_TRUE(grpc_server.ok()) << grpc_server.status();
  const Exposition loading = ReadExposition(context.MetricsText());
  context.SetServing(std::make_shared<testing::FakeEngine>(), {});
  const Exposition serving = ReadExposition(context.MetricsText());
  for (const Exposition* read : {&loading, &serving}) {
    for (const auto& [family, type] : read->types) {
      EXPECT_TRUE(read->HasSamples(family)) << family;
      if (family.starts_with("process_") || family.starts_with("moeserve_moe_")) continue;
      for (const auto& [name, value] : read->samples) {
        const bool counts = type == "counter" || type == "histogram";
        if (counts && name.starts_with(family)) {
          EXPECT_EQ(value, 0) << name;
        }
      }
    }
  }
  for (const char* family : {"requests_running",
                             "requests_waiting",
                             "kv_cache_usage_ratio",
                             "kv_cache_tokens",
                             "preemptions_total",
                             "draft_tokens_total",
                             "draft_accepted_tokens_total",
                             "beam_rows_total",
                             "tier_bytes_total",
                             "tier_stall_seconds_total",
                             "tier_policy",
                             "prefix_cache_queried_tokens_total",
                             "prefix_cache_hit_tokens_total",
                             "prompt_tokens_total",
                             "generation_tokens_total",
                             "requests_finished_total",
                             "requests_rejected_total",
                             "time_to_first_token_seconds",
                             "inter_token_latency_seconds",
                             "request_time_per_output_token_seconds",
                             "request_duration_seconds",
                             "request_queue_seconds",
                             "request_prefill_seconds",
                             "request_decode_seconds",
                             "request_inference_seconds",
                             "request_prompt_tokens",
                             "request_generation_tokens",
                             "request_max_tokens",
                             "request_n",
                             "step_tokens",
                             "step_sequences",
                             "step_duration_seconds",
                             "engine_up",
                             "engine_last_step_timestamp_seconds",
                             "model_load_duration_seconds",
                             "build_info",
                             "cache_config_info",
                             "http_requests_total",
                             "http_request_duration_seconds",
                             "grpc_requests_total",
                             "grpc_request_duration_seconds",
                             "connections_open"}) {
    EXPECT_TRUE(loading.types.contains(std::string("moeserve_") + family)) << family;
  }
  for (const char* sample :
       {R"(moeserve_http_requests_total{endpoint="/v1/completions",method="POST",code="500"})",
        R"(moeserve_grpc_requests_total{method="Generate",code="INTERNAL"})",
        R"(moeserve_requests_finished_total{model="tiny",finished_reason="abort"})",
        R"(moeserve_step_duration_seconds_count{model="tiny",phase="prefill"})",
        R"(moeserve_step_duration_seconds_count{model="tiny",phase="decode"})"}) {
    EXPECT_TRUE(loading.samples.contains(sample)) << sample;
  }
}

TEST(MetricsCompat, WordsAreChecked) {
  EXPECT_FALSE(ParseMetricsCompat({})->vllm);
  EXPECT_TRUE(ParseMetricsCompat({"sglang"})->sglang);
  const auto both = ParseMetricsCompat({"vllm", "sglang", "vllm"});
  EXPECT_TRUE(both->vllm && both->sglang);
  for (const char* bad : {"", "VLLM", "triton", "vllm "}) {
    EXPECT_FALSE(ParseMetricsCompat({"vllm", bad}).ok()) << bad;
  }
}

// Metrics under the names of other servers must have the values of the server's own metrics.
TEST(MetricsCompat, NamesAreAliases) {
  Metrics server;
  RequestMetrics metrics;
  EngineStats stats;
  stats.running = 3;
  stats.waiting = 4;
  stats.kv_block_tokens = 16;
  stats.kv_blocks_total = 100;
  stats.kv_blocks_used = 25;
  stats.kv_blocks_evictable = 15;
  stats.preemptions = 5;
  stats.drafted_tokens = 30;
  stats.accepted_tokens = 20;
  stats.prefix_queried_tokens = 60;
  stats.prefix_hit_tokens = 15;
  stats.prompt_tokens = 7;
  stats.generation_tokens = 8;
  stats.finished_stop = 1;
  stats.finished_length = 2;
  stats.finished_abort = 3;
  stats.finished_error = 4;
  stats.histograms.queue_seconds.Observe(0.9);
  stats.histograms.step_tokens.Observe(100);
  metrics.request_n.Observe(3);
  server.CountHttp("/v1/completions", "POST", 400, 0.1);
  server.CountHttp("/v1/completions", "POST", 404, 0.1);
  PrometheusText text;
  WriteVllmNames(text, metrics, stats, "m");
  WriteSglangNames(text, metrics, stats, "m");
  WriteHttpRequests(text, server);
  const Exposition read = ReadExposition(text.Take());
  const auto vllm = [&](const std::string& name, const std::string& more = "") {
    return read.samples.at("vllm:" + name + "{model_name=\"m\",engine=\"0\"" + more + "}");
  };
  EXPECT_EQ(vllm("num_requests_running"), 3);
  EXPECT_EQ(vllm("num_requests_waiting"), 4);
  EXPECT_EQ(vllm("kv_cache_usage_perc"), 0.25);
  EXPECT_EQ(vllm("num_preemptions_total"), 5);
  EXPECT_EQ(vllm("spec_decode_num_draft_tokens_total"), 30);
  EXPECT_EQ(vllm("spec_decode_num_accepted_tokens_total"), 20);
  EXPECT_EQ(vllm("prefix_cache_queries_total"), 60);
  EXPECT_EQ(vllm("prefix_cache_hits_total"), 15);
  EXPECT_EQ(vllm("prompt_tokens_total"), 7);
  EXPECT_EQ(vllm("generation_tokens_total"), 8);
  EXPECT_EQ(vllm("request_success_total", R"(,finished_reason="length")"), 2);
  EXPECT_EQ(vllm("request_success_total", R"(,finished_reason="abort")"), 3);
  EXPECT_EQ(vllm("request_queue_time_seconds_bucket", R"(,le="0.8")"), 0);
  EXPECT_EQ(vllm("request_queue_time_seconds_bucket", R"(,le="1.0")"), 1);
  EXPECT_EQ(vllm("iteration_tokens_total_sum"), 100);
  EXPECT_EQ(vllm("request_params_n_sum"), 3);
  EXPECT_EQ(vllm("e2e_request_latency_seconds_count"), 0);
  EXPECT_EQ(read.samples.at(
                R"(http_requests_total{handler="/v1/completions",method="POST",status="4xx"})"),
            2);
  const auto sglang = [&](const std::string& name) {
    return read.samples.at("sglang:" + name + "{model_name=\"m\"}");
  };
  EXPECT_EQ(sglang("num_running_reqs"), 3);
  EXPECT_EQ(sglang("num_queue_reqs"), 4);
  EXPECT_EQ(sglang("token_usage"), 0.25);
  EXPECT_EQ(sglang("num_used_tokens"), 400);
  EXPECT_EQ(sglang("kv_available_tokens"), 960);
  EXPECT_EQ(sglang("kv_evictable_tokens"), 240);
  EXPECT_EQ(sglang("cache_hit_rate"), 0.25);
  EXPECT_EQ(sglang("num_requests_total"), 10);
  EXPECT_EQ(sglang("num_aborted_requests_total"), 3);
}

TEST(MetricsCompat, IsOffUnlessAskedFor) {
  ServerContext plain(Settings());
  EXPECT_EQ(plain.MetricsText().find("vllm:"), std::string::npos);
  EXPECT_EQ(plain.MetricsText().find("sglang:"), std::string::npos);
  ServerSettings settings = Settings();
  settings.metrics_compat = {.vllm = true, .sglang = true};
  ServerContext context(settings);
  const Exposition read = ReadExposition(context.MetricsText());
  EXPECT_TRUE(read.types.contains("vllm:num_requests_running"));
  EXPECT_TRUE(read.types.contains("sglang:num_running_reqs"));
}

TEST(MeasureLoad, KnowsTheExtremes) {
  EXPECT_DOUBLE_EQ(MeasureLoad({5, 5, 5, 5}).balance, 1.0);
  EXPECT_DOUBLE_EQ(MeasureLoad({5, 5, 5, 5}).entropy, 1.0);
  const LoadShape one = MeasureLoad({0, 8, 0, 0});
  EXPECT_DOUBLE_EQ(one.balance, 0.25);
  EXPECT_DOUBLE_EQ(one.entropy, 0.0);
  EXPECT_EQ(one.unused, 3);
  EXPECT_EQ(MeasureLoad({0, 0}).unused, 2);
}

ExpertStats Wide(int blocks, int experts) {
  ExpertStats stats;
  stats.tokens = 100;
  for (int b = 0; b < blocks; ++b) {
    BlockExpertStats block;
    block.layer = b;
    block.num_experts = experts;
    block.selections.resize(experts);
    block.expert_parameters.resize(experts, 10);
    block.selections[3] = 60;
    block.selections[5] = 40;
    stats.blocks.push_back(block);
  }
  return stats;
}

TEST(ExpertHistory, GivesWindowsAndStaysSmall) {
  ExpertHistory history;
  EXPECT_FALSE(history.Latest());
  absl::Time now = absl::UnixEpoch();
  ExpertStats stats = Wide(1, 8);
  for (int second = 0; second < 2000; ++second) {
    stats.tokens = 10 * static_cast<uint64_t>(second);
    history.Add(now, stats);
    now += absl::Seconds(1);
  }
  EXPECT_EQ(history.Latest()->tokens, 19990u);
  const auto base = history.Before(now, absl::Seconds(30));
  EXPECT_EQ(now - base->time, absl::Seconds(30));
  EXPECT_EQ(Difference(stats, *base->stats).tokens, 290u);
  const auto far = history.Before(now, absl::Seconds(600));
  EXPECT_GE(now - far->time, absl::Seconds(590));
  EXPECT_LE(now - far->time, absl::Seconds(620));
}

TEST(ExpertHistory, StaysWithinItsMemory) {
  constexpr size_t kMaxBytes = 200'000;  // some 20 snapshots
  ExpertHistory history(kMaxBytes);
  absl::Time now = absl::UnixEpoch();
  ExpertStats stats = Wide(4, 120);
  for (int second = 0; second < 1000; ++second) {
    stats.steps = stats.tokens = static_cast<uint64_t>(second);
    history.Add(now, stats);
    ASSERT_LE(history.bytes(), kMaxBytes);
    now += absl::Seconds(1);
  }
  EXPECT_GT(history.bytes(), kMaxBytes / 2);
  // Windows are at least as long as asked for, and not much longer.
  for (const int window : {1, 10, 60, 300, 600}) {
    const double covered =
        absl::ToDoubleSeconds(now - history.Before(now, absl::Seconds(window))->time);
    EXPECT_GE(covered, window * 0.9) << window;
    EXPECT_LE(covered, window * 2.0 + 2.0) << window;
  }
}

TEST(ExpertHistory, KeepsSomeSnapshotsWhateverTheirSize) {
  ExpertHistory history(1);
  for (int second = 0; second < 100; ++second) {
    ExpertStats stats = Wide(1, 8);
    stats.steps = static_cast<uint64_t>(second);
    history.Add(absl::UnixEpoch() + absl::Seconds(second), std::move(stats));
  }
  EXPECT_EQ(history.Latest()->steps, 99u);
  EXPECT_LT(history.Before(absl::UnixEpoch() + absl::Seconds(99), absl::Seconds(30))->stats->steps,
            70u);
}

TEST(ExpertHistory, AnIdleServerKeepsOneCopy) {
  ExpertHistory history;
  const ExpertStats stats = Wide(4, 128);
  history.Add(absl::UnixEpoch(), stats);
  const size_t one = history.bytes();
  for (int second = 1; second < 50; ++second) {
    history.Add(absl::UnixEpoch() + absl::Seconds(second), stats);
  }
  EXPECT_EQ(history.bytes(), one);
  const absl::Time now = absl::UnixEpoch() + absl::Seconds(50);
  EXPECT_EQ(now - history.Before(now, absl::Seconds(10))->time, absl::Seconds(10));
}

TEST(ExpertStatsTable, HasALineForEachBlock) {
  const std::string table = ExpertStatsTable(Wide(3, 8), 0.0);
  EXPECT_EQ(std::count(table.begin(), table.end(), '\n'), 6);
}

TEST(TextValues, Bytes) {
  EXPECT_EQ(*ParseBytes("512MiB"), 512 << 20);
  EXPECT_EQ(*ParseBytes("2gb"), 2'000'000'000);
  EXPECT_EQ(*ParseBytes("17"), 17);
  for (const char* bad : {"", "MiB", "-1", "1.5GB", "1XB", "99999999TiB", "1 GB"}) {
    EXPECT_FALSE(ParseBytes(bad).ok()) << bad;
  }
  EXPECT_EQ(ShowBytes(1536), "1.5 KiB");
}

TEST(TextValues, HostPort) {
  EXPECT_EQ(ParseHostPort("[::1]:80")->host, "::1");
  EXPECT_TRUE(ParseHostPort("[::1]:80")->IsLoopback());
  EXPECT_TRUE(ParseHostPort("127.0.0.1:0")->IsLoopback());
  EXPECT_FALSE(ParseHostPort("0.0.0.0:80")->IsLoopback());
  for (const char* bad : {"", "a", ":80", "a:", "a:x", "a:65536", "::1:80", "a:-1"}) {
    EXPECT_FALSE(ParseHostPort(bad).ok()) << bad;
  }
}

}  // namespace
}  // namespace moeserve::server

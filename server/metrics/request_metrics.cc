#include "server/metrics/request_metrics.h"

#include <vector>

#include "engine/engine_histograms.h"

namespace moeserve::server {
namespace {

std::vector<double> FirstTokenBounds() {
  return {.001, .005, .01, .02, .04, .06, .08, .1, .25, .5,  .75,
          1,    2.5,  5,   7.5, 10,  20,  40,  80, 160, 640, 2560};
}

std::vector<double> InterTokenBounds() {
  return {.001, .0025, .005, .01, .025, .05, .075, .1, .15, .2, .3,
          .4,   .5,    .75,  1,   2.5,  5,   7.5,  10, 20,  40, 80};
}

std::vector<double> TokenCountBounds() {
  std::vector<double> bounds;
  for (double decade = 1; decade <= 100'000; decade *= 10) {
    for (const double step : {1, 2, 5}) bounds.push_back(step * decade);
  }
  return bounds;
}

std::vector<double> SampleCountBounds() { return {1, 2, 5, 10, 20, 50, 100, 200}; }

}  // namespace

RequestMetrics::RequestMetrics()
    : time_to_first_token(FirstTokenBounds()),
      inter_token_latency(InterTokenBounds()),
      request_time_per_output_token(InterTokenBounds()),
      request_duration({kRequestPhaseBounds.begin(), kRequestPhaseBounds.end()}),
      request_prompt_tokens(TokenCountBounds()),
      request_generation_tokens(TokenCountBounds()),
      request_max_tokens(TokenCountBounds()),
      request_n(SampleCountBounds()) {}

void RequestMetrics::CountRequest(std::string_view task) {
  for (size_t i = 0; i < std::size(kTasks); ++i) {
    if (task == kTasks[i]) requests[i].fetch_add(1, std::memory_order_relaxed);
  }
}

void RequestMetrics::Write(PrometheusText& text) const {
  text.Family("requests_total", "counter", "Accepted requests, by what they ask of the model.");
  for (size_t i = 0; i < std::size(kTasks); ++i) {
    text.Sample({{"task", kTasks[i]}}, requests[i].load());
  }
  text.Family("encode_tokens_total", "counter",
              "Tokens of texts of which vectors or scores were computed.");
  text.Sample({}, encode_tokens.load());
  struct Row {
    const char* name;
    const char* help;
    const Histogram& histogram;
  };
  const Row rows[] = {
      {"time_to_first_token_seconds",
       "From submission to the first token, of every sequence that gave one.", time_to_first_token},
      {"inter_token_latency_seconds", "Between the tokens of a sequence, of every token but first.",
       inter_token_latency},
      {"request_time_per_output_token_seconds",
       "Mean time between the tokens of each sequence that ended by stop or length.",
       request_time_per_output_token},
      {"request_duration_seconds",
       "From submission to the end, of sequences that ended by stop or length.", request_duration},
      {"request_prompt_tokens", "Prompt tokens of sequences that ended by stop or length.",
       request_prompt_tokens},
      {"request_generation_tokens", "Tokens given by sequences that ended by stop or length.",
       request_generation_tokens},
      {"request_max_tokens", "Tokens that may be generated at most, of every accepted prompt.",
       request_max_tokens},
      {"request_n", "Samples asked for, of every accepted prompt.", request_n},
  };
  for (const auto& [name, help, histogram] : rows) {
    text.Family(name, "histogram", help);
    text.HistogramSamples({}, histogram);
  }
}

}  // namespace moeserve::server

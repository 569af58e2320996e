#include "server/bench/bench_report.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <utility>

#include "base/error_text.h"
#include "base/kinds.h"

namespace moeserve::server {
namespace {

void Append(std::string& out, const char* format, ...) __attribute__((format(printf, 2, 3)));

void Append(std::string& out, const char* format, ...) {
  char line[256];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(line, sizeof(line), format, arguments);
  va_end(arguments);
  out += line;
}

Json ToJson(const MachineRates& rates) {
  Json json = Json::object();
  const std::pair<const char*, double> peaks[] = {
      {"f32", rates.f32}, {"bf16", rates.bf16}, {"int8", rates.int8}};
  for (const auto& [name, value] : peaks) {
    if (value > 0) json[name] = value;
  }
  return json;
}

Json RoutingJson(const RoutedLayerSpec& routing) {
  Json json = {{"num_experts", routing.num_experts}, {"score", KindName(routing.score.kind)}};
  if (routing.select.kind == SelectKind::kTopP) {
    json["top_p"] = routing.select.p;
    json["max_experts"] = routing.select.max_experts;
  } else {
    json["top_k"] = routing.select.k;
  }
  return json;
}

// Describes the first attention block and the first feed-forward, because all layers of a synthetic
// model are equal. "attention" is null if the model has none.
Json ShapeJson(const ModelSpec& spec) {
  const FeedForwardSpec& f = spec.feed_forward(0);
  const auto first = std::ranges::find_if(
      spec.blocks, [](const BlockSpec& block) { return block.attention() != nullptr; });
  Json attention;
  if (first != spec.blocks.end()) {
    const AttentionSpec& a = *first->attention();
    attention = {{"kind", a.routed() ? "routed" : "dense"},
                 {"num_kv_heads", a.num_kv_heads},
                 {"head_dim", a.head_dim}};
    if (a.routed()) {
      attention["routing"] = RoutingJson(*a.routing);
    } else {
      attention["num_heads"] = a.num_heads;
    }
  }
  Json feed_forward = {{"kind", f.routed() ? "routed" : "dense"}};
  if (f.routed()) {
    feed_forward["routing"] = RoutingJson(*f.routing);
    feed_forward["widths"] = f.routing->widths;
    feed_forward["split_heads"] = f.routing->split.heads;
  } else {
    feed_forward["width"] = f.width;
  }
  return {{"vocab_size", spec.vocab_size},
          {"hidden_size", spec.hidden_size},
          {"num_hidden_layers", spec.num_layers()},
          {"attention", std::move(attention)},
          {"feed_forward", std::move(feed_forward)}};
}

}  // namespace

std::string BenchTable(const BenchReport& report) {
  std::string out;
  const MachineRates& before = report.before;
  const MachineRates& after = report.after;
  Append(out, "read bandwidth %.1f GB/s before, %.1f GB/s after (2 GiB, best of 5)\n",
         before.read_bandwidth / 1e9, after.read_bandwidth / 1e9);
  const std::pair<const char*, std::pair<double, double>> peaks[] = {
      {"f32", {before.f32, after.f32}},
      {"bf16", {before.bf16, after.bf16}},
      {"int8", {before.int8, after.int8}}};
  for (const auto& [name, rates] : peaks) {
    if (rates.first <= 0 && rates.second <= 0) continue;
    Append(out, "%s products %.1f Gop/s before, %.1f Gop/s after\n", name, rates.first / 1e9,
           rates.second / 1e9);
  }
  Append(out, "%-14s %10s %21s %10s %11s %10s %7s %7s\n", "case", "tokens/s", "range", "MB/step",
         "experts/blk", "bound", "share", "steady");
  for (const CaseResult& r : report.cases) {
    Append(out, "%-14s %10.1f %10.1f-%-10.1f %10.1f %11.1f", r.name.c_str(), r.Median(), r.Min(),
           r.Max(), r.bytes_per_step / 1e6, r.distinct_experts);
    const ShareOfBound share = r.Share(report.types, report.kv_cache);
    if (share.bound > 0) {
      const std::string steady = Concat(share.steady, "/", r.rounds.size());
      Append(out, " %10.1f %6.1f%% %7s", share.bound, 100.0 * share.share, steady.c_str());
    }
    out += "\n";
  }
  return out;
}

Json BenchJson(const BenchReport& report, const ModelSpec& spec) {
  MachineRates best = MachineRates::Best(report.before, report.after);
  Json cases = Json::array();
  for (const CaseResult& r : report.cases) {
    Json rounds = Json::array();
    for (const Measurement& m : r.rounds) {
      rounds.push_back(m.tokens_per_second);
      best = MachineRates::Best(best, MachineRates::Best(m.before, m.after));
    }
    Json c = {
        {"name", r.name},
        {"tokens_per_second", r.Median()},
        {"min", r.Min()},
        {"max", r.Max()},
        {"rounds", std::move(rounds)},
        {"bytes_per_step", r.bytes_per_step},
        {"operations_per_step", r.operations_per_step.matrices + r.operations_per_step.attention},
        {"attention_operations_per_step", r.operations_per_step.attention},
        {"distinct_experts", r.distinct_experts}};
    const ShareOfBound share = r.Share(report.types, report.kv_cache);
    if (share.bound > 0) {
      c["bound_tokens_per_second"] = share.bound;
      c["share"] = share.share;
      c["steady_rounds"] = share.steady;
    }
    cases.push_back(std::move(c));
  }
  Json json = {{"model", report.model},
               {"device", report.device},
               {"dtype", std::string(report.types.quantization == Quantization::kNone
                                         ? Name(report.types.compute)
                                         : Name(report.types.quantization))},
               {"kv_cache_dtype", std::string(Name(report.kv_cache))},
               {"weight_bytes", report.weight_bytes},
               {"context", report.settings.context},
               {"tokens", report.settings.tokens},
               {"chunk", report.settings.chunk},
               {"read_bandwidth", best.read_bandwidth},
               {"read_bandwidth_runs", {report.before.read_bandwidth, report.after.read_bandwidth}},
               {"peaks", ToJson(best)},
               {"peaks_runs", {ToJson(report.before), ToJson(report.after)}},
               {"shape", ShapeJson(spec)},
               {"cases", std::move(cases)}};
  if (report.interrupted) json["interrupted"] = true;
  if (report.threads > 0) json["threads"] = report.threads;
  if (!report.instruction_set.empty()) json["isa"] = report.instruction_set;
  return json;
}

}  // namespace moeserve::server

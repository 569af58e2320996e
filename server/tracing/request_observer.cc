#include "server/tracing/request_observer.h"

#include <algorithm>
#include <utility>

#include "server/base/version.h"
#include "server/logging/logging.h"

namespace moeserve::server {
namespace {

absl::Duration Between(SteadyPoint begin, SteadyPoint end) { return absl::FromChrono(end - begin); }

std::string Joined(const std::vector<std::string_view>& words) {
  // More choices than these say nothing new.
  constexpr size_t kMost = 8;
  std::string out;
  for (size_t i = 0; i < words.size() && i < kMost; ++i) {
    if (i > 0) out += ',';
    out += words[i];
  }
  return out;
}

// Collects the attributes of a span, without those that have no value.
class Attributes {
 public:
  explicit Attributes(Span& span) : span_(span) {}

  void Text(const char* key, std::string_view value) {
    constexpr size_t kMaxBytes = 512;
    if (!value.empty()) span_.attributes.emplace_back(key, std::string(value.substr(0, kMaxBytes)));
  }
  void Integer(const char* key, int64_t value) { span_.attributes.emplace_back(key, value); }
  void Seconds(const char* key, absl::Duration value) {
    span_.attributes.emplace_back(key, absl::ToDoubleSeconds(value));
  }
  void Texts(const char* key, const std::vector<std::string_view>& values) {
    if (values.empty()) return;
    span_.attributes.emplace_back(key, std::vector<std::string>(values.begin(), values.end()));
  }

 private:
  Span& span_;
};

void AddProtocol(const RequestRecord& record, const RequestEnd& end, Attributes& out) {
  const RequestStart& start = record.start();
  if (start.protocol == "grpc") {
    const size_t slash = start.method.find('/');
    out.Text("rpc.system", "grpc");
    out.Text("rpc.service", std::string_view(start.method).substr(0, slash));
    if (slash != std::string::npos) {
      out.Text("rpc.method", std::string_view(start.method).substr(slash + 1));
    }
    out.Integer("rpc.grpc.status_code", end.status);
  } else {
    out.Text("http.request.method", end.method);
    out.Text("http.route", end.route);
    out.Text("url.path", start.path);
    out.Integer("http.response.status_code", end.status);
  }
  if (end.request_bytes > 0) out.Integer("http.request.body.size", end.request_bytes);
  if (end.response_bytes > 0) out.Integer("http.response.body.size", end.response_bytes);
  out.Text("client.address", start.client.substr(0, start.client.rfind(':')));
}

void AddGeneration(const RequestRecord& record, const RequestFacts& facts, Attributes& out) {
  if (facts.operation.empty()) return;
  const RequestStart& start = record.start();
  out.Text("gen_ai.operation.name", facts.operation);
  out.Text("gen_ai.provider.name", "moeserve");
  out.Text("gen_ai.request.model", facts.model);
  out.Text("gen_ai.response.model", facts.model);
  out.Text("gen_ai.response.id", facts.response_id);
  if (facts.max_tokens > 0) out.Integer("gen_ai.request.max_tokens", facts.max_tokens);
  if (facts.choices > 1) out.Integer("gen_ai.request.choice.count", facts.choices);
  if (!facts.submitted) return;
  out.Integer("gen_ai.usage.input_tokens", facts.prompt_tokens);
  out.Integer("gen_ai.usage.output_tokens", facts.output_tokens);
  out.Integer("gen_ai.usage.cache_read.input_tokens", facts.cached_tokens);
  out.Texts("gen_ai.response.finish_reasons", facts.finish_reasons);
  // The names that vLLM uses.
  if (facts.queue_seconds) {
    out.Seconds("gen_ai.latency.time_in_queue", absl::Seconds(*facts.queue_seconds));
  }
  if (facts.first_token) {
    out.Seconds("gen_ai.latency.time_to_first_token", Between(start.time, *facts.first_token));
  }
}

// Returns the spans inside the request's span: in the queue, computing the prompt, generating.
std::vector<Span> Phases(const RequestRecord& record, const RequestFacts& facts, SteadyPoint now) {
  std::vector<Span> out;
  if (!facts.submitted) return out;
  const auto wall = [&](SteadyPoint point) {
    return record.wall_start() + Between(record.start().time, point);
  };
  const auto add = [&](const char* name, absl::Time begin, absl::Time end) {
    Span span;
    span.trace_id = record.trace().trace_id;
    span.span_id = RandomHex(16);
    span.parent_id = record.trace().span_id;
    span.state = record.trace().state;
    span.name = name;
    span.start = begin;
    span.end = std::max(begin, end);
    out.push_back(std::move(span));
  };
  const absl::Time submitted = wall(*facts.submitted);
  if (!facts.queue_seconds) {
    // It ended before the engine reported that it had left the queue.
    add("queue", submitted, wall(now));
    return out;
  }
  const absl::Time started = submitted + absl::Seconds(*facts.queue_seconds);
  add("queue", submitted, started);
  if (!facts.first_token) {
    add("prefill", started, wall(now));
    return out;
  }
  add("prefill", started, wall(*facts.first_token));
  add("decode", wall(*facts.first_token), wall(facts.last_token.value_or(*facts.first_token)));
  return out;
}

std::string SpanName(const RequestRecord& record, const RequestEnd& end) {
  if (record.start().protocol == "grpc") return record.start().method;
  std::string name(end.method);
  if (!end.route.empty() && end.route != "other") {
    name += ' ';
    name += end.route;
  }
  return name;
}

}  // namespace

RequestObserver::RequestObserver(RequestObserverOptions options) : options_(std::move(options)) {
  if (options_.exporter) {
    exporter_ = std::make_unique<SpanExporter>(*options_.exporter, options_.resource);
  }
}

std::shared_ptr<RequestRecord> RequestObserver::Begin(RequestStart start,
                                                      std::string_view traceparent,
                                                      std::string_view tracestate) const {
  const std::optional<TraceParent> parent = ParseTraceParent(traceparent);
  TraceContext trace = StartSpan(parent, options_.sample_ratio);
  if (parent) trace.state = ParseTraceState(tracestate).value_or("");
  // Ids that nobody else knows would tell nothing.
  const bool shown = parent.has_value() || exporter_ != nullptr;
  return std::make_shared<RequestRecord>(std::move(start), std::move(trace), shown);
}

void RequestObserver::End(const RequestRecord& record, const RequestEnd& end) {
  const SteadyPoint now = std::chrono::steady_clock::now();
  const RequestFacts facts = record.facts();
  const RequestStart& start = record.start();
  const bool quiet = end.for_operators && end.status < 400;
  if (options_.access_log == AccessLog::kAll || (options_.access_log == AccessLog::kOn && !quiet)) {
    const std::string finish_reasons = Joined(facts.finish_reasons);
    RequestLine line;
    line.protocol = start.protocol;
    line.request_id = start.request_id;
    if (record.shows_trace()) {
      line.trace_id = record.trace().trace_id;
      line.span_id = record.trace().span_id;
      line.parent_id = record.trace().parent_id;
    }
    line.method = end.method;
    line.path = start.path;
    line.endpoint = end.route;
    if (end.code.empty()) line.status = end.status;
    line.code = end.code;
    line.seconds = absl::ToDoubleSeconds(Between(start.time, now));
    line.request_bytes = end.request_bytes;
    line.response_bytes = end.response_bytes;
    if (facts.submitted) {
      line.prompt_tokens = facts.prompt_tokens;
      line.output_tokens = facts.output_tokens;
    }
    line.finish_reasons = finish_reasons;
    line.model = facts.model;
    line.key = end.key;
    line.client = start.client;
    LogRequest(line);
  }
  if (exporter_ == nullptr || !record.trace().sampled || end.for_operators) return;
  Span span;
  span.trace_id = record.trace().trace_id;
  span.span_id = record.trace().span_id;
  span.parent_id = record.trace().parent_id;
  span.state = record.trace().state;
  span.name = SpanName(record, end);
  span.kind = SpanKind::kServer;
  span.start = record.wall_start();
  span.end = record.wall_start() + Between(start.time, now);
  span.failed = end.failed;
  Attributes attributes(span);
  AddProtocol(record, end, attributes);
  if (end.failed)
    attributes.Text("error.type", end.code.empty() ? std::to_string(end.status) : end.code);
  attributes.Text("gen_ai.request.id", start.request_id);
  attributes.Text("moeserve.key.name", end.key);
  AddGeneration(record, facts, attributes);
  std::vector<Span> spans = Phases(record, facts, now);
  spans.insert(spans.begin(), std::move(span));
  exporter_->Add(std::move(spans));
}

void RequestObserver::Flush(std::chrono::milliseconds timeout) {
  if (exporter_ != nullptr) exporter_->Flush(timeout);
}

void RequestObserver::WriteMetrics(PrometheusText& text) const {
  const auto counter = [&](const char* name, const char* help, uint64_t value) {
    text.Single(name, "counter", help, static_cast<double>(value));
  };
  counter("spans_exported_total", "Spans that the collector has accepted",
          exporter_ != nullptr ? exporter_->exported() : 0);
  counter("spans_dropped_total",
          "Spans that the collector did not take, or that did not fit into the queue",
          exporter_ != nullptr ? exporter_->dropped() : 0);
}

}  // namespace moeserve::server

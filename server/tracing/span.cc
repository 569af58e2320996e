#include "server/tracing/span.h"

#include "server/base/version.h"

namespace moeserve::server {
namespace {

// OTLP's JSON writes 64-bit integers as strings.
OrderedJson Integer(int64_t value) { return std::to_string(value); }

OrderedJson ValueJson(const Span::Value& value) {
  if (const auto* text = std::get_if<std::string>(&value)) return {{"stringValue", *text}};
  if (const auto* integer = std::get_if<int64_t>(&value)) return {{"intValue", Integer(*integer)}};
  if (const auto* number = std::get_if<double>(&value)) return {{"doubleValue", *number}};
  OrderedJson values = OrderedJson::array();
  for (const std::string& text : std::get<std::vector<std::string>>(value)) {
    values.push_back({{"stringValue", text}});
  }
  return {{"arrayValue", {{"values", std::move(values)}}}};
}

OrderedJson AttributeJson(const std::string& key, const Span::Value& value) {
  return {{"key", key}, {"value", ValueJson(value)}};
}

OrderedJson SpanJson(const Span& span) {
  OrderedJson out = {{"traceId", span.trace_id}, {"spanId", span.span_id}};
  if (!span.state.empty()) out["traceState"] = span.state;
  if (!span.parent_id.empty()) out["parentSpanId"] = span.parent_id;
  out["name"] = span.name;
  out["kind"] = static_cast<int>(span.kind);
  out["startTimeUnixNano"] = Integer(absl::ToUnixNanos(span.start));
  out["endTimeUnixNano"] = Integer(absl::ToUnixNanos(span.end));
  OrderedJson attributes = OrderedJson::array();
  for (const auto& [key, value] : span.attributes) attributes.push_back(AttributeJson(key, value));
  out["attributes"] = std::move(attributes);
  constexpr int kError = 2;
  if (span.failed) out["status"] = {{"code", kError}};
  return out;
}

}  // namespace

std::string ExportRequestJson(const SpanResource& resource, const std::vector<Span>& spans) {
  OrderedJson attributes = OrderedJson::array();
  attributes.push_back(AttributeJson("service.name", resource.service_name));
  attributes.push_back(AttributeJson("service.version", resource.service_version));
  attributes.push_back(AttributeJson("service.instance.id", resource.instance_id));
  OrderedJson list = OrderedJson::array();
  for (const Span& span : spans) list.push_back(SpanJson(span));
  OrderedJson scope = {{"scope", {{"name", "moeserve"}, {"version", std::string(kVersion)}}},
                       {"spans", std::move(list)}};
  OrderedJson scopes = OrderedJson::array();
  scopes.push_back(std::move(scope));
  OrderedJson resources = OrderedJson::array();
  resources.push_back(
      {{"resource", {{"attributes", std::move(attributes)}}}, {"scopeSpans", std::move(scopes)}});
  const OrderedJson body = {{"resourceSpans", std::move(resources)}};
  return body.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

}  // namespace moeserve::server

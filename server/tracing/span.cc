#include "server/tracing/span.h"

#include "server/base/version.h"

namespace moeserve::server {
namespace {

using Json = nlohmann::ordered_json;

// OTLP's JSON writes 64-bit integers as strings.
Json Integer(int64_t value) { return std::to_string(value); }

Json ValueJson(const Span::Value& value) {
  if (const auto* text = std::get_if<std::string>(&value)) return {{"stringValue", *text}};
  if (const auto* integer = std::get_if<int64_t>(&value)) return {{"intValue", Integer(*integer)}};
  if (const auto* number = std::get_if<double>(&value)) return {{"doubleValue", *number}};
  Json values = Json::array();
  for (const std::string& text : std::get<std::vector<std::string>>(value)) {
    values.push_back({{"stringValue", text}});
  }
  return {{"arrayValue", {{"values", std::move(values)}}}};
}

Json AttributeJson(const std::string& key, const Span::Value& value) {
  return {{"key", key}, {"value", ValueJson(value)}};
}

Json SpanJson(const Span& span) {
  Json out = {{"traceId", span.trace_id}, {"spanId", span.span_id}};
  if (!span.state.empty()) out["traceState"] = span.state;
  if (!span.parent_id.empty()) out["parentSpanId"] = span.parent_id;
  out["name"] = span.name;
  out["kind"] = static_cast<int>(span.kind);
  out["startTimeUnixNano"] = Integer(absl::ToUnixNanos(span.start));
  out["endTimeUnixNano"] = Integer(absl::ToUnixNanos(span.end));
  Json attributes = Json::array();
  for (const auto& [key, value] : span.attributes) attributes.push_back(AttributeJson(key, value));
  out["attributes"] = std::move(attributes);
  constexpr int kError = 2;
  if (span.failed) out["status"] = {{"code", kError}};
  return out;
}

}  // namespace

std::string ExportRequestJson(const SpanResource& resource, const std::vector<Span>& spans) {
  Json attributes = Json::array();
  attributes.push_back(AttributeJson("service.name", resource.service_name));
  attributes.push_back(AttributeJson("service.version", resource.service_version));
  attributes.push_back(AttributeJson("service.instance.id", resource.instance_id));
  Json list = Json::array();
  for (const Span& span : spans) list.push_back(SpanJson(span));
  Json scope = {{"scope", {{"name", "moeserve"}, {"version", std::string(kVersion)}}},
                {"spans", std::move(list)}};
  Json scopes = Json::array();
  scopes.push_back(std::move(scope));
  Json resources = Json::array();
  resources.push_back(
      {{"resource", {{"attributes", std::move(attributes)}}}, {"scopeSpans", std::move(scopes)}});
  const Json body = {{"resourceSpans", std::move(resources)}};
  return body.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace moeserve::server

#include "server/base/logging.h"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <cstdio>
#include <memory>

#include "base/message.h"
#include "nlohmann/json.hpp"

namespace moeserve::server {
namespace {

LogFormat g_format = LogFormat::kText;

using Fields = nlohmann::ordered_json;

void Emit(spdlog::level::level_enum level, std::string_view component, std::string_view message,
          const Fields& fields = Fields::object()) {
  if (!spdlog::should_log(level)) return;
  if (g_format == LogFormat::kJson) {
    Fields line;
    const auto name = spdlog::level::to_string_view(level);
    line["level"] = std::string(name.data(), name.size());
    line["component"] = std::string(component);
    line["message"] = std::string(message);
    for (const auto& [key, value] : fields.items()) line[key] = value;
    // The logger's pattern already writes "{" and the time, so the "{" of this text is dropped.
    const std::string text = line.dump(-1, ' ', true, Fields::error_handler_t::replace);
    spdlog::log(level, "{}", text.substr(1));
    return;
  }
  std::string text = Concat(component, ": ", Printable(message, 2000));
  for (const auto& [key, value] : fields.items()) {
    text += Concat(' ', key, '=', value.is_string() ? value.get<std::string>() : value.dump());
  }
  spdlog::log(level, "{}", text);
}

spdlog::level::level_enum Convert(LogLevel level) {
  switch (level) {
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
    case LogLevel::kOff:
      return spdlog::level::off;
  }
  return spdlog::level::info;
}

double Milliseconds(double seconds) {
  return static_cast<double>(static_cast<int64_t>(seconds * 1e6)) / 1e3;
}

}  // namespace

void SetUpLogging(LogFormat format, LogLevel level) {
  g_format = format;
  auto logger = std::make_shared<spdlog::logger>("moeserve",
                                                 std::make_shared<spdlog::sinks::stderr_sink_mt>());
  logger->set_pattern(format == LogFormat::kJson ? R"({"time":"%Y-%m-%dT%H:%M:%S.%e%z",%v)"
                                                 : "%Y-%m-%d %H:%M:%S.%e %l %v");
  logger->set_level(Convert(level));
  logger->flush_on(spdlog::level::info);
  spdlog::set_level(Convert(level));
  spdlog::set_default_logger(std::move(logger));
}

void LogInfo(std::string_view component, std::string_view message) {
  Emit(spdlog::level::info, component, message);
}
void LogWarning(std::string_view component, std::string_view message) {
  Emit(spdlog::level::warn, component, message);
}
void LogError(std::string_view component, std::string_view message) {
  Emit(spdlog::level::err, component, message);
}

void LogHttpRequest(std::string_view request_id, std::string_view method, std::string_view endpoint,
                    int status, double seconds) {
  Emit(spdlog::level::info, "http", "request",
       {{"request_id", std::string(request_id)},
        {"method", std::string(method)},
        {"endpoint", std::string(endpoint)},
        {"status", status},
        {"ms", Milliseconds(seconds)}});
}

void LogGrpcCall(std::string_view request_id, std::string_view method, std::string_view code,
                 double seconds) {
  Emit(spdlog::level::info, "grpc", "call",
       {{"request_id", std::string(request_id)},
        {"method", std::string(method)},
        {"code", std::string(code)},
        {"ms", Milliseconds(seconds)}});
}

}  // namespace moeserve::server

#include "server/logging/logging.h"

#include <spdlog/sinks/base_sink.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>

#include "base/error_text.h"
#include "server/base/json.h"
#include "server/logging/log_queue.h"

namespace moeserve::server {
namespace {

// Enough for some thousands of lines.
constexpr size_t kMaxQueuedBytes = size_t{1} << 20;

LogFormat g_format = LogFormat::kText;
// Null until SetUpLogging(). Never destroyed, because threads may log until the process ends.
LogQueue* g_queue = nullptr;
std::atomic<uint64_t> g_reported_drops = 0;
std::atomic<uint64_t> g_lines_without_memory = 0;

class QueueSink final : public spdlog::sinks::base_sink<std::mutex> {
 public:
  explicit QueueSink(LogQueue& queue) : queue_(queue) {}

 private:
  void sink_it_(const spdlog::details::log_msg& message) override {
    spdlog::memory_buf_t line;
    formatter_->format(message, line);
    queue_.Append(std::string(line.data(), line.size()));
  }
  void flush_() override {}

  LogQueue& queue_;
};

using Fields = OrderedJson;

void EmitLine(spdlog::level::level_enum level, std::string_view component, std::string_view message,
              const Fields& fields) {
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

uint64_t DroppedLines() {
  return g_lines_without_memory + (g_queue == nullptr ? 0 : g_queue->dropped());
}

// Logs how many lines have been dropped since the last report, when lines are taken again.
void ReportDrops() {
  if (g_queue == nullptr) return;
  uint64_t reported = g_reported_drops;
  const uint64_t dropped = DroppedLines();
  if (dropped == reported || !g_queue->Flush(std::chrono::seconds(0))) return;
  if (!g_reported_drops.compare_exchange_strong(reported, dropped)) return;
  EmitLine(spdlog::level::warn, "log",
           "lines were dropped because standard error did not take them",
           {{"lines", dropped - reported}});
}

void Emit(spdlog::level::level_enum level, std::string_view component, std::string_view message,
          const Fields* fields = nullptr) {
  if (!spdlog::should_log(level)) return;
  try {
    ReportDrops();
    EmitLine(level, component, message, fields == nullptr ? Fields::object() : *fields);
  } catch (const std::bad_alloc&) {
    ++g_lines_without_memory;
  }
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

void EmitRequest(const RequestLine& request) {
  constexpr size_t kMaxPathBytes = 200;
  Fields fields;
  const auto text = [&](const char* name, std::string_view value, size_t max_bytes = 128) {
    if (!value.empty()) fields[name] = Printable(value, max_bytes);
  };
  const auto number = [&](const char* name, int64_t value) {
    if (value >= 0) fields[name] = value;
  };
  text("request_id", request.request_id);
  text("trace_id", request.trace_id);
  text("span_id", request.span_id);
  text("parent_span_id", request.parent_id);
  text("method", request.method);
  text("endpoint", request.endpoint);
  text("path", request.path, kMaxPathBytes);
  number("status", request.status);
  text("code", request.code);
  fields["ms"] = Milliseconds(request.seconds);
  number("request_bytes", request.request_bytes);
  number("response_bytes", request.response_bytes);
  number("prompt_tokens", request.prompt_tokens);
  number("output_tokens", request.output_tokens);
  text("finish_reason", request.finish_reasons);
  text("model", request.model);
  text("key", request.key);
  text("client", request.client);
  Emit(spdlog::level::info, request.protocol, request.protocol == "grpc" ? "call" : "request",
       &fields);
}

}  // namespace

void SetUpLogging(LogFormat format, LogLevel level) {
  g_format = format;
  if (g_queue == nullptr) g_queue = new LogQueue(STDERR_FILENO, kMaxQueuedBytes);
  auto logger = std::make_shared<spdlog::logger>("moeserve", std::make_shared<QueueSink>(*g_queue));
  // The library's own handler writes to standard error and may wait for its reader.
  logger->set_error_handler([](const std::string&) {});
  logger->set_pattern(format == LogFormat::kJson ? R"({"time":"%Y-%m-%dT%H:%M:%S.%e%z",%v)"
                                                 : "%Y-%m-%d %H:%M:%S.%e %l %v");
  logger->set_level(Convert(level));
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

void FlushLog(std::chrono::steady_clock::duration timeout) {
  if (g_queue != nullptr) g_queue->Flush(timeout);
}

uint64_t LogLinesDropped() { return DroppedLines(); }

void LogRequest(const RequestLine& request) {
  if (!spdlog::should_log(spdlog::level::info)) return;
  try {
    EmitRequest(request);
  } catch (const std::bad_alloc&) {
    ++g_lines_without_memory;
  }
}

}  // namespace moeserve::server

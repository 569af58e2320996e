// The log, on standard error. It never contains prompts or keys. Nobody who logs waits for the
// reader of standard error: lines that it does not take in time are dropped and counted.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace moeserve::server {

enum class LogFormat { kText, kJson };

enum class LogLevel { kInfo, kWarning, kError, kOff };

// Must be called before other threads start.
void SetUpLogging(LogFormat format, LogLevel level);

// Write one line each; without memory for it, drop it and count it. Control characters are escaped,
// so that no text can forge a log line.
void LogInfo(std::string_view component, std::string_view message);
void LogWarning(std::string_view component, std::string_view message);
void LogError(std::string_view component, std::string_view message);

// Waits until every line has been written, at most for `timeout`.
void FlushLog(std::chrono::steady_clock::duration timeout);
// Returns the number of lines dropped since the start.
uint64_t LogLinesDropped();

// One request in the log. Numbers that are negative and texts that are empty are left out.
struct RequestLine {
  std::string_view protocol;  // "http" or "grpc"; the component of the line
  std::string_view request_id;
  std::string_view trace_id;
  std::string_view span_id;
  std::string_view parent_id;
  std::string_view method;    // one of a fixed set of names
  std::string_view endpoint;  // the pattern that the path matches
  std::string_view path;      // hostile; is escaped and cut to 200 bytes
  int status = -1;            // of HTTP
  std::string_view code;      // of gRPC
  double seconds = 0.0;
  int64_t request_bytes = -1;
  int64_t response_bytes = -1;
  int64_t prompt_tokens = -1;
  int64_t output_tokens = -1;
  std::string_view finish_reasons;  // of the choices, with commas
  std::string_view model;
  std::string_view key;  // the name of the request's API key
  std::string_view client;
};
void LogRequest(const RequestLine& request);

}  // namespace moeserve::server

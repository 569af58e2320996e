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

// Write one line each. Control characters are escaped, so that no text can forge a log line.
void LogInfo(std::string_view component, std::string_view message);
void LogWarning(std::string_view component, std::string_view message);
void LogError(std::string_view component, std::string_view message);

// Waits until every line has been written, at most for `timeout`.
void FlushLog(std::chrono::steady_clock::duration timeout);
// Returns the number of lines dropped since the start.
uint64_t LogLinesDropped();

// `key` is the name of the request's API key; empty if there is none.
void LogHttpRequest(std::string_view request_id, std::string_view method, std::string_view endpoint,
                    int status, double seconds, std::string_view key = {});
void LogGrpcCall(std::string_view request_id, std::string_view method, std::string_view code,
                 double seconds, std::string_view key = {});

}  // namespace moeserve::server

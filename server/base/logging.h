// The log, on standard error. It never contains prompts or keys.
#pragma once

#include <string>
#include <string_view>

namespace moeserve::server {

enum class LogFormat { kText, kJson };

enum class LogLevel { kInfo, kWarning, kError, kOff };

// Call before threads start.
void SetUpLogging(LogFormat format, LogLevel level);

// Control characters are escaped, so that no text can forge a line.
void LogInfo(std::string_view component, std::string_view message);
void LogWarning(std::string_view component, std::string_view message);
void LogError(std::string_view component, std::string_view message);

void LogHttpRequest(std::string_view request_id, std::string_view method, std::string_view endpoint,
                    int status, double seconds);
void LogGrpcCall(std::string_view request_id, std::string_view method, std::string_view code,
                 double seconds);

}  // namespace moeserve::server

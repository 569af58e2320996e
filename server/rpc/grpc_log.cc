#include "server/rpc/grpc_log.h"

#include <grpc/support/log.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "base/error_text.h"
#include "base/mutex.h"
#include "server/logging/logging.h"

namespace moeserve::server::rpc {
namespace {

constexpr int kLinesPerSecond = 10;
constexpr size_t kMaxMessage = 500;

bool IsSet(const char* variable) {
  const char* const value = std::getenv(variable);
  return value != nullptr && *value != '\0';
}

// Limits the lines per second and counts those that are left out.
class LineLimit {
 public:
  // Returns whether a line may be logged; `left_out` is then the number of lines left out before.
  bool Take(uint64_t& left_out) {
    const auto now = std::chrono::steady_clock::now();
    const MutexLock lock(mutex_);
    if (now - second_ >= std::chrono::seconds(1)) {
      second_ = now;
      lines_ = 0;
    }
    if (++lines_ > kLinesPerSecond) {
      ++left_out_;
      return false;
    }
    left_out = left_out_;
    left_out_ = 0;
    return true;
  }

 private:
  Mutex mutex_;
  std::chrono::steady_clock::time_point second_ ABSL_GUARDED_BY(mutex_){};
  int lines_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t left_out_ ABSL_GUARDED_BY(mutex_) = 0;
};

void Log(gpr_log_func_args* line) {
  static LineLimit limit;
  static const bool verbose = IsSet("GRPC_VERBOSITY") || IsSet("GRPC_TRACE");
  uint64_t left_out = 0;
  if (!limit.Take(left_out)) return;
  const std::string_view path = line->file;
  std::string text = Concat(path.substr(path.rfind('/') + 1), ':', line->line);
  if (verbose) text += Concat(": ", Printable(line->message, kMaxMessage));
  if (left_out > 0) text += Concat(" (", left_out, " more before)");
  if (line->severity == GPR_LOG_SEVERITY_ERROR) {
    LogWarning("grpc library", text);
  } else {
    LogInfo("grpc library", text);
  }
}

}  // namespace

void RouteGrpcLog() { gpr_set_log_function(Log); }

}  // namespace moeserve::server::rpc

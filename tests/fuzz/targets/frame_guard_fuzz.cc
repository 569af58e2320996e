// HTTP/2 frames of a gRPC client and of the server. The input is a list of events: a byte that says
// what happens, a byte with a length or a time, and the bytes that arrive.

#include <memory>
#include <string>
#include <vector>

#include "server/base/api_error.h"
#include "server/base/memory_budget.h"
#include "server/rpc/http2/frame_guard.h"
#include "tests/fuzz/fuzz.h"

namespace moeserve::server::rpc {
namespace {

constexpr size_t kMemory = 96 << 10;

FrameLimits Limits() {
  FrameLimits limits;
  limits.max_streams = 8;
  limits.max_header_bytes = 1 << 10;
  limits.max_continuations = 4;
  limits.reset_burst = 6;
  limits.resets_per_second = 1;
  limits.control_burst = 20;
  limits.control_per_second = 4;
  return limits;
}

struct Event {
  enum class Kind { kClient, kServer, kTime } kind;
  std::string_view bytes;
  std::chrono::milliseconds time{0};
};

std::vector<Event> Events(testing::Input input) {
  std::vector<Event> out;
  // Most clients begin with the preface, which mutations would rarely find.
  static constexpr std::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  if (input.Byte() % 8 != 0) out.push_back({Event::Kind::kClient, kPreface, {}});
  while (!input.empty()) {
    const uint8_t kind = input.Byte();
    const size_t count = input.Byte();
    if (kind % 4 == 3) {
      out.push_back({Event::Kind::kTime, {}, std::chrono::milliseconds(count * 100)});
    } else {
      const auto from = kind % 4 == 2 ? Event::Kind::kServer : Event::Kind::kClient;
      out.push_back({from, input.Take(count), {}});
    }
  }
  return out;
}

// The state of a connection after some events.
class Connection {
 public:
  explicit Connection(size_t step) : step_(step) {}

  // Returns false if the connection must be closed.
  bool Handle(const Event& event) {
    now_ += event.time;
    if (event.kind == Event::Kind::kTime) {
      // Bytes that found no memory are tried again.
      return guard_.CheckTime(now_).ok() && Client();
    }
    for (size_t at = 0; at < event.bytes.size(); at += step_) {
      const std::string_view part = event.bytes.substr(at, step_);
      if (event.kind == Event::Kind::kServer) {
        if (!guard_.CheckServer(part, now_, to_client_).ok()) return false;
      } else {
        waiting_ += part;
        if (!Client()) return false;
      }
    }
    return true;
  }

  void Check() const {
    MOESERVE_CHECK(guard_.held_bytes() == memory_->used(), "what is held is charged");
    MOESERVE_CHECK(guard_.open_streams() <= limits_.max_streams, "the limit on streams");
  }
  void End() {
    guard_.Release();
    MOESERVE_CHECK(memory_->used() == 0, "all memory is given back");
  }

  bool operator==(const Connection& other) const {
    return guard_.open_streams() == other.guard_.open_streams() &&
           guard_.held_bytes() == other.guard_.held_bytes() && waiting_ == other.waiting_ &&
           guard_.server_between_frames() == other.guard_.server_between_frames() &&
           guard_.bytes_for_client() == other.guard_.bytes_for_client() &&
           to_server_ == other.to_server_ && to_client_ == other.to_client_;
  }

 private:
  bool Client() {
    std::string_view bytes = waiting_;
    const absl::Status status = guard_.CheckClient(bytes, now_, to_server_);
    waiting_ = std::string(bytes);
    return status.ok() || ApiCode(status) == "out_of_memory";
  }

  const size_t step_;
  const FrameLimits limits_ = Limits();
  FrameGuard::Time now_{std::chrono::hours(1)};
  std::shared_ptr<MemoryBudget> memory_ = std::make_shared<MemoryBudget>(kMemory);
  FrameGuard guard_{limits_, memory_, now_};
  std::string waiting_;    // bytes of the client that found no memory
  std::string to_server_;  // what has passed
  std::string to_client_;
};

}  // namespace
}  // namespace moeserve::server::rpc

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moeserve;               // NOLINT(google-build-using-namespace)
  using namespace moeserve::server::rpc;  // NOLINT(google-build-using-namespace)
  Connection whole(size + 1);
  Connection bytes(1);
  bool open = true;
  for (const Event& event : Events(testing::Input(data, size))) {
    open = whole.Handle(event);
    MOESERVE_CHECK(bytes.Handle(event) == open, "how bytes arrive does not change the verdict");
    if (!open) break;
    whole.Check();
    MOESERVE_CHECK(whole == bytes, "how bytes arrive does not change the state");
  }
  if (open && size > 20) testing::CountAccepted();
  whole.End();
  bytes.End();
  return 0;
}

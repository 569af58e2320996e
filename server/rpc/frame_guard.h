// Watches the HTTP/2 frames (RFC 9113) of one gRPC connection and tells when the connection must be
// closed, because its client takes more of the server than it may. gRPC itself keeps memory for
// streams that were reset, for header blocks that do not end, and for clients that never
// acknowledge its settings.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "absl/status/status.h"
#include "server/base/memory_budget.h"

namespace moeserve::server::rpc {

struct FrameLimits {
  // Streams that may be open at once. The server's SETTINGS announce the same number.
  size_t max_streams = 256;
  // Bytes of one header block: of HEADERS and of the CONTINUATION frames that follow.
  size_t max_header_bytes = 32 << 10;
  int max_continuations = 16;
  // Streams that the client may reset, or make the server reset, before they have ended.
  double reset_burst = 300;
  double resets_per_second = 50;
  // Frames that carry nothing, such as PING, WINDOW_UPDATE and empty DATA. Every HEADERS and DATA
  // frame of the server allows two more.
  double control_burst = 4000;
  double control_per_second = 200;
  // Time for the client's preface and SETTINGS, and to acknowledge the server's SETTINGS.
  std::chrono::milliseconds preface_timeout{10000};
  std::chrono::milliseconds settings_timeout{30000};
  // What an open stream is charged, in addition to its DATA.
  size_t stream_bytes = 16 << 10;
  // gRPC needs this long to give back the memory of a stream that the client has reset.
  std::chrono::milliseconds reset_linger{2000};
};

// A frame's header (RFC 9113, section 4.1).
struct FrameHeader {
  uint32_t length = 0;  // of the payload, in bytes
  uint8_t type = 0;
  uint8_t flags = 0;
  uint32_t stream = 0;
  uint32_t error = 0;  // the error code; of RST_STREAM frames only
};

// Splits a sequence of bytes into frames.
class FrameReader {
 public:
  // Removes bytes from the front of `bytes`, up to the next point at which a frame is known, and
  // returns true; a frame is known when its header is complete, RST_STREAM when its error code is.
  // Returns false if `bytes` has no further frame; it is then empty.
  bool Next(std::string_view& bytes, FrameHeader& frame);
  // Returns whether the bytes so far end at the end of a frame.
  bool between_frames() const { return header_.empty() && left_ == 0; }

 private:
  std::string header_;  // the part of a frame that is collected until the frame is known
  uint32_t left_ = 0;   // bytes of the payload that are skipped
};

// A number of events that grows with time up to a limit, and of which every event takes one.
class EventAllowance {
 public:
  EventAllowance(double burst, double per_second)
      : burst_(burst), per_second_(per_second), left_(burst) {}
  bool Take(std::chrono::steady_clock::time_point now);
  void Add(double events) { left_ += events; }

 private:
  const double burst_;
  const double per_second_;
  double left_;
  std::chrono::steady_clock::time_point updated_{};
};

// Must be used by one thread at a time. All times are of the steady clock.
class FrameGuard {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // `memory` is charged for open streams and their DATA. `limits` must outlive the guard.
  FrameGuard(const FrameLimits& limits, std::shared_ptr<MemoryBudget> memory, Time now);

  // Checks bytes that the client has sent; they may end within a frame. Returns ResourceExhausted
  // with code "out_of_memory" if the budget has no room for them: the call may be repeated with the
  // rest that CheckClient() has left in `bytes`. Every other error means that the connection must
  // be closed, and its message says why.
  absl::Status CheckClient(std::string_view& bytes, Time now);
  // Follows bytes that the server sends, with the same errors.
  absl::Status CheckServer(std::string_view bytes, Time now);
  // Returns an error if the client is late. Must be called every few seconds.
  absl::Status CheckTime(Time now);

  // Returns whether a frame may be added behind the bytes that the server has sent.
  bool server_between_frames() const { return server_.between_frames(); }
  size_t open_streams() const { return streams_.size(); }
  size_t held_bytes() const { return held_; }
  // Gives back everything that the connection holds of the budget.
  void Release();

 private:
  absl::Status ClientFrame(const FrameHeader& frame, Time now);
  absl::Status ClientHeaders(const FrameHeader& frame, Time now);
  absl::Status ClientData(const FrameHeader& frame, Time now);
  absl::Status CountReset(Time now);
  absl::Status CountControl(Time now);
  absl::Status Charge(MemoryCharge& charge, size_t bytes);
  void CloseStream(uint32_t stream, Time now, bool reset);
  void ReleaseLingering(Time now);

  const FrameLimits& limits_;
  const std::shared_ptr<MemoryBudget> memory_;
  const Time start_;
  FrameReader client_;
  FrameReader server_;
  size_t preface_bytes_ = 0;  // bytes of the preface that have arrived
  bool first_frame_ = true;   // whether the next frame is the client's first one
  FrameHeader retried_;       // the frame that the budget had no room for
  bool retry_ = false;
  uint32_t last_stream_ = 0;
  std::unordered_map<uint32_t, MemoryCharge> streams_;  // open streams
  std::deque<std::pair<Time, MemoryCharge>> lingering_;
  size_t held_ = 0;
  // The header block that has begun and not ended; stream 0 if there is none.
  uint32_t block_stream_ = 0;
  size_t block_bytes_ = 0;
  int block_frames_ = 0;
  // SETTINGS of the server that the client has not acknowledged, and since when.
  int unacknowledged_ = 0;
  Time settings_sent_;
  EventAllowance resets_;
  EventAllowance controls_;
};

}  // namespace moeserve::server::rpc

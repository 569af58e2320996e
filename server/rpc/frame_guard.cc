#include "server/rpc/frame_guard.h"

#include <algorithm>

#include "base/message.h"
#include "base/status.h"
#include "server/base/api_error.h"

namespace moeserve::server::rpc {
namespace {

constexpr std::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
constexpr size_t kHeaderBytes = 9;

enum FrameType : uint8_t {
  kData = 0,
  kHeaders = 1,
  kRstStream = 3,
  kSettings = 4,
  kContinuation = 9,
};
constexpr uint8_t kEndStream = 1;  // of DATA and HEADERS
constexpr uint8_t kAck = 1;        // of SETTINGS
constexpr uint8_t kEndHeaders = 4;
// Error codes of RST_STREAM with which the server ends streams that are in order.
constexpr uint32_t kNoError = 0;
constexpr uint32_t kCancel = 8;

uint32_t Number(std::string_view bytes) {
  uint32_t value = 0;
  for (const char c : bytes) value = value << 8 | static_cast<uint8_t>(c);
  return value;
}

absl::Status Violation(std::string message) {
  return absl::FailedPreconditionError(std::move(message));
}

}  // namespace

bool FrameReader::Next(std::string_view& bytes, FrameHeader& frame) {
  while (!bytes.empty()) {
    if (left_ > 0) {
      const size_t skipped = std::min<size_t>(left_, bytes.size());
      bytes.remove_prefix(skipped);
      left_ -= static_cast<uint32_t>(skipped);
      continue;
    }
    size_t wanted = kHeaderBytes;
    if (header_.size() >= kHeaderBytes) wanted += sizeof(frame.error);
    const size_t taken = std::min(wanted - header_.size(), bytes.size());
    header_ += bytes.substr(0, taken);
    bytes.remove_prefix(taken);
    if (header_.size() < wanted) continue;
    const std::string_view header = header_;
    frame = {.length = Number(header.substr(0, 3)),
             .type = static_cast<uint8_t>(header[3]),
             .flags = static_cast<uint8_t>(header[4]),
             .stream = Number(header.substr(5, 4)) & 0x7fffffff};
    const bool has_error = frame.type == kRstStream && frame.length >= sizeof(frame.error);
    if (has_error && wanted == kHeaderBytes) continue;  // collect the error code, too
    left_ = frame.length;
    if (has_error) {
      frame.error = Number(header.substr(kHeaderBytes));
      left_ -= static_cast<uint32_t>(sizeof(frame.error));
    }
    header_.clear();
    return true;
  }
  return false;
}

bool EventAllowance::Take(std::chrono::steady_clock::time_point now) {
  if (updated_ == std::chrono::steady_clock::time_point{}) updated_ = now;
  const double seconds = std::chrono::duration<double>(now - updated_).count();
  updated_ = now;
  left_ = std::min(burst_, left_ + seconds * per_second_);
  if (left_ < 1) return false;
  left_ -= 1;
  return true;
}

FrameGuard::FrameGuard(const FrameLimits& limits, std::shared_ptr<MemoryBudget> memory, Time now)
    : limits_(limits),
      memory_(std::move(memory)),
      start_(now),
      settings_sent_(now),
      resets_(limits.reset_burst, limits.resets_per_second),
      controls_(limits.control_burst, limits.control_per_second) {}

absl::Status FrameGuard::CheckClient(std::string_view& bytes, Time now) {
  if (preface_bytes_ < kPreface.size()) {
    const std::string_view expected = kPreface.substr(preface_bytes_, bytes.size());
    const std::string_view found = bytes.substr(0, expected.size());
    if (found != expected) return Violation("the client does not speak HTTP/2");
    preface_bytes_ += expected.size();
    bytes.remove_prefix(expected.size());
  }
  if (retry_) {
    MOESERVE_RETURN_IF_ERROR(ClientFrame(retried_, now));
    retry_ = false;
  }
  FrameHeader frame;
  while (client_.Next(bytes, frame)) {
    if (absl::Status status = ClientFrame(frame, now); !status.ok()) {
      retry_ = true;
      retried_ = frame;
      return status;
    }
  }
  return absl::OkStatus();
}

absl::Status FrameGuard::ClientFrame(const FrameHeader& frame, Time now) {
  if (first_frame_ && (frame.type != kSettings || (frame.flags & kAck) != 0)) {
    return Violation("the client's first frame is not SETTINGS");
  }
  first_frame_ = false;
  if (block_stream_ != 0 && (frame.type != kContinuation || frame.stream != block_stream_)) {
    return Violation("a header block is interrupted by another frame");
  }
  switch (frame.type) {
    case kHeaders:
      return ClientHeaders(frame, now);
    case kContinuation:
      if (block_stream_ == 0) return Violation("CONTINUATION without HEADERS");
      block_bytes_ += frame.length;
      if (block_bytes_ > limits_.max_header_bytes || ++block_frames_ > limits_.max_continuations) {
        return Violation("a header block is too long");
      }
      if ((frame.flags & kEndHeaders) != 0) block_stream_ = 0;
      return absl::OkStatus();
    case kData:
      return ClientData(frame, now);
    case kRstStream:
      if (!streams_.contains(frame.stream)) return CountControl(now);
      CloseStream(frame.stream, now, /*reset=*/true);
      return CountReset(now);
    case kSettings:
      if ((frame.flags & kAck) != 0 && unacknowledged_ > 0) --unacknowledged_;
      return CountControl(now);
    default:
      return CountControl(now);
  }
}

absl::Status FrameGuard::ClientHeaders(const FrameHeader& frame, Time now) {
  if (frame.length > limits_.max_header_bytes) return Violation("a header block is too long");
  if (frame.stream > last_stream_) {
    ReleaseLingering(now);
    if (streams_.size() >= limits_.max_streams) {
      return Violation(Concat("expected at most ", limits_.max_streams, " open streams"));
    }
    MemoryCharge charge(memory_);
    MOESERVE_RETURN_IF_ERROR(Charge(charge, limits_.stream_bytes));
    last_stream_ = frame.stream;
    streams_.emplace(frame.stream, std::move(charge));
  } else {
    // Trailers, or headers of a stream that has ended.
    MOESERVE_RETURN_IF_ERROR(CountControl(now));
  }
  if ((frame.flags & kEndHeaders) == 0) {
    block_stream_ = frame.stream;
    block_bytes_ = frame.length;
    block_frames_ = 0;
  }
  return absl::OkStatus();
}

absl::Status FrameGuard::ClientData(const FrameHeader& frame, Time now) {
  const auto stream = streams_.find(frame.stream);
  if (stream == streams_.end() || (frame.length == 0 && (frame.flags & kEndStream) == 0)) {
    return CountControl(now);
  }
  return Charge(stream->second, frame.length);
}

absl::Status FrameGuard::CheckServer(std::string_view bytes, Time now) {
  FrameHeader frame;
  while (server_.Next(bytes, frame)) {
    if (frame.type == kData || frame.type == kHeaders) controls_.Add(2);
    switch (frame.type) {
      case kSettings:
        if ((frame.flags & kAck) == 0 && unacknowledged_++ == 0) settings_sent_ = now;
        break;
      case kData:
      case kHeaders:
        if ((frame.flags & kEndStream) != 0) CloseStream(frame.stream, now, /*reset=*/false);
        break;
      case kRstStream:
        if (!streams_.contains(frame.stream)) break;
        CloseStream(frame.stream, now, /*reset=*/true);
        if (frame.error != kNoError && frame.error != kCancel) {
          MOESERVE_RETURN_IF_ERROR(CountReset(now));
        }
        break;
      default:
        break;
    }
  }
  return absl::OkStatus();
}

absl::Status FrameGuard::CheckTime(Time now) {
  ReleaseLingering(now);
  if (first_frame_ && now - start_ > limits_.preface_timeout) {
    return Violation("the client's preface and SETTINGS came too slowly");
  }
  if (unacknowledged_ > 0 && now - settings_sent_ > limits_.settings_timeout) {
    return Violation("the client does not acknowledge SETTINGS");
  }
  return absl::OkStatus();
}

absl::Status FrameGuard::CountReset(Time now) {
  return resets_.Take(now) ? absl::OkStatus() : Violation("too many streams were reset");
}

absl::Status FrameGuard::CountControl(Time now) {
  return controls_.Take(now) ? absl::OkStatus() : Violation("too many frames without content");
}

absl::Status FrameGuard::Charge(MemoryCharge& charge, size_t bytes) {
  MOESERVE_RETURN_IF_ERROR(charge.Add(bytes, ChargeFor::kRunningRequest));
  held_ += bytes;
  return absl::OkStatus();
}

void FrameGuard::CloseStream(uint32_t stream, Time now, bool reset) {
  const auto it = streams_.find(stream);
  if (it == streams_.end()) return;
  if (reset) {
    lingering_.emplace_back(now, std::move(it->second));
  } else {
    held_ -= it->second.bytes();
  }
  streams_.erase(it);
}

void FrameGuard::ReleaseLingering(Time now) {
  while (!lingering_.empty() && now - lingering_.front().first >= limits_.reset_linger) {
    held_ -= lingering_.front().second.bytes();
    lingering_.pop_front();
  }
}

void FrameGuard::Release() {
  streams_.clear();
  lingering_.clear();
  held_ = 0;
}

}  // namespace moeserve::server::rpc

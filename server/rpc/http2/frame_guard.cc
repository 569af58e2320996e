#include "server/rpc/http2/frame_guard.h"

#include <algorithm>
#include <optional>

#include "base/error_text.h"
#include "base/status.h"
#include "server/base/api_error.h"
#include "server/rpc/http2/request_head.h"

namespace moeserve::server::rpc {
namespace {

constexpr std::string_view kPreface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
constexpr int64_t kMaxWindow = 0x7fffffff;
constexpr size_t kFrameBytes = 16384;  // that every receiver must take
// More settings than this in one frame are of no use.
constexpr uint32_t kMaxSettingsBytes = 6 * 64;

std::string HeaderBytes(const FrameHeader& frame) {
  std::string bytes = Frame(frame.type, frame.flags, frame.stream, {});
  for (int i = 0; i < 3; ++i) bytes[i] = static_cast<char>(frame.length >> (16 - 8 * i));
  return bytes;
}

// Appends the frames with which a call begins.
void AppendHeaders(uint32_t stream, const HeaderFields& fields, bool end, std::string& out) {
  std::string block;
  for (const auto& [name, value] : fields) AppendField(name, value, block);
  std::string_view rest = block;
  uint8_t type = kHeaders;
  do {
    const std::string_view part = rest.substr(0, kFrameBytes);
    rest.remove_prefix(part.size());
    uint8_t flags = rest.empty() ? kEndHeaders : 0;
    if (end && type == kHeaders) flags |= kEndStream;
    out += Frame(type, flags, stream, part);
    type = kContinuation;
  } while (!rest.empty());
}

Refusal StreamError(Http2Error error) { return {.reset = error, .reason = {}, .message = {}}; }

}  // namespace

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
      decoder_(limits.max_header_list_bytes),
      settings_sent_(now),
      resets_(limits.reset_burst, limits.resets_per_second),
      controls_(limits.control_burst, limits.control_per_second) {}

absl::Status FrameGuard::CheckClient(std::string_view& bytes, Time now, std::string& to_server) {
  if (preface_bytes_ < kPreface.size()) {
    const std::string_view expected = kPreface.substr(preface_bytes_, bytes.size());
    const std::string_view found = bytes.substr(0, expected.size());
    if (found != expected) {
      // The names of HTTP's methods are in upper case; a TLS handshake begins with byte 22.
      client_speaks_http1_ = preface_bytes_ == 0 && bytes[0] >= 'A' && bytes[0] <= 'Z';
      return Violation("the client does not speak HTTP/2");
    }
    preface_bytes_ += expected.size();
    bytes.remove_prefix(expected.size());
    to_server += expected;
  }
  if (retry_) {
    MOESERVE_RETURN_IF_ERROR(BeginFrame(client_.frame(), now, to_server));
    retry_ = false;
  }
  std::string_view payload;
  while (true) {
    const FrameReader::Event event = client_.Next(bytes, payload);
    if (event == FrameReader::Event::kNone) return absl::OkStatus();
    if (absl::Status status = ClientEvent(event, payload, now, to_server); !status.ok()) {
      retry_ = event == FrameReader::Event::kBegin;
      return status;
    }
  }
}

absl::Status FrameGuard::ClientEvent(FrameReader::Event event, std::string_view payload, Time now,
                                     std::string& out) {
  const FrameHeader& frame = client_.frame();
  switch (event) {
    case FrameReader::Event::kBegin:
      return BeginFrame(frame, now, out);
    case FrameReader::Event::kPayload:
      return FramePayload(frame, payload, now, out);
    case FrameReader::Event::kEnd:
      return EndFrame(frame, now, out);
    case FrameReader::Event::kNone:
      break;
  }
  return absl::OkStatus();
}

absl::Status FrameGuard::CheckShape(const FrameHeader& frame) {
  const auto wrong_length = [&](bool wrong) {
    return wrong ? Violation(Concat("a frame of type ", int{frame.type}, " has ", frame.length,
                                    " bytes, which its type does not allow"),
                             Http2Error::kFrameSizeError)
                 : absl::OkStatus();
  };
  const bool of_connection =
      frame.type == kSettings || frame.type == kPing || frame.type == kGoAway;
  const bool of_stream = frame.type == kData || frame.type == kHeaders || frame.type == kPriority ||
                         frame.type == kRstStream || frame.type == kContinuation;
  if (frame.stream == 0 ? of_stream : of_connection) {
    return Violation(
        Concat("a frame of type ", int{frame.type}, " is on the wrong stream, ", frame.stream),
        Http2Error::kProtocolError);
  }
  // Streams are opened by HEADERS, in ascending order.
  const bool idle = frame.stream > last_stream_ || frame.stream % 2 == 0;
  const bool needs_open = frame.type == kData || frame.type == kRstStream ||
                          (frame.type == kWindowUpdate && frame.stream != 0);
  if ((needs_open && idle) || (frame.type == kHeaders && frame.stream % 2 == 0)) {
    return Violation(Concat("a frame of type ", int{frame.type}, " is on stream ", frame.stream,
                            ", which is not open"),
                     Http2Error::kProtocolError);
  }
  switch (frame.type) {
    case kPriority:
      return wrong_length(frame.length != 5);
    case kRstStream:
    case kWindowUpdate:
      return wrong_length(frame.length != 4);
    case kSettings:
      if (frame.length > kMaxSettingsBytes) return Violation("a frame has too many settings");
      return wrong_length(frame.length % 6 != 0 || (frame.Has(kAck) && frame.length > 0));
    case kPing:
      return wrong_length(frame.length != 8);
    case kGoAway:
      return wrong_length(frame.length < 8 || frame.length > kFrameBytes);  // gRPC keeps it
    case kPushPromise:
      return Violation("a client must not push", Http2Error::kProtocolError);
    default:
      return absl::OkStatus();
  }
}

absl::Status FrameGuard::BeginFrame(const FrameHeader& frame, Time now, std::string& out) {
  if (first_frame_ && (frame.type != kSettings || frame.Has(kAck))) {
    return Violation("the client's first frame is not SETTINGS", Http2Error::kProtocolError);
  }
  first_frame_ = false;
  if (block_stream_ != 0 && (frame.type != kContinuation || frame.stream != block_stream_)) {
    return Violation("a header block is interrupted by another frame", Http2Error::kProtocolError);
  }
  MOESERVE_RETURN_IF_ERROR(CheckShape(frame));
  control_.clear();
  // gRPC must not get what the guard refuses, so frames on which it acts wait for their payload.
  delayed_ = frame.type == kRstStream || frame.type == kSettings || frame.type == kWindowUpdate;
  switch (frame.type) {
    case kHeaders:
      return BeginHeaders(frame, now);
    case kContinuation: {
      if (block_stream_ == 0) {
        return Violation("CONTINUATION without HEADERS", Http2Error::kProtocolError);
      }
      block_bytes_ += frame.length;
      if (block_bytes_ > limits_.max_header_bytes || ++block_frames_ > limits_.max_continuations) {
        return Violation("a header block is too long");
      }
      content_.Begin({.length = frame.length, .type = frame.type, .stream = frame.stream});
      return absl::OkStatus();
    }
    case kData:
      return BeginData(frame, now, out);
    default:
      if (!delayed_) out += HeaderBytes(frame);
      return absl::OkStatus();
  }
}

absl::Status FrameGuard::BeginHeaders(const FrameHeader& frame, Time now) {
  if (frame.length > limits_.max_header_bytes) return Violation("a header block is too long");
  if (!content_.Begin(frame)) {
    return Violation("HEADERS is too short for its flags", Http2Error::kProtocolError);
  }
  if (frame.stream > last_stream_) {
    ReleaseLingering(now);
    if (streams_.size() >= limits_.max_streams) {
      return Violation(Concat("expected at most ", limits_.max_streams, " open streams"));
    }
    MemoryCharge charge(memory_);
    MOESERVE_RETURN_IF_ERROR(Charge(charge, limits_.stream_bytes));
    last_stream_ = frame.stream;
    streams_.emplace(frame.stream, Stream{.charge = std::move(charge)});
    block_ = Block::kRequest;
  } else {
    MOESERVE_RETURN_IF_ERROR(CountControl(now));
    block_ = streams_.contains(frame.stream) ? Block::kTrailers : Block::kClosedStream;
  }
  block_stream_ = frame.stream;
  block_ends_stream_ = frame.Has(kEndStream);
  block_bytes_ = frame.length;
  block_frames_ = 0;
  return absl::OkStatus();
}

absl::Status FrameGuard::BeginData(const FrameHeader& frame, Time now, std::string& out) {
  const auto stream = streams_.find(frame.stream);
  data_known_ = stream != streams_.end() && !stream->second.client_ended;
  if (!data_known_ || (frame.length == 0 && !frame.Has(kEndStream))) {
    MOESERVE_RETURN_IF_ERROR(CountControl(now));
  } else {
    MOESERVE_RETURN_IF_ERROR(Charge(stream->second.charge, frame.length));
  }
  if (!data_known_) {
    // gRPC gives back the window of DATA on streams that it does not know.
    out += HeaderBytes(frame);
  } else if (!content_.Begin(frame)) {
    return Violation("DATA is too short for its flags", Http2Error::kProtocolError);
  }
  return absl::OkStatus();
}

absl::Status FrameGuard::FramePayload(const FrameHeader& frame, std::string_view payload, Time now,
                                      std::string& out) {
  if (frame.type == kHeaders || frame.type == kContinuation) {
    if (decoder_.Decode(content_.Next(payload), /*last=*/false).ok()) return absl::OkStatus();
    return Violation("a header block cannot be decoded", Http2Error::kCompressionError);
  }
  if (delayed_) {
    control_ += payload;
    return absl::OkStatus();
  }
  if (frame.type != kData || !data_known_) {
    out += payload;
    return absl::OkStatus();
  }
  const std::string_view content = content_.Next(payload);
  if (!content_.valid()) {
    return Violation("DATA has more padding than bytes", Http2Error::kProtocolError);
  }
  if (content.empty()) return absl::OkStatus();
  if (const auto stream = streams_.find(frame.stream); stream != streams_.end()) {
    std::optional<Refusal> refusal = stream->second.messages.Read(content);
    if (refusal) {
      MOESERVE_RETURN_IF_ERROR(Refuse(frame.stream, *std::move(refusal), now, out));
    } else {
      ReleaseEarlierMessages(stream->second);
    }
  }
  // gRPC 1.51 does not know padding, so it gets frames of its own.
  out += Frame(kData, 0, frame.stream, content);
  return absl::OkStatus();
}

absl::Status FrameGuard::EndFrame(const FrameHeader& frame, Time now, std::string& out) {
  switch (frame.type) {
    case kHeaders:
    case kContinuation:
      if (!content_.valid()) {
        return Violation("HEADERS has more padding than bytes", Http2Error::kProtocolError);
      }
      return frame.Has(kEndHeaders) ? EndBlock(now, out) : absl::OkStatus();
    case kData:
      return EndData(frame, now, out);
    case kRstStream:
      out += HeaderBytes(frame) + control_;
      if (!streams_.contains(frame.stream)) return CountControl(now);
      CloseStream(frame.stream, now, /*reset=*/true);
      return CountReset(now);
    case kSettings:
      MOESERVE_RETURN_IF_ERROR(CheckSettings(frame, now));
      out += HeaderBytes(frame) + control_;
      return absl::OkStatus();
    case kWindowUpdate:
      return EndWindowUpdate(frame, now, out);
    default:
      return CountControl(now);
  }
}

absl::Status FrameGuard::EndBlock(Time now, std::string& out) {
  const uint32_t id = std::exchange(block_stream_, 0);
  if (!decoder_.Decode({}, /*last=*/true).ok()) {
    return Violation("a header block cannot be decoded", Http2Error::kCompressionError);
  }
  const bool too_large = decoder_.too_large();
  HeaderFields fields = decoder_.Take();
  const auto found = streams_.find(id);
  if (block_ == Block::kClosedStream || found == streams_.end()) return absl::OkStatus();
  Stream& stream = found->second;
  if (block_ == Block::kTrailers) {
    if (stream.client_ended || !block_ends_stream_ || CheckTrailers(fields)) {
      return Refuse(id, StreamError(Http2Error::kProtocolError), now, out);
    }
    // Clients of gRPC have no trailers.
    return EndClientSide(id, stream, now, out);
  }
  stream.client_ended = block_ends_stream_;
  RequestHead head;
  std::optional<Refusal> refusal;
  if (too_large) {
    refusal = Refusal{.code = grpc::StatusCode::RESOURCE_EXHAUSTED,
                      .reason = "request_too_large",
                      .message = Concat("the headers of a call may have ",
                                        limits_.max_header_list_bytes, " bytes")};
  } else {
    refusal = CheckRequestHead(fields, head);
  }
  if (refusal) return Refuse(id, *std::move(refusal), now, out);
  stream.messages = MessageReader(head.compressed);
  stream.request_id = std::move(head.request_id);
  stream.forwarded = true;
  AppendHeaders(id, fields, block_ends_stream_, out);
  return absl::OkStatus();
}

absl::Status FrameGuard::EndData(const FrameHeader& frame, Time now, std::string& out) {
  if (!data_known_) return absl::OkStatus();
  const auto found = streams_.find(frame.stream);
  const bool open = found != streams_.end();
  if (frame.Has(kPadded)) {
    // gRPC does not give back the window of what it did not get.
    to_client_ += WindowFrame(0, content_.padding());
    if (open && !frame.Has(kEndStream)) to_client_ += WindowFrame(frame.stream, content_.padding());
  }
  if (!open || !frame.Has(kEndStream)) return absl::OkStatus();
  return EndClientSide(frame.stream, found->second, now, out);
}

absl::Status FrameGuard::EndClientSide(uint32_t id, Stream& stream, Time now, std::string& out) {
  stream.client_ended = true;
  if (std::optional<Refusal> refusal = stream.messages.End()) {
    return Refuse(id, *std::move(refusal), now, out);
  }
  out += Frame(kData, kEndStream, id, {});
  return absl::OkStatus();
}

absl::Status FrameGuard::CheckSettings(const FrameHeader& frame, Time now) {
  enum Setting : uint32_t { kEnablePush = 2, kInitialWindow = 4, kMaxFrame = 5 };
  if (frame.Has(kAck) && unacknowledged_ > 0) --unacknowledged_;
  for (std::string_view rest = control_; rest.size() >= 6; rest.remove_prefix(6)) {
    const uint32_t setting = Number(rest.substr(0, 2));
    const uint32_t value = Number(rest.substr(2, 4));
    if ((setting == kEnablePush && value > 1) ||
        (setting == kMaxFrame && (value < kFrameBytes || value > 0xffffff))) {
      return Violation(Concat("the setting ", setting, " must not be ", value),
                       Http2Error::kProtocolError);
    }
    if (setting != kInitialWindow) continue;
    initial_window_ = value;
    const bool overflow = std::ranges::any_of(streams_, [&](const auto& stream) {
      return initial_window_ + stream.second.window > kMaxWindow;
    });
    if (initial_window_ > kMaxWindow || overflow) {
      return Violation(Concat("the setting ", setting, " must not be ", value),
                       Http2Error::kFlowControlError);
    }
  }
  return CountControl(now);
}

absl::Status FrameGuard::EndWindowUpdate(const FrameHeader& frame, Time now, std::string& out) {
  MOESERVE_RETURN_IF_ERROR(CountControl(now));
  const int64_t increment = Number(control_) & 0x7fffffff;
  if (frame.stream == 0) {
    window_ += increment;
    if (increment == 0) {
      return Violation("a window is enlarged by nothing", Http2Error::kProtocolError);
    }
    if (window_ > kMaxWindow) {
      return Violation("the connection's window is too large", Http2Error::kFlowControlError);
    }
  } else {
    const auto stream = streams_.find(frame.stream);
    if (stream == streams_.end()) return absl::OkStatus();  // gRPC does not need it
    stream->second.window += increment;
    const bool too_large = initial_window_ + stream->second.window > kMaxWindow;
    if (increment == 0 || too_large) {
      return Refuse(
          frame.stream,
          StreamError(too_large ? Http2Error::kFlowControlError : Http2Error::kProtocolError), now,
          out);
    }
  }
  out += HeaderBytes(frame) + control_;
  return absl::OkStatus();
}

absl::Status FrameGuard::CheckServer(std::string_view bytes, Time now, std::string& to_client) {
  std::string_view payload;
  while (true) {
    const FrameReader::Event event = server_.Next(bytes, payload);
    const FrameHeader& frame = server_.frame();
    switch (event) {
      case FrameReader::Event::kNone:
        return absl::OkStatus();
      case FrameReader::Event::kBegin:
        server_payload_.clear();
        server_delayed_ =
            (frame.type == kHeaders || frame.type == kRstStream) && refused_.contains(frame.stream);
        if (!server_delayed_) to_client += HeaderBytes(frame);
        BeginServerFrame(frame, now);
        break;
      case FrameReader::Event::kPayload:
        if (server_delayed_ || frame.type == kRstStream) server_payload_ += payload;
        if (!server_delayed_) to_client += payload;
        break;
      case FrameReader::Event::kEnd:
        MOESERVE_RETURN_IF_ERROR(EndServerFrame(frame, now, to_client));
        break;
    }
  }
}

void FrameGuard::BeginServerFrame(const FrameHeader& frame, Time now) {
  const auto stream = streams_.find(frame.stream);
  const bool open = stream != streams_.end();
  switch (frame.type) {
    case kSettings:
      if (!frame.Has(kAck) && unacknowledged_++ == 0) settings_sent_ = now;
      return;
    case kContinuation:
      server_block_open_ = !frame.Has(kEndHeaders);
      return;
    case kHeaders:
      server_block_open_ = !frame.Has(kEndHeaders);
      if (open) stream->second.begun = true;
      break;
    case kData:
      window_ -= frame.length;
      if (open) stream->second.window -= frame.length;
      break;
    default:
      return;
  }
  controls_.Add(2);
  if (frame.Has(kEndStream)) CloseStream(frame.stream, now, /*reset=*/false);
}

absl::Status FrameGuard::EndServerFrame(const FrameHeader& frame, Time now,
                                        std::string& to_client) {
  if (server_delayed_) {
    // gRPC answers a stream that was reset, but the guard has already answered it.
    if (frame.type == kRstStream || IsStateless(server_payload_)) return absl::OkStatus();
    to_client += HeaderBytes(frame) + server_payload_;
  }
  if (frame.type != kRstStream || !streams_.contains(frame.stream)) return absl::OkStatus();
  CloseStream(frame.stream, now, /*reset=*/true);
  const auto error = static_cast<Http2Error>(Number(server_payload_));
  // With these codes, the server ends streams that are in order.
  if (error == Http2Error::kNoError || error == Http2Error::kCancel) return absl::OkStatus();
  return CountReset(now);
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

absl::Status FrameGuard::Refuse(uint32_t id, Refusal refusal, Time now, std::string& out) {
  Stream& stream = streams_.at(id);
  if (refusal.request_id.empty()) refusal.request_id = stream.request_id;
  to_client_ += RefusalFrames(id, refusal, stream.begun, stream.client_ended);
  if (stream.forwarded) {
    out += ResetFrame(id, Http2Error::kCancel);
    refused_.insert(id);
  }
  CloseStream(id, now, /*reset=*/true);
  return CountReset(now);
}

absl::Status FrameGuard::Violation(std::string message, Http2Error error) {
  error_ = error;
  return absl::FailedPreconditionError(std::move(message));
}

absl::Status FrameGuard::CountReset(Time now) {
  return resets_.Take(now) ? absl::OkStatus() : Violation("too many streams were reset");
}

absl::Status FrameGuard::CountControl(Time now) {
  return controls_.Take(now) ? absl::OkStatus() : Violation("too many frames without content");
}

absl::Status FrameGuard::Charge(MemoryCharge& charge, size_t bytes) {
  MOESERVE_RETURN_IF_ERROR(charge.Add(bytes, ChargeFor::kArriving));
  held_ += bytes;
  return absl::OkStatus();
}

void FrameGuard::ReleaseEarlierMessages(Stream& stream) {
  const size_t before = stream.charge.bytes();
  stream.charge.ReduceTo(limits_.stream_bytes + limits_.window_bytes + stream.messages.size());
  held_ -= before - stream.charge.bytes();
}

void FrameGuard::CloseStream(uint32_t stream, Time now, bool reset) {
  const auto it = streams_.find(stream);
  if (it == streams_.end()) return;
  if (reset) {
    lingering_.push_back({now, std::move(it->second.charge), stream});
  } else {
    held_ -= it->second.charge.bytes();
  }
  streams_.erase(it);
}

void FrameGuard::ReleaseLingering(Time now) {
  while (!lingering_.empty() && now - lingering_.front().since >= limits_.reset_linger) {
    held_ -= lingering_.front().charge.bytes();
    refused_.erase(lingering_.front().stream);
    lingering_.pop_front();
  }
}

void FrameGuard::Release() {
  streams_.clear();
  lingering_.clear();
  held_ = 0;
}

}  // namespace moeserve::server::rpc

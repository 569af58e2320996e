// Stands between the client of one gRPC connection and gRPC, and checks the HTTP/2 frames (RFC
// 9113). It tells when the connection must be closed, because its client takes more of the server
// than it may: gRPC itself keeps memory for streams that were reset, for header blocks that do not
// end, and for clients that never acknowledge its settings. It also answers calls that gRPC 1.51
// would answer wrongly, or only when all their bytes have arrived. Header blocks are decoded,
// checked and encoded anew, so gRPC sees no other fields than well-formed ones.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "absl/status/status.h"
#include "server/base/memory_budget.h"
#include "server/rpc/http2/frame_reader.h"
#include "server/rpc/http2/header_block.h"
#include "server/rpc/http2/message_reader.h"
#include "server/rpc/http2/refusal.h"

namespace moeserve::server::rpc {

struct FrameLimits {
  // Streams that may be open at once. The server's SETTINGS announce the same number.
  size_t max_streams = 256;
  // Bytes of one header block: of HEADERS and of the CONTINUATION frames that follow.
  size_t max_header_bytes = 32 << 10;
  // Bytes of the fields of one header block, each with 32 bytes more.
  size_t max_header_list_bytes = 16 << 10;
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
  // DATA of a stream that gRPC takes before the application asks for it.
  size_t window_bytes = 256 << 10;
  // gRPC needs this long to give back the memory of a stream that the client has reset.
  std::chrono::milliseconds reset_linger{2000};
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

  // Checks bytes that the client has sent, which may end within a frame, and appends what gRPC must
  // get instead of them to `to_server`. Returns ResourceExhausted with code "out_of_memory" if the
  // budget has no room for them: the call may be repeated with the rest that CheckClient() has left
  // in `bytes`. Every other error means that the connection must be closed with error(), and its
  // message says why. May throw std::bad_alloc; the connection must then be closed.
  absl::Status CheckClient(std::string_view& bytes, Time now, std::string& to_server);
  // Follows bytes that the server sends, and appends what the client must get instead of them to
  // `to_client`, with the same errors.
  absl::Status CheckServer(std::string_view bytes, Time now, std::string& to_client);
  // Returns the frames that the guard itself has for the client, which must be sent when
  // server_between_frames().
  std::string TakeForClient() { return std::exchange(to_client_, {}); }
  size_t bytes_for_client() const { return to_client_.size(); }
  // Returns an error if the client is late. Must be called every few seconds.
  absl::Status CheckTime(Time now);

  // Returns the error code for the GOAWAY frame that tells the client about the last error.
  Http2Error error() const { return error_; }
  // Returns whether the client's first bytes look like a request of HTTP/1.
  bool client_speaks_http1() const { return client_speaks_http1_; }
  // Returns whether a frame may be added behind the bytes that the server has sent.
  bool server_between_frames() const { return server_.between_frames() && !server_block_open_; }
  size_t open_streams() const { return streams_.size(); }
  size_t held_bytes() const { return held_; }
  // Gives back everything that the connection holds of the budget.
  void Release();

 private:
  struct Stream {
    MemoryCharge charge;
    MessageReader messages{};
    std::string request_id{};   // if the client has chosen one
    bool forwarded = false;     // whether gRPC knows the stream
    bool begun = false;         // whether the server has sent its header fields
    bool client_ended = false;  // whether the client has ended its side
    int64_t window = 0;         // what the server may send, less initial_window_
  };
  // A stream that was reset.
  struct Lingering {
    Time since;
    MemoryCharge charge;
    uint32_t stream;
  };
  // What the header block that is being decoded belongs to.
  enum class Block { kRequest, kTrailers, kClosedStream };

  absl::Status ClientEvent(FrameReader::Event event, std::string_view payload, Time now,
                           std::string& out);
  absl::Status BeginFrame(const FrameHeader& frame, Time now, std::string& out);
  absl::Status BeginHeaders(const FrameHeader& frame, Time now);
  absl::Status BeginData(const FrameHeader& frame, Time now, std::string& out);
  absl::Status FramePayload(const FrameHeader& frame, std::string_view payload, Time now,
                            std::string& out);
  absl::Status EndFrame(const FrameHeader& frame, Time now, std::string& out);
  absl::Status EndBlock(Time now, std::string& out);
  absl::Status EndData(const FrameHeader& frame, Time now, std::string& out);
  absl::Status EndClientSide(uint32_t id, Stream& stream, Time now, std::string& out);
  absl::Status CheckSettings(const FrameHeader& frame, Time now);
  absl::Status EndWindowUpdate(const FrameHeader& frame, Time now, std::string& out);
  void BeginServerFrame(const FrameHeader& frame, Time now);
  absl::Status EndServerFrame(const FrameHeader& frame, Time now, std::string& to_client);
  // Checks what can be checked without the payload.
  absl::Status CheckShape(const FrameHeader& frame);
  // Answers a call and ends its stream for both sides.
  absl::Status Refuse(uint32_t id, Refusal refusal, Time now, std::string& out);
  absl::Status Violation(std::string message, Http2Error error = Http2Error::kEnhanceYourCalm);
  absl::Status CountReset(Time now);
  absl::Status CountControl(Time now);
  absl::Status Charge(MemoryCharge& charge, size_t bytes);
  // Gives back what is charged for messages of the stream that the application has got.
  void ReleaseEarlierMessages(Stream& stream);
  void CloseStream(uint32_t stream, Time now, bool reset);
  void ReleaseLingering(Time now);

  const FrameLimits& limits_;
  const std::shared_ptr<MemoryBudget> memory_;
  const Time start_;
  FrameReader client_;
  FrameReader server_;
  size_t preface_bytes_ = 0;  // bytes of the preface that have arrived
  bool first_frame_ = true;   // whether the next frame is the client's first one
  bool retry_ = false;        // whether the budget had no room for the frame that has begun
  uint32_t last_stream_ = 0;
  std::unordered_map<uint32_t, Stream> streams_;  // open streams
  std::deque<Lingering> lingering_;
  std::unordered_set<uint32_t> refused_;  // streams in lingering_ that the guard has answered
  size_t held_ = 0;
  Http2Error error_ = Http2Error::kNoError;
  bool client_speaks_http1_ = false;
  std::string to_client_;

  // The header block that has begun and not ended; stream 0 if there is none.
  uint32_t block_stream_ = 0;
  Block block_ = Block::kRequest;
  bool block_ends_stream_ = false;
  size_t block_bytes_ = 0;
  int block_frames_ = 0;
  HeaderDecoder decoder_;

  // The client's frame that is being read.
  ContentReader content_;
  bool data_known_ = false;  // whether DATA belongs to an open stream
  bool delayed_ = false;     // whether gRPC gets the frame only when it has been checked
  std::string control_;      // its payload

  // SETTINGS of the server that the client has not acknowledged, and since when.
  int unacknowledged_ = 0;
  Time settings_sent_;
  // What the server may send: to the connection, and to a stream at its start.
  int64_t window_ = 65535;
  int64_t initial_window_ = 65535;
  bool server_block_open_ = false;
  bool server_delayed_ = false;  // whether the client gets the frame only at its end, or never
  std::string server_payload_;   // of such a frame, or of RST_STREAM
  EventAllowance resets_;
  EventAllowance controls_;
};

}  // namespace moeserve::server::rpc

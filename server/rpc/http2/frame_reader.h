// Splits the bytes of one direction of an HTTP/2 connection into frames.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace moeserve::server::rpc {

enum FrameType : uint8_t {
  kData = 0,
  kHeaders = 1,
  kPriority = 2,
  kRstStream = 3,
  kSettings = 4,
  kPushPromise = 5,
  kPing = 6,
  kGoAway = 7,
  kWindowUpdate = 8,
  kContinuation = 9,
};
inline constexpr uint8_t kEndStream = 1;  // of DATA and HEADERS
inline constexpr uint8_t kAck = 1;        // of SETTINGS and PING
inline constexpr uint8_t kEndHeaders = 4;
inline constexpr uint8_t kPadded = 8;        // of DATA and HEADERS
inline constexpr uint8_t kPrioritized = 32;  // of HEADERS

// A frame's header (RFC 9113, section 4.1).
struct FrameHeader {
  uint32_t length = 0;  // of the payload, in bytes
  uint8_t type = 0;
  uint8_t flags = 0;
  uint32_t stream = 0;

  bool Has(uint8_t flag) const { return (flags & flag) != 0; }
};

class FrameReader {
 public:
  // What Next() has found: a frame's header, a part of its payload, the end of its payload.
  enum class Event { kNone, kBegin, kPayload, kEnd };

  // Removes the bytes of the next event from the front of `bytes`, and stores a part of a payload
  // in `payload`. kNone if `bytes` has no further event; it is then empty.
  Event Next(std::string_view& bytes, std::string_view& payload);
  // Returns the frame of the last event.
  const FrameHeader& frame() const { return frame_; }
  // Returns whether the events so far end at the end of a frame.
  bool between_frames() const { return header_.empty() && !inside_; }

 private:
  std::string header_;  // the part of a frame's header that has arrived
  FrameHeader frame_;
  uint32_t left_ = 0;    // bytes of the payload
  bool inside_ = false;  // whether kBegin was returned, and kEnd was not
};

// Removes padding and the fields of priority from the payload of DATA and HEADERS.
class ContentReader {
 public:
  // Must be called when a frame begins. Returns false if its payload is too short.
  bool Begin(const FrameHeader& frame);
  // Returns the content within the next part of the payload.
  std::string_view Next(std::string_view payload);
  // Returns, at the frame's end, whether the padding was not longer than the payload.
  bool valid() const { return !invalid_; }
  // Returns how many bytes of the payload were padding, with the length of the padding.
  uint32_t padding() const { return padding_; }

 private:
  bool read_length_ = false;  // whether the next byte is the padding's length
  uint32_t skip_ = 0;         // bytes to skip in front of the content
  uint32_t content_ = 0;      // bytes of the content, once `read_length_` is false
  uint32_t padding_ = 0;
  bool invalid_ = false;
};

// Returns the big-endian number in `bytes`, of which there are at most four.
uint32_t Number(std::string_view bytes);

}  // namespace moeserve::server::rpc

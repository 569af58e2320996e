// How the frame guard ends a call by itself.
#pragma once

#include <grpcpp/support/status.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace moeserve::server::rpc {

// Error codes of HTTP/2 (RFC 9113, section 7).
enum class Http2Error : uint32_t {
  kNoError = 0,
  kProtocolError = 1,
  kFlowControlError = 3,
  kFrameSizeError = 6,
  kCancel = 8,
  kCompressionError = 9,
  kEnhanceYourCalm = 11,
};

// What is wrong with a call.
struct Refusal {
  // Other than kNoError: the stream is not even HTTP/2, and gets RST_STREAM instead of an answer.
  Http2Error reset = Http2Error::kNoError;
  int http_status = 200;
  grpc::StatusCode code = grpc::StatusCode::INVALID_ARGUMENT;
  std::string_view reason;  // an API error code
  std::string message;
  std::string request_id = {};  // empty: a new one
};

// Returns a frame (RFC 9113, section 4.1).
std::string Frame(uint8_t type, uint8_t flags, uint32_t stream, std::string_view payload = {});
// Returns a RST_STREAM frame.
std::string ResetFrame(uint32_t stream, Http2Error error);
// Returns a WINDOW_UPDATE frame; `stream` 0 stands for the connection.
std::string WindowFrame(uint32_t stream, uint32_t increment);

// Returns the frames that end `stream` for its client: the answer, or RST_STREAM. `begun`: the
// server has sent its header fields. `client_ended`: the client will send nothing more; else it is
// told that it need not.
std::string RefusalFrames(uint32_t stream, const Refusal& refusal, bool begun, bool client_ended);

}  // namespace moeserve::server::rpc

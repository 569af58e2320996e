#include "server/rpc/http2/refusal.h"

#include "absl/strings/escaping.h"
#include "base/error_text.h"
#include "server/base/request_id.h"
#include "server/rpc/error_details.h"
#include "server/rpc/http2/frame_reader.h"
#include "server/rpc/http2/header_block.h"

namespace moeserve::server::rpc {
namespace {

void AppendNumber(uint32_t number, int bytes, std::string& out) {
  for (int shift = 8 * (bytes - 1); shift >= 0; shift -= 8) {
    out += static_cast<char>(number >> shift);
  }
}

// Encodes the value of grpc-message.
std::string PercentEncoded(std::string_view text) {
  constexpr char kDigits[] = "0123456789ABCDEF";
  std::string out;
  for (const char c : text) {
    if (c >= ' ' && c <= '~' && c != '%') {
      out += c;
    } else {
      const auto byte = static_cast<unsigned char>(c);
      out += {'%', kDigits[byte / 16], kDigits[byte % 16]};
    }
  }
  return out;
}

std::string Base64(const std::string& bytes) {
  std::string out;
  absl::Base64Escape(bytes, &out);
  while (!out.empty() && out.back() == '=') out.pop_back();
  return out;
}

}  // namespace

std::string Frame(uint8_t type, uint8_t flags, uint32_t stream, std::string_view payload) {
  std::string frame;
  AppendNumber(static_cast<uint32_t>(payload.size()), 3, frame);
  frame += static_cast<char>(type);
  frame += static_cast<char>(flags);
  AppendNumber(stream, 4, frame);
  frame += payload;
  return frame;
}

std::string ResetFrame(uint32_t stream, Http2Error error) {
  std::string payload;
  AppendNumber(static_cast<uint32_t>(error), 4, payload);
  return Frame(kRstStream, 0, stream, payload);
}

std::string WindowFrame(uint32_t stream, uint32_t increment) {
  std::string payload;
  AppendNumber(increment, 4, payload);
  return Frame(kWindowUpdate, 0, stream, payload);
}

std::string RefusalFrames(uint32_t stream, const Refusal& refusal, bool begun, bool client_ended) {
  if (refusal.reset != Http2Error::kNoError) return ResetFrame(stream, refusal.reset);
  const std::string id = refusal.request_id.empty() ? NewRequestId() : refusal.request_id;
  const grpc::Status status = DetailedStatus(refusal.code, refusal.message, refusal.reason, id);
  std::string block;
  if (!begun) {
    AppendField(":status", std::to_string(refusal.http_status), block);
    AppendField("content-type", "application/grpc", block);
    if (refusal.http_status == 405) AppendField("allow", "POST", block);
    if (refusal.code == grpc::StatusCode::UNIMPLEMENTED) {
      AppendField("grpc-accept-encoding", "identity, deflate, gzip", block);
    }
  }
  AppendField("grpc-status", std::to_string(static_cast<int>(status.error_code())), block);
  AppendField("grpc-message", PercentEncoded(status.error_message()), block);
  AppendField("grpc-status-details-bin", Base64(status.error_details()), block);
  AppendField("x-request-id", id, block);
  AppendField("x-error-code", refusal.reason, block);
  std::string frames = Frame(kHeaders, kEndHeaders | kEndStream, stream, block);
  if (!client_ended) frames += ResetFrame(stream, Http2Error::kNoError);
  return frames;
}

}  // namespace moeserve::server::rpc

#include "server/rpc/messages/message_bytes.h"

#include <google/protobuf/io/zero_copy_stream.h>
#include <grpc/compression.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/support/proto_buffer_reader.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "base/error_text.h"
#include "base/status.h"
#include "server/base/api_error.h"
#include "server/rpc/messages/message_cost.h"

namespace moeserve::server::rpc {
namespace {

std::string PathOf(const Method& method) { return Concat(method.service, '/', method.name); }

absl::Status InvalidMessage(std::string text) {
  return MakeError(absl::StatusCode::kInvalidArgument, "invalid_message", std::move(text));
}

// No server has so much memory for one call, so counting need not go on.
constexpr size_t kMostParsedBytes = size_t{1} << 40;

absl::Status TooLong() {
  return MakeError(
      absl::StatusCode::kResourceExhausted, "request_too_large",
      Concat("a message may have ", kMaxMessageBytes, " bytes, and this one inflates to more"));
}

// The bytes of a message as gRPC has received them.
class ReceivedBytes final : public grpc::ProtoBufferReader {
 public:
  explicit ReceivedBytes(grpc::ByteBuffer* bytes) : grpc::ProtoBufferReader(bytes) {}
  grpc_compression_algorithm compression() {
    return status().ok() ? reader()->buffer_in->data.raw.compression : GRPC_COMPRESS_NONE;
  }
};

// Inflates a stream piece by piece.
class InflatedBytes final : public google::protobuf::io::ZeroCopyInputStream {
 public:
  // `input` must outlive this object.
  InflatedBytes(ReceivedBytes& input, bool gzip) : input_(input) {
    constexpr int kGzip = 16;  // added to the window's bits (zlib.h)
    ready_ = inflateInit2(&zlib_, MAX_WBITS + (gzip ? kGzip : 0)) == Z_OK;
  }
  ~InflatedBytes() override { inflateEnd(&zlib_); }
  InflatedBytes(const InflatedBytes&) = delete;
  InflatedBytes& operator=(const InflatedBytes&) = delete;

  bool Next(const void** data, int* size) override {
    if (backed_up_ > 0) {
      *data = buffer_.data() + filled_ - backed_up_;
      *size = std::exchange(backed_up_, 0);
      return true;
    }
    if (!Fill()) return false;
    *data = buffer_.data();
    *size = filled_;
    return true;
  }
  void BackUp(int count) override { backed_up_ = count; }
  bool Skip(int count) override {
    const void* data = nullptr;
    for (int size = 0; count > 0; count -= size) {
      if (!Next(&data, &size)) return false;
      if (size > count) {
        BackUp(size - count);
        return true;
      }
    }
    return true;
  }
  int64_t ByteCount() const override { return total_ - backed_up_; }

  // Returns whether the compressed stream was complete, and nothing came behind it.
  bool complete() { return ended_ && !NextInput(); }
  // Returns whether the stream has more bytes than a message may have. They are not read.
  bool too_long() const { return total_ > kMaxMessageBytes; }

 private:
  // Reads bytes to inflate if none are left. Returns whether there are any.
  bool NextInput() {
    const void* data = nullptr;
    int size = 0;
    // gRPC's buffers may have empty pieces.
    while (zlib_.avail_in == 0 && input_.Next(&data, &size)) {
      zlib_.next_in = static_cast<Bytef*>(const_cast<void*>(data));
      zlib_.avail_in = static_cast<uInt>(size);
    }
    return zlib_.avail_in > 0;
  }

  // Inflates the next piece.
  bool Fill() {
    zlib_.next_out = buffer_.data();
    zlib_.avail_out = static_cast<uInt>(buffer_.size());
    while (ready_ && !ended_ && zlib_.avail_out == buffer_.size()) {
      NextInput();  // without further input, the next line returns Z_BUF_ERROR
      const int result = inflate(&zlib_, Z_NO_FLUSH);
      ended_ = result == Z_STREAM_END;
      ready_ = ended_ || result == Z_OK;
    }
    filled_ = static_cast<int>(buffer_.size() - zlib_.avail_out);
    total_ += filled_;
    ready_ = ready_ && !too_long();
    return filled_ > 0 && !too_long();
  }

  ReceivedBytes& input_;
  z_stream zlib_{};
  std::array<Bytef, 32 << 10> buffer_;
  int filled_ = 0;
  int backed_up_ = 0;
  int64_t total_ = 0;
  bool ready_ = false;  // whether more can be inflated
  bool ended_ = false;
};

}  // namespace

absl::Status ParseMessage(const Method& method, grpc::ByteBuffer& bytes, MemoryCharge& charge,
                          google::protobuf::Message& message) {
  const auto invalid = [&](std::string_view problem) {
    return InvalidMessage(Concat("a message of ", PathOf(method), ' ', problem, ' ',
                                 std::string(message.GetDescriptor()->full_name())));
  };
  // The bytes are read twice: to charge the message's memory, and to parse it.
  const grpc_compression_algorithm compression = ReceivedBytes(&bytes).compression();
  const bool gzip = compression == GRPC_COMPRESS_GZIP;
  const bool compressed = compression != GRPC_COMPRESS_NONE && bytes.Length() > 0;
  ReceivedBytes scanned(&bytes);
  ReceivedBytes received(&bytes);
  if (!compressed) {
    const size_t parsed_bytes = ParsedBytes(*message.GetDescriptor(), scanned, kMostParsedBytes);
    // The received bytes are charged already, as long as the call runs.
    MOESERVE_RETURN_IF_ERROR(charge.Add(parsed_bytes - std::min(parsed_bytes, bytes.Length())));
    if (message.ParseFromZeroCopyStream(&received)) return absl::OkStatus();
    return invalid("is not a valid");
  }
  InflatedBytes inflated_scan(scanned, gzip);
  const size_t parsed_bytes =
      ParsedBytes(*message.GetDescriptor(), inflated_scan, kMostParsedBytes);
  if (inflated_scan.too_long()) return TooLong();
  MOESERVE_RETURN_IF_ERROR(charge.Add(parsed_bytes));
  InflatedBytes inflated(received, gzip);
  const bool parsed = message.ParseFromZeroCopyStream(&inflated);
  if (inflated.too_long()) return TooLong();
  if (parsed && inflated.complete()) return absl::OkStatus();
  return invalid(parsed ? "is not a completely compressed" : "is not a valid compressed");
}

void SerializeMessage(const google::protobuf::Message& message, grpc::ByteBuffer& bytes) {
  bytes.Clear();
  bool owned = true;
  grpc::SerializationTraits<google::protobuf::Message>::Serialize(message, &bytes, &owned);
}

absl::Status NoMessage(const Method& method) {
  return InvalidMessage(Concat(PathOf(method), " expects one message, found none"));
}

absl::Status SecondMessage(const Method& method) {
  return InvalidMessage(
      Concat(PathOf(method), " expects one message, found another one behind it"));
}

}  // namespace moeserve::server::rpc

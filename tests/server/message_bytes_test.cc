// Tests how messages of gRPC clients are parsed and charged. Compressed messages are tested by
// tests/clients/test_grpc_protocol.py.
#include "server/rpc/messages/message_bytes.h"

#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "inference/grpc_predict_v2.pb.h"
#include "moeserve/v1/moeserve.pb.h"
#include "server/base/api_error.h"
#include "server/rpc/messages/message_cost.h"

namespace moeserve::server::rpc {
namespace {

constexpr size_t kNoLimit = size_t{1} << 40;

grpc::ByteBuffer BytesOfMessage(const std::string& text) {
  const grpc::Slice slice(text);
  return grpc::ByteBuffer(&slice, 1);
}

template <typename Message>
size_t Estimate(const std::string& bytes, size_t most = kNoLimit) {
  google::protobuf::io::ArrayInputStream stream(bytes.data(), static_cast<int>(bytes.size()));
  return ParsedBytes(*Message::descriptor(), stream, most);
}

std::string Repeated(const std::string& text, int times) {
  std::string all;
  for (int i = 0; i < times; ++i) all += text;
  return all;
}

// The estimate is at least what protobuf says that the message takes.
template <typename Message>
void ExpectCovered(const std::string& bytes, const char* what) {
  Message message;
  ASSERT_TRUE(message.ParseFromString(bytes)) << what;
#if defined(__SANITIZE_THREAD__)
  // Maps have another layout in code with this sanitizer than in protobuf's library, which counts.
  if constexpr (std::is_same_v<Message, inference::ModelInferRequest>) return;
#endif
  EXPECT_GE(Estimate<Message>(bytes), message.SpaceUsedLong()) << what;
}

TEST(MessageCost, CoversWhatParsingTakes) {
  using inference::ModelInferRequest;
  using v1::GenerateRequest;
  GenerateRequest text;
  text.set_text(std::string(1 << 20, 'a'));
  ExpectCovered<GenerateRequest>(text.SerializeAsString(), "text");
  // A text counts little more than once.
  EXPECT_LT(Estimate<GenerateRequest>(text.SerializeAsString()), (1 << 20) + 1000);
  GenerateRequest ids;
  for (int i = 0; i < 100000; ++i) ids.mutable_token_ids()->add_ids(i % 100);
  ExpectCovered<GenerateRequest>(ids.SerializeAsString(), "packed numbers");
  inference::InferTensorContents contents;
  for (int i = 0; i < 70000; ++i) {
    contents.add_int64_contents(i);
    contents.add_bool_contents(true);
    contents.add_fp32_contents(1);
  }
  ExpectCovered<inference::InferTensorContents>(contents.SerializeAsString(), "packed numbers");
  ModelInferRequest infer;
  for (int i = 0; i < 1000; ++i) {
    (*infer.mutable_parameters())[std::to_string(i)].set_int64_param(i);
    auto& input = *infer.add_inputs();
    input.set_name("text_input");
    input.add_shape(i);
    input.mutable_contents()->add_bytes_contents("abc");
    input.mutable_contents()->add_uint64_contents(1);
  }
  infer.add_raw_input_contents("abc");
  ExpectCovered<ModelInferRequest>(infer.SerializeAsString(), "tensors");
  ExpectCovered<ModelInferRequest>(Repeated({'\x2a', 0}, 100000), "empty tensors");
  ExpectCovered<ModelInferRequest>(Repeated({'\x3a', 0}, 100000), "empty strings");
  ExpectCovered<ModelInferRequest>(Repeated({'\x22', 0}, 1000), "empty map entries");
  for (const std::string& unknown :
       {std::string("\x78\1"), std::string("\x7a\0", 2), std::string("\x7b\x7c"),
        std::string("\x7d\1\1\1\1"), std::string("\x79\1\1\1\1\1\1\1\1")}) {
    ExpectCovered<GenerateRequest>(Repeated(unknown, 100000), "unknown fields");
  }
  // A known field with a value of another type is kept as unknown.
  const std::string number_for_text = {'\x10', 1};
  ExpectCovered<v1::TokenizeRequest>(Repeated(number_for_text, 100000), "wrong types");
}

TEST(MessageCost, EndsAtTheFirstError) {
  for (const std::string& bytes :
       {std::string("\xff"), std::string("\x12\xff\xff\xff\xff\x0f"), std::string("\x12\x7f"),
        std::string("\x7c"), std::string("\x0f"), Repeated("\x7b", 100000)}) {
    EXPECT_LT(Estimate<v1::GenerateRequest>(bytes), 20000u);
    v1::GenerateRequest message;
    EXPECT_FALSE(message.ParseFromString(bytes));
  }
  EXPECT_LT(Estimate<v1::GenerateRequest>(Repeated({'\x7a', 0}, 100000), 5000), 6000u);
}

TEST(ParseMessage, ParsesOrSaysWhatItExpected) {
  v1::TokenizeRequest sent;
  sent.set_text("The");
  v1::TokenizeRequest request;
  MemoryCharge charge;
  grpc::ByteBuffer bytes = BytesOfMessage(sent.SerializeAsString());
  ASSERT_TRUE(ParseMessage(kTokenize, bytes, charge, request).ok());
  EXPECT_EQ(request.text(), "The");
  for (const std::string& wrong : {std::string("\xff\xff"), std::string("\x12\2\xc3\x28")}) {
    bytes = BytesOfMessage(wrong);
    const absl::Status status = ParseMessage(kTokenize, bytes, charge, request);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ApiCode(status), "invalid_message");
    EXPECT_EQ(status.message(),
              "a message of moeserve.v1.Inference/Tokenize is not a valid "
              "moeserve.v1.TokenizeRequest");
  }
}

TEST(ParseMessage, ChargesBeforeItParses) {
  const auto budget = std::make_shared<MemoryBudget>(1 << 20);
  MemoryCharge charge(budget);
  v1::TokenizeRequest request;
  // 40 KB, of which each two bytes take tens.
  grpc::ByteBuffer bytes = BytesOfMessage(Repeated({'\x7a', 0}, 20000));
  EXPECT_EQ(ApiCode(ParseMessage(kTokenize, bytes, charge, request)), "request_too_large");
  EXPECT_EQ(budget->used(), 0u);
  bytes = BytesOfMessage(Repeated({'\x7a', 0}, 2000));
  EXPECT_TRUE(ParseMessage(kTokenize, bytes, charge, request).ok());
  EXPECT_GE(budget->used(), 2000u * 16);
}

TEST(SerializeMessage, ReplacesTheBytes) {
  grpc::ByteBuffer bytes = BytesOfMessage("old");
  for (const size_t size : {0, 3, 100000, 5000000}) {
    v1::TokenizeRequest sent;
    sent.set_text(std::string(size, 'a'));
    SerializeMessage(sent, bytes);
    EXPECT_EQ(bytes.Length(), sent.ByteSizeLong());
    v1::TokenizeRequest request;
    MemoryCharge charge;
    ASSERT_TRUE(ParseMessage(kTokenize, bytes, charge, request).ok());
    EXPECT_EQ(request.text().size(), size);
  }
}

}  // namespace
}  // namespace moeserve::server::rpc

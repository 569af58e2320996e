// Checks that every number and flag of engine/sampling_params.h has the same name, range and
// default in JSON, in protobuf and in the engine's validation.
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/error_text.h"
#include "engine/validate_request.h"
#include "moeserve/v1/moeserve.pb.h"
#include "server/completions/completion_request.h"
#include "server/rpc/messages/messages.h"
#include "tests/server/fake_engine.h"

namespace moeserve::server {
namespace {

RequestRules FieldRules() {
  RequestRules rules;
  rules.served_names = {"tiny"};
  rules.vocab_size = testing::kVocabSize;
  rules.strict_fields = true;  // JSON fields that the parser does not read are errors
  return rules;
}

std::vector<SamplingField> Numbers() {
  std::vector<SamplingField> out(std::begin(kDrawFields), std::end(kDrawFields));
  out.insert(out.end(), std::begin(kPenaltyFields), std::end(kPenaltyFields));
  return out;
}

Result<SamplingParams> FromJson(const std::string& name, const nlohmann::json& value) {
  const nlohmann::json body = {{"prompt", "hi"}, {name, value}};
  const auto params = ParseCompletion(body, FieldRules());
  if (!params.ok()) return params.status();
  return params->sampling;
}

Result<SamplingParams> FromMessage(
    const std::function<void(v1::SamplingParams&, const google::protobuf::Reflection&)>& fill) {
  v1::GenerateRequest request;
  request.set_text("hi");
  v1::SamplingParams& message = *request.mutable_sampling();
  fill(message, *message.GetReflection());
  const auto params = rpc::ParseGenerate(request, FieldRules());
  if (!params.ok()) return params.status();
  return params->sampling;
}

Result<SamplingParams> FromMessage(const std::string& name, double value) {
  return FromMessage([&](v1::SamplingParams& message, const google::protobuf::Reflection& access) {
    const auto* field = v1::SamplingParams::descriptor()->FindFieldByName(name);
    switch (field->cpp_type()) {
      case google::protobuf::FieldDescriptor::CPPTYPE_DOUBLE:
        access.SetDouble(&message, field, value);
        break;
      case google::protobuf::FieldDescriptor::CPPTYPE_INT32:
        access.SetInt32(&message, field, static_cast<int32_t>(value));
        break;
      default:
        access.SetUInt32(&message, field, static_cast<uint32_t>(value));
    }
  });
}

absl::Status Validate(const SamplingField& field, double value) {
  Request request;
  request.prompt = {1};
  request.sampling.max_tokens = 1000;
  field.Set(request.sampling, value);
  ModelSpec spec;
  spec.vocab_size = 10;
  return ValidateRequest(request, {.max_model_len = 2000}, spec);
}

nlohmann::json JsonValue(const SamplingField& field, double value) {
  return field.is_integer() ? nlohmann::json(static_cast<int64_t>(value)) : nlohmann::json(value);
}

TEST(SamplingFields, DefaultsAreInTheRangesAndTheSameEverywhere) {
  const auto json = FromJson("n", 1);
  const auto message = FromMessage([](auto&, const auto&) {});
  ASSERT_TRUE(json.ok()) << json.status();
  ASSERT_TRUE(message.ok()) << message.status();
  for (const SamplingField& field : Numbers()) {
    const double value = field.Get(SamplingParams());
    EXPECT_TRUE(field.Accepts(value)) << field.name;
    EXPECT_EQ(field.Get(*json), value) << field.name;
    EXPECT_EQ(field.Get(*message), value) << field.name;
    EXPECT_TRUE(Validate(field, value).ok()) << field.name;
  }
  for (const SamplingFlag& flag : kSamplingFlags) {
    EXPECT_EQ((*json).*flag.member, SamplingParams().*flag.member) << flag.name;
    EXPECT_EQ((*message).*flag.member, SamplingParams().*flag.member) << flag.name;
  }
}

TEST(SamplingFields, TheEndsOfARangeReachTheEngine) {
  for (const SamplingField& field : Numbers()) {
    const double low = field.min_excluded ? (field.min + field.max) / 128 : field.min;
    for (const double value : {low, field.max}) {
      const auto json = FromJson(field.name, JsonValue(field, value));
      const auto message = FromMessage(field.name, value);
      ASSERT_TRUE(json.ok()) << json.status();
      ASSERT_TRUE(message.ok()) << message.status();
      EXPECT_EQ(field.Get(*json), value) << field.name;
      EXPECT_EQ(field.Get(*message), value) << field.name;
      // would exceed max_tokens
      if (std::string(field.name) == "min_tokens" && value > 1000) continue;
      EXPECT_TRUE(Validate(field, value).ok()) << Validate(field, value);
    }
  }
}

TEST(SamplingFields, ValuesBeyondARangeAreRefusedEverywhere) {
  for (const SamplingField& field : Numbers()) {
    std::vector<double> beyond;
    const bool is_unsigned = field.is_integer() && field.min == 0;
    if (!is_unsigned) beyond.push_back(field.min_excluded ? field.min : field.min - 1);
    if (!field.is_integer()) beyond.push_back(field.max + 0.5);
    for (const double value : beyond) {
      const std::string shown = Concat(field.name, " ", std::to_string(value));
      EXPECT_FALSE(FromJson(field.name, JsonValue(field, value)).ok()) << shown;
      EXPECT_FALSE(FromMessage(field.name, value).ok()) << shown;
      const absl::Status status = Validate(field, value);
      EXPECT_TRUE(absl::IsInvalidArgument(status)) << shown;
      EXPECT_TRUE(status.message().find(field.name) == 0) << status;
    }
  }
  EXPECT_FALSE(FromJson("top_k", int64_t{1} << 31).ok());
  EXPECT_FALSE(FromJson("min_tokens", -1).ok());
  EXPECT_FALSE(FromMessage("min_tokens", 4294967295.0).ok());
}

TEST(SamplingFields, FlagsReachTheEngine) {
  for (const SamplingFlag& flag : kSamplingFlags) {
    const bool value = !(SamplingParams().*flag.member);
    const auto json = FromJson(flag.name, value);
    const auto message = FromMessage([&](v1::SamplingParams& out, const auto& access) {
      access.SetBool(&out, v1::SamplingParams::descriptor()->FindFieldByName(flag.name), value);
    });
    ASSERT_TRUE(json.ok()) << json.status();
    ASSERT_TRUE(message.ok()) << message.status();
    EXPECT_EQ((*json).*flag.member, value) << flag.name;
    EXPECT_EQ((*message).*flag.member, value) << flag.name;
  }
}

}  // namespace
}  // namespace moeserve::server

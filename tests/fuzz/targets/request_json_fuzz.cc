// The bodies of requests over HTTP. The first byte says which request it is (kKinds), the second
// one which of the server's options are set. Behind the JSON and "\n\n\n" are the bytes of binary
// tensors.

#include <memory>
#include <string>
#include <utility>

#include "base/strict_json.h"
#include "server/answers/answer.h"
#include "server/anthropic/message_request.h"
#include "server/base/api_error.h"
#include "server/base/json_fields.h"
#include "server/base/memory_budget.h"
#include "server/chat/chat_request.h"
#include "server/completions/completion_request.h"
#include "server/fields/request_fields.h"
#include "server/ollama/ollama_request.h"
#include "server/open_inference/infer_json.h"
#include "server/open_inference/infer_request.h"
#include "server/open_inference/tensor_bytes.h"
#include "server/responses/response_request.h"
#include "tests/fuzz/bundled_model.h"
#include "tests/fuzz/fuzz.h"

namespace moeserve::server {
namespace {

using Json = nlohmann::json;
using testing::BundledModel;

// Completions, chat, tokenize, detokenize, infer, generate, binary elements, responses, messages,
// Ollama's chat and generate.
constexpr std::string_view kKinds = "ctkdigbrmop";
constexpr std::time_t kNow = 1'700'000'000;

struct Case {
  char kind = 'c';
  uint8_t options = 0;
  std::string_view bytes;  // behind the JSON
  std::shared_ptr<MemoryBudget> memory;
};

absl::Status RunChat(const Json& body, std::string_view text, const RequestRules& rules,
                     const Case& input) {
  const BundledModel& model = BundledModel::Get();
  MOESERVE_ASSIGN_OR_RETURN(ChatParams params,
                            ParseChat(body, text, rules, (input.options & 16) != 0));
  std::vector<PreparedPrompt> prompts(1);
  MOESERVE_ASSIGN_OR_RETURN(prompts[0], PrepareChat(params, model.chat_format(), &model.tokenizer(),
                                                    rules.limits, model.max_model_len(), kNow));
  return model.Admit(params, prompts, input.memory);
}

// Runs a chat to which another form of request was converted.
absl::Status RunConverted(const nlohmann::ordered_json& chat, const RequestRules& rules,
                          const Case& input) {
  const std::string text = DumpJson(chat);
  JsonLimits limits;
  limits.max_depth += 8;  // some values are nested deeper than in the request
  const Result<Json> body = ParseStrictJson(text, limits);
  MOESERVE_CHECK(body.ok(), "what is converted is JSON");
  return RunChat(*body, text, rules, input);
}

absl::Status RunTokenize(const Json& body, std::string_view text, const RequestRules& rules,
                         const Case& input) {
  const BundledModel& model = BundledModel::Get();
  FieldFindings findings;
  MOESERVE_RETURN_IF_ERROR(
      CheckRequestFields(body, FieldRoute::kTokenize, rules.strict_fields, findings));
  if (FindField(body, "messages") != nullptr) {
    const ConversationRules conversation_rules = {.limits = rules.limits,
                                                  .allow_template = (input.options & 16) != 0,
                                                  .strict_fields = rules.strict_fields};
    MOESERVE_ASSIGN_OR_RETURN(const Conversation conversation,
                              ParseConversation(body, text, conversation_rules));
    return model.chat_format().Encode(conversation, model.tokenizer(), rules.limits, kNow).status();
  }
  MOESERVE_ASSIGN_OR_RETURN(const auto prompt, StringField(body, "prompt"));
  if (!prompt) return MissingField("prompt");
  MOESERVE_ASSIGN_OR_RETURN(const auto special, BoolField(body, "add_special_tokens"));
  return model.tokenizer().Encode(*prompt, special.value_or(true)).status();
}

absl::Status RunDetokenize(const Json& body, const RequestRules& rules) {
  const Json* tokens = FindField(body, "tokens");
  if (tokens == nullptr) return MissingField("tokens");
  MOESERVE_ASSIGN_OR_RETURN(const auto ids, TokenIdList(*tokens, "tokens", rules.vocab_size));
  return BundledModel::Get().tokenizer().Decode(ids, false).status();
}

absl::Status RunInfer(const Json& body, const RequestRules& rules, const Case& input) {
  MemoryCharge charge(input.memory);
  MOESERVE_RETURN_IF_ERROR(charge.Add(3 * input.bytes.size()));
  MOESERVE_ASSIGN_OR_RETURN(const InferRequest infer, input.kind == 'i'
                                                          ? ParseInfer(body, input.bytes)
                                                          : ParseGenerate(body));
  for (const InferTensor& tensor : infer.inputs) {
    MOESERVE_CHECK(static_cast<int64_t>(tensor.data.size()) <= kMaxTensorElements,
                   "the limit on elements");
  }
  InferSettings settings;
  const Pieces pieces = input.kind == 'i' ? Pieces::kNever : Pieces::kByDefault;
  MOESERVE_ASSIGN_OR_RETURN(Json completion, CompletionBody(infer, pieces, settings));
  Result<CompletionParams> params = ParseCompletion(completion, rules);
  ClearJson(completion);
  if (!params.ok()) return params.status();
  return BundledModel::Get().Admit(*params, input.memory);
}

absl::Status Run(const Json& body, std::string_view text, const RequestRules& rules,
                 const Case& input) {
  switch (input.kind) {
    case 'c': {
      MOESERVE_ASSIGN_OR_RETURN(const CompletionParams params, ParseCompletion(body, rules));
      return BundledModel::Get().Admit(params, input.memory);
    }
    case 't':
      return RunChat(body, text, rules, input);
    case 'k':
      return RunTokenize(body, text, rules, input);
    case 'd':
      return RunDetokenize(body, rules);
    case 'r': {
      MOESERVE_ASSIGN_OR_RETURN(const ResponseRequest request,
                                ParseResponseRequest(body, text, rules.strict_fields));
      return RunConverted(request.chat, rules, input);
    }
    case 'm': {
      MOESERVE_ASSIGN_OR_RETURN(
          const MessageRequest request,
          ParseMessageRequest(body, text, (input.options & 32) != 0, rules.strict_fields));
      return RunConverted(request.chat, rules, input);
    }
    case 'o':
    case 'p': {
      MOESERVE_ASSIGN_OR_RETURN(const OllamaRequest request,
                                input.kind == 'o'
                                    ? ParseOllamaChat(body, text, "", rules.strict_fields)
                                    : ParseOllamaGenerate(body, text, "", (input.options & 32) != 0,
                                                          rules.strict_fields));
      if (request.only_loads) return absl::OkStatus();
      if (!request.completes) return RunConverted(request.body, rules, input);
      const Result<Json> completion = ParseStrictJson(DumpJson(request.body));
      MOESERVE_CHECK(completion.ok(), "what is converted is JSON");
      Case as_completion = input;
      as_completion.kind = 'c';
      return Run(*completion, DumpJson(request.body), rules, as_completion);
    }
    default:
      return RunInfer(body, rules, input);
  }
}

// The elements of a tensor that are read can be written, and are the same bytes.
void CheckElements(std::string_view bytes, bool texts, int64_t count) {
  InferTensor tensor{
      .name = "t", .datatype = texts ? "BYTES" : "UINT32", .shape = {count}, .data = {}};
  if (!ReadElements(bytes, tensor).ok()) return;
  MOESERVE_CHECK(static_cast<int64_t>(tensor.data.size()) == count, "all elements");
  MOESERVE_CHECK(ElementBytes(tensor) == bytes, "the same elements");
  // CheckTensor() refuses texts that are not UTF-8.
  if (CheckTensor(tensor).ok()) testing::CountAccepted();
}

void CheckBody(std::string_view text, const Case& input) {
  MemoryCharge charge(input.memory);
  const TakeMemory take = [&](size_t bytes) { return charge.Add(bytes).ok(); };
  Result<Json> body = ParseStrictJson(text, {}, take);
  if (!body.ok()) return;
  // What is written is valid, and has the same values.
  Result<Json> again = ParseStrictJson(body->dump());
  MOESERVE_CHECK(again.ok() && *again == *body, "JSON that is written is read as the same");
  ClearJson(*again);
  if (body->is_object()) {
    const absl::Status status = Run(*body, text, BundledModel::Get().Rules(input.options), input);
    if (status.ok()) {
      testing::CountAccepted();
    } else {
      // Clients see the message.
      MOESERVE_CHECK(status.code() != absl::StatusCode::kInternal, "requests cause no such errors");
      MOESERVE_CHECK(!DumpJson(Json{{"message", std::string(status.message())}}).empty(), "a text");
    }
  }
  ClearJson(*body);
}

}  // namespace
}  // namespace moeserve::server

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace moeserve;  // NOLINT(google-build-using-namespace)
  testing::Input input(data, size);
  server::Case item;
  item.kind = static_cast<char>(input.Byte());
  if (server::kKinds.find(item.kind) == std::string_view::npos) {
    item.kind = server::kKinds[static_cast<uint8_t>(item.kind) % server::kKinds.size()];
  }
  item.options = input.Byte();
  // Half of the inputs have little memory.
  item.memory =
      std::make_shared<server::MemoryBudget>((item.options & 64) != 0 ? 64 << 10 : 16 << 20);
  if (item.kind == 'b') {
    const int64_t count = input.Byte();
    server::CheckElements(input.rest(), (item.options & 1) != 0, count);
    return 0;
  }
  const std::string_view text = input.Section();
  item.bytes = input.rest();
  server::CheckBody(text, item);
  MOESERVE_CHECK(item.memory->used() == 0, "all memory is given back");
  return 0;
}

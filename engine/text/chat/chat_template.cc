#include "engine/text/chat/chat_template.h"

#include <charconv>
#include <new>
#include <utility>

#include "base/error_text.h"
#include "engine/text/chat/interpreter.h"
#include "engine/text/chat/parser.h"
#include "engine/text/tokenizer/utf8.h"

namespace moeserve::chat {
namespace {

using OrderedJson = nlohmann::ordered_json;

Value FromJson(const OrderedJson& json, bool trusted, bool trusted_roles, Budget& budget) {
  budget.Step();
  switch (json.type()) {
    case OrderedJson::value_t::boolean:
      return json.get<bool>();
    case OrderedJson::value_t::number_integer:
      return json.get<int64_t>();
    case OrderedJson::value_t::number_unsigned:
      if (json.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX)) {
        return BigInt{std::to_string(json.get<uint64_t>()), json.get<double>()};
      }
      return json.get<int64_t>();
    case OrderedJson::value_t::number_float:
      return json.get<double>();
    case OrderedJson::value_t::string:
      if (!IsValidUtf8(json.get_ref<const std::string&>())) Fail("a string is not valid UTF-8");
      budget.Bytes(json.get_ref<const std::string&>().size());
      budget.Read(json.get_ref<const std::string&>().size());
      return Text(json.get<std::string>(), trusted);
    case OrderedJson::value_t::binary: {
      BigInt value;
      value.digits.assign(json.get_binary().begin(), json.get_binary().end());
      budget.Bytes(value.digits.size());
      budget.Read(value.digits.size());
      const char* const end = value.digits.data() + value.digits.size();
      std::from_chars(value.digits.data(), end, value.value);
      return value;
    }
    case OrderedJson::value_t::array: {
      std::vector<Value> items;
      for (const OrderedJson& item : json) {
        items.push_back(FromJson(item, trusted, trusted_roles, budget));
      }
      return MakeList(std::move(items), false, budget);
    }
    case OrderedJson::value_t::object: {
      Dict dict;
      budget.Elements(json.size());
      for (const auto& [key, item] : json.items()) {
        budget.Bytes(key.size());
        const bool is_role = trusted_roles && key == "role";
        dict.Set(Text(key, trusted), FromJson(item, trusted || is_role, false, budget), budget);
      }
      if (dict.depth > kMaxContainerDepth) Fail("a variable is nested too deeply");
      return dict;
    }
    default:
      return None{};
  }
}

std::string WithLine(const TemplateError& error) {
  if (error.refusal) return error.message;
  std::string message = "chat template";
  if (error.line > 0) message += ", line " + std::to_string(error.line);
  return message + ": " + error.message;
}

// Runs `work` and turns every exception into a status. `fault` is the status code for an error in
// the template.
template <typename Work>
absl::Status Guarded(absl::StatusCode fault, Work work) {
  try {
    work();
    return absl::OkStatus();
  } catch (const TemplateError& error) {
    return absl::Status(error.refusal ? absl::StatusCode::kInvalidArgument : fault,
                        WithLine(error));
  } catch (const std::bad_alloc&) {
    return absl::InternalError("chat template: not enough memory");
  } catch (const std::exception& error) {
    return absl::InternalError(std::string("chat template: ") + error.what());
  }
}

}  // namespace

struct ChatTemplate::Tree {
  Body body;
};

ChatTemplate::ChatTemplate() = default;
ChatTemplate::~ChatTemplate() = default;

Result<std::unique_ptr<const ChatTemplate>> ChatTemplate::Compile(std::string_view source) {
  if (source.size() > kMaxTemplateBytes) {
    return absl::InvalidArgumentError(Concat("chat template: expected at most ", kMaxTemplateBytes,
                                             " bytes, found ", source.size()));
  }
  if (!IsValidUtf8(source)) return absl::InvalidArgumentError("chat template: not valid UTF-8");
  std::unique_ptr<ChatTemplate> out(new ChatTemplate);
  out->source_ = source;
  MOESERVE_RETURN_IF_ERROR(Guarded(absl::StatusCode::kInvalidArgument, [&] {
    auto tree = std::make_unique<Tree>();
    tree->body = ParseTemplate(source);
    out->tree_ = std::move(tree);
  }));
  return std::unique_ptr<const ChatTemplate>(std::move(out));
}

Result<RenderedPrompt> ChatTemplate::Render(const RenderInput& input) const {
  RenderedPrompt prompt;
  MOESERVE_RETURN_IF_ERROR(Guarded(absl::StatusCode::kFailedPrecondition, [&] {
    Interpreter interpreter(input.limits, input.now);
    Budget& budget = interpreter.budget();
    for (const auto& [name, value] : input.untrusted.items()) {
      interpreter.Define(name, FromJson(value, false, false, budget));
    }
    for (const auto& [name, value] : input.trusted.items()) {
      interpreter.Define(name, FromJson(value, true, false, budget));
    }
    interpreter.Define("messages", FromJson(input.messages, false, true, budget));
    const Text text = interpreter.Run(tree_->body);
    prompt.text = text.bytes();
    prompt.trusted = text.spans();
  }));
  return prompt;
}

}  // namespace moeserve::chat

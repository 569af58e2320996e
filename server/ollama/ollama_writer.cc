#include "server/ollama/ollama_writer.h"

#include <algorithm>

#include "absl/time/clock.h"
#include "server/base/json_fields.h"
#include "server/fields/routing_fields.h"

namespace moeserve::server {

namespace {

OrderedJson CallJson(int number, const std::string& id, const std::string& name,
                     const std::string& text) {
  OrderedJson arguments = ParseOrdered(text);
  // The arguments are no JSON if the limit on tokens was reached.
  if (!arguments.is_object()) arguments = OrderedJson::object();
  return {{"id", id},
          {"function", {{"index", number}, {"name", name}, {"arguments", std::move(arguments)}}}};
}

OrderedJson Start(const std::string& model) {
  return {{"model", model}, {"created_at", OllamaTime(absl::Now())}};
}

}  // namespace

std::string OllamaErrorJson(const HttpError& error) { return DumpJson({{"error", error.message}}); }

std::string OllamaTime(absl::Time time) {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", time, absl::UTCTimeZone());
}

OrderedJson OllamaLoadedJson(OllamaForm form, const std::string& model) {
  OrderedJson out = Start(model);
  if (form == OllamaForm::kChat) {
    out["message"] = {{"role", "assistant"}, {"content", ""}};
  } else {
    out["response"] = "";
  }
  out["done"] = true;
  out["done_reason"] = "load";
  return out;
}

std::string OllamaWriter::ErrorBody(const HttpError& error) const { return OllamaErrorJson(error); }

void OllamaWriter::AppendError(const HttpError& error, std::string& out) {
  out += OllamaErrorJson(error) + "\n";
}

OrderedJson OllamaWriter::Envelope() const { return Start(model_); }

void OllamaWriter::PutText(std::string_view text, std::string_view reasoning,
                           OrderedJson& out) const {
  OrderedJson* target = &out;
  if (form_ == OllamaForm::kChat) {
    target = &(out["message"] = {{"role", "assistant"}});
    (*target)["content"] = text;
  } else {
    out["response"] = text;
  }
  if (!reasoning.empty()) (*target)["thinking"] = reasoning;
}

void OllamaWriter::PutEnd(const Usage& sums, OrderedJson& out) const {
  const absl::Time now = SteadyNow();
  const absl::Time first = std::clamp(first_output(), start_, now);
  out["done"] = true;
  out["done_reason"] = end().finish_reason == FinishReason::kLength ? "length" : "stop";
  out["total_duration"] = absl::ToInt64Nanoseconds(now - start_);
  out["load_duration"] = 0;  // models are loaded before requests name them
  out["prompt_eval_count"] = sums.prompt_tokens;
  out["prompt_eval_duration"] = absl::ToInt64Nanoseconds(first - start_);
  out["eval_count"] = sums.completion_tokens;
  out["eval_duration"] = absl::ToInt64Nanoseconds(now - first);
  PutWarnings(options_.warnings, timed_out(), out);
}

OrderedJson OllamaWriter::TakeAnswer(const Usage& sums) {
  std::string text;
  std::string reasoning;
  OrderedJson calls = OrderedJson::array();
  OrderedJson logprobs = OrderedJson::array();
  for (const Block& block : blocks()) {
    switch (block.kind) {
      case Block::Kind::kReasoning:
        reasoning += block.text;
        break;
      case Block::Kind::kText:
        text += block.text;
        logprobs.insert(logprobs.end(), block.logprobs.begin(), block.logprobs.end());
        break;
      case Block::Kind::kCall:
        calls.push_back(
            CallJson(static_cast<int>(calls.size()), block.call_id, block.call_name, block.text));
        break;
    }
  }
  OrderedJson answer = Envelope();
  PutText(text, reasoning, answer);
  if (!calls.empty()) answer["message"]["tool_calls"] = std::move(calls);
  if (options_.logprobs) answer["logprobs"] = std::move(logprobs);
  PutEnd(sums, answer);
  return answer;
}

void OllamaWriter::WriteDelta(const Block& block, std::string_view piece, OrderedJson logprobs,
                              std::string& out) {
  if (block.kind == Block::Kind::kCall) return;  // written when it is complete
  const bool reasons = block.kind == Block::Kind::kReasoning;
  OrderedJson line = Envelope();
  PutText(reasons ? std::string_view() : piece, reasons ? piece : std::string_view(), line);
  if (!reasons && options_.logprobs) line["logprobs"] = std::move(logprobs);
  line["done"] = false;
  out += DumpJson(line) + "\n";
}

void OllamaWriter::WriteClose(const Block& block, std::string& out) {
  if (block.kind != Block::Kind::kCall) return;
  const auto before =
      std::count_if(blocks().begin(), blocks().begin() + block.index,
                    [](const Block& earlier) { return earlier.kind == Block::Kind::kCall; });
  OrderedJson line = Envelope();
  PutText("", "", line);
  line["message"]["tool_calls"] = OrderedJson::array(
      {CallJson(static_cast<int>(before), block.call_id, block.call_name, block.text)});
  line["done"] = false;
  out += DumpJson(line) + "\n";
}

void OllamaWriter::WriteEnd(const Usage& sums, std::string& out) {
  OrderedJson line = Envelope();
  PutText("", "", line);
  PutEnd(sums, line);
  out += DumpJson(line) + "\n";
}

}  // namespace moeserve::server

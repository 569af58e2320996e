#include "model_loaders/inspect.h"

#include <cstdio>
#include <memory>
#include <string>

#include "base/error_text.h"
#include "engine/validate_request.h"
#include "model_loaders/checkpoint/loader.h"
#include "server/base/text_values.h"
#include "server/chat/chat_format.h"
#include "server/commands/commands.h"
#include "server/commands/model_options.h"

namespace moeserve::server {
namespace {

struct InspectArguments {
  ModelOptionsText model;
  bool json = false;
};

// Returns how rows become the vector or the logits of a text; empty if they do not.
std::string PoolingText(const ModelSpec& spec) {
  if (!spec.pooling.has_value()) return "";
  std::string text(KindName(spec.pooling->kind));
  for (const DenseSpec& dense : spec.pooling->dense) text += Concat(", dense ", dense.width);
  if (spec.pooling->normalize) text += ", normalized";
  return text;
}

void PrintTasks(const ModelSpec& spec) {
  std::printf("tasks: %s\n", TasksOf(spec).c_str());
  if (spec.pooling.has_value()) std::printf("pooling: %s\n", PoolingText(spec).c_str());
  if (spec.head.labels.empty()) return;
  std::string labels;
  constexpr size_t kShown = 20;
  for (size_t i = 0; i < spec.head.labels.size() && i < kShown; ++i) {
    labels += Concat(i > 0 ? ", " : "", Printable(spec.head.labels[i], 64));
  }
  if (spec.head.labels.size() > kShown) labels += ", ...";
  std::printf("labels: %zu (%s), scores by %s\n", spec.head.labels.size(), labels.c_str(),
              std::string(KindName(spec.head.scores)).c_str());
}

int RunInspect(const InspectArguments& options) {
  moeserve::LoadOptions load;  // not that of "bench load"
  load.require_tokenizer = false;
  load.ignored_keys = options.model.ignored_keys;
  const auto checkpoint = LoadCheckpoint(options.model.directory, load);
  if (!checkpoint.ok()) return Fail(checkpoint.status());
  const ModelSummary summary = Summarize(checkpoint->spec);
  const DType dominant = checkpoint->weights->DominantDType();
  const Quantization quantization = checkpoint->weights->StoredQuantization();
  const bool integers = quantization != Quantization::kNone;
  const std::string& blocks = checkpoint->block_type;
  const std::string type(integers          ? Name(quantization)
                         : !blocks.empty() ? std::string_view(blocks)
                                           : Name(dominant));
  // The KV cache type of a run with the stored weight type.
  const DType cache = integers ? DType::kBF16 : dominant;
  if (options.json) {
    Json json = SummaryJson(summary);
    json["stored"] = {{"type", type}, {"weight_bytes", checkpoint->weight_bytes}};
    json["tasks"] = TaskNames(checkpoint->spec);
    json["pooling"] = checkpoint->spec.pooling ? Json(PoolingText(checkpoint->spec)) : Json();
    json["labels"] = checkpoint->spec.head.labels;
    json["notes"] = checkpoint->notes;
    json["warnings"] = checkpoint->warnings;
    std::printf("%s\n", json.dump(2).c_str());
    return 0;
  }
  std::fputs(SummaryText(summary).c_str(), stdout);
  PrintTasks(checkpoint->spec);
  std::printf("stored as %s: %s of weights, %s of KV cache for each token\n", type.c_str(),
              ShowBytes(checkpoint->weight_bytes).c_str(),
              ShowBytes(summary.KvBytesPerToken(cache)).c_str());
  if (checkpoint->tokenizer != nullptr) {
    std::printf("tokenizer: %d tokens\n", checkpoint->tokenizer->vocab_size());
  } else {
    std::printf("tokenizer: none\n");
  }
  const absl::Status chat = ChatFormat(checkpoint->tokenizer_config).status();
  std::printf("chat template: %s\n", chat.ok()                ? "yes"
                                     : absl::IsNotFound(chat) ? "none"
                                                              : "cannot be used");
  PrintWarnings(checkpoint->warnings);
  PrintNotes(checkpoint->notes);
  return 0;
}

}  // namespace

void AddInspectCommand(CLI::App& app, Command& selected) {
  CLI::App* command =
      app.add_subcommand("inspect", "Show architecture, parameters and memory of a checkpoint");
  auto options = std::make_shared<InspectArguments>();
  AddModelDirectory(*command, options->model);
  AddIgnoreConfig(*command, options->model.ignored_keys);
  command->add_flag("--json", options->json, "Print JSON");
  command->callback(
      [options, &selected] { selected = [options] { return RunInspect(*options); }; });
}

}  // namespace moeserve::server

#include "model_loaders/inspect.h"

#include <cstdio>
#include <memory>
#include <string>

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
    json["notes"] = checkpoint->notes;
    json["warnings"] = checkpoint->warnings;
    std::printf("%s\n", json.dump(2).c_str());
    return 0;
  }
  std::fputs(SummaryText(summary).c_str(), stdout);
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

#include "server/commands/inspect.h"

#include <cstdio>
#include <memory>
#include <string>

#include "model_loaders/inspect.h"
#include "model_loaders/loader.h"
#include "server/chat_format.h"
#include "server/commands/model_options.h"
#include "server/text_values.h"

namespace moeserve::server {
namespace {

struct Options {
  ModelOptionsText model;
  bool json = false;
};

int Run(const Options& options) {
  LoadOptions load;
  load.require_tokenizer = false;
  const auto checkpoint = LoadCheckpoint(options.model.directory, load);
  if (!checkpoint.ok()) return Fail(checkpoint.status());
  const ModelSummary summary = Summarize(checkpoint->spec);
  if (options.json) {
    std::printf("%s\n", SummaryJson(summary).dump(2).c_str());
    return 0;
  }
  std::fputs(SummaryText(summary).c_str(), stdout);
  const DType stored = checkpoint->weights->DominantDType();
  std::printf("stored as %s: %s of weights, %s of KV cache for each token\n",
              std::string(Name(stored)).c_str(), ShowBytes(summary.WeightBytes(stored)).c_str(),
              ShowBytes(summary.KvBytesPerToken(stored)).c_str());
  if (checkpoint->tokenizer != nullptr) {
    std::printf("tokenizer: %d tokens\n", checkpoint->tokenizer->vocab_size());
  } else {
    std::printf("tokenizer: none\n");
  }
  const absl::Status chat = ChatFormat(checkpoint->tokenizer_config).status();
  std::printf("chat template: %s\n", chat.ok()                ? "yes"
                                     : absl::IsNotFound(chat) ? "none"
                                                              : "cannot be used");
  return 0;
}

}  // namespace

void AddInspectCommand(CLI::App& app, Command& selected) {
  CLI::App* command = app.add_subcommand("inspect", "Show what a checkpoint contains");
  auto options = std::make_shared<Options>();
  AddModelDirectory(*command, options->model);
  command->add_flag("--json", options->json, "As JSON");
  command->callback([options, &selected] { selected = [options] { return Run(*options); }; });
}

}  // namespace moeserve::server

#include <cstdio>
#include <memory>
#include <string>

#include "base/error_text.h"
#include "model_loaders/checkpoint/loader.h"
#include "model_loaders/checkpoint/quantized_tensors.h"
#include "model_loaders/inspect.h"
#include "server/chat/chat_format.h"
#include "server/commands/commands.h"
#include "server/commands/model_options.h"

namespace moeserve::server {
namespace {

int RunCheck(const ModelOptionsText& options) {
  const auto checkpoint = LoadCheckpoint(options.directory, {.ignored_keys = options.ignored_keys});
  if (!checkpoint.ok()) return Fail(checkpoint.status());
  const absl::Status integers = CheckQuantizedData(checkpoint->spec, *checkpoint->weights);
  if (!integers.ok()) return Fail(integers);
  if (const absl::Status lost = checkpoint->weights->Check(); !lost.ok()) return Fail(lost);
  const absl::Status tables = CheckTables(checkpoint->spec, *checkpoint->weights);
  if (!tables.ok()) return Fail(tables);
  const ChatFormat chat(checkpoint->tokenizer_config);
  if (!chat.status().ok() && !absl::IsNotFound(chat.status())) {
    std::fprintf(stderr, "warning: chats will be refused: %s\n",
                 Printable(std::string(chat.status().message()), 300).c_str());
  }
  std::fputs(SummaryText(Summarize(checkpoint->spec)).c_str(), stdout);
  PrintWarnings(checkpoint->warnings);
  PrintNotes(checkpoint->notes);
  std::printf("%s: ok\n", checkpoint->directory_name.c_str());
  return 0;
}

}  // namespace

void AddCheckCommand(CLI::App& app, Command& selected) {
  CLI::App* command = app.add_subcommand(
      "check", "Validate a checkpoint; exit status 1 and the reason if it is invalid");
  auto options = std::make_shared<ModelOptionsText>();
  AddModelDirectory(*command, *options);
  AddIgnoreConfig(*command, options->ignored_keys);
  command->callback([options, &selected] { selected = [options] { return RunCheck(*options); }; });
}

}  // namespace moeserve::server

#include <climits>
#include <cstdio>
#include <memory>
#include <string>

#include "base/error_text.h"
#include "base/kinds.h"
#include "model_loaders/write/quantize_folder.h"
#include "server/base/text_values.h"
#include "server/commands/commands.h"
#include "server/commands/model_options.h"
#include "server/commands/progress/write_report.h"

namespace moeserve::server {
namespace {

struct QuantizeArguments {
  std::string source;
  std::string destination;
  std::string dtype;
  std::vector<std::string> ignored_keys;
  bool quiet = false;
};

int RunQuantize(const QuantizeArguments& options) {
  const Quantization type = KindNamed(options.dtype, Quantization::kInt8).value();
  WriteReport report("quantizing", options.quiet);
  const auto folder = QuantizeFolder(options.source, options.destination, type, report.Callback(),
                                     options.ignored_keys);
  report.Finish(folder.ok());
  if (!folder.ok()) return Fail(folder.status());
  if (folder->source_type != Quantization::kNone && folder->source_type != type) {
    std::fprintf(stderr, "warning: %s is %s already and was rounded a second time\n",
                 Printable(options.source, PATH_MAX).c_str(),
                 std::string(Name(folder->source_type)).c_str());
  }
  std::printf(
      "%s: %s of weights\n%s: %s of weights (%.1f %%)\n",
      Printable(options.source, PATH_MAX).c_str(), ShowBytes(folder->source_bytes).c_str(),
      Printable(options.destination, PATH_MAX).c_str(), ShowBytes(folder->bytes).c_str(),
      100.0 * static_cast<double>(folder->bytes) / static_cast<double>(folder->source_bytes));
  return 0;
}

}  // namespace

void AddQuantizeCommand(CLI::App& app, Command& selected) {
  CLI::App* command =
      app.add_subcommand("quantize", "Write a copy of a model with integer weights");
  auto options = std::make_shared<QuantizeArguments>();
  command->add_option("source", options->source, "Folder of the model")->required();
  command->add_option("destination", options->destination, "New folder, absent or empty")
      ->required();
  command->add_option("--dtype", options->dtype, "Integer type of expert and projection matrices")
      ->check(CLI::IsMember(KindNames(Quantization::kInt8)))
      ->required();
  AddIgnoreConfig(*command, options->ignored_keys);
  AddQuietOption(*command, options->quiet);
  command->callback(
      [options, &selected] { selected = [options] { return RunQuantize(*options); }; });
}

}  // namespace moeserve::server

#include <climits>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "base/error_text.h"
#include "base/kinds.h"
#include "model_loaders/write/convert_folder.h"
#include "server/base/text_values.h"
#include "server/commands/checked_options.h"
#include "server/commands/commands.h"
#include "server/commands/model_options.h"
#include "server/commands/progress/write_report.h"

namespace moeserve::server {
namespace {

struct ConvertArguments {
  std::string source;
  std::string destination;
  std::string dtype = std::string(KindName(ConvertType::kStored));
  std::string tokenizer;
  std::string dictionary;
  std::vector<std::string> ignored_keys;
  bool quiet = false;
};

// Returns for example "12 tensors in 1 file, 3.1 MiB (F32 1.0 MiB, BF16 2.1 MiB)".
std::string WeightsText(const WrittenWeights& weights) {
  std::string text =
      Concat(weights.tensors, " tensors in ", weights.files,
             weights.files == 1 ? " file" : " files", ", ", ShowBytes(weights.bytes), " (");
  for (size_t i = 0; i < weights.types.size(); ++i) {
    const auto& [type, bytes] = weights.types[i];
    text += Concat(i == 0 ? "" : ", ", Name(type), ' ', ShowBytes(bytes));
  }
  return text + ")";
}

std::string FilesText(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += Concat(text.empty() ? "" : ", ", Printable(name));
  return text.empty() ? "none" : text;
}

void PrintConverted(const ConvertArguments& options, const ConvertedFolder& folder) {
  const std::string source = Printable(options.source, PATH_MAX);
  std::printf("%s: %s of weights\n", source.c_str(), ShowBytes(folder.source_bytes).c_str());
  std::printf("%s\n", folder.architecture.c_str());
  PrintNotes(folder.notes);
  std::printf("%s: %s\n", Printable(options.destination, PATH_MAX).c_str(),
              WeightsText(folder.weights).c_str());
  std::printf("tokenizer and defaults: %s\n", FilesText(folder.other_files).c_str());
  if (folder.dtype != folder.source_dtype) {
    std::printf(
        "note: most weights of the source were %s or smaller, those of the new folder are "
        "%s; --dtype auto goes by that\n",
        std::string(Name(folder.source_dtype)).c_str(), std::string(Name(folder.dtype)).c_str());
  }
  if (folder.tokenizer_stays) {
    std::printf(
        "note: the tokenizer stays in %s; add its tokenizer.json or SentencePiece model "
        "with --tokenizer\n",
        source.c_str());
  } else if (!folder.has_tokenizer) {
    std::printf("note: there is no tokenizer; the server needs one (--tokenizer)\n");
  }
}

int RunConvert(const ConvertArguments& options) {
  ConvertOptions convert;
  convert.type = KindNamed<ConvertType>(options.dtype).value();
  convert.tokenizer = {.tokenizer = options.tokenizer, .dictionary = options.dictionary};
  convert.ignored_keys = options.ignored_keys;
  WriteReport report("converting", options.quiet);
  convert.progress = report.Callback();
  const auto folder = ConvertFolder(options.source, options.destination, convert);
  report.Finish(folder.ok());
  if (!folder.ok()) return Fail(folder.status());
  PrintConverted(options, *folder);
  return 0;
}

}  // namespace

void AddConvertCommand(CLI::App& app, Command& selected) {
  CLI::App* command = app.add_subcommand(
      "convert", "Write any readable checkpoint as a folder in the native format");
  auto options = std::make_shared<ConvertArguments>();
  command->add_option("source", options->source, "Folder or file of the model")->required();
  command->add_option("destination", options->destination, "New folder, absent or empty")
      ->required();
  AddChoiceOption(*command, "--dtype", options->dtype,
                  "Type of the weights; stored: as in the source, widened where it has blocks",
                  KindNames<ConvertType>());
  CLI::Option* tokenizer =
      command->add_option("--tokenizer", options->tokenizer,
                          "tokenizer.json or SentencePiece model (*.model) for the new folder");
  command
      ->add_option(
          "--dictionary", options->dictionary,
          "fairseq's dict.txt, which gives the pieces of the SentencePiece model their ids")
      ->needs(tokenizer);
  AddIgnoreConfig(*command, options->ignored_keys);
  AddQuietOption(*command, options->quiet);
  command->callback(
      [options, &selected] { selected = [options] { return RunConvert(*options); }; });
}

}  // namespace moeserve::server

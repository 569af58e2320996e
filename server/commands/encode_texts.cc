#include "server/commands/encode_texts.h"

#include <condition_variable>
#include <fstream>
#include <iostream>
#include <memory>
#include <utility>

#include "base/error_text.h"
#include "base/mutex.h"
#include "server/commands/checked_options.h"

namespace moeserve::server {
namespace {

// So many texts are computed and reported together.
constexpr size_t kTextsOfRun = 1024;
constexpr size_t kMaxTextBytes = size_t{64} << 20;

struct ResultSignal {
  Mutex mutex;
  std::condition_variable changed;
  bool set ABSL_GUARDED_BY(mutex) = false;

  void Set() {
    {
      MutexLock lock(mutex);
      set = true;
    }
    changed.notify_one();
  }
  void Wait() {
    MutexLock lock(mutex);
    changed.wait(lock, [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) { return set; });
    set = false;
  }
};

absl::Status RunTexts(EncodeRun& run) {
  const auto signal = std::make_shared<ResultSignal>();
  MOESERVE_RETURN_IF_ERROR(run.Start(absl::InfiniteFuture(), [signal] { signal->Set(); }));
  while (true) {
    MOESERVE_ASSIGN_OR_RETURN(const bool ended, run.Advance());
    if (ended) return absl::OkStatus();
    signal->Wait();
  }
}

TextInput InputOf(std::string line, bool pairs) {
  TextInput input;
  if (const size_t tab = line.find('\t'); pairs && tab != std::string::npos) {
    input.pair = line.substr(tab + 1);
    line.resize(tab);
  }
  input.text = std::move(line);
  return input;
}

// Returns the texts one after the other.
class TextReader {
 public:
  explicit TextReader(const TextOptions& options) : options_(options) {
    if (options.texts.empty() && options.files.empty()) files_ = {"-"};
    files_.insert(files_.end(), options.files.begin(), options.files.end());
  }

  Result<std::vector<TextInput>> Next() {
    std::vector<TextInput> out;
    while (text_ < options_.texts.size() && out.size() < kTextsOfRun) {
      out.push_back(InputOf(options_.texts[text_++], options_.pairs));
    }
    while (file_ < files_.size() && out.size() < kTextsOfRun) {
      MOESERVE_RETURN_IF_ERROR(Open());
      std::string line;
      if (std::getline(*stream_, line)) {
        if (line.ends_with('\r')) line.pop_back();
        out.push_back(InputOf(std::move(line), options_.pairs));
      } else {
        if (stream_->bad()) {
          return absl::InvalidArgumentError(Concat("cannot read ", files_[file_]));
        }
        stream_ = nullptr;
        ++file_;
      }
    }
    return out;
  }

 private:
  absl::Status Open() {
    if (stream_ != nullptr) return absl::OkStatus();
    if (files_[file_] == "-") {
      stream_ = &std::cin;
      return absl::OkStatus();
    }
    opened_ = std::ifstream(files_[file_], std::ios::binary);
    if (!opened_) return absl::NotFoundError(Concat("cannot read ", files_[file_]));
    stream_ = &opened_;
    return absl::OkStatus();
  }

  const TextOptions& options_;
  std::vector<std::string> files_;
  size_t text_ = 0;
  size_t file_ = 0;
  std::ifstream opened_;
  std::istream* stream_ = nullptr;  // null: the next file is not open
};

}  // namespace

void AddTextOptions(CLI::App& app, TextOptions& options) {
  app.add_option("TEXT", options.texts, "Texts; without any and --file: lines of standard input");
  app.add_option("--file", options.files,
                 "File with a text in each line, - for standard input; can be repeated")
      ->allow_extra_args(false);
  AddNumberOption(app, "--truncate", options.max_tokens,
                  "Tokens that stay of a longer text, -1: as many as the model takes; 0: longer "
                  "texts are an error",
                  -1, 1 << 24);
}

absl::Status EncodeTexts(const RunningModel& model, const TextOptions& options,
                         const std::function<absl::Status(const EncodeModel&, EncodeJob&)>& prepare,
                         const std::function<absl::Status(EncodeRun&, size_t first)>& on_results) {
  const EncodeModel known =
      MakeEncodeModel(*model.engine, model.text_settings, model.tokenizer_config);
  TextReader reader(options);
  size_t first = 0;
  while (true) {
    EncodeJob job;
    MOESERVE_ASSIGN_OR_RETURN(job.inputs, reader.Next());
    if (job.inputs.empty()) return absl::OkStatus();
    const size_t count = job.inputs.size();
    job.input_field = "texts";
    if (options.max_tokens != 0) job.truncate = options.max_tokens;
    MOESERVE_RETURN_IF_ERROR(prepare(known, job));
    MOESERVE_ASSIGN_OR_RETURN(auto texts, PrepareTexts(job, known, kMaxTextBytes));
    SubmissionContext context;
    context.engine = model.engine;
    MOESERVE_ASSIGN_OR_RETURN(
        auto run, EncodeRun::Prepare(std::move(context), known, std::move(job), std::move(texts)));
    MOESERVE_RETURN_IF_ERROR(RunTexts(*run));
    MOESERVE_RETURN_IF_ERROR(on_results(*run, first));
    first += count;
  }
}

}  // namespace moeserve::server

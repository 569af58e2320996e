// Reports how much of a new folder has been written.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "model_loaders/write/new_folder.h"
#include "server/commands/progress/progress.h"

namespace moeserve::server {

class WriteReport {
 public:
  WriteReport(std::string what, bool quiet) : what_(std::move(what)), quiet_(quiet) {}

  // The object must outlive the function.
  WriteProgress Callback() {
    return [this](int64_t written, int64_t total) {
      if (!progress_) {
        progress_.emplace(what_, kByteUnit, static_cast<double>(total),
                          quiet_ ? ProgressOutput::kNone : ProgressOutput::kTerminal);
      }
      progress_->Set(static_cast<double>(written));
    };
  }

  // Nothing more will be written. `complete`: the folder is complete.
  void Finish(bool complete) {
    if (complete && progress_) progress_->Finish();
    progress_.reset();
  }

 private:
  const std::string what_;
  const bool quiet_;
  std::optional<Progress> progress_;  // once the number of bytes is known
};

}  // namespace moeserve::server

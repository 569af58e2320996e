// Finds the files of a checkpoint that fairseq wrote.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"

namespace moeserve {

// fairseq writes a model into one file. Of a mixture of experts, each process writes its experts
// into a file of its own, and one of them everything else into another:
//
//   checkpoint_last.pt         or  checkpoint_last-shared.pt
//                                  checkpoint_last-rank-0.pt, checkpoint_last-rank-1.pt, ...
struct FairseqFiles {
  std::filesystem::path folder;
  std::string main;                // name of the only file, or of the shared one
  std::vector<std::string> ranks;  // [rank] names; empty if there is only one file
};

// Returns the checkpoint that `path` stands for: a .pt file, with the files that belong to it, or
// the only checkpoint of such files in a folder. A folder has none if it has weights in another
// format, or a config.json whose "model_type" is not "torchscale". nullopt if there is none.
// InvalidArgument if a folder has several checkpoints, or if one is in shards; NotFound if files of
// a checkpoint are missing.
Result<std::optional<FairseqFiles>> FindFairseq(const std::filesystem::path& path);

}  // namespace moeserve

// Opens checkpoints that fairseq wrote: X-MoE, MH-MoE and other models of torchscale, and MoA.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/checkpoint/fairseq_files.h"
#include "model_loaders/files/weight_files.h"

namespace moeserve {

struct FairseqCheckpoint {
  WeightFiles files;  // the tensors of all files; experts have their numbers in the model
  std::unique_ptr<const CheckpointConfig> config;
  std::string config_text;  // of config.json; empty if the folder has none
};

// Reads the options of a checkpoint and unites its files. The names of the tensors lose the names
// of wrappers ("module."), and get the prefix "decoder." if no name has it or that of an encoder.
//
// The options are those that the checkpoint contains. If the folder has a config.json, its keys
// replace them, and a null removes an option; of a file that has only tensors, config.json must
// contain all options.
//
// A process has the experts that follow those of the processes before it, or one expert if there
// are more processes than experts; then several have the same, of which one file each is read.
//
// InvalidArgument or NotFound with the file, the option or tensor, the expected and the found
// value. Does not check the tensors (CheckTensors()).
//
// The options `ignored` are read as if the checkpoint did not have them.
Result<FairseqCheckpoint> OpenFairseq(const FairseqFiles& files,
                                      const std::vector<std::string>& ignored = {});

}  // namespace moeserve

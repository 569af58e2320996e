// The configuration of a model in a fairseq checkpoint.
#pragma once

#include <memory>
#include <string_view>

#include "base/status.h"
#include "model_loaders/architectures/architecture.h"
#include "model_loaders/architectures/fairseq/options.h"
#include "model_loaders/files/weight_files.h"

namespace moeserve {

// One checkpoint. All members must outlive the calls that get it.
struct FairseqSource {
  std::string_view file;  // name of the file that contains the options
  const FairseqOptions& options;
  const WeightFiles&
      files;  // the tensors under their names in the model, such as "decoder.version"
};

// Reads the options and decides from them and from the stored tensors what the model computes: a
// decoder, an encoder or both of torchscale (X-MoE, MH-MoE, other mixtures, dense), of MoA, or of
// fairseq itself. InvalidArgument, with the file, the option, the expected and the found value, for
// models and options that the engine cannot compute, and where options and tensors disagree.
ConfigResult ReadFairseqConfig(const FairseqSource& source);

}  // namespace moeserve

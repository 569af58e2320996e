// config.json of the native format.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "engine/spec/spec.h"
#include "kernels/base/quantize.h"

namespace moeserve {

struct NativeConfig {
  ModelSpec spec;
  Quantization quantization = Quantization::kNone;  // of the matrices in the folder
  // Whether the file gives these as a list with one entry per layer, or as one object for all.
  bool attention_is_list = false;
  bool feed_forward_is_list = false;

  // `text` with the keys of Validate() and RequiredTensors() ("attention[0].head_dim") as the file
  // spells them ("attention.head_dim" where there is one object).
  std::string AsInFile(std::string_view text) const;
};

// Parses and validates. InvalidArgument with the path of the key, expected and found; the text
// begins with "config.json: ". Several faults are listed together.
Result<NativeConfig> ParseNativeConfig(std::string_view text);

}  // namespace moeserve

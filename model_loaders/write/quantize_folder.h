// Writes a copy of a checkpoint folder with quantized matrices.
#pragma once

#include <cstdint>
#include <filesystem>

#include "base/status.h"
#include "kernels/base/quantize.h"
#include "model_loaders/write/new_folder.h"

namespace moeserve {

struct QuantizedFolder {
  int64_t source_bytes = 0;  // bytes of all tensors
  int64_t bytes = 0;
  Quantization source_type = Quantization::kNone;  // type of the source's matrices
};

// Writes the native folder `destination`, which must be absent or empty, from the native folder
// `source`. `type` must not be kNone. A matrix gets the type that QuantizationOf() returns for
// `type`, and its values are rounded as when a model is loaded with `type`. Other tensors and the
// files of the tokenizer and of generation defaults are copied. Integers in the source are copied
// if they have type `type`; integers of another type are rounded a second time.
//
// Writes to a temporary folder next to `destination`, reads the result back and renames the folder.
// Keeps some rows of a matrix in memory, or a whole matrix if the source has integers.
// InvalidArgument, with the tensor's name, for a value that is not finite or too large for its
// scale. Throws nothing. `progress`, if set, is called after each written piece. The new folder's
// configuration lacks the keys `ignored_keys` (LoadOptions::ignored_keys).
Result<QuantizedFolder> QuantizeFolder(const std::filesystem::path& source,
                                       const std::filesystem::path& destination, Quantization type,
                                       const WriteProgress& progress = {},
                                       const std::vector<std::string>& ignored_keys = {});

}  // namespace moeserve

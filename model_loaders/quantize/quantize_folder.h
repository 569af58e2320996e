// Writes a copy of a checkpoint folder with quantized matrices.
#pragma once

#include <cstdint>
#include <filesystem>

#include "base/status.h"
#include "kernels/base/quantize.h"

namespace moeserve {

struct QuantizedFolder {
  int64_t source_bytes = 0;  // of all tensors
  int64_t bytes = 0;
  Quantization source_type = Quantization::kNone;  // of the source's matrices
};

// Writes the native folder `destination`, which must be absent or empty, from the native folder
// `source`. Matrices get the type QuantizationOf() for `type` (not kNone), with the rounding of a
// run of that type. Other tensors and the files of tokenizer and generation are copied. A source
// that has integers of `type` is copied; integers of another type are rounded a second time.
//
// Writes under a temporary name beside `destination`, reads the result back and renames it. Keeps
// some rows of a matrix in memory, or a whole matrix if the source has integers. InvalidArgument
// names a tensor with a value that is not finite or too large for its scale. Throws nothing.
Result<QuantizedFolder> QuantizeFolder(const std::filesystem::path& source,
                                       const std::filesystem::path& destination, Quantization type);

}  // namespace moeserve

// Writes a copy of a checkpoint folder with its matrices as integers.
#pragma once

#include <cstdint>
#include <filesystem>

#include "base/status.h"
#include "kernels/base/quantize.h"

namespace moeserve {

struct QuantizedFolder {
  int64_t source_bytes = 0;  // of all tensors
  int64_t bytes = 0;
  Quantization source_type = Quantization::kNone;  // what the source's matrices were already
};

// Makes the native folder `destination`, which must not exist or be empty, from the checkpoint
// `source`: matrices as QuantizationOf() says for `type` (not kNone), rounded as a run with these
// types rounds them, every other tensor bit by bit, the files of tokenizer and generation byte by
// byte. A source of integers of that type is copied; of another type, its integers are rounded
// again.
//
// The folder is made beside `destination` under a temporary name, read back, and renamed at the
// end. Holds some rows of a matrix in memory, or the whole of one where the source has integers.
// InvalidArgument names a tensor with a value that is not finite or too large for its scale. No
// exception leaves.
Result<QuantizedFolder> QuantizeFolder(const std::filesystem::path& source,
                                       const std::filesystem::path& destination, Quantization type);

}  // namespace moeserve

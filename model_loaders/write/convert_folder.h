// Writes any checkpoint that the loader can open as a folder of the native format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "base/status.h"
#include "kernels/base/dtype.h"
#include "model_loaders/write/tokenizer_copy.h"
#include "model_loaders/write/weight_shards.h"

namespace moeserve {

struct ConvertOptions {
  ConvertType type = ConvertType::kStored;
  // If it has a path, replaces the vocabulary files of the source.
  GivenTokenizer tokenizer = {};
  int64_t shard_bytes = 5'000'000'000;         // bytes of tensors per file
  std::vector<std::string> ignored_keys = {};  // LoadOptions::ignored_keys for the source
  WriteProgress progress = {};                 // if set, called after each written piece
};

// What ConvertFolder() did.
struct ConvertedFolder {
  std::string architecture;        // one line (DescribeModel())
  std::vector<std::string> notes;  // Checkpoint::notes and Checkpoint::warnings of the source
  int64_t source_bytes = 0;        // bytes of all tensors in the source
  // The float types that most weights have: --dtype auto computes in bf16 if this is bf16.
  DType source_dtype = DType::kF32;
  DType dtype = DType::kF32;
  WrittenWeights weights;
  std::vector<std::string> other_files;  // names of files without weights, config.json excepted
  bool has_tokenizer = false;
  // The source is one file that contains its tokenizer (GGUF), which is not written.
  bool tokenizer_stays = false;
};

// Writes the native folder `destination`, which must be absent or empty, from the checkpoint
// `source` (LoadCheckpoint()). WriteWeights() says which types the weights get. In f32 and with the
// type kStored, the new folder computes what the source computes, to the last bit.
//
// Copies the files of the source's tokenizer and of its generation defaults. What a source of one
// file says instead (chat template, names of tokens, defaults) is written as such files; the
// vocabulary of a GGUF file is not.
//
// Writes to a temporary folder next to `destination`, reads the result back with LoadCheckpoint(),
// compares it with the source and renames the folder; on an error nothing is left. Memory: one
// tensor. Throws nothing.
Result<ConvertedFolder> ConvertFolder(const std::filesystem::path& source,
                                      const std::filesystem::path& destination,
                                      const ConvertOptions& options = {});

}  // namespace moeserve

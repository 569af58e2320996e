// Writes the weights of a model as safetensors files of the native format.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/spec/spec.h"
#include "engine/spec/weights.h"
#include "kernels/base/dtype.h"
#include "model_loaders/files/tensor_file.h"
#include "model_loaders/write/new_folder.h"

namespace moeserve {

// The type in which a new folder stores its weights.
enum class ConvertType : uint8_t { kStored, kF32, kBf16, kF16 };

struct ConvertTypeTraits {
  std::string_view name;       // in options
  std::optional<DType> dtype;  // nullopt: that of the source
};

constexpr ConvertTypeTraits Traits(ConvertType type) {
  switch (type) {
    case ConvertType::kStored:
      return {"stored", std::nullopt};
    case ConvertType::kF32:
      return {"f32", DType::kF32};
    case ConvertType::kBf16:
      return {"bf16", DType::kBF16};
    case ConvertType::kF16:
      return {"f16", DType::kF16};
  }
  return {};
}

struct WrittenWeights {
  size_t tensors = 0;
  size_t files = 0;  // safetensors files
  int64_t bytes = 0;
  std::vector<std::pair<ElementType, int64_t>> types = {};  // bytes of the tensors of each type
};

// Writes all tensors of `spec` into the existing folder `folder`: as model.safetensors, or, if they
// have more than `shard_bytes`, as shards of at most so many bytes (or of one tensor) with an
// index.
//
// kStored keeps every value: a tensor gets the type in which the source returns it, so what the
// source stores in blocks of fewer bits is widened, and integers (Quantization) stay integers. kF32
// widens all tensors, integers too. kBf16 and kF16 round matrices. Routers and vectors (norms,
// biases, sinks) are never rounded and keep their types, and ids become I32, since a bf16 run does
// not round them either; it does round the matrices, except untied embeddings.
//
// Has at most one tensor in memory. Reads the tensors twice if their types must be found out.
// InvalidArgument, with the tensor's name, for a number that rounding would make infinite, and for
// damaged integers. `progress`, if set, is called after each written piece.
Result<WrittenWeights> WriteWeights(const ModelSpec& spec, WeightSource& source, ConvertType type,
                                    int64_t shard_bytes, const std::filesystem::path& folder,
                                    const WriteProgress& progress = {});

}  // namespace moeserve

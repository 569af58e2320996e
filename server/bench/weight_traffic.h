// How many bytes of weights steps had to read: what a rate is compared with where memory is the
// limit.
#pragma once

#include <cstdint>

#include "engine/model/model.h"
#include "engine/spec/spec.h"
#include "engine/statistics/expert_stats.h"
#include "kernels/base/quantize.h"

namespace moeserve {

// Of `parameters` values of matrices, their scales included.
int64_t MatrixBytes(int64_t parameters, DType weights, Quantization quantization);

// Of every step, whatever its routes: all tensors but routed experts, embeddings (of which a row or
// so is read) and, once, the head. Routers and vectors are f32 in memory.
int64_t FixedWeightBytes(const ModelSpec& spec, const ModelOptions& types);

// Of all steps in `stats`: an expert's matrices are read once in each step in which a row chose it.
double WeightBytesRead(const ExpertStats& stats, const ModelSpec& spec, const ModelOptions& types);

}  // namespace moeserve

// Bytes of weights that steps read, for the limit set by memory bandwidth.
#pragma once

#include <cstdint>

#include "engine/model/model.h"
#include "engine/spec/spec.h"
#include "engine/statistics/expert_stats.h"
#include "kernels/base/quantize.h"

namespace moeserve {

// Bytes of `parameters` matrix values, scales included.
int64_t MatrixBytes(int64_t parameters, DType weights, Quantization quantization);

// Bytes that every step reads: all tensors except routed experts and embeddings, of which few rows
// are read. Tied embeddings count once, as the head. Routers and vectors are f32.
int64_t FixedWeightBytes(const ModelSpec& spec, const ModelOptions& types);

// Bytes that all steps in `stats` read: the fixed ones, and an expert's matrices once in each step
// in which a row chose it.
double WeightBytesRead(const ExpertStats& stats, const ModelSpec& spec, const ModelOptions& types);

}  // namespace moeserve

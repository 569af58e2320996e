// Counts the bytes of weights that steps read, for the bound set by memory bandwidth.
#pragma once

#include <cstdint>

#include "engine/model/model.h"
#include "engine/spec/spec.h"
#include "engine/statistics/expert_stats.h"
#include "kernels/base/quantize.h"

namespace moeserve {

// Returns the bytes that `parameters` matrix elements take, including quantization scales.
int64_t MatrixBytes(int64_t parameters, DType weights, Quantization quantization);

// Returns the bytes of weights that every step reads: all tensors except routed experts, which are
// read only if selected, and embeddings, of which a step reads only few rows. Tied embeddings count
// once, as the LM head. Routers and vectors count as f32.
int64_t FixedWeightBytes(const ModelSpec& spec, const ModelOptions& types);

// Returns the bytes of weights that all steps counted in `stats` read: FixedWeightBytes() per step,
// and an expert's matrices once per step in which a row selected that expert.
double WeightBytesRead(const ExpertStats& stats, const ModelSpec& spec, const ModelOptions& types);

}  // namespace moeserve

// The inner kernels of one instruction set. Each isa_*.cc compiles isa_kernels.inl with its own
// flags and fills one table; the backend picks a table once.
//
// Results are bit-identical for any number of rows per call and any number of threads. Routing
// (RouteRow and everything under it) is bit-identical across the tables as well.
#pragma once

#include <cstdint>

#include "kernels/base/activation.h"
#include "kernels/base/dtype.h"
#include "kernels/base/quantization.h"
#include "kernels/base/routing.h"
#include "kernels/kv_cache_type.h"

namespace moeserve::cpu {

// Packed weights: a matrix [N, K] becomes blocks of up to 4 panels of 16 outputs. A block is one
// linear stream of lines: for each step, each of its panels contributes one line of 16 outputs
// (f32: one k, 64 bytes; f16: one k, 32 bytes; bf16: two k, 64 bytes, output-major pairs).
//
// Integers come in groups of QuantGroup() k. A group has lines of 64 bytes (int8: four k of each
// output, the bytes 128 + value; int4: eight k, byte j of an output holding 8 + value of k j in its
// low and of k 4 + j in its high bits), then, for each panel, the 16 scales of the group as f16.
//
// The functions are static for the reason given in dtype.h.
static constexpr int QuantStep(Quantization q) {  // k of each output in a line
  switch (q) {
    case Quantization::kNone:
      break;
    case Quantization::kInt8:
      return 4;
    case Quantization::kInt4:
      return 8;
  }
  return 1;
}
static constexpr int QuantZero(Quantization q) {  // what a stored integer has added
  switch (q) {
    case Quantization::kNone:
      break;
    case Quantization::kInt8:
      return 128;
    case Quantization::kInt4:
      return 8;
  }
  return 0;
}

inline constexpr int kPanel = 16;
inline constexpr int kPanelsPerBlock = 4;
inline constexpr int kBlock = kPanel * kPanelsPerBlock;
inline constexpr int kMaxRowTile = 6;

struct LinearTileArgs {
  const char* weights;  // the block
  DType weight_dtype;
  int panels;  // in the block, 1..4
  int rows;    // 1..row_tile
  int64_t k;
  const void* const* x;  // [rows] input rows: f32, or bf16 in linear_bf16
  // Prefetches the weights needed next: one line per step from `ahead`, which advances by
  // `ahead_stride` (at most 64 bytes). Null: the block itself is read from memory.
  const char* ahead;
  int64_t ahead_stride;
  float* out;  // [rows][kBlock]
};

// Inputs are rows rounded to int8 by groups (QuantizeRowArgs).
struct QuantTileArgs {
  const char* weights;  // the block
  Quantization quantization;
  int panels;  // in the block, 1..4
  int rows;    // 1..row_tile
  int64_t k;
  const char* const* x;  // [rows] records
  // Prefetches the weights needed next: one line per step from `ahead`, which advances by
  // `ahead_stride` (at most 64 bytes). Null: the block itself is read from memory.
  const char* ahead;
  int64_t ahead_stride;
  float* out;  // [rows][kBlock]
};

// A row becomes one record for each group: int8 values [group] (zeros after the row's end), the
// scale as f32 and a correction as int32. value = nearest integer to x / scale, scale = largest
// magnitude of the group / 127; NaN where a value of the group is not finite. Weights are stored
// with `zero` added, which adds zero * sum(values) to a product: the correction is its negative.
struct QuantizeRowArgs {
  const void* x;
  bool bf16;
  int64_t n;
  int group;  // 32 or 64
  int zero;
  char* records;  // [groups][group + 8]
};

struct EpilogueArgs {
  const float* tile;  // [rows][kBlock]
  int rows;
  int panels;
  bool gated;  // panels alternate gate, up
  ActivationKind activation;
  const float* bias;  // [kBlock] or null
  char* const* out;   // [rows] first output column of this block
  bool out_bf16;
  int cols;  // output columns to write
};

struct NormRowArgs {
  const float* x;
  int64_t n;
  bool layer;
  float eps;
  const float* scale;
  const float* shift;  // null: none
  void* out;
  bool out_bf16;
};

// Attention computes a softmax for each block of positions, which begin at multiples of this;
// MergeAttention() joins them.
inline constexpr int kAttentionBlock = 256;
inline constexpr int kMaxAttentionRows = 8;

// Floats of AttentionTileArgs::scratch.
inline constexpr int64_t kAttentionScratch = int64_t{kMaxAttentionRows} * kAttentionBlock;

// Query rows of one sequence against one block of positions of one kv head.
struct AttentionTileArgs {
  int rows;                     // 1..attention_rows
  const float* const* queries;  // [rows] each [head_dim]
  // [rows] visible positions [begin, end), at least one of them in the block; neither bound falls
  // from row to row.
  const int32_t* begin;
  const int32_t* end;
  KvCacheType type;
  const char* keys;  // of this kv head in cache block 0 of the layer
  const char* values;
  const int32_t* block_table;
  int64_t key_block_bytes;  // bytes of one cache block of one layer
  int64_t value_block_bytes;
  int head_dim;
  int padded_dim;
  int block;  // positions [block, block + 1) * kAttentionBlock
  float scale;
  float* scratch;  // [kAttentionScratch]
  // Of the row's visible positions in the block: the largest score, and the sums of weights
  // e^(score - largest) and of weighted values.
  float* largest;  // [rows]
  float* total;    // [rows]
  float* sums;     // [kMaxAttentionRows][padded_dim]; rows past the last one are overwritten
};

// Adds the part of a later block to a row's state.
struct AttentionMergeArgs {
  int padded_dim;
  float* largest;
  float* total;
  float* sums;  // [padded_dim]
  float partial_largest;
  float partial_total;
  const float* partial_sums;  // [padded_dim]
};

struct RouteRowArgs {
  const RouteSettings* settings;
  RowSelection selection;
  float* scores;     // [E] in: scores after bias and temperature; overwritten
  uint64_t* keys;    // scratch [E]
  float* values;     // scratch [E]
  float* gates;      // scratch [E]
  int32_t* experts;  // out [n] ascending
  float* weights;    // out [n]
  uint8_t* status;   // out: RoutingPlan::row_nonfinite
};

struct KernelTable {
  const char* name;
  bool bf16_dot;  // linear_bf16 works on bf16 rows; else the caller widens rows to f32
  int row_tile;
  int attention_rows;  // query rows that share loads, up to kMaxAttentionRows

  void (*linear_f32)(const LinearTileArgs&);
  void (*linear_bf16)(const LinearTileArgs&);  // null unless bf16_dot
  void (*linear_quantized)(const QuantTileArgs&);
  void (*quantize_row)(const QuantizeRowArgs&);
  void (*epilogue)(const EpilogueArgs&);
  void (*norm_row)(const NormRowArgs&);
  void (*attention_tile)(const AttentionTileArgs&);
  void (*merge_attention)(const AttentionMergeArgs&);
  // The routing contract's dot product of two vectors of n elements.
  float (*contract_dot)(const float* a, const float* b, int64_t n);
  // Contract dots of x [n] with `count` vectors, interleaved in panels of kPanel:
  // [count rounded up / kPanel][n][kPanel].
  void (*contract_dots)(const float* columns, const float* x, int64_t n, int count, float* dots);
  int (*route_row)(const RouteRowArgs&);  // number of selected experts
  void (*widen_bf16)(const Bf16* in, float* out, int64_t n);
  void (*convert_row)(const float* in, Bf16* out, int64_t n);
  void (*axpy)(float a, const float* x, float* y, int64_t n);  // y += a * x
  void (*axpy_bf16)(float a, const Bf16* x, float* y, int64_t n);
  // Sum of all words: reads memory with the widest loads, for the bandwidth probe.
  uint64_t (*read_stream)(const char* data, int64_t bytes);
  // `iterations` rounds of products in registers for the arithmetic probe. Returns the number of
  // operations and adds a value that depends on all of them to *sink.
  int64_t (*arithmetic_f32)(int64_t iterations, float* sink);
  int64_t (*arithmetic_bf16)(int64_t iterations, float* sink);  // null without bf16_dot
  int64_t (*arithmetic_int8)(int64_t iterations, float* sink);
};

extern const KernelTable kPlainTable;
#if defined(__x86_64__)
extern const KernelTable kAvx2Table;
extern const KernelTable kAvx512Table;
extern const KernelTable kAvx512VnniTable;
extern const KernelTable kAvx512Bf16Table;
#endif

}  // namespace moeserve::cpu

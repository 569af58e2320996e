// The inner kernels of one instruction set. Each isa_*.cc compiles isa_kernels.inl with compiler
// flags for its instruction set and defines one table. The backend selects a table when it is
// created.
//
// Results are bit-identical for any number of rows per call and any number of threads. The results
// of routing (RouteRow and the functions it calls) are also bit-identical across the tables.
#pragma once

#include <cstdint>

#include "kernels/base/activation.h"
#include "kernels/base/dtype.h"
#include "kernels/base/kv_cache_type.h"
#include "kernels/base/quantization.h"
#include "kernels/base/recurrence.h"
#include "kernels/base/routing.h"

namespace moeserve::cpu {

// The layout of packed weights. A matrix [N, K] is split into blocks of up to 4 panels; a panel has
// 16 outputs. A block is one sequential stream of lines: for each step over k, each panel of the
// block contributes one line for its 16 outputs (f32: one k, 64 bytes; f16: one k, 32 bytes; bf16:
// two k, 64 bytes, the two values of an output adjacent).
//
// Integer weights come in groups of QuantGroup() values of k. A group consists of lines of 64
// bytes, followed, for each panel, by the group's 16 scales as f16. In a line each output has 4
// bytes. int8, int8-channel: the bytes are 128 + value for four values of k. int4: byte j holds 8 +
// value for k = j in its low bits and for k = j + 4 in its high bits, so a line covers eight values
// of k. int4-k: the same with values in 0..15. Every kFactorColumns values of k begin, for each
// panel, with kFactorBytes: for each of the 16 outputs the factor bytes (QuantizedMatrix) of two
// subgroups. After a group's lines follow, for each panel, the 16 scales d as f16 and the 16 units
// u as uint16.
//
// The following functions are static so that the linker cannot replace the copy of one instruction
// set by that of another.
static constexpr int QuantStep(Quantization q) {  // number of values of k per output in a line
  switch (q) {
    case Quantization::kNone:
      break;
    case Quantization::kInt8:
    case Quantization::kInt8Channel:
      return 4;
    case Quantization::kInt4:
    case Quantization::kInt4K:
      return 8;
  }
  return 1;
}
static constexpr int QuantZero(Quantization q) {  // the offset added to a stored integer
  switch (q) {
    case Quantization::kNone:
    case Quantization::kInt4K:
      break;
    case Quantization::kInt8:
    case Quantization::kInt8Channel:
      return 128;
    case Quantization::kInt4:
      return 8;
  }
  return 0;
}

// Returns the number of columns that a record of QuantizeRowArgs has for a group of n columns of an
// input row.
static constexpr int64_t QuantRecordColumns(Quantization q, int64_t n) {
  const int64_t padded = (n + 63) / 64 * 64;
  return padded < QuantGroup(q) ? padded : QuantGroup(q);
}
inline constexpr int kFactorColumns = 64;
inline constexpr int kFactorBytes = 32;
// Returns the bytes of a record with this many columns before its scale: its values and, for types
// with subgroups, a sum as int16 for each of them.
static constexpr int64_t QuantRecordValues(Quantization q, int64_t columns) {
  return columns + QuantSubGroups(q, columns) * 2;
}
// Returns the bytes of all records of an input row of n columns.
static constexpr int64_t QuantRecordBytes(Quantization q, int64_t n) {
  const int64_t rest = n % QuantGroup(q);
  return n / QuantGroup(q) * (QuantRecordValues(q, QuantGroup(q)) + 8) +
         (rest == 0 ? 0 : QuantRecordValues(q, QuantRecordColumns(q, rest)) + 8);
}

// How many bytes before it reads them a tile prefetches its own weights, and into the first-level
// cache. On a Xeon with AMX, one row of int8-channel weights from memory is 1.2 times as fast with
// 2 KiB as with 4 KiB there.
inline constexpr int kPrefetchBytes = 4096;
inline constexpr int kPrefetchBytesL1 = 2048;

inline constexpr int kPanel = 16;
inline constexpr int kPanelsPerBlock = 4;
inline constexpr int kBlock = kPanel * kPanelsPerBlock;
inline constexpr int kMaxRowTile = 6;
// The largest KernelTable::matrix_rows.
inline constexpr int kMatrixRows = 32;

struct LinearTileArgs {
  const char* weights;  // the block of weights
  DType weight_dtype;
  int panels;  // panels in the block, 1..4
  int rows;    // 1..row_tile
  int64_t k;
  const void* const* x;  // [rows] input rows: f32 for linear_f32, bf16 for linear_bf16
  // If not null, weights needed later are prefetched: in each step `lines_ahead` lines from `ahead`
  // on, which then advances by `ahead_stride` (at most these lines' bytes). If null, the block is
  // read from memory, and the block itself is prefetched into the first-level cache if `fetch_l1`
  // is true (PrefetchesToL1()), else for some types and numbers of rows into the second-level
  // cache.
  const char* ahead;
  int64_t ahead_stride;
  bool fetch_l1;
  // With KernelTable::matrix_rows, the rows of linear_bf16 in the layout of PackRowsArgs, and
  // `rows` is at most matrix_rows. Else null.
  const char* packed;
  float* out;  // [rows][kBlock]
};

// The input rows were rounded to int8 in groups (QuantizeRowArgs).
struct QuantTileArgs {
  const char* weights;  // the block of weights
  Quantization quantization;
  int panels;  // panels in the block, 1..4
  int rows;    // 1..quant_row_tile
  int64_t k;
  const char* const* x;  // [rows] QuantizeRowArgs::records of each row
  // If not null, `lines_ahead` lines from `ahead` on are prefetched in each step, and `ahead`
  // advances by `ahead_stride`. If null, the block is read from memory, and the block itself is
  // prefetched as LinearTileArgs states, but blocks of fewer than four panels, and blocks
  // multiplied by `wide` rows, into the first-level cache.
  const char* ahead;
  int64_t ahead_stride;
  bool fetch_l1;
  bool widened;  // `weights` are WidenArgs::out; `ahead` is not null and k is at most kWholeRow
  // With KernelTable::wide_inputs, int8 weights and more than one row: memory of rows *
  // WideRecordBytes(). Else unused.
  char* wide;
  // If not null, the values of the records in the layout of PackRowsArgs; `rows` is then at most
  // KernelTable::matrix_rows, and the weights are int8, int8-channel, or int4-k that is widened.
  const char* packed;
  float* out;  // [rows][kBlock]
};

// Copies rows into the layout that a matrix unit loads: tiles of 16 rows, in each tile 64 bytes of
// each row after the other. The last tile has the same size whatever its number of rows. A row's
// last 64 bytes are filled up with zeros.
struct PackRowsArgs {
  const char* const* x;  // [rows]
  int rows;
  int64_t bytes;  // of a row, without the bytes between groups
  // The row consists of groups of `group_bytes` bytes (the last may be shorter), which begin
  // `group_stride` bytes apart. group_bytes is a multiple of 64, or there is one group.
  int64_t group_bytes;
  int64_t group_stride;
  char* out;  // [PackedRowsBytes()], aligned to 64 bytes
};
inline constexpr int kMatrixTileRows = 16;
static constexpr int64_t PackedRowsBytes(int64_t rows, int64_t bytes) {
  return (rows + kMatrixTileRows - 1) / kMatrixTileRows * kMatrixTileRows * ((bytes + 63) / 64) *
         64;
}

// Returns the bytes of a row of k int8 values that are widened to 16 bits.
static constexpr int64_t WideRecordBytes(int64_t k) { return (k + 63) / 64 * 128; }

// Multiplies the weights of an int4-k block by their factors, which yields bytes. With many rows
// this is faster than to do it in each tile. The result has, for each kFactorColumns values of k,
// kWideLines lines of 64 bytes for each panel: the minimums times their units as pairs of int16,
// and then the weights of four values of k in each line. The scales d of the panels follow.
struct WidenArgs {
  const char* weights;
  int panels;
  int64_t k;      // at most kWholeRow
  bool fetch_l1;  // whether the block is prefetched, into the first-level cache
  char* out;      // [WidenedBytes()]
};
inline constexpr int kWideLines = 1 + kFactorColumns / 4;
static constexpr int64_t WidenedBytes(int panels, int64_t k) {
  return panels * ((k + kFactorColumns - 1) / kFactorColumns * kWideLines * 64 + 32);
}

// Rounds a row to int8. The row becomes one record per group: int8 values [QuantRecordColumns()]
// (zeros after the row's end), for types with subgroups the negative sums of the values of each
// subgroup as int16, the scale as f32 and a correction as int32. Here scale = (largest
// magnitude in the group) / 127, and value = x / scale rounded to the nearest integer. The scale is
// NaN if an element of the group is not finite. Weights are stored with QuantZero() added, which
// adds QuantZero() * sum(values) to a product; the correction is its negative.
struct QuantizeRowArgs {
  const void* x;
  bool bf16;
  int64_t n;
  Quantization quantization;
  char* records;  // [QuantRecordBytes()]
};

struct EpilogueArgs {
  const float* tile;  // [rows][kBlock]
  int rows;
  int panels;
  bool gated;  // gate and up panels alternate
  Activation activation;
  const float* bias;  // [kBlock] or null
  char* const* out;   // [rows] first output column of this block
  bool out_bf16;
  int cols;  // number of output columns to write
  // The distance from 64 bytes of a row's output to its next 64 bytes, which is larger in the
  // layout of PackRowsArgs.
  int64_t line_stride = 64;
};

struct NormRowArgs {
  const float* x;
  int64_t n;
  int parts;  // NormShape::parts
  bool layer;
  float eps;
  const float* scale;
  const float* shift;  // null if there is none
  void* out;
  bool out_bf16;
};

// The number of positions in an attention block. Blocks begin at multiples of it. A separate
// softmax is computed for each block, and MergeAttention() merges the results.
inline constexpr int kAttentionBlock = 256;
static_assert(kAttentionAlignment % kAttentionBlock == 0);
inline constexpr int kMaxAttentionRows = 32;

// The size of AttentionTileArgs::scratch in floats.
inline constexpr int64_t kAttentionScratch = int64_t{kMaxAttentionRows} * kAttentionBlock;

// Keys and values of one block of positions of one kv head in the layout that a matrix unit loads.
// The tiles of query rows that attend to the block share it.
struct AttentionOperands {
  uint32_t keys_ready = 0;    // a bit for each page
  uint32_t values_ready = 0;  // a bit for each 32 positions
  char* memory = nullptr;     // [AttentionOperandBytes()], aligned to 64 bytes
};
static constexpr int64_t AttentionOperandBytes(int head_dim, int padded_dim) {
  return int64_t{kAttentionBlock} * ((head_dim + 31) / 32 * 32 + padded_dim) * 2;
}

// Attention of query rows of one sequence over one block of positions of one kv head.
struct AttentionTileArgs {
  int rows;                     // 1..attention_rows
  const float* const* queries;  // [rows] each [head_dim]
  // [rows] each row's visible positions [begin, end), at least one of which is in the block.
  // Neither begin nor end decreases from one row to the next.
  const int32_t* begin;
  const int32_t* end;
  KvCacheType type;
  const char* keys;  // the keys of this kv head in page 0 of the layer
  const char* values;
  // Memory for the values of one block of positions, if the values are the first elements of the
  // keys; `values` is then unused. Else null.
  char* latent_values;
  const int32_t* page_table;
  int64_t key_page_bytes;  // bytes of one page of one layer
  int64_t value_page_bytes;
  // Bytes from the keys and values of this kv head to those of the next one, which are prefetched
  // when this one's have been read; 0 if there is no next one.
  int64_t key_head_bytes;
  int64_t value_head_bytes;
  int head_dim;    // of the keys
  int value_dim;   // of the values; only with latent_values
  int padded_dim;  // of the values
  int block;       // the block consists of positions [block, block + 1) * kAttentionBlock
  float scale;
  float soft_cap;  // 0: scores are not capped
  // [rows] the bias of each row's head for its own position, distance 0. The bias of distance n
  // (the row's position minus the key's) is n elements after it: up to bias_distances - 1, whose
  // bias larger distances have too, and likewise from 1 - bias_distances on if the row sees
  // positions after its own. Null if there are no biases.
  const float* const* bias;
  int bias_distances;
  const int32_t* position;  // [rows] each row's own position; only with biases
  float* scratch;           // [kAttentionScratch]
  // Memory for the queries in bf16, aligned to 64 bytes: PackedRowsBytes(rows, head_dim * 2).
  Bf16* rounded_queries;
  // With KernelTable::matrix_rows and a cache in bf16: what is ready of the block's operands; the
  // tile adds what it needs. Else null.
  AttentionOperands* operands;
  // Results over the visible positions of each row in the block: the largest score, the sum of the
  // weights e^(score - largest), and the weighted sum of the values.
  float* largest;  // [rows]
  float* total;    // [rows]
  // [rows rounded up to a power of two][padded_dim]; rows after the last query row are overwritten
  float* sums;
};

// Merges the result of a later block into a row's state.
struct AttentionMergeArgs {
  int padded_dim;
  float* largest;
  float* total;
  float* sums;  // [padded_dim]
  float partial_largest;
  float partial_total;
  const float* partial_sums;  // [padded_dim]
};

// Prepares the inputs of one row of a recurrence, in place (RecurrenceArgs): the lengths of queries
// and keys, the factors of the decays, the strengths.
struct RecurrentInputsArgs {
  RecurrenceSettings settings;
  RecurrentShape shape;
  const float* rate;  // [heads]
  const float* bias;  // [decay_width()]
  float* query;
  float* key;
  float* decay;
  float* strength;
};

// One row of a recurrence, for a block of columns of a head's state.
struct RecurrentRowArgs {
  float* state;  // [key_dim, columns rounded up to a multiple of kPanel], updated
  int key_dim;
  int columns;         // 1..kRecurrentColumns
  const float* query;  // [key_dim]; null: the state advances without a result
  const float* key;    // [key_dim]
  const float* value;  // [columns]
  const float* decay;  // a factor for each row of the state, or one for all
  bool decays_keys;
  bool delta;
  float strength;
  float skip;
  float* out;  // [columns]; may be `value`
};

struct RouteRowArgs {
  const RouteSettings* settings;
  RowSelection selection;
  const float* choice_bias;   // [E]; null without RouteSettings::choice_bias
  const float* expert_scale;  // [E]; null without RouteSettings::expert_scale
  const int32_t* listed;      // [RouteSettings::k] the row's experts in the table; null without
                              // SelectKind::kTable
  float* scores;              // [E] in: scores after bias and temperature; overwritten
  uint64_t* keys;             // scratch [E]
  uint32_t* orders;           // scratch [E]
  float* values;              // scratch [E]
  float* gates;               // scratch [E]
  int32_t* experts;           // out [n] ascending
  float* weights;             // out [n]
  uint8_t* status;            // out: RoutingPlan::row_nonfinite
};

struct KernelTable {
  const char* name;
  bool bf16_dot;  // linear_bf16 reads bf16 rows; if false, the caller widens rows to f32
  int row_tile;
  int quant_row_tile;  // of linear_quantized
  // Returns how many panels of a block the linear kernels cover at once, in tiles of `rows` rows.
  // They cover a block of more panels in several passes, and prefetch in each of them.
  int (*panels_of_tile)(int rows);
  int lines_ahead;     // of 64 bytes, that the tiles of linear layers prefetch in a step
  int attention_rows;  // maximum number of query rows that share loads, up to kMaxAttentionRows

  // The rows that a matrix unit multiplies at once, or 0 if there is none. With a matrix unit,
  // linear_bf16 takes packed rows only, and linear_quantized takes them where
  // QuantTileArgs::packed states.
  int matrix_rows;
  void (*pack_rows)(const PackRowsArgs&);  // null without a matrix unit
  void (*linear_f32)(const LinearTileArgs&);
  void (*linear_bf16)(const LinearTileArgs&);  // null unless bf16_dot
  void (*linear_quantized)(const QuantTileArgs&);
  bool wide_inputs;                       // linear_quantized uses QuantTileArgs::wide
  void (*widen_block)(const WidenArgs&);  // int4-k; null where tiles are faster without it
  void (*quantize_row)(const QuantizeRowArgs&);
  void (*epilogue)(const EpilogueArgs&);
  void (*norm_row)(const NormRowArgs&);
  void (*attention_tile)(const AttentionTileArgs&);
  void (*merge_attention)(const AttentionMergeArgs&);
  // Returns the factor that turns a row's weighted sum of values into its output if the softmax has
  // one more score, `sink`. `largest` and `total` are the row's largest score and the sum of its
  // weights e^(score - largest).
  float (*inverse_with_sink)(float largest, float total, float sink);
  void (*soft_cap)(float cap, float* x, int64_t n);  // x = SoftCap(x, cap)
  // Multiplies x[i], f32 or bf16, by the activation of gate[i], which may be x.
  void (*multiply_by_gate)(void* x, bool bf16, const float* gate, int64_t n,
                           GateActivation activation);
  void (*recurrent_inputs)(const RecurrentInputsArgs&);
  void (*recurrent_row)(const RecurrentRowArgs&);
  // Returns the dot product of two vectors of n elements, with the order of operations specified in
  // kernels/base/routing.h.
  float (*contract_dot)(const float* a, const float* b, int64_t n);
  // Computes the same dot product of each of the rows x[r] [n] with each of `count` vectors, and
  // stores them in dots[r] [count]. The vectors are interleaved in panels of kPanel: columns [count
  // rounded up / kPanel][n][kPanel].
  void (*contract_dots)(const float* columns, const float* const* x, int rows, int64_t n, int count,
                        float* const* dots);
  int (*route_row)(const RouteRowArgs&);  // returns the number of selected experts
  void (*widen_bf16)(const Bf16* in, float* out, int64_t n);
  void (*convert_row)(const float* in, Bf16* out, int64_t n);
  // Converts 16 rows of n values, and stores element i of row r at out[16 i + r].
  void (*interleave_bf16)(const float* const* rows, int64_t n, Bf16* out);
  void (*axpy)(float a, const float* x, float* y, int64_t n);  // y += a * x
  void (*axpy_bf16)(float a, const Bf16* x, float* y, int64_t n);
  // Reads memory with the widest loads and returns the sum of all words; used by the bandwidth
  // probe. `prefetch_level` is the level of the cache that the memory is prefetched into, 1 or 2,
  // or 0 for no prefetches.
  uint64_t (*read_stream)(const char* data, int64_t bytes, int prefetch_level);
  // Arithmetic probes: run `iterations` rounds of products in registers, return the number of
  // operations, and add a value that depends on all results to *sink.
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
extern const KernelTable kAmxBf16Table;
#elif defined(__aarch64__)
extern const KernelTable kNeonTable;
extern const KernelTable kNeonDotTable;
extern const KernelTable kNeonI8mmTable;
extern const KernelTable kNeonBf16Table;
#endif

}  // namespace moeserve::cpu

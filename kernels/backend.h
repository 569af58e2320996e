// The interface of a device backend: it stores weights in a layout of its own and implements the
// coarse operations of a decoder step.
//
// The CPU and CUDA backends implement this interface; engine code uses no other part of them.
// Activations are matrices of rows: every operation computes a row's result from that row (and the
// KV cache) alone, in an order that does not depend on which other rows are present. So a row's
// result is bit-identical whether the row runs alone or in any batch.
//
// Only one thread at a time calls the operations of a backend. The callers in engine/ check all
// arguments; a violated precondition is a broken invariant and stops the process.
//
// Activations and routing plans are in device memory: the host reads them through CopyToHost() and
// HostPlan() only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "base/status.h"
#include "kernels/base/activation.h"
#include "kernels/base/dtype.h"
#include "kernels/base/fp8_matrix.h"
#include "kernels/base/host_tensor.h"
#include "kernels/base/pooling.h"
#include "kernels/base/position_scale.h"
#include "kernels/base/quantize.h"
#include "kernels/base/recurrence.h"
#include "kernels/base/rope.h"
#include "kernels/base/route_settings.h"
#include "kernels/kv_cache_storage.h"
#include "kernels/route_counters.h"
#include "kernels/state_storage.h"

namespace moeserve {

// A matrix of activations, row-major. Copies are cheap; the view does not own the memory.
struct RowsView {
  void* data = nullptr;
  DType dtype = DType::kF32;  // kF32 or kBF16
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;  // elements from the start of a row to the start of the next, >= cols

  char* row(int64_t r) const {
    return static_cast<char*>(data) + r * stride * static_cast<int64_t>(SizeOf(dtype));
  }
  // Returns a view of columns [begin, begin + count) of every row.
  RowsView Columns(int64_t begin, int64_t count) const {
    RowsView v = *this;
    v.data = static_cast<char*>(data) + begin * static_cast<int64_t>(SizeOf(dtype));
    v.cols = count;
    return v;
  }
  // Returns a view of rows [begin, begin + count).
  RowsView Rows(int64_t begin, int64_t count) const {
    RowsView v = *this;
    v.data = row(begin);
    v.rows = count;
    return v;
  }
};

// Device memory for activations.
class DeviceBuffer {
 public:
  virtual ~DeviceBuffer() = default;
  virtual void* data() const = 0;
  virtual size_t bytes() const = 0;
};

// E linear layers, possibly of different widths, in the device's layout. A dense linear layer is a
// bank with E = 1.
struct LinearBankShape {
  std::vector<int> in_features;  // [E], or one value for all experts
  // [E]; if gated, the width of each half (gate and up). 0: the expert has no matrix, and its rows
  // are not written.
  std::vector<int> out_features;
  bool gated = false;  // every output is act(gate) * up
  bool bias = false;
  DType weight_dtype = DType::kF32;  // the type in which weights are stored if not quantized
  // Unless kNone, weights are stored as integers; weight_dtype is then kBF16, and the bank rounds
  // input rows (f32 or bf16) to int8 in groups of QuantGroup() columns.
  Quantization quantization = Quantization::kNone;
  // The weights, of weight_dtype kBF16, are 4-bit floats (E2M1) times a power of two that 32 inputs
  // share, and the bank stores them so (Backend::stores_mxfp4()). Input rows are bf16, and results
  // have the same bits as with bf16 weights.
  bool mxfp4 = false;
  // The weights, of weight_dtype kBF16, are FP8 numbers (Fp8Matrix), and the bank stores them so
  // (Backend::stores_fp8()); LinearBank::LoadFp8() loads them. Input rows are bf16. The products of
  // 128 inputs are summed without the scale; their sum is multiplied by the scale and added to the
  // sum of all by one fused multiply-add in f32, in ascending order of the inputs. So results do
  // not have the bits of weights that were rounded to bf16.
  bool fp8 = false;
  // The sizes of all experts of the layer, if this rank lacks some of them, which are then absent:
  // out_features has 0 in their place, and in_features may. Rows are given to experts that are here
  // only. A device whose sums depend on the sizes of a bank must derive them from these. Empty: no
  // expert is absent.
  std::vector<int> layer_in_features = {};
  std::vector<int> layer_out_features = {};

  int in_features_of(int e) const {
    return in_features.size() == 1 ? in_features[0] : in_features[e];
  }
  // Returns whether other ranks have the expert.
  bool is_absent(int e) const {
    return !layer_out_features.empty() && layer_out_features[e] > 0 && out_features[e] == 0;
  }
  // Returns the shape of a bank with all experts of the layer.
  LinearBankShape layer() const {
    LinearBankShape all = *this;
    if (!layer_out_features.empty()) {
      all.in_features = layer_in_features;
      all.out_features = layer_out_features;
    }
    all.layer_in_features.clear();
    all.layer_out_features.clear();
    return all;
  }
};

// The packed weights of a bank in read-only host memory; `owner` keeps it alive.
struct PackedBytes {
  std::vector<std::span<const char>> experts;  // [E]; empty for experts of width 0
  std::shared_ptr<const void> owner;
};

class LinearBank {
 public:
  enum class Half : uint8_t { kMain, kGate };  // kGate exists only if gated; the up half is kMain

  virtual ~LinearBank() = default;
  // Copies `weight` [n, in_features_of(expert)] into rows [row_begin, row_begin + n) of the matrix
  // of `expert`. Any dtype is accepted and converted to the stored one.
  virtual void LoadWeight(int expert, Half half, int row_begin, const HostTensor& weight) = 0;
  // Like LoadWeight(), for a bank whose quantization is weight.type: integers and scales are stored
  // unchanged.
  virtual void LoadQuantized(int expert, Half half, int row_begin,
                             const QuantizedMatrix& weight) = 0;
  virtual void LoadBias(int expert, Half half, int row_begin, const HostTensor& bias) = 0;
  // Only for banks with LinearBankShape::fp8, which take no other weights.
  virtual void LoadFp8(int expert, Half half, int row_begin, const Fp8Matrix& weight) {
    (void)expert, (void)half, (void)row_begin, (void)weight;
    MOESERVE_CHECK(false, "this device has no banks of FP8");
  }

  // Returns whether the bank holds the weights that were loaded. Only a bank with
  // LinearBankShape::mxfp4 or fp8 may not: a weight was no 4-bit float or too large, or a NaN of
  // FP8. It must not be used.
  virtual bool holds_weights() const { return true; }

  // Returns the loaded weights and biases of an expert in the format that Backend::NewPackedBank()
  // reads; empty if the device has no such format or the expert's width is 0. The span is valid
  // while the bank exists.
  virtual std::span<const char> packed_bytes(int expert) const {
    (void)expert;
    return {};
  }

  const LinearBankShape& shape() const { return shape_; }
  int num_experts() const { return static_cast<int>(shape_.out_features.size()); }

 protected:
  explicit LinearBank(LinearBankShape shape) : shape_(std::move(shape)) {}
  LinearBankShape shape_;
};

// The f32 vectors of one or more norms of the same kind, which are numbered and called groups: each
// group has one scale vector and, for layer norm, one shift vector.
class NormBank {
 public:
  virtual ~NormBank() = default;
};

struct NormShape {
  bool layer = false;  // true: layer norm (subtracts the mean, adds a shift); false: RMS norm
  float eps = 1e-5f;
  // Above 1: a vector consists of this many adjacent parts of equal size, and each is normalised by
  // itself.
  int parts = 1;
};

class EmbeddingTable {
 public:
  virtual ~EmbeddingTable() = default;
  // Returns the first byte of the tensor that the table reads in place; null if it has a copy.
  virtual const void* read_in_place() const { return nullptr; }
};

// The router of one MoE block with its settings. Its tensors are widened to f32.
class Router {
 public:
  virtual ~Router() = default;
};

struct RouterTensors {
  HostTensor weight;  // dot router: [E, c]; cosine router: the expert vectors [E, dim]
  HostTensor bias;    // dot router: [E]; cosine router: bias of the projection [dim]; null data if
                      // there is none
  HostTensor projection;    // cosine router only: [dim, c]
  HostTensor choice_bias;   // [E]; null data without RouteSettings::choice_bias
  HostTensor row_weight;    // [c]; null data unless RouteSettings::row_norm is kRmsWeight
  HostTensor expert_scale;  // [E]; null data without RouteSettings::expert_scale
  // [vocabulary, RouteSettings::k] with SelectKind::kTable, else empty: the experts of each token,
  // distinct and in [0, E).
  std::vector<int32_t> table;
  float temperature = 0.0f;  // the stored value, before RouteSettings::temperature is applied
};

// Which experts compute which rows, as compressed sparse rows in both directions (assignments of an
// expert, assignments of a row). An assignment is a (row, expert) pair; assignments are sorted by
// expert, then by row, and A is their number. All arrays are in device memory and are valid until
// the backend's next Route() with the same slot. Padding rows have no assignments.
struct RoutingPlan {
  int rows = 0;
  int num_experts = 0;
  int num_assignments = 0;  // A; -1 if only the device has it, in expert_offsets[E]
  int capacity = 0;     // upper bound of A; an array with a row per assignment has this many rows
  int expected = 0;     // about how large A is, 0: capacity; a backend may choose its kernels by it
  int most_of_row = 0;  // upper bound of a row's assignments if this is a part of a plan; else 0
  const int32_t* expert_offsets = nullptr;        // [E + 1]
  const int32_t* expert_of_assignment = nullptr;  // [A]
  const int32_t* row_of_assignment = nullptr;     // [A]
  const float* weight_of_assignment = nullptr;    // [A] final gate weight
  const int32_t* row_offsets = nullptr;           // [rows + 1]
  const int32_t* assignments_of_row = nullptr;  // [A] assignment indices of each row, ascending by
                                                // expert
  // The order of the experts in which a backend that computes them one after another should do so,
  // [num_experts] in host memory: first all of order[0, num_early), then the others. Null:
  // ascending. Results do not depend on it.
  const int32_t* order = nullptr;
  int num_early = 0;
  const uint8_t* row_nonfinite = nullptr;  // [rows] 2 if the largest score (NaN ignored) is not
                                           // finite; else 1 if a score is NaN; else 0

  // Returns an upper bound of the assignments of a row. All parts of a plan have that of the plan.
  int MostOfRow() const {
    if (most_of_row > 0) return most_of_row;
    return rows == 0 ? 1 : capacity / rows;
  }
};

// What AssignRows() writes for the assignments of an expert, besides rows of constants.
inline constexpr int32_t kAssignNothing = -1;  // it leaves the rows as they are
inline constexpr int32_t kAssignZeros = -2;
inline constexpr int32_t kAssignInput = -3;  // the input row

// Writes the rows of assignments without a product, in f32 or bf16. With `weighted`, input rows are
// multiplied by the weights of the assignments.
struct AssignRowsArgs {
  const RoutingPlan* plan = nullptr;
  // [num_experts] in device memory: the row of `constants` that the assignments of an expert get,
  // or one of the values above. Null: kAssignInput for all experts.
  const int32_t* sources = nullptr;
  int first = 0;  // the sources of the experts before this one are kAssignNothing
  const float* constants = nullptr;  // [any, output.cols] in device memory
  RowsView input;                    // [plan->rows, output.cols]; f32 or bf16
  RowsView output;                   // [plan->capacity, cols]
  bool weighted = false;
};

// Routes used instead of the router's choice (in parity tests), as compressed sparse rows. The
// experts of a row are ascending.
struct GivenRoutes {
  std::vector<int32_t> offsets;  // [rows + 1]
  std::vector<int32_t> experts;  // [A]
  std::vector<float> weights;    // [A]
};

struct AddNormArgs;
struct CombineArgs;

// Computes output[a] = epilogue(input[source_row(a)] * W_e^T + b_e) for every assignment a to an
// expert e. Only the first in_features_of(e) columns of an input row are used.
struct LinearArgs {
  const LinearBank* bank = nullptr;
  const RoutingPlan* plan = nullptr;  // null: every row of `input` uses the only expert
  bool gather = false;                // source_row(a) is plan->row_of_assignment[a] if true, else a
  RowsView input;
  // One row per assignment (the plan's capacity), or per input row without a plan. Its columns are
  // at least the largest out_features, which pad_output rounds up to a multiple of 16.
  RowsView output;
  Activation activation = {};
  // Without a plan: the columns of input and output consist of E equal segments each, and expert e
  // computes segment e of every output row from segment e of the input row.
  bool segments = false;
  bool pad_output = false;  // allows writing zeros into columns up to the next multiple of 16
  // If not null, AddNorm(*norm) and Combine(*sum) come first. Their output may be `input`, or its
  // sub-tokens.
  const AddNormArgs* norm = nullptr;
  const CombineArgs* sum = nullptr;
};

// Computes output[a] = down(epilogue(up(input[source_row(a)]))). The hidden units are rounded to
// the dtype of the input, as they are between two Linear() calls, so the results are equal.
struct FeedForwardArgs {
  const LinearBank* up = nullptr;
  const LinearBank* down = nullptr;
  const RoutingPlan* plan = nullptr;  // null: every row of `input` uses the only expert
  bool gather = false;                // source_row(a) is plan->row_of_assignment[a] if true, else a
  RowsView input;
  RowsView output;  // f32 or bf16 [capacity, out_features of down]
  Activation activation = {};
};

struct NormArgs {
  const NormBank* bank = nullptr;
  const RoutingPlan* plan = nullptr;  // assignment a uses the group of its expert; null: every row
                                      // uses group 0
  int segments = 1;  // number of adjacent vectors in a row; each is normalised separately
  RowsView input;    // f32
  RowsView output;   // f32 or bf16; may be `input`
};

// Computes output[r] = residual[r] (if set) + the sum of weight * results[a] over the row's
// assignments a (or of results[a] alone, without `weighted`), in f32 and in ascending order of
// experts. `results` is f32 or bf16, whichever the model's activations are stored in.
struct CombineArgs {
  const RoutingPlan* plan = nullptr;
  RowsView results;                    // [A, c]
  const RowsView* residual = nullptr;  // the sub-token itself (MH-MoE eq. 6), or null
  RowsView output;                     // f32 or bf16 [rows, c]
  bool weighted = true;
};

// Computes x += scale * (branch + bias), then output = norm(x): the end of one residual branch of a
// layer and the beginning of the next branch.
struct AddNormArgs {
  RowsView x;       // f32
  RowsView branch;  // f32
  // If not null, Combine(*sum) comes first. It writes `branch`, whose contents are undefined
  // afterwards, because a backend may compute everything at once.
  const CombineArgs* sum = nullptr;
  const float* bias = nullptr;  // [cols] in device memory, or null
  float scale = 1.0f;
  const NormBank* norm = nullptr;
  RowsView output;  // f32 or bf16; may be `x`
};

// Computes (token * scale + type) + position for each token, in this order, without what is absent.
struct EmbedArgs {
  const EmbeddingTable* tokens = nullptr;
  const EmbeddingTable* types = nullptr;      // rows of StepInputs::token_types; null: none
  const EmbeddingTable* positions = nullptr;  // learned positions; null if there are none
  // Adds to column j of the first half of the columns the sine of position * f_j, and to the same
  // column of the second half the cosine. f_j is 10000^(-j / (d/2 - 1)), as in fairseq, or, with
  // half_spacing, 10000^(-2j / d), as in Marian.
  bool sinusoidal = false;
  bool half_spacing = false;
  int first_position = 0;  // sinusoidal: added to the tokens' positions
  float scale = 1.0f;      // factor of the token embeddings
  RowsView output;         // f32 [T, d]
};

struct RopeArgs {
  RopeSettings settings;              // with XPOS, `keys` tells what the rows are
  const RoutingPlan* plan = nullptr;  // if set, `rows` are the plan's assignments; null: row r is
                                      // token first_token + r
  RowsView rows;                      // f32, updated in place; the heads of a row are adjacent
  int64_t first_token = 0;            // not 0 only on devices with rank_ops()
};

struct PositionScaleArgs {
  PositionScale scale;
  RowsView rows;            // f32, updated in place; row r is token first_token + r
  int64_t first_token = 0;  // as in RopeArgs
};

// G is the layer's number of kv heads, d_h its head dimension.
struct AppendKvArgs {
  KvCacheStorage* cache = nullptr;
  int layer = 0;
  RowsView keys;    // f32 [T, G * d_h]
  RowsView values;  // f32 [T, G * value_dim]; unused with KvLayerShape::latent_dim
};

// Views of the queries, keys and values in the rows of a QKV projection.
struct QkvColumns {
  RowsView query, keys, values;
};

// Prepares the rows of a QKV projection for attention: normalises queries and keys, applies rotary
// positions to both (in this or the opposite order), and writes keys and values to the cache.
struct NormRopeAppendArgs {
  KvCacheStorage* cache = nullptr;
  int layer = 0;
  // f32 [T, (H + G) * d_h + G * value_dim]: the columns of a row hold queries, keys, values.
  // Queries are updated in place; the contents of keys and values are unspecified afterwards. G,
  // d_h and value_dim are those of the cache's layer.
  RowsView rows;
  int heads = 0;                         // H; 0 if there are no queries
  const NormBank* query_norm = nullptr;  // one group; null disables the norm
  const NormBank* key_norm = nullptr;    // one group; null disables the norm
  bool norm_heads = true;  // true: each head is normalised separately; false: all heads of a row
                           // together
  bool norm_last = false;  // true: normalises after the rotation; false: before it
  // Above 0: queries, keys and values are limited to [-clip, clip] before the rotation (and after a
  // norm before it).
  float clip = 0.0f;
  RopeSettings rope;  // head_dim is d_h; dimensions = 0 disables rotation; `keys` is ignored

  // Return the settings for the queries and for the keys, which differ with XPOS only.
  RopeSettings query_rope() const { return RopeOf(false); }
  RopeSettings key_rope() const { return RopeOf(rope.xpos_base > 0.0); }

  QkvColumns columns() const {
    const KvLayerShape& shape = cache->shape(layer);
    const int64_t query = int64_t{heads} * shape.head_dim;
    const int64_t keys = int64_t{shape.num_kv_heads} * shape.head_dim;
    const int64_t values = int64_t{shape.num_kv_heads} * shape.value_dim();
    return {rows.Columns(0, query), rows.Columns(query, keys), rows.Columns(query + keys, values)};
  }

 private:
  RopeSettings RopeOf(bool keys) const {
    RopeSettings settings = rope;
    settings.keys = keys;
    return settings;
  }
};

// The kv head (of G) that query head h (of H) reads.
enum class HeadOrder : uint8_t {
  kInterleave,  // floor(h / (H / G))
  kTile         // h mod G
};

// The positions that a row attends to, in the page table that the layer has of the row's sequence.
// p is the row's position, w the window if it is above 0:
// - causal: [0, p]; with a window, those above p - w, or, with `chunks`, those from p - p mod w on.
// - otherwise: [0, n), where n is the table's StepInputs::lengths; with a window, only positions j
//   with |p - j| < w, at least one of which must be in [0, n). Without a window, p need not be in
//   [0, n): so it is in cross-attention, whose table has the positions of the source.
struct AttentionArgs {
  const KvCacheStorage* cache = nullptr;
  int layer = 0;
  bool causal = true;
  const RoutingPlan* plan = nullptr;  // if set, query rows are the plan's assignments; null: row r
                                      // is token first_token + r
  int64_t first_token = 0;            // as in RopeArgs
  int rows_per_token = 1;  // query rows that a token has by the model's shape, which is k with
                           // experts of attention; the results' bits may depend on it
  int heads = 1;           // H, heads of a query row; a multiple of the cache's number of kv heads
  HeadOrder order = HeadOrder::kInterleave;
  float scale = 1.0f;
  float soft_cap = 0.0f;  // above 0: scaled scores become SoftCap(score, soft_cap)
  // f32 [heads] in device memory: each head's softmax has one more score of this value, whose
  // position has no value to add. Null if there are none.
  const float* sinks = nullptr;
  // The biases of a head by distance n, the query's position minus the key's, in device memory;
  // they are added to scaled scores. With D = bias_distances:
  // - causal: f32 [heads, D], the bias is element min(n, D - 1).
  // - otherwise: f32 [heads, 2 D - 1], the bias is element clamp(n, 1 - D, D - 1) + D - 1.
  // Null if there are none; must be null with a soft cap and with latent vectors.
  const float* bias = nullptr;
  int bias_distances = 0;
  int window = 0;       // size of the sliding window in positions; 0 disables it
  bool chunks = false;  // causal only: the window does not slide, but moves on by its whole size
  // If not null, NormRopeAppend(*append) comes first. Its queries, if it has any, are `query`.
  const NormRopeAppendArgs* append = nullptr;
  // If not null, the query rows are rotated first, as by Rope() with these settings and `plan`.
  // With `append` or `rope`, the contents of `query` are unspecified afterwards.
  const RopeSettings* rope = nullptr;
  RowsView query;   // f32 [Q, heads * d_h]
  RowsView output;  // f32 or bf16 [Q, heads * value_dim]
};

// A convolution over the last tokens, for each column by itself, with taps summed from the oldest
// row to the newest one:
//   y[t] = bias + sum over j in [0, taps) of weight[j] * u[t - taps + 1 + j]
// Rows before those of the step come from the sequence's state, which has taps - 1 rows.
// - gated (LFM2): with the columns b, c and x of a row of the input, u = b * x, output = c * y.
// - otherwise: u is the input, output = y * sigmoid(y).
struct ShortConvolutionArgs {
  StateStorage* states = nullptr;
  int block = 0;  // of the states
  bool gated = true;
  int taps = 1;
  const float* weight = nullptr;  // [taps, cols] in device memory
  const float* bias = nullptr;    // [cols] in device memory, or null
  RowsView input;                 // f32 [T, 3 * cols]: b, c, x; not gated: [T, cols]
  RowsView output;                // f32 or bf16 [T, cols]
};

// Advances the states of a recurrence over the rows of the step, each sequence's in ascending
// order, and writes what the queries read after each row. With the RecurrentShape of the states,
// a head's state S [key_dim, value_dim], and its row's query q, key k and value v:
//   delta:     S = decay * S;  S += k (strength * (v - S^T k))^T;  output = S^T q
//   otherwise: S = decay * S;  S += k (strength * v)^T;            output = S^T q + skip * v
// where decay multiplies the rows of S. With delta, queries and keys are divided by their length
// before, and queries by sqrt(key_dim), too. Decays and strengths are those of
// kernels/base/recurrence.h.
struct RecurrenceArgs {
  StateStorage* states = nullptr;
  int block = 0;  // of the states
  RecurrenceSettings settings;
  const float* rate = nullptr;  // [heads] in device memory
  const float* bias = nullptr;  // [decay_width()] of the decays' inputs, in device memory
  const float* skip = nullptr;  // [heads] in device memory, or null
  // f32 [T, key_width()], [T, key_width()], [T, value_width()]; queries and keys are overwritten.
  RowsView queries, keys, values;
  RowsView decays;     // f32 [T, decay_width()]: inputs without bias; overwritten
  RowsView strengths;  // f32 [T, heads]: inputs with the delta rule, else none; overwritten
  RowsView output;     // f32 [T, value_width()]; may be `values`
};

struct RouteArgs {
  const Router* router = nullptr;
  // f32 or bf16 [rows, c]. With a table (SelectKind::kTable), a step must have begun, and each of
  // its tokens has the same number of adjacent rows.
  RowsView input;
  // If not null, AddNorm(*norm) comes first. Its output may be `input`.
  const AddNormArgs* norm = nullptr;
  const GivenRoutes* given = nullptr;  // if set, replaces the router's choice
  int slot = 0;  // a plan stays valid until the next Route() with the same slot
  // If set, f32 [rows, E] that receives the scores after the router's bias and temperature, without
  // the bias of any RouteOverride.
  const RowsView* scores = nullptr;
  std::span<const RouteOverride> overrides = {};  // [rows], or empty for no overrides
};

// Computes output[i] from the rows that StepInputs::pool_ranges names i-th: kMean adds them in
// ascending order in f32, then divides once by their number; kMax takes the largest element of each
// column, and NaN where one is NaN.
struct PoolArgs {
  PoolKind kind = PoolKind::kMean;
  RowsView input;   // f32 [T, d]
  RowsView output;  // f32 [P, d]
};

// The maximum number of alternative tokens that a device returns per sampled token.
inline constexpr int kMaxAlternatives = 20;

// The sampling parameters of one row of logits (kernels/base/sampling.h).
struct SampleRow {
  float scale;       // SamplingScale(temperature); 0 selects the most probable token
  int32_t top_k;     // a value of 0 or below disables the limit
  double top_p;      // [0, 1]
  float min_p;       // [0, 1]
  int32_t row;       // row of the logits; if negative, nothing is drawn and no result is written
  double uniform;    // UniformDraw for this row, in [0, 1)
  int32_t logprobs;  // number of alternatives, up to kMaxAlternatives; -1: no log-probability
  // Only ids in [0, drawable) are drawn, ranked and listed as alternatives; 0: all ids. The softmax
  // of log-probabilities is over all ids.
  int32_t drawable;
};

struct SampleResult {
  int32_t token;   // -1 if a logit is NaN
  int32_t finite;  // 0 if a logit is NaN or infinite; `token` is valid unless one is NaN
  // The following members are valid if logprobs >= 0 and no logit is NaN. Log-probabilities are
  // those of the softmax of the unmodified logits.
  float logprob;
  int32_t rank;  // number of tokens that are more probable; of equal logits, the lower id ranks
                 // first
  // The most probable tokens, descending, as many as SampleRow::logprobs asks for or can be drawn.
  // Further entries are not written.
  float top_logprob[kMaxAlternatives];
  int32_t top_token[kMaxAlternatives];
};

// The rows [begin, end) of a matrix.
struct RowRange {
  int32_t begin, end;
};

// The tokens of a step, from several sequences, as the operations read them. T is the number of
// tokens, S the number of sequences.
struct StepInputs {
  std::span<const int32_t> token_ids = {};  // [T]
  std::span<const int32_t> position = {};   // [T]
  std::span<const int32_t> sequence = {};   // [T] the index of the token's sequence
  // [S, cache->num_tables()] the pages of each sequence
  std::span<const std::span<const int32_t>> page_tables = {};
  // [S, cache->num_tables()] the number of positions that a sequence has in each of its tables, all
  // of them written before attention reads them; at least 1 where a layer that is not causal reads
  // the table. Empty if attention of all layers is causal.
  std::span<const int32_t> lengths = {};
  // [T] 1 for the tokens of long sequences (RopeScalingKind::kLong), else 0; empty: all 0.
  std::span<const uint8_t> long_sequence = {};
  // [T] the row of EmbedArgs::types of each token; empty: all 0.
  std::span<const uint8_t> token_types = {};
  const KvCacheStorage* cache = nullptr;        // the only cache that the step's operations use
  const StateStorage* state_storage = nullptr;  // the only states that they use; may be null
  StepStates states = {};                       // empty without state_storage
  std::span<const int32_t> output_rows = {};    // rows that GatherOutputRows() copies
  // [T] or empty: rows that GatherSourceRows() copies
  std::span<const int32_t> source_rows = {};
  // [P] non-empty ranges of rows that PoolRows() pools. A step that has some is not replayable.
  std::span<const RowRange> pool_ranges = {};
  std::span<const SampleRow> samples = {};  // [output_rows] what Sample() draws, or empty
  RouteCounters* counters = nullptr;   // receives the counts of the step's plans; null: not counted
  std::span<const uint8_t> kind = {};  // [T] kTokenPrefill, kTokenDecode and so on; only with
                                       // counters
  bool count_later = false;            // whether the step is counted by CountStep() and not before;
                                       // only with counters
  int variant = 0;                     // distinguishes replayable steps whose operations differ
};

// Per-token results of a step, apart from its logits; valid until the next step.
struct StepOutcome {
  std::span<const uint8_t> failed;  // [T] 1 if some row of the token had no finite largest router
                                    // score
  std::span<const TokenRoutes> routes;  // [T] routes in the MoE blocks that are counted; empty
                                        // without counters and with StepInputs::count_later
};

// The numbers of rows that the operations of a step process; padding can make them larger than the
// numbers of rows in the inputs.
struct StepRows {
  int64_t tokens = 0;
  int64_t outputs = 0;
};

// The types of products that the arithmetic probe times: f32; bf16 summed in f32; int8 summed in
// int32.
enum class ArithmeticKind : uint8_t { kF32, kBF16, kInt8 };

// Host code that takes part in a step, such as the exchange of rows with another process.
class HostExchange {
 public:
  virtual ~HostExchange() = default;
  // Fills `received` with the answer to `sent`; both are rows without padding. May run on a thread
  // of the device's, and must not call the backend.
  virtual void Run(std::span<const std::byte> sent, std::span<std::byte> received) = 0;
};

struct ExchangeArgs {
  RowsView send;
  RowsView receive;
  HostExchange* exchange = nullptr;
};

class RankOps;
class WeightPages;

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string_view name() const = 0;         // "cpu", "cuda"
  virtual std::string_view description() const = 0;  // e.g. "cpu, avx512_bf16, 2 threads"
  // The number of threads and the name of the instruction set of a CPU backend. Other backends
  // return 0 and an empty name.
  virtual int threads() const { return 0; }
  virtual std::string_view instruction_set() const { return {}; }

  // Returns what users of this backend should know about the layers computed so far, as whole
  // sentences without a final stop.
  virtual std::vector<std::string> warnings() const { return {}; }

  // Setup. A function that runs out of memory returns ResourceExhausted; the message states the
  // size.
  virtual Result<std::unique_ptr<DeviceBuffer>> Allocate(size_t bytes) = 0;
  // Returns Unimplemented for integer weights of a type for which the device has no products.
  virtual Result<std::unique_ptr<LinearBank>> NewLinearBank(LinearBankShape shape) = 0;
  // Returns whether banks may have LinearBankShape::mxfp4.
  virtual bool stores_mxfp4() const { return false; }
  // Returns whether banks may have LinearBankShape::fp8.
  virtual bool stores_fp8() const { return false; }
  // Returns the name of the layout of packed_bytes(). The layout depends on the shape of a bank
  // alone. Layouts that assign different weights to the same bytes have different names. Empty if
  // the device has no packed format.
  virtual std::string_view packed_layout() const { return {}; }
  // Returns the size of packed_bytes(expert) for a bank of that shape.
  virtual int64_t PackedExpertBytes(const LinearBankShape& shape, int expert) const {
    (void)shape, (void)expert;
    return 0;
  }
  // Returns a bank that reads its weights from `packed` (PackedExpertBytes(shape, e) bytes of each
  // expert e, 64-byte aligned). Load*() must not be called on that bank. No content of `packed`
  // causes an access out of bounds. Unimplemented if packed_layout() is empty.
  virtual Result<std::unique_ptr<LinearBank>> NewPackedBank(LinearBankShape shape,
                                                            PackedBytes packed) {
    (void)shape, (void)packed;
    return absl::UnimplementedError("this device has no packed banks");
  }
  // scales[e] is the scale vector [n_e] of group e; shifts is empty unless shape.layer.
  virtual Result<std::unique_ptr<NormBank>> NewNormBank(NormShape shape,
                                                        std::span<const HostTensor> scales,
                                                        std::span<const HostTensor> shifts) = 0;
  // If `table` has an owner, the backend may read the tensor in place instead of copying it.
  virtual Result<std::unique_ptr<EmbeddingTable>> NewEmbeddingTable(const HostTensor& table) = 0;
  // For tied embeddings: the table reads the rows of the only matrix of `bank` without a copy, so
  // `bank` must outlive it.
  virtual Result<std::unique_ptr<EmbeddingTable>> NewTiedEmbeddingTable(const LinearBank& bank) = 0;
  virtual Result<std::unique_ptr<Router>> NewRouter(const RouteSettings& settings,
                                                    const RouterTensors& tensors) = 0;
  // Returns a copy in device memory.
  virtual Result<std::unique_ptr<DeviceBuffer>> UploadBytes(std::span<const std::byte> bytes) = 0;
  Result<std::unique_ptr<DeviceBuffer>> Upload(std::span<const float> values) {
    return UploadBytes(std::as_bytes(values));
  }
  Result<std::unique_ptr<DeviceBuffer>> Upload(std::span<const int32_t> values) {
    return UploadBytes(std::as_bytes(values));
  }
  // Returns Unimplemented if the device has no cache of this type.
  virtual Result<std::unique_ptr<KvCacheStorage>> NewKvCache(std::vector<KvLayerShape> layers,
                                                             KvCacheType type,
                                                             std::vector<int64_t> num_pages) = 0;
  // Returns the bytes of one page of such layers, summed over them.
  virtual int64_t PageBytes(std::span<const KvLayerShape> layers, KvCacheType type) const = 0;

  // Returns states whose contents are undefined.
  virtual Result<std::unique_ptr<StateStorage>> NewStates(std::vector<StateShape> shapes,
                                                          int num_slots, int pending_rows) = 0;

  // A step consists of a call of BeginStep(), then of RunStep() with the step's operations.
  //
  // The spans in `inputs` must stay valid until the next BeginStep(). A `replayable` step issues
  // the same operations on the same memory as every other step of `owner` with the same number of
  // rows, variant, cache and counters. So a backend may pad the rows of a replayable step, record
  // its operations once and replay them. A step that is not replayable is not padded.
  virtual StepRows BeginStep(const StepInputs& inputs, const void* owner, bool replayable) = 0;
  virtual void RunStep(const std::function<void()>& operations) = 0;
  // Drops the recordings of the steps of `owner`. Must be called before the memory that these steps
  // use is freed.
  virtual void ForgetSteps(const void* owner) = 0;

  virtual void Embed(const EmbedArgs& args) = 0;
  virtual void Norm(const NormArgs& args) = 0;
  virtual void Linear(const LinearArgs& args) = 0;
  // Computes what comes before a linear layer, by operations of their own.
  void PrepareLinear(const LinearArgs& args) {
    if (args.norm != nullptr) AddNorm(*args.norm);
    if (args.sum != nullptr) Combine(*args.sum);
  }
  // Returns whether FusedFeedForward() supports this call and is expected to be faster than two
  // Linear() calls. Does not read the plan's arrays or the rows.
  virtual bool FusesFeedForward(const FeedForwardArgs& args) const {
    (void)args;
    return false;
  }
  virtual void FusedFeedForward(const FeedForwardArgs& args) { (void)args; }
  virtual void Rope(const RopeArgs& args) = 0;
  virtual void ScaleByPosition(const PositionScaleArgs& args) = 0;
  virtual void AppendKv(const AppendKvArgs& args) = 0;
  // Has bit-identical results to Norm(), Clamp(), Rope() and AppendKv() called one after another.
  virtual void NormRopeAppend(const NormRopeAppendArgs& args) {
    const auto [query, keys, values] = args.columns();
    const int kv_heads = args.cache->shape(args.layer).num_kv_heads;
    const auto norm = [&](const NormBank* bank, const RowsView& rows, int heads) {
      if (bank == nullptr || rows.cols == 0) return;
      Norm({.bank = bank, .segments = args.norm_heads ? heads : 1, .input = rows, .output = rows});
    };
    const auto norms = [&, &query = query, &keys = keys] {
      norm(args.query_norm, query, args.heads);
      norm(args.key_norm, keys, kv_heads);
    };
    if (!args.norm_last) norms();
    if (args.clip > 0.0f) {
      Clamp(args.rows.Columns(0, query.cols + keys.cols + values.cols), args.clip);
    }
    if (args.rope.dimensions > 0 && args.rope.xpos_base > 0.0) {
      if (query.cols > 0) Rope({.settings = args.query_rope(), .rows = query});
      Rope({.settings = args.key_rope(), .rows = keys});
    } else if (args.rope.dimensions > 0) {
      // Queries and keys are adjacent, so one call rotates both.
      Rope({.settings = args.rope, .rows = args.rows.Columns(0, query.cols + keys.cols)});
    }
    if (args.norm_last) norms();
    AppendKv({.cache = args.cache, .layer = args.layer, .keys = keys, .values = values});
  }
  virtual void Attention(const AttentionArgs& args) = 0;
  // Computes what comes before an attention, by operations of their own.
  void PrepareAttention(const AttentionArgs& args) {
    if (args.append != nullptr) NormRopeAppend(*args.append);
    if (args.rope != nullptr) {
      Rope({.settings = *args.rope,
            .plan = args.plan,
            .rows = args.query,
            .first_token = args.first_token});
    }
  }
  virtual void ShortConvolution(const ShortConvolutionArgs& args) = 0;
  virtual void Recurrence(const RecurrenceArgs& args) = 0;
  virtual RoutingPlan Route(const RouteArgs& args) = 0;
  // Returns the part of a plan that belongs to the experts [0, count). Its row_offsets and
  // assignments_of_row are null; the other arrays are those of `plan`.
  virtual RoutingPlan FirstExperts(const RoutingPlan& plan, int count) const {
    RoutingPlan part = plan;
    part.num_experts = count;
    part.num_assignments = -1;
    part.row_offsets = part.assignments_of_row = nullptr;
    return part;
  }
  // Returns the operations for a part of the experts (kernels/rank_ops.h), which live as long as
  // the backend; null if it computes all experts only.
  virtual RankOps* rank_ops() { return nullptr; }
  // Returns the operations on weights in mapped files (kernels/weight_pages.h), which live as long
  // as the backend; null without a packed layout.
  virtual WeightPages* weight_pages() { return nullptr; }
  virtual void AssignRows(const AssignRowsArgs& args) = 0;
  virtual void Combine(const CombineArgs& args) = 0;
  // Converts or copies rows: output = input (f32 to f32 or bf16, bf16 to f32).
  virtual void Convert(const RowsView& input, const RowsView& output) = 0;
  // Computes x += scale * (branch + bias); bias is f32 [cols] in device memory, or null.
  virtual void AddScaled(const RowsView& x, const RowsView& branch, const float* bias,
                         float scale) = 0;
  virtual void AddNorm(const AddNormArgs& args) {
    if (args.sum != nullptr) Combine(*args.sum);
    AddScaled(args.x, args.branch, args.bias, args.scale);
    Norm({.bank = args.norm, .input = args.x, .output = args.output});
  }
  // Computes x[r] *= sigmoid(gate[r][0]), all f32: the gate of a shared expert.
  virtual void ScaleBySigmoid(const RowsView& x, const RowsView& gate) = 0;
  // Multiplies x, f32 or bf16, by the activation of `gate`, f32: the gate of the heads of a layer.
  // Each column of `gate` is that of x.cols / gate.cols adjacent columns of x.
  virtual void MultiplyByGate(const RowsView& x, const RowsView& gate,
                              GateActivation activation) = 0;
  // Computes output[i] = input[output_rows[i]] with the output_rows of the step's inputs, f32.
  virtual void GatherOutputRows(const RowsView& input, const RowsView& output) = 0;
  // The same with the source_rows, of rows that an earlier step has written. `output` has the
  // step's rows; those that pad the step have the row 0.
  virtual void GatherSourceRows(const RowsView& input, const RowsView& output) = 0;
  // The results have the same bits on every device.
  virtual void PoolRows(const PoolArgs& args) = 0;
  // Multiplies every element of x by `factor`, f32, in place.
  virtual void Scale(const RowsView& x, float factor) = 0;
  // Replaces every element of x by SoftCap(element, cap), f32, in place.
  virtual void SoftCapRows(const RowsView& x, float cap) = 0;
  // Limits every element of x to [-limit, limit], f32, in place. NaN stays NaN.
  virtual void Clamp(const RowsView& x, float limit) = 0;
  // Returns whether Sample() is implemented. If so, steps with output rows call Sample().
  virtual bool samples_on_device() const { return false; }
  // Draws the tokens of StepInputs::samples from the logits, f32 [outputs, V].
  virtual void Sample(const RowsView& logits) { (void)logits; }
  // Copies the results of Sample(), one for each element of StepInputs::samples. Must not be called
  // inside RunStep().
  virtual void ReadSamples(std::span<SampleResult> results) { (void)results; }
  // Copies the rows `send` to the host, runs the exchange and copies the answer to the rows
  // `receive`, in the order of the step's operations. A recorded step runs the exchange at each
  // replay, so the exchange must live until ForgetSteps().
  virtual void Exchange(const ExchangeArgs& args) = 0;
  // Waits for all earlier operations, then copies the rows as f32 to contiguous host memory.
  virtual void CopyToHost(const RowsView& input, std::span<float> output) = 0;
  // Copies contiguous rows to the device and rounds them if `output` is bf16. Must not be called
  // inside RunStep().
  virtual void CopyFromHost(std::span<const float> input, const RowsView& output) = 0;
  // Returns the slot's last plan in host memory, without padding rows; valid until the next step.
  // At the first call in a step, a device copies the plans of all slots, so further calls are
  // cheap. Must not be called while a step is being recorded.
  virtual RoutingPlan HostPlan(int slot) = 0;

  // Returns counters for the plans of a model's steps (StepInputs::counters). ResourceExhausted if
  // memory runs out.
  virtual Result<std::unique_ptr<RouteCounters>> NewRouteCounters(
      const CountSettings& settings) = 0;
  // Returns how many steps since construction were replayed from a recording instead of being
  // issued.
  virtual uint64_t replayed_steps() const { return 0; }
  // Waits for the step that RunStep() issued and returns its per-token results.
  virtual StepOutcome FinishStep() = 0;
  // Counts the plans of a step with StepInputs::count_later, whose tokens turned out to be of these
  // kinds [T]. Must be called once, after FinishStep() and before the next BeginStep(). Returns
  // what StepOutcome::routes would be otherwise.
  virtual std::span<const TokenRoutes> CountStep(std::span<const uint8_t> kind) = 0;

  // Returns whether the memory of the largest step must be allocated before requests are accepted
  // (Model::Reserve()). A device that runs out of memory during a step stops the process.
  virtual bool needs_reservation() const { return false; }
  // The largest step runs between these calls. A backend may choose its kernels by measuring those
  // of the step's operations, which must not change any result. Must not be called inside
  // RunStep().
  virtual void BeginTuning() {}
  virtual absl::Status EndTuning() { return absl::OkStatus(); }

  // Returns whether a bf16 model should round the rows that reach the LM head to bf16, because this
  // backend multiplies bf16 rows faster than f32 rows. Otherwise they stay f32, which is more
  // exact.
  virtual bool rounds_head_input() const { return false; }
  // Returns the step size (rows) beyond which further rows raise latency without raising throughput
  // much.
  virtual int preferred_step_rows() const { return 512; }
  // Measures how fast the device reads memory, in bytes per second, with a buffer of `bytes` (at
  // least a few times the last-level cache). Returns the best of `rounds` runs. ResourceExhausted
  // if the buffer cannot be allocated.
  virtual Result<double> MeasureReadBandwidth(int64_t bytes, int rounds) = 0;
  // Measures the most operations per second (a multiplication and an addition count as two) that
  // all threads together reach on products in registers. Returns the best of `rounds` runs, or 0 if
  // the backend has no such probe or the device has no instructions for this type.
  virtual double MeasureArithmetic(ArithmeticKind kind, int rounds) {
    (void)kind, (void)rounds;
    return 0.0;
  }
  // Returns the bytes of all weights stored so far.
  virtual int64_t weight_bytes() const = 0;
};

}  // namespace moeserve

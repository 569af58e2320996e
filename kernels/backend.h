// The interface of a device: weights in its own layout and the coarse operations of a decoder step.
//
// The CPU and CUDA backends implement it; engine code sees nothing else of them. Rows are the unit
// of all activations: every operation computes a row's result from that row (and the cache) alone,
// in an order that does not depend on which other rows are present, so results are bit-identical
// alone and in any batch.
//
// One thread at a time calls the operations of a backend. Arguments are checked by the callers in
// engine/; a violated precondition is a broken invariant and stops the process.
//
// Memory of activations and plans is the device's: the host reads it through CopyToHost() and
// HostPlan() alone.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "kernels/base/activation.h"
#include "kernels/base/dtype.h"
#include "kernels/base/host_tensor.h"
#include "kernels/base/quantize.h"
#include "kernels/kv_cache_storage.h"
#include "kernels/route_counters.h"
#include "kernels/route_settings.h"

namespace moeserve {

// Rows of activations, row-major; a cheap value that owns nothing.
struct RowsView {
  void* data = nullptr;
  DType dtype = DType::kF32;  // kF32 or kBF16
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;  // elements from row to row, >= cols

  char* row(int64_t r) const {
    return static_cast<char*>(data) + r * stride * static_cast<int64_t>(SizeOf(dtype));
  }
  // The same columns [begin, begin + count) of every row.
  RowsView Columns(int64_t begin, int64_t count) const {
    RowsView v = *this;
    v.data = static_cast<char*>(data) + begin * static_cast<int64_t>(SizeOf(dtype));
    v.cols = count;
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

// E linear layers of possibly unequal widths, in the device's layout. A dense linear layer is a
// bank of one.
struct LinearBankShape {
  std::vector<int> in_features;   // [E], or one for all
  std::vector<int> out_features;  // [E]; gated: the width of the gate and of the up half
  bool gated = false;             // every output is act(gate) * up
  bool bias = false;
  DType weight_dtype = DType::kF32;  // stored type
  // Not kNone: weights are stored as integers. weight_dtype is then kBF16, and the bank rounds
  // input rows, f32 or bf16, to int8 in groups of QuantGroup() columns.
  Quantization quantization = Quantization::kNone;

  int in_features_of(int e) const {
    return in_features.size() == 1 ? in_features[0] : in_features[e];
  }
};

// Read-only host memory; `owner` keeps it alive.
struct PackedBytes {
  std::span<const char> bytes;
  std::shared_ptr<const void> owner;
};

class LinearBank {
 public:
  enum class Half : uint8_t { kMain, kGate };  // kGate only where gated; up is kMain

  virtual ~LinearBank() = default;
  // Copies `weight` [n, in_features_of(expert)] (any dtype, converted to the stored one) into rows
  // [row_begin, row_begin + n) of matrix `expert`.
  virtual void LoadWeight(int expert, Half half, int row_begin, const HostTensor& weight) = 0;
  // The same for a bank of that quantization: integers and scales are taken as they are.
  virtual void LoadQuantized(int expert, Half half, int row_begin,
                             const QuantizedMatrix& weight) = 0;
  virtual void LoadBias(int expert, Half half, int row_begin, const HostTensor& bias) = 0;

  // All loaded weights in the form of Backend::NewPackedBank(); empty where the device has no such
  // form. Valid while the bank lives.
  virtual std::span<const char> packed_bytes() const { return {}; }

  const LinearBankShape& shape() const { return shape_; }
  int num_experts() const { return static_cast<int>(shape_.out_features.size()); }

 protected:
  explicit LinearBank(LinearBankShape shape) : shape_(std::move(shape)) {}
  LinearBankShape shape_;
};

// Scale (and shift) vectors of a norm, one per group of rows; always f32.
class NormBank {
 public:
  virtual ~NormBank() = default;
};

struct NormShape {
  bool layer = false;  // layer norm (mean removed, shift added); else RMS
  float eps = 1e-5f;
};

class EmbeddingTable {
 public:
  virtual ~EmbeddingTable() = default;
};

// Router of one routed block with its settings; tensors widened to f32.
class Router {
 public:
  virtual ~Router() = default;
};

struct RouterTensors {
  HostTensor weight;         // dot: [E, c]; cosine: expert vectors [E, dim]
  HostTensor bias;           // dot: [E]; cosine: of the projection [dim]; data null: none
  HostTensor projection;     // cosine: [dim, c]
  float temperature = 0.0f;  // raw stored value; used where settings.temperature says so
};

// Which experts compute which rows: compressed rows in both directions. Assignments are sorted by
// expert, then by row; A is their number. All arrays are in the device's memory and valid
// until the backend's next Route() of the same slot. Padding rows have no assignment.
struct RoutingPlan {
  int rows = 0;
  int num_experts = 0;
  int num_assignments = 0;  // -1 where it is on the device only: expert_offsets[E]
  int capacity = 0;         // upper bound of A; rows of arrays with a row per assignment
  const int32_t* expert_offsets = nullptr;        // [E + 1]
  const int32_t* expert_of_assignment = nullptr;  // [A]
  const int32_t* row_of_assignment = nullptr;     // [A]
  const float* weight_of_assignment = nullptr;    // [A] final gate
  const int32_t* row_offsets = nullptr;           // [rows + 1]
  const int32_t* assignments_of_row = nullptr;    // [A] a row's assignments, ascending expert
  const uint8_t* row_nonfinite = nullptr;  // [rows] 1: a NaN score; 2: no finite largest score
};

// Routes that replace the router's (parity tests): compressed rows, experts ascending.
struct GivenRoutes {
  std::vector<int32_t> offsets;  // [rows + 1]
  std::vector<int32_t> experts;  // [A]
  std::vector<float> weights;    // [A]
};

// output[a] = epilogue(input[source_row(a)] * W_e^T + b_e) for every assignment a of expert e. Of
// an input row the first in_features_of(e) columns count.
struct LinearArgs {
  const LinearBank* bank = nullptr;
  const RoutingPlan* plan = nullptr;  // null: one expert, every row of `input`
  bool gather = false;                // input row of a is plan->row_of_assignment[a], else a itself
  RowsView input;
  RowsView output;  // [capacity, >= widest out_features rounded up to 16 where pad_output]
  // Without gated bank: activation of each output. With gated bank: act(gate) * up.
  ActivationKind activation = ActivationKind::kNone;
  bool pad_output = false;  // zero columns up to the next multiple of 16 may be written
};

// output[a] = down(epilogue(up(input[source_row(a)]))), the hidden units rounded to the activation
// type in between, as two LinearArgs would have it.
struct FeedForwardArgs {
  const LinearBank* up = nullptr;
  const LinearBank* down = nullptr;
  const RoutingPlan* plan = nullptr;  // null: one expert, every row of `input`
  bool gather = false;
  RowsView input;
  RowsView output;  // [capacity, out_features of down]
  ActivationKind activation = ActivationKind::kNone;
};

struct NormArgs {
  const NormBank* bank = nullptr;
  const RoutingPlan* plan = nullptr;  // group of assignment a = its expert; null: group 0
  int segments = 1;  // a row holds this many adjacent vectors, each normalised by itself
  RowsView input;    // f32
  RowsView output;   // f32 or bf16; may be `input`
};

// x += scale * (branch + bias), then output = norm(x): the end of one branch of a layer and the
// beginning of the next.
struct AddNormArgs {
  RowsView x;                   // f32
  RowsView branch;              // f32
  const float* bias = nullptr;  // [cols] on the device, or null
  float scale = 1.0f;
  const NormBank* norm = nullptr;
  RowsView output;  // f32 or bf16; may be `x`
};

struct EmbedArgs {
  const EmbeddingTable* tokens = nullptr;
  const EmbeddingTable* positions = nullptr;  // learned; null: none
  bool sinusoidal = false;
  float scale = 1.0f;
  RowsView output;  // f32 [T, d]
};

struct RopeSettings {
  int head_dim = 0;
  int dimensions = 0;  // leading dimensions that are rotated, even
  double theta = 10000.0;
  bool interleaved = false;
};

struct RopeArgs {
  RopeSettings settings;
  const RoutingPlan* plan = nullptr;  // rows are its assignments; null: row r is token r
  RowsView rows;                      // f32, in place; heads adjacent
};

struct AppendKvArgs {
  KvCacheStorage* cache = nullptr;
  int layer = 0;
  RowsView keys;    // f32 [T, G * d_h]
  RowsView values;  // f32 [T, G * d_h]
};

// Queries, keys and values of a projection; columns of the same rows.
struct QkvColumns {
  RowsView query, keys, values;
};

// What attention needs from the rows of a projection: normalised queries and keys, rotary positions
// of both, keys and values written to the cache.
struct NormRopeAppendArgs {
  KvCacheStorage* cache = nullptr;
  int layer = 0;
  // f32 [T, (H + 2 G) * d_h]: queries, updated in place, then keys and values, whose contents are
  // unspecified afterwards. G and d_h are those of the cache's layer.
  RowsView rows;
  int heads = 0;                         // H; 0: no queries
  const NormBank* query_norm = nullptr;  // of one group; null: none
  const NormBank* key_norm = nullptr;    // of one group; null: none
  bool norm_heads = true;                // a norm's vector is one head; else all heads of a row
  RopeSettings rope;                     // head_dim is d_h; dimensions 0: none

  QkvColumns columns() const {
    const KvLayerShape& shape = cache->shape(layer);
    const int64_t query = int64_t{heads} * shape.head_dim;
    const int64_t kv = int64_t{shape.num_kv_heads} * shape.head_dim;
    return {rows.Columns(0, query), rows.Columns(query, kv), rows.Columns(query + kv, kv)};
  }
};

// Which kv head (of G) a query head (of H) reads.
enum class HeadOrder : uint8_t {
  kInterleave,  // floor(h / (H / G))
  kTile         // h mod G
};

struct AttentionArgs {
  const KvCacheStorage* cache = nullptr;
  int layer = 0;
  const RoutingPlan* plan = nullptr;  // query rows are its assignments; null: row r is token r
  int heads = 1;                      // H, of a query row; a multiple of the cache's kv heads
  HeadOrder order = HeadOrder::kInterleave;
  float scale = 1.0f;
  int window = 0;   // 0: none
  RowsView query;   // f32 [Q, heads * d_h]
  RowsView output;  // f32 or bf16 [Q, heads * d_h]
};

struct RouteArgs {
  const Router* router = nullptr;
  RowsView input;                      // f32 or bf16 [rows, c]
  const GivenRoutes* given = nullptr;  // replaces the router's choice
  int slot = 0;                        // a plan is kept until the next one of its slot
  // Null, or f32 [rows, E]: receives the scores after the router's bias and temperature, without
  // the bias of an override.
  const RowsView* scores = nullptr;
  std::span<const RouteOverride> overrides = {};  // [rows], or empty: none
};

// output[r] = (residual[r] +) sum over the row's assignments of weight * rounded(results[a]),
// in ascending expert order, in f32. `results` in the run's activation type.
struct CombineArgs {
  const RoutingPlan* plan = nullptr;
  RowsView results;                    // [A, c]
  const RowsView* residual = nullptr;  // the sub-token itself (MH-MoE eq. 6)
  RowsView output;                     // f32 or bf16 [rows, c]
};

// Max alternatives that a device returns per token.
inline constexpr int kMaxAlternatives = 20;

// What to draw from one row of logits (kernels/base/sampling.h).
struct SampleRow {
  float scale;       // SamplingScale(temperature); 0: the most probable token
  int32_t top_k;     // at most 0: no limit
  double top_p;      // (0, 1]
  float min_p;       // [0, 1]
  int32_t row;       // of the logits; below 0: no draw, the result is not written
  double uniform;    // UniformDraw of the row, in [0, 1)
  int32_t logprobs;  // number of alternatives, up to kMaxAlternatives; -1: no log-probability
};

struct SampleResult {
  int32_t token;   // -1 where a logit is NaN
  int32_t finite;  // 0: a logit is NaN or infinite. The token is valid if it is only infinite.
  // With logprobs >= 0 and without NaN, under the softmax of the logits alone:
  float logprob;
  int32_t rank;  // number of tokens that are more probable (equal logits: lower ids are)
  // The most probable tokens, descending: min(SampleRow::logprobs, V) of them. Later entries are
  // not written.
  float top_logprob[kMaxAlternatives];
  int32_t top_token[kMaxAlternatives];
};

// The ragged batch of a step, as the operations read it.
struct StepInputs {
  std::span<const int32_t> token_ids = {};                      // [T]
  std::span<const int32_t> position = {};                       // [T]
  std::span<const int32_t> sequence = {};                       // [T] index into block_tables
  std::span<const std::span<const int32_t>> block_tables = {};  // [S]
  const KvCacheStorage* cache = nullptr;      // the only one of the step's operations
  std::span<const int32_t> output_rows = {};  // rows that GatherOutputRows() takes
  std::span<const SampleRow> samples = {};    // [output_rows] what Sample() draws, or empty
  RouteCounters* counters = nullptr;          // the step adds its plans; null: to none
  std::span<const uint8_t> kind = {};         // with counters: [T] kTokenPrefill and so on
  int variant = 0;                            // of the operations of a replayable step
};

// Per-token results of a step beside its logits; valid until the next step.
struct StepOutcome {
  std::span<const uint8_t> failed;      // [T] 1: some row had no finite largest router score
  std::span<const TokenRoutes> routes;  // [T] of the counted blocks; empty without counters
};

// Rows that the operations of a step work on: at least those of the inputs.
struct StepRows {
  int64_t tokens = 0;
  int64_t outputs = 0;
};

// Products that the arithmetic probe times: of f32, of bf16 summed in f32, of int8 summed in int32.
enum class ArithmeticKind : uint8_t { kF32, kBF16, kInt8 };

class Backend {
 public:
  virtual ~Backend() = default;

  virtual std::string_view name() const = 0;         // "cpu", "cuda"
  virtual std::string_view description() const = 0;  // e.g. "cpu, avx512_bf16, 2 threads"
  // Of a backend on the host: threads and the instruction set's name. 0 and empty otherwise.
  virtual int threads() const { return 0; }
  virtual std::string_view instruction_set() const { return {}; }

  // Setup. ResourceExhausted names the size.
  virtual Result<std::unique_ptr<DeviceBuffer>> Allocate(size_t bytes) = 0;
  // Unimplemented where the device has no products with integers.
  virtual Result<std::unique_ptr<LinearBank>> NewLinearBank(LinearBankShape shape) = 0;
  // Names the layout of packed_bytes(), which depends on a bank's shape alone. Layouts in which the
  // same bytes mean different weights have different names. Empty: the device has no such form.
  virtual std::string_view packed_layout() const { return {}; }
  // Size of packed_bytes() of a bank of that shape.
  virtual int64_t PackedBankBytes(const LinearBankShape& shape) const {
    (void)shape;
    return 0;
  }
  // A bank that reads its weights from `packed` (PackedBankBytes(shape) bytes, 64-byte aligned) and
  // takes no Load*() calls. Any content is safe. Unimplemented without packed_layout().
  virtual Result<std::unique_ptr<LinearBank>> NewPackedBank(LinearBankShape shape,
                                                            PackedBytes packed) {
    (void)shape, (void)packed;
    return absl::UnimplementedError("this device has no packed banks");
  }
  // groups[e]: scale [n_e]; shifts empty unless shape.layer.
  virtual Result<std::unique_ptr<NormBank>> NewNormBank(NormShape shape,
                                                        std::span<const HostTensor> scales,
                                                        std::span<const HostTensor> shifts) = 0;
  // A `table` with an owner may be read in place.
  virtual Result<std::unique_ptr<EmbeddingTable>> NewEmbeddingTable(const HostTensor& table) = 0;
  // Tied embeddings: the rows of the only matrix of `bank`, without a copy.
  virtual Result<std::unique_ptr<EmbeddingTable>> NewTiedEmbeddingTable(const LinearBank& bank) = 0;
  virtual Result<std::unique_ptr<Router>> NewRouter(const RouteSettings& settings,
                                                    const RouterTensors& tensors) = 0;
  // A copy of `values` on the device.
  virtual Result<std::unique_ptr<DeviceBuffer>> Upload(std::span<const float> values) = 0;
  // Unimplemented where the device has no cache of this type.
  virtual Result<std::unique_ptr<KvCacheStorage>> NewKvCache(std::vector<KvLayerShape> layers,
                                                             KvCacheType type,
                                                             int64_t num_blocks) = 0;
  // Bytes of one block of such a cache, all layers together.
  virtual int64_t KvBlockBytes(std::span<const KvLayerShape> layers, KvCacheType type) const = 0;

  // Step: BeginStep, then RunStep with the operations.
  //
  // The spans live until the next call. A `replayable` step issues the same operations on the same
  // memory as every step of `owner` with as many rows, the same variant, cache and counters, so a
  // backend may fill up its rows, record its operations once and replay them; any other step has
  // the rows of the inputs.
  virtual StepRows BeginStep(const StepInputs& inputs, const void* owner, bool replayable) = 0;
  virtual void RunStep(const std::function<void()>& operations) = 0;
  // The memory that the steps of `owner` work on is about to go.
  virtual void ForgetSteps(const void* owner) = 0;

  virtual void Embed(const EmbedArgs& args) = 0;
  virtual void Norm(const NormArgs& args) = 0;
  virtual void Linear(const LinearArgs& args) = 0;
  // Whether FusedFeedForward() exists for these banks and is expected to be faster than two
  // Linear() calls for `rows` rows of `dtype`.
  virtual bool FusesFeedForward(const LinearBank& up, const LinearBank& down, DType dtype,
                                int64_t rows) const {
    (void)up, (void)down, (void)dtype, (void)rows;
    return false;
  }
  virtual void FusedFeedForward(const FeedForwardArgs& args) { (void)args; }
  virtual void Rope(const RopeArgs& args) = 0;
  virtual void AppendKv(const AppendKvArgs& args) = 0;
  // Has the bits of Norm(), Rope() and AppendKv() called one after another.
  virtual void NormRopeAppend(const NormRopeAppendArgs& args) {
    const auto [query, keys, values] = args.columns();
    const int kv_heads = args.cache->shape(args.layer).num_kv_heads;
    const auto norm = [&](const NormBank* bank, const RowsView& rows, int heads) {
      if (bank == nullptr || rows.cols == 0) return;
      Norm({.bank = bank, .segments = args.norm_heads ? heads : 1, .input = rows, .output = rows});
    };
    norm(args.query_norm, query, args.heads);
    norm(args.key_norm, keys, kv_heads);
    if (args.rope.dimensions > 0) {
      // Queries and keys are adjacent, so one call rotates both.
      Rope({.settings = args.rope, .rows = args.rows.Columns(0, query.cols + keys.cols)});
    }
    AppendKv({.cache = args.cache, .layer = args.layer, .keys = keys, .values = values});
  }
  virtual void Attention(const AttentionArgs& args) = 0;
  virtual RoutingPlan Route(const RouteArgs& args) = 0;
  virtual void Combine(const CombineArgs& args) = 0;
  // Rounds, widens or copies rows: output = input (f32 -> f32 or bf16, bf16 -> f32).
  virtual void Convert(const RowsView& input, const RowsView& output) = 0;
  // x += scale * (branch + bias); bias [cols] f32 on the device, or null.
  virtual void AddScaled(const RowsView& x, const RowsView& branch, const float* bias,
                         float scale) = 0;
  virtual void AddNorm(const AddNormArgs& args) {
    AddScaled(args.x, args.branch, args.bias, args.scale);
    Norm({.bank = args.norm, .input = args.x, .output = args.output});
  }
  // x[r] *= sigmoid(gate[r][0]); all f32. The gate of a shared expert.
  virtual void ScaleBySigmoid(const RowsView& x, const RowsView& gate) = 0;
  // output[i] = input[output_rows[i]] of the step's inputs, f32.
  virtual void GatherOutputRows(const RowsView& input, const RowsView& output) = 0;
  // Multiplies every element, f32, in place.
  virtual void Scale(const RowsView& x, float factor) = 0;
  // Whether Sample() exists. If so, steps call it where there are output rows.
  virtual bool samples_on_device() const { return false; }
  // Draws the tokens of StepInputs::samples from the logits, f32 [outputs, V].
  virtual void Sample(const RowsView& logits) { (void)logits; }
  // The results of Sample(), one for each of StepInputs::samples. Outside of RunStep.
  virtual void ReadSamples(std::span<SampleResult> results) { (void)results; }
  // Waits for all earlier operations, then copies the rows to contiguous host memory as f32.
  virtual void CopyToHost(const RowsView& input, std::span<float> output) = 0;
  // Copies contiguous rows to the device, rounded if `output` is bf16. Not inside RunStep().
  virtual void CopyFromHost(std::span<const float> input, const RowsView& output) = 0;
  // The slot's last plan in host memory, of the rows of the inputs alone; valid until the next
  // step. A device copies the plans of all blocks of the step at the first call. Not while a step
  // is recorded.
  virtual RoutingPlan HostPlan(int slot) = 0;

  // Counters for the plans of a model's steps (StepInputs::counters). ResourceExhausted.
  virtual Result<std::unique_ptr<RouteCounters>> NewRouteCounters(
      const CountSettings& settings) = 0;
  // Since construction: steps that were replayed from a recording instead of being issued.
  virtual uint64_t replayed_steps() const { return 0; }
  // Waits for the step that RunStep() issued and returns its per-token results.
  virtual StepOutcome FinishStep() = 0;

  // Whether the memory of the largest step has to be taken before requests depend on it
  // (Model::Reserve()): a device that has no memory left in a step stops the process.
  virtual bool needs_reservation() const { return false; }

  // Step size beyond which more rows per step raise latency without raising throughput much.
  virtual int preferred_step_rows() const { return 512; }
  // Measures how fast the device reads memory, in bytes per second, over `bytes` (at least a few
  // times the last-level cache), best of `rounds`. ResourceExhausted.
  virtual Result<double> MeasureReadBandwidth(int64_t bytes, int rounds) = 0;
  // Measures the most operations per second (a multiplication and an addition are two) that all
  // threads together reach on products in registers, best of `rounds`. 0: not measured, or the
  // device has no instructions of its own for this type.
  virtual double MeasureArithmetic(ArithmeticKind kind, int rounds) {
    (void)kind, (void)rounds;
    return 0.0;
  }
  // Bytes of all weights laid out so far.
  virtual int64_t weight_bytes() const = 0;
};

}  // namespace moeserve

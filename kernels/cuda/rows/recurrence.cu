#include "kernels/base/dtype.h"
#include "kernels/cuda/device/launch.h"
#include "kernels/cuda/device/ptx.cuh"
#include "kernels/cuda/rows/recurrence.h"

namespace moeserve::cuda {
namespace {

// A block computes 32 columns of the state of a head: a thread has one column, and every kGroups-th
// row from that of its warp on.
constexpr int kColumns = kRecurrentColumns;
constexpr int kGroups = 8;
constexpr int kThreads = kColumns * kGroups;

// What a token does to a state, after the preparation of its inputs.
struct Inputs {
  const float* key;
  const float* value;
  const float* decay;
  const float* strength;
};

struct Params {
  RecurrenceLaunch launch;

  __device__ float* Row(const RowsView& view, int64_t row) const {
    return static_cast<float*>(view.data) + row * view.stride;
  }
  __device__ Inputs InputsOf(int64_t row) const {
    const RecurrenceArgs& a = launch.args;
    return {Row(a.keys, row), Row(a.values, row), Row(a.decays, row), Row(a.strengths, row)};
  }
  __device__ float* State(int32_t slot) const {
    return launch.states + int64_t{slot} * launch.slot_floats;
  }
};

__device__ Inputs PendingInputs(const RecurrentShape& shape, const float* part, int row) {
  const float* const key = part + shape.state_floats() + row * shape.input_floats();
  const float* const value = key + shape.key_width();
  const float* const decay = value + shape.value_width();
  return {key, value, decay, decay + shape.decay_width()};
}

__device__ float WarpSum(float v) {
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(kFullMask, v, offset);
  return v;
}

// Divides a vector by its length, and multiplies it by `factor`; all threads of a warp call this.
__device__ void MakeUnit(float* x, int n, float factor) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float square = 0.0f;
  for (int i = lane; i < n; i += 32) square = fmaf(x[i], x[i], square);
  const float inverse = factor / sqrtf(WarpSum(square) + kUnitEps);
  for (int i = lane; i < n; i += 32) x[i] *= inverse;
}

// Prepares the inputs of a row, and stores them if it is pending. One block for each row.
__global__ void __launch_bounds__(kThreads) InputsKernel(const Params p) {
  GridDependencyPass();
  const RecurrenceArgs& a = p.launch.args;
  const RecurrentShape& shape = p.launch.shape;
  const RecurrenceSettings& settings = a.settings;
  const int64_t row = blockIdx.x;
  const int thread = static_cast<int>(threadIdx.x);
  float* const decay = p.Row(a.decays, row);
  float* const strength = p.Row(a.strengths, row);
  if (settings.delta) {
    const float scale = 1.0f / sqrtf(static_cast<float>(shape.key_dim));
    for (int h = thread / 32; h < shape.key_heads; h += kThreads / 32) {
      MakeUnit(p.Row(a.queries, row) + h * shape.key_dim, shape.key_dim, scale);
      MakeUnit(p.Row(a.keys, row) + h * shape.key_dim, shape.key_dim, 1.0f);
    }
  }
  for (int h = thread; h < shape.heads; h += kThreads) {
    strength[h] =
        settings.delta ? ContractSigmoid(strength[h]) : StepSize(settings, decay[h] + a.bias[h]);
  }
  __syncthreads();  // without delta, the strengths follow from the decays' inputs
  const int per_head = shape.decays_keys ? shape.key_dim : 1;
  for (int i = thread; i < shape.decay_width(); i += kThreads) {
    decay[i] = DecayFactor(settings, decay[i] + a.bias[i], a.rate[i / per_head]);
  }
  if (p.launch.pending[row] < 0 || p.launch.slot[row] < 0) return;
  __syncthreads();
  const Inputs from = p.InputsOf(row);
  const Inputs to = PendingInputs(shape, p.State(p.launch.slot[row]), p.launch.pending[row]);
  const auto copy = [thread](const float* source, const float* target, int n) {
    for (int i = thread; i < n; i += kThreads) const_cast<float*>(target)[i] = source[i];
  };
  copy(from.key, to.key, shape.key_width());
  copy(from.value, to.value, shape.value_width());
  copy(from.decay, to.decay, shape.decay_width());
  copy(from.strength, to.strength, shape.heads);
}

// Some columns of the state of a head. kRows: rows of a thread.
template <int kRows>
struct Tile {
  const RecurrentShape& shape;
  int head, column, group;  // column: of the thread
  float state[kRows];
  // Shared memory: [key_dim] each, and [kGroups][kColumns].
  float* key;
  float* query;
  float* decay;
  float* sums;

  __device__ Tile(const RecurrentShape& s, int h, int first_column, float* shared)
      : shape(s),
        head(h),
        column(first_column + static_cast<int>(threadIdx.x) % kColumns),
        group(static_cast<int>(threadIdx.x) / kColumns),
        key(shared),
        query(shared + s.key_dim),
        decay(shared + 2 * s.key_dim),
        sums(shared + 3 * s.key_dim) {
    for (int r = 0; r < kRows; ++r) state[r] = 0.0f;
  }

  __device__ bool has_column() const { return column < shape.value_dim; }
  __device__ int64_t At(int i) const {
    const int first = column / kColumns * kColumns;
    return shape.block_begin(first) + i * shape.block_columns(first) + column - first;
  }
  __device__ void LoadState(const float* part) {
    const float* const from = part + head * shape.head_floats();
    for (int r = 0; r < kRows; ++r) {
      const int i = group + r * kGroups;
      if (i < shape.key_dim && has_column()) state[r] = from[At(i)];
    }
  }
  __device__ void StoreState(float* part) const {
    float* const to = part + head * shape.head_floats();
    for (int r = 0; r < kRows; ++r) {
      const int i = group + r * kGroups;
      if (i < shape.key_dim && has_column()) to[At(i)] = state[r];
    }
  }
  // Returns, in all threads of a column, the sum of their values.
  __device__ float Total(float part) {
    __syncthreads();  // earlier sums were read
    sums[threadIdx.x] = part;
    __syncthreads();
    float total = 0.0f;
    for (int g = 0; g < kGroups; ++g) {
      total += sums[g * kColumns + static_cast<int>(threadIdx.x) % kColumns];
    }
    return total;
  }
  // Advances the state over a token. Returns what the query reads; 0 without a query.
  __device__ float Advance(const Inputs& inputs, const float* queries, bool delta) {
    const int key_head = head / (shape.heads / shape.key_heads);
    __syncthreads();  // the token before was read
    for (int i = static_cast<int>(threadIdx.x); i < shape.key_dim; i += kThreads) {
      key[i] = inputs.key[key_head * shape.key_dim + i];
      if (queries != nullptr) query[i] = queries[key_head * shape.key_dim + i];
      decay[i] = inputs.decay[shape.decays_keys ? head * shape.key_dim + i : head];
    }
    __syncthreads();
    float added = has_column() ? inputs.value[head * shape.value_dim + column] : 0.0f;
    if (delta) {
      float known = 0.0f;
      for (int r = 0; r < kRows; ++r) {
        const int i = group + r * kGroups;
        if (i < shape.key_dim) known = fmaf(key[i] * decay[i], state[r], known);
      }
      added -= Total(known);
    }
    added *= inputs.strength[head];
    float read = 0.0f;
    for (int r = 0; r < kRows; ++r) {
      const int i = group + r * kGroups;
      if (i >= shape.key_dim) break;
      state[r] = fmaf(key[i], added, decay[i] * state[r]);
      if (queries != nullptr) read = fmaf(query[i], state[r], read);
    }
    return queries == nullptr ? 0.0f : Total(read);
  }
};

// The block of the first row of a sequence computes all of them; the others end at once.
template <int kRows>
__global__ void __launch_bounds__(kThreads) ScanKernel(const Params p) {
  GridDependencyPass();
  const RecurrenceLaunch& launch = p.launch;
  const RecurrenceArgs& a = launch.args;
  const RecurrentShape& shape = launch.shape;
  const int64_t first = blockIdx.x;
  const int head = static_cast<int>(blockIdx.y);
  Tile<kRows> tile(shape, head, static_cast<int>(blockIdx.z) * kColumns, DynamicShared<float>());
  const int at = head * shape.value_dim + tile.column;
  const int32_t sequence = launch.sequence[first];
  const bool writes = tile.group == 0 && tile.has_column();
  if (sequence < 0) {
    if (writes) p.Row(a.output, first)[at] = 0.0f;
    return;
  }
  if (first > 0 && launch.sequence[first - 1] == sequence) return;
  const int32_t slot = launch.slot[first];
  if (slot >= 0) tile.LoadState(p.State(slot));
  const float skip = a.skip == nullptr ? 0.0f : a.skip[head];
  for (int64_t row = first; row < a.output.rows && launch.sequence[row] == sequence; ++row) {
    const float value = writes ? p.Row(a.values, row)[at] : 0.0f;
    const float read = tile.Advance(p.InputsOf(row), p.Row(a.queries, row), a.settings.delta);
    if (launch.keep[row] >= 0) tile.StoreState(p.State(launch.keep[row]));
    if (launch.snapshot[row] >= 0) tile.StoreState(p.State(launch.snapshot[row]));
    // All threads have read the value, because the sums wait for them.
    if (writes) p.Row(a.output, row)[at] = fmaf(skip, value, read);
  }
}

template <int kRows>
__global__ void __launch_bounds__(kThreads)
    AdvanceKernel(const RecurrentShape shape, const float* from, int rows, float* to) {
  Tile<kRows> tile(shape, static_cast<int>(blockIdx.y), static_cast<int>(blockIdx.z) * kColumns,
                   DynamicShared<float>());
  tile.LoadState(from);
  for (int row = 0; row < rows; ++row) {
    tile.Advance(PendingInputs(shape, from, row), nullptr, shape.delta);
  }
  tile.StoreState(to);
}

LaunchShape TileShape(const RecurrentShape& shape, int64_t rows, bool overlaps,
                      cudaStream_t stream) {
  const auto tiles = static_cast<unsigned>((shape.value_dim + kColumns - 1) / kColumns);
  return {dim3(static_cast<unsigned>(rows), static_cast<unsigned>(shape.heads), tiles),
          dim3(kThreads), (3 * static_cast<size_t>(shape.key_dim) + kThreads) * sizeof(float),
          stream, overlaps};
}

// Calls run(Index<rows of a thread>).
template <int kRows>
struct RowsOfThread {
  static constexpr int value = kRows;
};
template <typename Run>
void ForKeyDim(int key_dim, const Run& run) {
  if (key_dim <= 8 * kGroups) return run(RowsOfThread<8>());
  if (key_dim <= 16 * kGroups) return run(RowsOfThread<16>());
  run(RowsOfThread<kMaxRecurrentKeys / kGroups>());
}

}  // namespace

void LaunchRecurrence(const RecurrenceLaunch& launch, cudaStream_t stream) {
  const int64_t rows = launch.args.output.rows;
  if (rows == 0) return;
  const Params p{launch};
  Launch(InputsKernel,
         LaunchShape{dim3(static_cast<unsigned>(rows)), dim3(kThreads), 0, stream, true}, p);
  ForKeyDim(launch.shape.key_dim, [&](auto held) {
    Launch(ScanKernel<decltype(held)::value>, TileShape(launch.shape, rows, true, stream), p);
  });
}

void LaunchAdvanceRecurrence(const RecurrentShape& shape, const float* from, int rows, float* to,
                             cudaStream_t stream) {
  ForKeyDim(shape.key_dim, [&](auto held) {
    Launch(AdvanceKernel<decltype(held)::value>, TileShape(shape, 1, false, stream), shape, from,
           rows, to);
  });
}

}  // namespace moeserve::cuda

#include "kernels/cpu/states.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/cpu/storage/state_slots.h"

namespace moeserve::cpu {
namespace {

// One call of ShortConvolution().
struct Convolution {
  const ShortConvolutionArgs& args;
  const CpuStates& states;
  const StepInputs& step;
  const KernelTable& table;

  int64_t cols() const { return args.output.cols; }
  const float* input(int64_t row, int part) const {
    return reinterpret_cast<const float*>(args.input.row(row)) + part * cols();
  }
  // Returns how many rows of the sequence of row `t` stand before it in the step, at most `most`.
  int Before(int64_t t, int most) const {
    const auto& sequence = step.sequence;
    int count = 0;
    while (count < most && t - count > 0 &&
           sequence[static_cast<size_t>(t - count) - 1] == sequence[static_cast<size_t>(t)]) {
      ++count;
    }
    return count;
  }
  int32_t SlotOf(int64_t t) const {
    const int32_t sequence = step.sequence[static_cast<size_t>(t)];
    return sequence < 0 ? -1 : step.states.slot[static_cast<size_t>(sequence)];
  }
  // Returns the convolution's input `back` rows before row `t` of the step, in `memory` if it is
  // computed; null if the row has no state. `before` is Before() of the row.
  const float* Input(int64_t t, int back, int before, float* memory) const {
    if (back > before) {
      const int32_t slot = SlotOf(t);
      return slot < 0 ? nullptr : states.Row(args.block, slot, args.taps - 1 - (back - before));
    }
    if (!args.gated) return input(t - back, 0);
    const float* const b = input(t - back, 0);
    const float* const x = input(t - back, 2);
    for (int64_t i = 0; i < cols(); ++i) memory[i] = b[i] * x[i];
    return memory;
  }
  // Computes the output of row `t`, f32. `memory` has room for a row.
  void Row(int64_t t, float* sum, float* memory) const {
    if (args.bias == nullptr) {
      std::fill_n(sum, cols(), 0.0f);
    } else {
      std::copy_n(args.bias, cols(), sum);
    }
    const int before = Before(t, args.taps - 1);
    for (int j = 0; j < args.taps; ++j) {
      const float* const u = Input(t, args.taps - 1 - j, before, memory);
      if (u == nullptr) continue;
      const float* const weight = args.weight + j * cols();
      for (int64_t i = 0; i < cols(); ++i) sum[i] += weight[i] * u[i];
    }
    if (!args.gated) {
      return table.multiply_by_gate(sum, false, sum, cols(), GateActivation::kSigmoid);
    }
    const float* const c = input(t, 1);
    for (int64_t i = 0; i < cols(); ++i) sum[i] *= c[i];
  }
  // Stores the state after row `t`. The oldest row comes first, so that a slot may be its own
  // source.
  void Keep(int64_t t, int32_t slot, float* memory) const {
    const int rows = args.taps - 1;
    const int before = Before(t, rows);
    for (int r = 0; r < rows; ++r) {
      const float* const u = Input(t, rows - 1 - r, before, memory);
      std::memmove(states.Row(args.block, slot, r), u, static_cast<size_t>(cols()) * sizeof(float));
    }
  }
};

}  // namespace

void StateOps::ShortConvolution(const ShortConvolutionArgs& args) {
  const Convolution call{args, static_cast<const CpuStates&>(*args.states), step_, table_};
  const StepStates& to = step_.states;
  const auto width = static_cast<size_t>(call.cols());
  const bool rounds = args.output.dtype == DType::kBF16;
  const int64_t work = call.cols() * 4 * args.taps;
  workers_.ForRows(args.output.rows, work, [&](int64_t begin, int64_t end, int worker) {
    float* const sum = workers_.Floats(worker, 2 * width);
    float* const memory = sum + width;
    for (int64_t t = begin; t < end; ++t) {
      call.Row(t, rounds ? sum : reinterpret_cast<float*>(args.output.row(t)), memory);
      if (rounds) {
        table_.convert_row(sum, reinterpret_cast<Bf16*>(args.output.row(t)), call.cols());
      }
      if (to.slot.empty()) continue;
      const auto row = static_cast<size_t>(t);
      if (to.snapshot[row] >= 0) call.Keep(t, to.snapshot[row], memory);
      if (to.pending[row] >= 0) {
        const int place = args.taps - 1 + to.pending[row];
        std::copy_n(call.Input(t, 0, 0, memory), width,
                    call.states.Row(args.block, call.SlotOf(t), place));
      }
    }
  });
  // A state is overwritten only after every row has read it.
  float* const memory = workers_.Floats(0, width);
  for (size_t row = 0; row < to.keep.size(); ++row) {
    if (to.keep[row] >= 0) call.Keep(static_cast<int64_t>(row), to.keep[row], memory);
  }
}

}  // namespace moeserve::cpu

// The recurrences of linear attention and of state-space layers.

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "kernels/cpu/states.h"
#include "kernels/cpu/storage/state_slots.h"

namespace moeserve::cpu {
namespace {

float* FloatsOf(const RowsView& view, int64_t row) {
  return reinterpret_cast<float*>(view.row(row));
}

// One call of Recurrence().
struct Recurrent {
  const RecurrenceArgs& args;
  const CpuStates& states;
  const RecurrentShape& shape;
  const StepInputs& step;
  const KernelTable& table;

  RecurrentInputs Inputs(int64_t row) const {
    return {.key = FloatsOf(args.keys, row),
            .value = FloatsOf(args.values, row),
            .decay = FloatsOf(args.decays, row),
            .strength = FloatsOf(args.strengths, row)};
  }
  int32_t SlotOf(int64_t row) const {
    const int32_t sequence = step.sequence[static_cast<size_t>(row)];
    return sequence < 0 || step.states.slot.empty()
               ? -1
               : step.states.slot[static_cast<size_t>(sequence)];
  }

  // Prepares the inputs of a row, and stores them if it is pending.
  void Prepare(int64_t row) const {
    const RecurrentInputs inputs = Inputs(row);
    table.recurrent_inputs({.settings = args.settings,
                            .shape = shape,
                            .rate = args.rate,
                            .bias = args.bias,
                            .query = FloatsOf(args.queries, row),
                            .key = inputs.key,
                            .decay = inputs.decay,
                            .strength = inputs.strength});
    const int32_t slot = SlotOf(row);
    if (slot < 0 || step.states.pending[static_cast<size_t>(row)] < 0) return;
    const RecurrentInputs to =
        states.Pending(args.block, slot, step.states.pending[static_cast<size_t>(row)]);
    std::copy_n(inputs.key, shape.key_width(), to.key);
    std::copy_n(inputs.value, shape.value_width(), to.value);
    std::copy_n(inputs.decay, shape.decay_width(), to.decay);
    std::copy_n(inputs.strength, shape.heads, to.strength);
  }
};

// The rows [begin, end) of a step are those of one sequence. After those before `kept` the state
// stays in the slot.
struct RecurrentRun {
  int64_t begin = 0, kept = 0, end = 0;
  int32_t slot = -1;  // -1: the state before the first row is that before a text, and is dropped
};

std::vector<RecurrentRun> RunsOf(const Recurrent& call, int64_t rows) {
  const auto& sequence = call.step.sequence;
  const auto& keep = call.step.states.keep;
  std::vector<RecurrentRun> runs;
  for (int64_t row = 0; row < rows; ++row) {
    const auto t = static_cast<size_t>(row);
    if (row == 0 || sequence[t] != sequence[t - 1]) {
      runs.push_back({.begin = row, .kept = row, .end = row, .slot = call.SlotOf(row)});
    }
    runs.back().end = row + 1;
    if (!keep.empty() && keep[t] >= 0) runs.back().kept = row + 1;
  }
  return runs;
}

// Advances a block of columns of a head's state over the rows of a run, which stays in the
// first-level cache. `memory` has room for it.
void RunColumns(const Recurrent& call, const RecurrentRun& run, int head, int column,
                float* memory) {
  const RecurrentShape& shape = call.shape;
  const int64_t floats = int64_t{shape.key_dim} * shape.block_columns(column);
  const auto block_of = [&](int32_t slot) {
    return call.states.Head(call.args.block, slot, head) + shape.block_begin(column);
  };
  float* state = run.slot < 0 ? memory : block_of(run.slot);
  if (run.slot < 0) std::fill_n(memory, floats, 0.0f);
  const int key_head = head / (shape.heads / shape.key_heads);
  for (int64_t row = run.begin; row < run.end; ++row) {
    if (row == run.kept && state != memory) {
      std::copy_n(state, floats, memory);
      state = memory;
    }
    RecurrentRowArgs args = RecurrentColumns(shape, call.Inputs(row), head, column);
    args.state = state;
    args.query = FloatsOf(call.args.queries, row) + key_head * shape.key_dim;
    args.skip = call.args.skip == nullptr ? 0.0f : call.args.skip[head];
    args.out = FloatsOf(call.args.output, row) + head * shape.value_dim + column;
    call.table.recurrent_row(args);
    const auto& snapshot = call.step.states.snapshot;
    if (!snapshot.empty() && snapshot[static_cast<size_t>(row)] >= 0) {
      std::copy_n(state, floats, block_of(snapshot[static_cast<size_t>(row)]));
    }
  }
}

}  // namespace

void StateOps::Recurrence(const RecurrenceArgs& args) {
  const auto& states = static_cast<const CpuStates&>(*args.states);
  const RecurrentShape& shape = states.shape(args.block).recurrence;
  MOESERVE_CHECK(shape.delta == args.settings.delta, "states of the same recurrence");
  const Recurrent call{args, states, shape, step_, table_};
  const int64_t rows = args.output.rows;
  const int64_t inputs = int64_t{2} * shape.key_width() + 16 * shape.decay_width();
  workers_.ForEachRow(rows, inputs, [&](int64_t row) { call.Prepare(row); });

  const std::vector<RecurrentRun> runs = RunsOf(call, rows);
  const int parts = (shape.value_dim + kRecurrentColumns - 1) / kRecurrentColumns;
  const int64_t items = int64_t{shape.heads} * parts;
  for (const RecurrentRun& run : runs) {
    if (step_.sequence[static_cast<size_t>(run.begin)] < 0) {
      for (int64_t row = run.begin; row < run.end; ++row) {
        std::fill_n(FloatsOf(args.output, row), args.output.cols, 0.0f);
      }
    }
  }
  const int64_t work =
      int64_t{shape.key_dim} * kRecurrentColumns * (rows / std::max<int64_t>(std::ssize(runs), 1));
  workers_.ForRows(std::ssize(runs) * items, work, [&](int64_t begin, int64_t end, int worker) {
    float* const memory =
        workers_.Floats(worker, static_cast<size_t>(shape.key_dim) * kRecurrentColumns);
    for (int64_t i = begin; i < end; ++i) {
      const RecurrentRun& run = runs[static_cast<size_t>(i / items)];
      if (step_.sequence[static_cast<size_t>(run.begin)] < 0) continue;
      const int head = static_cast<int>(i % items) / parts;
      const int column = static_cast<int>(i % items) % parts * kRecurrentColumns;
      RunColumns(call, run, head, column, memory);
    }
  });
}

}  // namespace moeserve::cpu

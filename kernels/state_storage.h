// The memory of blocks that keep a state of fixed size for each sequence, whatever its length.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kernels/base/recurrence.h"
#include "kernels/storage_observer.h"

namespace moeserve {

// The state of a convolution, its last `rows` inputs, f32 rows of `cols` elements, the oldest one
// first; rows before a text are zeros. Behind it the state of a recurrence, if there is one.
struct StateShape {
  int rows = 0;
  int cols = 0;
  RecurrentShape recurrence = {};

  // Returns the number of floats of the state, and of what a token adds to it.
  int64_t floats() const { return int64_t{rows} * cols + recurrence.state_floats(); }
  int64_t pending_floats() const { return cols + recurrence.input_floats(); }
};

// The states of all such blocks of a model. A slot has the state of one sequence after some number
// of its tokens, or a snapshot of one. A slot of a sequence also has room for the inputs of
// `pending_rows` tokens behind the state: drafted tokens, which may be rejected. A block's part of
// a slot consists of the rows of its convolution, those of pending tokens, the state of its
// recurrence, and the recurrence's inputs of pending tokens.
class StateStorage {
 public:
  virtual ~StateStorage() {
    if (observer_ != nullptr) observer_->Drops(id_);
  }
  StateStorage(const StateStorage&) = delete;
  StateStorage& operator=(const StateStorage&) = delete;

  int num_slots() const { return num_slots_; }
  int pending_rows() const { return pending_rows_; }
  int num_blocks() const { return static_cast<int>(shapes_.size()); }
  const StateShape& shape(int block) const { return shapes_[static_cast<size_t>(block)]; }
  // Unique within the process and not 0, for the same purpose as KvCacheStorage::id().
  uint64_t id() const { return id_; }

  // Stores the state before the first token of a text.
  void Clear(int32_t slot) {
    if (observer_ != nullptr) observer_->ClearsState(id_, slot);
    DoClear(slot);
  }
  // Stores in `to`, which may be `from`, the state of `from` after its first `rows` pending rows.
  void Advance(int32_t from, int rows, int32_t to) {
    if (observer_ != nullptr) observer_->AdvancesState(id_, from, rows, to);
    DoAdvance(from, rows, to);
  }

  // The observer must outlive the storage or be replaced by null.
  void SetObserver(StorageObserver* observer) { observer_ = observer; }

  // Returns the bytes of one slot.
  static int64_t SlotBytes(std::span<const StateShape> shapes, int pending_rows) {
    int64_t bytes = 0;
    for (const StateShape& s : shapes) {
      bytes += (s.floats() + pending_rows * s.pending_floats()) * int64_t{sizeof(float)};
    }
    return bytes;
  }

 protected:
  virtual void DoClear(int32_t slot) = 0;
  virtual void DoAdvance(int32_t from, int rows, int32_t to) = 0;

  StateStorage(std::vector<StateShape> shapes, int num_slots, int pending_rows)
      : shapes_(std::move(shapes)), num_slots_(num_slots), pending_rows_(pending_rows) {}

  // Returns the first float of a block's part of a slot. All slots of a block are adjacent.
  int64_t Begin(int block, int32_t slot) const {
    int64_t begin = 0;
    for (int b = 0; b < block; ++b) begin += SlotFloats(b) * num_slots_;
    return begin + SlotFloats(block) * slot;
  }
  int64_t SlotFloats(int block) const {
    return shape(block).floats() + pending_rows_ * shape(block).pending_floats();
  }
  // Returns where in a block's part of a slot its recurrence begins, in floats: the state, then the
  // inputs of pending tokens.
  int64_t RecurrenceBegin(int block) const {
    return int64_t{shape(block).rows + pending_rows_} * shape(block).cols;
  }

  const std::vector<StateShape> shapes_;
  const int num_slots_;
  const int pending_rows_;

 private:
  inline static std::atomic<uint64_t> last_id_{0};
  const uint64_t id_ = ++last_id_;
  StorageObserver* observer_ = nullptr;
};

// Where the tokens of a step find and leave states. Empty for models without states.
struct StepStates {
  std::span<const int32_t> slot = {};  // [S] the slot of each sequence
  // [T] Each is -1 or, after the token of that row: the slot that receives the state, which is that
  // of the row's sequence; the slot that receives a snapshot; the index of the row of pending rows
  // that receives the token's input. At most one row of a sequence has `keep`; behind it there are
  // only rows with `pending`.
  std::span<const int32_t> keep = {}, snapshot = {}, pending = {};
};

}  // namespace moeserve

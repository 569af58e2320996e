// Attention over the KV cache on the CPU: groups query rows that share loads of keys and values
// into tiles, and distributes tiles, or blocks of positions of a tile, over threads.
//
// A row's result is the softmax over its visible positions. It is computed block by block
// (kAttentionBlock positions each) from the row's first visible position to its last, and the
// blocks are merged in that order. Blocks begin at multiples of kAttentionBlock for every row, so
// the bits of a row's result depend on its own visible positions alone; tiles, tasks and threads
// only determine which thread computes a block and when.

#include "kernels/cpu/attention.h"

#include <algorithm>
#include <bit>
#include <span>

#include "base/check.h"
#include "kernels/cpu/storage/kv_cache.h"

namespace moeserve::cpu {
namespace {

constexpr int64_t kWorkPerTask =
    1 << 16;  // elementary operations; a smaller task is not worth handing to a thread
// With fewer tiles per thread than this, each block of a tile is a task, to balance the load.
constexpr int kTilesPerThread = 4;
// Tasks per thread into which many tiles are divided.
constexpr int kTasksPerThread = 16;
// Tiles of one sequence and kv head that are computed together, block by block, so that all but the
// first read the block's keys and values from the cache.
constexpr int kTilesPerGroup = 8;

int BlockOf(int position) { return position / kAttentionBlock; }

}  // namespace

// The arguments that all tiles of one Attention() call share, and the steps of computing a tile.
class AttentionOps::Call {
 public:
  Call(AttentionOps& ops, const AttentionArgs& args)
      : args_(args),
        step_(ops.step_),
        table_(ops.table_),
        rows_(ops.rows_),
        cache_(static_cast<const CpuKvCache&>(*args.cache)),
        shape_(cache_.shape(args.layer)),
        geometry_(cache_.geometry(args.layer)),
        padded_(PaddedHeadDim(shape_.value_dim())),
        heads_per_kv_head_(args.heads / shape_.num_kv_heads) {
    MOESERVE_CHECK(args.query.cols == int64_t{args.heads} * shape_.head_dim, "query heads");
    MOESERVE_CHECK(args.bias == nullptr ||
                       (args.bias_distances > 0 && args.soft_cap == 0.0f && shape_.latent_dim == 0),
                   "biases of distances");
    MOESERVE_CHECK(!args.chunks || (args.causal && args.window > 0), "chunks of positions");
    MOESERVE_CHECK(args.causal || step_.lengths.size() == step_.page_tables.size(),
                   "lengths of page tables");
  }

  int FirstVisible(int token) const {
    const int position = step_.position[token];
    if (args_.chunks) return position - position % args_.window;
    return args_.window > 0 ? std::max(0, position - args_.window + 1) : 0;
  }
  int EndVisible(int token) const {
    const int position = step_.position[token];
    if (args_.causal) return position + 1;
    const int length = step_.lengths[TableOf(cache_, args_.layer, step_.sequence[token])];
    return args_.window > 0 && args_.window < length - position ? position + args_.window : length;
  }

  // Lists all query rows in rows_, in token order; the rows of a token are adjacent.
  void ListRows() {
    rows_.clear();
    if (args_.plan == nullptr) {
      const auto first = static_cast<int32_t>(args_.first_token);
      for (int32_t r = 0; r < args_.query.rows; ++r) rows_.push_back({r, first + r});
      return;
    }
    for (int t = 0; t < args_.plan->rows; ++t) {
      for (int i = args_.plan->row_offsets[t]; i < args_.plan->row_offsets[t + 1]; ++i) {
        rows_.push_back({args_.plan->assignments_of_row[i], t});
      }
    }
  }

  // Splits consecutive rows of one sequence, in ascending order of position, into tiles; each kv
  // head has its own tiles.
  void ListTiles(std::vector<TileTask>& tiles) {
    tiles.clear();
    const int count = static_cast<int>(rows_.size());
    for (int begin = 0, end = 0; begin < count; begin = end) {
      for (end = begin + 1; end < count && Follows(end); ++end) {
      }
      const int items = (end - begin) * heads_per_kv_head_;
      const int most = std::min(table_.attention_rows, items);
      part_rows_ =
          std::max(part_rows_, static_cast<int>(std::bit_ceil(static_cast<unsigned>(most))));
      for (int g = 0; g < shape_.num_kv_heads; ++g) {
        for (int item = 0; item < items; item += table_.attention_rows) {
          tiles.push_back({g, begin, item, std::min(table_.attention_rows, items - item)});
        }
      }
    }
  }

  // Returns a rough number of elementary operations for a tile.
  int64_t Work(const TileTask& task) const {
    const int64_t positions = EndVisible(LastToken(task)) - FirstVisible(FirstToken(task));
    return 2 * positions * task.count * shape_.head_dim;
  }

  int BlockBegin(const TileTask& task) const { return BlockOf(FirstVisible(FirstToken(task))); }
  int BlockEnd(const TileTask& task) const { return BlockOf(EndVisible(LastToken(task)) - 1) + 1; }

  // Returns the number of floats that a tile needs for its rows' weighted sums, largest scores and
  // totals.
  int64_t PartFloats() const { return (part_rows_ * (int64_t{padded_} + 2) + 15) / 16 * 16; }
  int64_t ScratchFloats() const {
    const int64_t queries = PackedRowsBytes(part_rows_, int64_t{shape_.head_dim} * 2);
    return kAttentionScratch + 2 * PartFloats() +
           (queries + LatentBytes() + OperandBytes()) / int64_t{sizeof(float)};
  }
  // Returns the number of floats that RunTiles() needs.
  int64_t GroupFloats() const { return ScratchFloats() + kTilesPerGroup * PartFloats(); }

  struct Tile {
    const float* queries[kMaxAttentionRows];
    char* output[kMaxAttentionRows];
    int32_t begin[kMaxAttentionRows];
    int32_t end[kMaxAttentionRows];
    float sink[kMaxAttentionRows];         // only with sinks
    const float* bias[kMaxAttentionRows];  // only with biases, of distance 0
    int32_t position[kMaxAttentionRows];
    const int32_t* page_table;
    int kv_head;
    int count;
  };

  Tile Gather(const TileTask& task) const {
    Tile tile;
    tile.kv_head = task.kv_head;
    tile.count = task.count;
    const int32_t sequence = step_.sequence[rows_[task.first_row].token];
    tile.page_table = step_.page_tables[TableOf(cache_, args_.layer, sequence)].data();
    const int64_t size = static_cast<int64_t>(SizeOf(args_.output.dtype));
    const int64_t biases_after = args_.causal ? 0 : args_.bias_distances - 1;
    for (int i = 0; i < task.count; ++i) {
      const int item = task.item + i;
      const Row row = rows_[task.first_row + item / heads_per_kv_head_];
      const int member = item % heads_per_kv_head_;
      const int64_t head = args_.order == HeadOrder::kInterleave
                               ? int64_t{task.kv_head} * heads_per_kv_head_ + member
                               : int64_t{member} * shape_.num_kv_heads + task.kv_head;
      tile.queries[i] =
          reinterpret_cast<const float*>(args_.query.row(row.row)) + head * shape_.head_dim;
      tile.output[i] = args_.output.row(row.row) + head * shape_.value_dim() * size;
      tile.begin[i] = FirstVisible(row.token);
      tile.end[i] = EndVisible(row.token);
      tile.position[i] = step_.position[row.token];
      if (args_.sinks != nullptr) tile.sink[i] = args_.sinks[head];
      if (args_.bias != nullptr) {
        tile.bias[i] = args_.bias + head * (args_.bias_distances + biases_after) + biases_after;
      }
    }
    return tile;
  }

  struct Range {
    int begin, end;
  };
  // Returns the rows of the tile that see at least one position of the block. They are adjacent,
  // because `begin` and `end` never decrease from row to row.
  static Range Seeing(const Tile& tile, int block) {
    Range range{0, tile.count};
    while (tile.end[range.begin] <= block * kAttentionBlock) ++range.begin;
    while (tile.begin[range.end - 1] >= (block + 1) * kAttentionBlock) --range.end;
    return range;
  }

  // Computes one block for a tile and stores the result in `part`. Row 0 of `part` is the first row
  // of the tile that sees the block.
  // `scratch` are ScratchFloats() floats, `part` may be within them.
  // `operands`, unless null, has what earlier tiles of the block and kv head have made ready in the
  // same scratch.
  void RunBlock(const Tile& tile, int block, float* scratch, float* part,
                AttentionOperands* operands = nullptr) const {
    char* const latent_values =
        reinterpret_cast<char*>(scratch + kAttentionScratch + 2 * PartFloats());
    char* const operand_memory = latent_values + LatentBytes();
    Bf16* const rounded_queries = reinterpret_cast<Bf16*>(operand_memory + OperandBytes());
    AttentionOperands own;
    if (operands == nullptr) operands = &own;
    operands->memory = operand_memory;
    const Range seeing = Seeing(tile, block);
    if (seeing.begin >= seeing.end) return;
    table_.attention_tile(
        {.rows = seeing.end - seeing.begin,
         .queries = tile.queries + seeing.begin,
         .begin = tile.begin + seeing.begin,
         .end = tile.end + seeing.begin,
         .type = cache_.type(),
         .keys = cache_.keys(args_.layer) + tile.kv_head * geometry_.key_head,
         .values = cache_.values(args_.layer) + tile.kv_head * geometry_.value_head,
         .latent_values = shape_.latent_dim > 0 ? latent_values : nullptr,
         .page_table = tile.page_table,
         .key_page_bytes = geometry_.key_block,
         .value_page_bytes = shape_.latent_dim > 0 ? LatentPageBytes() : geometry_.value_block,
         .key_head_bytes = tile.kv_head + 1 < shape_.num_kv_heads ? geometry_.key_head : 0,
         .value_head_bytes = tile.kv_head + 1 < shape_.num_kv_heads ? geometry_.value_head : 0,
         .head_dim = shape_.head_dim,
         .value_dim = shape_.value_dim(),
         .padded_dim = padded_,
         .block = block,
         .scale = args_.scale,
         .soft_cap = args_.soft_cap,
         .bias = args_.bias == nullptr ? nullptr : tile.bias + seeing.begin,
         .bias_distances = args_.bias_distances,
         .position = tile.position + seeing.begin,
         .scratch = scratch,
         .rounded_queries = rounded_queries,
         .operands = OperandBytes() > 0 ? operands : nullptr,
         .largest = Largest(part),
         .total = Total(part),
         .sums = part});
  }

  // Merges the result of a block into the tile's state. Must be called in ascending order of
  // blocks.
  void Join(const Tile& tile, int block, float* part, float* state) const {
    const Range seeing = Seeing(tile, block);
    for (int r = seeing.begin; r < seeing.end; ++r) {
      const int i = r - seeing.begin;
      const float* sums = part + int64_t{i} * padded_;
      float* to = state + int64_t{r} * padded_;
      if (block == BlockOf(tile.begin[r])) {
        Largest(state)[r] = Largest(part)[i];
        Total(state)[r] = Total(part)[i];
        std::copy_n(sums, padded_, to);
        continue;
      }
      table_.merge_attention({.padded_dim = padded_,
                              .largest = Largest(state) + r,
                              .total = Total(state) + r,
                              .sums = to,
                              .partial_largest = Largest(part)[i],
                              .partial_total = Total(part)[i],
                              .partial_sums = sums});
    }
  }

  void WriteOutput(const Tile& tile, float* state) const {
    for (int r = 0; r < tile.count; ++r) {
      float* sums = state + int64_t{r} * padded_;
      const float inverse =
          args_.sinks == nullptr
              ? 1.0f / Total(state)[r]
              : table_.inverse_with_sink(Largest(state)[r], Total(state)[r], tile.sink[r]);
      const int dim = shape_.value_dim();
      for (int d = 0; d < dim; ++d) sums[d] *= inverse;
      if (args_.output.dtype == DType::kBF16) {
        table_.convert_row(sums, reinterpret_cast<Bf16*>(tile.output[r]), dim);
      } else {
        std::copy_n(sums, dim, reinterpret_cast<float*>(tile.output[r]));
      }
    }
  }

  // Computes consecutive tiles. `scratch` are GroupFloats() floats.
  void RunTiles(std::span<const TileTask> tasks, float* scratch) const {
    while (!tasks.empty()) {
      const TileTask& first = tasks.front();
      size_t count = 1;
      while (count < std::min<size_t>(tasks.size(), kTilesPerGroup) &&
             tasks[count].first_row == first.first_row && tasks[count].kv_head == first.kv_head) {
        ++count;
      }
      RunGroup(tasks.first(count), scratch);
      tasks = tasks.subspan(count);
    }
  }

 private:
  int FirstToken(const TileTask& task) const {
    return rows_[task.first_row + task.item / heads_per_kv_head_].token;
  }
  int LastToken(const TileTask& task) const {
    return rows_[task.first_row + (task.item + task.count - 1) / heads_per_kv_head_].token;
  }
  // Computes tiles of one sequence and kv head.
  void RunGroup(std::span<const TileTask> tasks, float* scratch) const {
    Tile tiles[kTilesPerGroup];
    float* const states = scratch + ScratchFloats();
    const auto count = static_cast<int>(tasks.size());
    int begin = BlockBegin(tasks[0]), end = BlockEnd(tasks[0]);
    for (int i = 0; i < count; ++i) {
      tiles[i] = Gather(tasks[i]);
      begin = std::min(begin, BlockBegin(tasks[i]));
      end = std::max(end, BlockEnd(tasks[i]));
    }
    for (int block = begin; block < end; ++block) {
      AttentionOperands operands;
      for (int i = 0; i < count; ++i) {
        if (block < BlockBegin(tasks[i]) || block >= BlockEnd(tasks[i])) continue;
        RunAndJoin(tiles[i], block, scratch, states + i * PartFloats(), &operands);
      }
    }
    for (int i = 0; i < count; ++i) WriteOutput(tiles[i], states + i * PartFloats());
  }

  void RunAndJoin(const Tile& tile, int block, float* scratch, float* state,
                  AttentionOperands* operands) const {
    if (BlockOf(tile.begin[tile.count - 1]) == block && tile.end[0] > block * kAttentionBlock &&
        BlockOf(tile.begin[0]) == block) {
      return RunBlock(tile, block, scratch, state, operands);  // it is the first block of every row
    }
    float* const part = scratch + kAttentionScratch;
    RunBlock(tile, block, scratch, part, operands);
    Join(tile, block, part, state);
  }

  // Returns whether row i belongs to the same sequence as row i - 1, at the same or a later
  // position.
  bool Follows(int i) const {
    const int before = rows_[i - 1].token, token = rows_[i].token;
    return step_.sequence[before] == step_.sequence[token] &&
           step_.position[before] <= step_.position[token];
  }
  // Returns the bytes of the values of one page, and of one block of positions, that
  // attention over latent vectors copies from the keys.
  int64_t LatentPageBytes() const {
    const int64_t scales = cache_.type() == KvCacheType::kInt8 ? kKvScaleBytes : 0;
    return scales + int64_t{padded_} * kPageTokens * ElementBytes(cache_.type());
  }
  int64_t LatentBytes() const {
    return shape_.latent_dim > 0 ? LatentPageBytes() * (kAttentionBlock / kPageTokens) : 0;
  }
  int64_t OperandBytes() const {
    return table_.matrix_rows > 0 && cache_.type() == KvCacheType::kBF16
               ? AttentionOperandBytes(shape_.head_dim, padded_)
               : 0;
  }
  float* Largest(float* part) const { return part + int64_t{part_rows_} * padded_; }
  float* Total(float* part) const { return Largest(part) + part_rows_; }

  const AttentionArgs& args_;
  const StepInputs& step_;
  const KernelTable& table_;
  std::vector<Row>& rows_;
  const CpuKvCache& cache_;
  const KvLayerShape& shape_;
  const CpuKvCache::Geometry geometry_;
  const int padded_;
  const int heads_per_kv_head_;
  int part_rows_ = 1;  // rows of the largest tile, rounded up to a power of two
};

void AttentionOps::Attention(const AttentionArgs& args) {
  Call call(*this, args);
  call.ListRows();
  call.ListTiles(tiles_);
  const auto tiles = static_cast<int64_t>(tiles_.size());
  int64_t work = 0;
  for (const TileTask& t : tiles_) work += call.Work(t);
  const auto scratch = static_cast<size_t>(call.ScratchFloats());
  const int threads = workers_.threads();
  const auto group_floats = static_cast<size_t>(call.GroupFloats());
  if (threads == 1 || work < kWorkPerTask) {
    return call.RunTiles(tiles_, workers_.Floats(0, group_floats));
  }
  if (tiles >= int64_t{kTilesPerThread} * threads) {
    // Consecutive tiles form one task. The last task is started first, because the last tiles of a
    // prompt see the most positions and take longest.
    const int64_t least = std::max(kWorkPerTask, work / (int64_t{kTasksPerThread} * threads));
    task_bounds_.assign(1, 0);
    int64_t sum = 0;
    for (int32_t i = 0; i < tiles; ++i) {
      sum += call.Work(tiles_[i]);
      if (sum < least && i + 1 < tiles) continue;
      task_bounds_.push_back(i + 1);
      sum = 0;
    }
    const auto tasks = static_cast<int64_t>(task_bounds_.size()) - 1;
    workers_.pool().Run(tasks, [&](int64_t n, int worker) {
      const int32_t begin = task_bounds_[tasks - 1 - n], end = task_bounds_[tasks - n];
      call.RunTiles(std::span(tiles_).subspan(begin, end - begin),
                    workers_.Floats(worker, group_floats));
    });
    return;
  }

  blocks_.clear();
  for (int32_t i = 0; i < tiles; ++i) {
    for (int b = call.BlockBegin(tiles_[i]); b < call.BlockEnd(tiles_[i]); ++b) {
      blocks_.push_back({i, b});
    }
  }
  const auto blocks = static_cast<int64_t>(blocks_.size());
  const int64_t part_floats = call.PartFloats();
  if (parts_.size() < static_cast<size_t>(blocks * part_floats)) {
    parts_.resize(static_cast<size_t>(blocks * part_floats));
  }
  workers_.pool().Run(blocks, [&](int64_t n, int worker) {
    const BlockTask& b = blocks_[n];
    call.RunBlock(call.Gather(tiles_[b.tile]), b.block, workers_.Floats(worker, scratch),
                  parts_.data() + n * part_floats);
  });
  float* state = workers_.Floats(0, scratch);
  for (int64_t n = 0, tile = 0; tile < tiles; ++tile) {
    const Call::Tile rows = call.Gather(tiles_[tile]);
    for (; n < blocks && blocks_[n].tile == tile; ++n) {
      call.Join(rows, blocks_[n].block, parts_.data() + n * part_floats, state);
    }
    call.WriteOutput(rows, state);
  }
}

}  // namespace moeserve::cpu

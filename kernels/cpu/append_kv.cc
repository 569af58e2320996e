// Writes keys and values into the layout of the KV cache.

#include <algorithm>

#include "kernels/base/int8_cache.h"
#include "kernels/cpu/attention.h"
#include "kernels/cpu/storage/kv_cache.h"

namespace moeserve::cpu {
namespace {

// Rounds a head's elements to int8 with a common scale and returns the scale.
float Quantize(const float* x, int n, int8_t* out) {
  uint32_t largest = 0;
  for (int i = 0; i < n; ++i) largest = std::max(largest, MagnitudeBits(x[i]));
  const Int8Scale scale = CacheScaleOf(largest);
  for (int i = 0; i < n; ++i) out[i] = RoundToInt8(x[i], scale);
  return scale.scale;
}

template <typename Element>
void Scatter(const Element* from, int head_dim, int64_t slot, char* head) {
  Element* to = reinterpret_cast<Element*>(head) + slot;
  for (int d = 0; d < head_dim; ++d) to[int64_t{d} * kPageTokens] = from[d];
}

// Writes one head's key [dim] to a slot of its block. `rounded` is memory for one head.
void AppendKey(const KernelTable& table, KvCacheType type, const float* k, int dim, int64_t slot,
               char* key, float* rounded) {
  switch (type) {
    case KvCacheType::kF32:
      Scatter(k, dim, slot, key);
      break;
    case KvCacheType::kBF16: {
      Bf16* bf16 = reinterpret_cast<Bf16*>(rounded);
      table.convert_row(k, bf16, dim);
      Scatter(bf16, dim, slot, key);
      break;
    }
    case KvCacheType::kInt8: {
      int8_t* bytes = reinterpret_cast<int8_t*>(rounded);
      reinterpret_cast<float*>(key)[slot] = Quantize(k, dim, bytes);
      Scatter(bytes, dim, slot, key + kKvScaleBytes);
      break;
    }
  }
}

// The same for a value [dim], whose row in the block has `row_bytes`.
void AppendValue(const KernelTable& table, KvCacheType type, const float* v, int dim, int64_t slot,
                 int64_t row_bytes, char* value) {
  switch (type) {
    case KvCacheType::kF32:
      std::copy_n(v, dim, reinterpret_cast<float*>(value + slot * row_bytes));
      break;
    case KvCacheType::kBF16:
      table.convert_row(v, reinterpret_cast<Bf16*>(value + slot * row_bytes), dim);
      break;
    case KvCacheType::kInt8:
      reinterpret_cast<float*>(value)[slot] =
          Quantize(v, dim, reinterpret_cast<int8_t*>(value + kKvScaleBytes + slot * row_bytes));
      break;
  }
}

}  // namespace

void AttentionOps::AppendKv(const AppendKvArgs& args) {
  const int dim = args.cache->shape(args.layer).head_dim;
  // Rows of a prompt are divided between pages, because a whole block is stored at once.
  // Otherwise each element of a key goes to a cache line of its own, which takes as long as eight
  // other operations.
  const int64_t rows = args.keys.rows;
  const int64_t unit = rows > 4 * kPageTokens ? kPageTokens : 1;
  const int64_t work = args.keys.cols * (unit > 1 ? 2 : 9);
  const int64_t units = (rows + unit - 1) / unit;
  workers_.ForRows(units, work * unit, [&](int64_t begin, int64_t end_unit, int worker) {
    const int64_t end = std::min(end_unit * unit, rows);
    float* rounded = workers_.Floats(worker, static_cast<size_t>(dim));
    const auto block_of = [&](int64_t t) {
      const auto page = static_cast<size_t>(step_.position[t]) / kPageTokens;
      return step_.page_tables[TableOf(*args.cache, args.layer, step_.sequence[t])][page];
    };
    for (int64_t first = begin * unit; first < end;) {
      const int64_t block = block_of(first);
      int64_t last = first + 1;
      while (last < end && block_of(last) == block) ++last;
      AppendBlock(args, block, first, last, rounded);
      first = last;
    }
  });
}

void AttentionOps::AppendBlock(const AppendKvArgs& args, int64_t block, int64_t first, int64_t last,
                               float* rounded) const {
  const auto& cache = static_cast<const CpuKvCache&>(*args.cache);
  const KvLayerShape& shape = cache.shape(args.layer);
  const CpuKvCache::Geometry g = cache.geometry(args.layer);
  const int dim = shape.head_dim;
  const int value_dim = shape.value_dim();
  const int64_t value_row = PaddedHeadDim(value_dim) * ElementBytes(cache.type());
  const auto slot_of = [&](int64_t t) { return step_.position[t] % kPageTokens; };
  const auto key_of = [&](int64_t t, int64_t h) {
    return reinterpret_cast<const float*>(args.keys.row(t)) + h * dim;
  };
  const bool whole =
      last - first == kPageTokens && slot_of(first) == 0 && slot_of(last - 1) == kPageTokens - 1;
  // Loops over heads outside and tokens inside, because the keys that a block's tokens have for one
  // head are interleaved and so share cache lines.
  for (int64_t h = 0; h < shape.num_kv_heads; ++h) {
    char* const key = cache.keys(args.layer) + block * g.key_block + h * g.key_head;
    const bool at_once = whole && cache.type() == KvCacheType::kBF16;
    if (at_once) {
      const float* rows[kPageTokens];
      for (int64_t i = 0; i < kPageTokens; ++i) rows[i] = key_of(first + i, h);
      table_.interleave_bf16(rows, dim, reinterpret_cast<Bf16*>(key));
    }
    for (int64_t t = first; t < last; ++t) {
      if (!at_once) {
        AppendKey(table_, cache.type(), key_of(t, h), dim, slot_of(t), key, rounded);
      }
      if (shape.latent_dim > 0) continue;
      char* const value = cache.values(args.layer) + block * g.value_block + h * g.value_head;
      const float* const from = reinterpret_cast<const float*>(args.values.row(t)) + h * value_dim;
      AppendValue(table_, cache.type(), from, value_dim, slot_of(t), value_row, value);
    }
  }
}

}  // namespace moeserve::cpu

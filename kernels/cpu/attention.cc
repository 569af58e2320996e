// Rotary positions, the cache's writes and attention over it.

#include <algorithm>
#include <cmath>

#include "kernels/base/check.h"
#include "kernels/cpu/cpu_backend.h"
#include "kernels/cpu/kv_cache.h"

namespace moeserve::cpu {
namespace {

struct KvGeometry {
  int64_t element;
  int64_t key_head;  // bytes of one kv head within a block
  int64_t value_head;
  int64_t key_block;
  int64_t value_block;
};

KvGeometry GeometryOf(const CpuKvCache& cache, int layer) {
  const KvLayerShape& shape = cache.shape(layer);
  KvGeometry g;
  g.element = static_cast<int64_t>(SizeOf(cache.dtype()));
  g.key_head = int64_t{shape.head_dim} * kKvBlockTokens * g.element;
  g.value_head = int64_t{PaddedHeadDim(shape.head_dim)} * kKvBlockTokens * g.element;
  g.key_block = g.key_head * shape.num_kv_heads;
  g.value_block = g.value_head * shape.num_kv_heads;
  return g;
}

inline void StoreElement(char* p, float v, bool bf16) {
  if (bf16) {
    *reinterpret_cast<Bf16*>(p) = Bf16FromF32(v);
  } else {
    *reinterpret_cast<float*>(p) = v;
  }
}

}  // namespace

void CpuBackend::Rope(const RopeArgs& args) {
  const RopeSettings& s = args.settings;
  const int pairs = s.dimensions / 2;
  const int64_t heads = args.rows.cols / s.head_dim;
  MOESERVE_CHECK(heads * s.head_dim == args.rows.cols, "rope rows hold whole heads");
  ForRows(args.rows.rows, args.rows.cols * 4 + pairs * 80,
          [&](int64_t begin, int64_t end, int worker) {
            float* cosine = scratch_[worker].Floats(static_cast<size_t>(2 * pairs));
            float* sine = cosine + pairs;
            int32_t angles_of = -1;
            for (int64_t r = begin; r < end; ++r) {
              const int64_t token = args.plan == nullptr ? r : args.plan->row_of_assignment[r];
              const int32_t position = step_.position[token];
              if (position != angles_of) {
                for (int i = 0; i < pairs; ++i) {
                  const double angle = position * std::pow(s.theta, -2.0 * i / s.dimensions);
                  cosine[i] = static_cast<float>(std::cos(angle));
                  sine[i] = static_cast<float>(std::sin(angle));
                }
                angles_of = position;
              }
              float* row = reinterpret_cast<float*>(args.rows.row(r));
              for (int64_t h = 0; h < heads; ++h, row += s.head_dim) {
                for (int i = 0; i < pairs; ++i) {
                  float& x = row[s.interleaved ? 2 * i : i];
                  float& y = row[s.interleaved ? 2 * i + 1 : i + pairs];
                  const float a = x, b = y;
                  x = a * cosine[i] - b * sine[i];
                  y = b * cosine[i] + a * sine[i];
                }
              }
            }
          });
}

void CpuBackend::AppendKv(const AppendKvArgs& args) {
  const auto& cache = static_cast<const CpuKvCache&>(*args.cache);
  const KvLayerShape& shape = cache.shape(args.layer);
  const KvGeometry g = GeometryOf(cache, args.layer);
  const bool bf16 = cache.dtype() == DType::kBF16;
  const int padded = PaddedHeadDim(shape.head_dim);
  ForRows(args.keys.rows, args.keys.cols * 2, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      const int32_t position = step_.position[t];
      const int64_t block =
          step_.block_tables[step_.sequence[t]][static_cast<size_t>(position / kKvBlockTokens)];
      const int64_t slot = position % kKvBlockTokens;
      const float* k = reinterpret_cast<const float*>(args.keys.row(t));
      const float* v = reinterpret_cast<const float*>(args.values.row(t));
      for (int h = 0; h < shape.num_kv_heads; ++h) {
        char* key = cache.keys(args.layer) + block * g.key_block + h * g.key_head;
        char* value = cache.values(args.layer) + block * g.value_block + h * g.value_head +
                      slot * padded * g.element;
        for (int d = 0; d < shape.head_dim; ++d) {
          StoreElement(key + (int64_t{d} * kKvBlockTokens + slot) * g.element,
                       k[h * shape.head_dim + d], bf16);
          StoreElement(value + d * g.element, v[h * shape.head_dim + d], bf16);
        }
      }
    }
  });
}

void CpuBackend::Attention(const AttentionArgs& args) {
  const auto& cache = static_cast<const CpuKvCache&>(*args.cache);
  const KvLayerShape& shape = cache.shape(args.layer);
  const KvGeometry g = GeometryOf(cache, args.layer);
  const int heads = args.heads;
  const int padded = PaddedHeadDim(shape.head_dim);
  MOESERVE_CHECK(args.query.cols == int64_t{heads} * shape.head_dim, "query heads");

  int64_t context = 0;
  for (int32_t p : step_.position) context = std::max<int64_t>(context, p + 1);
  if (args.window > 0) context = std::min<int64_t>(context, args.window);
  ForRows(args.query.rows * heads, context * shape.head_dim * 2,
          [&](int64_t begin, int64_t end, int worker) {
            for (int64_t i = begin; i < end; ++i) {
              const int64_t r = i / heads;
              const int h = static_cast<int>(i % heads);
              const int64_t kv_head = KvHeadOf(args.order, h, heads, shape.num_kv_heads);
              const int64_t token = args.plan == nullptr ? r : args.plan->row_of_assignment[r];
              const int last = step_.position[token];
              const int first = args.window > 0 ? std::max(0, last - args.window + 1) : 0;
              const size_t lanes = static_cast<size_t>(last - first + 1) + 96;
              float* scores = scratch_[worker].Floats(lanes + padded);
              float* out = scores + lanes;
              table_->attention_head(
                  {.q = reinterpret_cast<const float*>(args.query.row(r)) + h * shape.head_dim,
                   .keys = cache.keys(args.layer),
                   .values = cache.values(args.layer),
                   .cache_bf16 = cache.dtype() == DType::kBF16,
                   .block_table = step_.block_tables[step_.sequence[token]].data(),
                   .key_block_bytes = g.key_block,
                   .value_block_bytes = g.value_block,
                   .key_head_offset = kv_head * g.key_head,
                   .value_head_offset = kv_head * g.value_head,
                   .head_dim = shape.head_dim,
                   .padded_dim = padded,
                   .begin = first,
                   .end = last + 1,
                   .scale = args.scale,
                   .scores = scores,
                   .out = out});
              char* to = args.output.row(r) +
                         h * shape.head_dim * static_cast<int64_t>(SizeOf(args.output.dtype));
              if (args.output.dtype == DType::kBF16) {
                table_->convert_row(out, reinterpret_cast<Bf16*>(to), shape.head_dim);
              } else {
                std::copy(out, out + shape.head_dim, reinterpret_cast<float*>(to));
              }
            }
          });
}

}  // namespace moeserve::cpu

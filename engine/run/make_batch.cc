#include "engine/run/make_batch.h"

#include <algorithm>
#include <numeric>

namespace moeserve {

Batch MakeBatch(const ModelSpec& spec, const std::vector<ScheduledRows>& rows, MemoryPool& memory,
                bool samples_on_device, const TextlessIds& textless) {
  const PoolingKind pooling = spec.pooling.value_or(PoolingSpec()).kind;
  Batch batch;
  batch.tables = memory.num_cache_tables();
  bool controlled = false;
  bool any_long = false;
  SampleRow on_host{};
  on_host.row = -1;
  for (const ScheduledRows& r : rows) {
    Sequence& s = *r.sequence;
    const int index = static_cast<int>(batch.page_tables.size()) / batch.tables;
    for (int table = 0; table < memory.num_tables(); ++table) {
      batch.page_tables.emplace_back(s.memory.tables[table]);
      if (spec.kind != ModelKind::kDecoder) batch.lengths.push_back(s.length());
    }
    if (spec.encoder != nullptr) {
      batch.page_tables.emplace_back(s.memory.source);
      batch.page_tables.emplace_back();  // of the encoder
      batch.lengths.insert(batch.lengths.end(), {s.source_length(), 0});
    }
    if (s.IsPooled(pooling)) {
      batch.pool_ranges.push_back({batch.num_tokens(), batch.num_tokens() + r.count});
    }
    if (!s.request.token_types.empty()) batch.token_types.resize(batch.tokens.size());
    memory.AddStates(s.memory, r.count, r.drafted, s.prompt_length(), batch.states);
    controlled = controlled || s.request.routing_control != nullptr;
    batch.controls.push_back(s.request.routing_control.get());
    any_long = any_long || s.is_long;
    for (int i = r.begin; i < r.begin + r.count; ++i) {
      const int behind = i - s.length();  // index of a drafted token, negative for a known one
      if (behind >= 0 || s.WantsLogits(i)) {
        if (samples_on_device && !s.request.encode.has_value()) {
          const int row = static_cast<int>(batch.logit_rows.size());
          const int ahead = std::max(behind + 1, 0);
          batch.samples.push_back(DeviceSample(s, row, ahead, textless).value_or(on_host));
        } else if (samples_on_device) {
          batch.samples.push_back(on_host);
        }
        batch.logit_rows.push_back(batch.num_tokens());
      }
      if (s.IsTextRow(i, pooling)) batch.text_rows.push_back(batch.num_tokens());
      if (!s.request.token_types.empty()) batch.token_types.push_back(s.request.token_types[i]);
      batch.tokens.push_back(behind < 0 ? s.tokens[static_cast<size_t>(i)]
                                        : s.draft[static_cast<size_t>(behind)]);
      batch.positions.push_back(i);
      batch.sequence.push_back(index);
      batch.long_sequence.push_back(s.is_long ? 1 : 0);
      batch.phase.push_back(i < s.high_water        ? Phase::kRecompute
                            : i < s.prompt_length() ? Phase::kPrefill
                                                    : Phase::kDecode);
    }
  }
  if (!controlled) batch.controls.clear();
  if (!any_long) batch.long_sequence.clear();
  if (!batch.token_types.empty()) batch.token_types.resize(batch.tokens.size());
  return batch;
}

Batch MakeSourceBatch(const std::vector<Sequence*>& sequences, std::vector<int32_t>& pages) {
  Batch batch;
  batch.tables = 3;
  batch.route_table = kSourceTable;
  int64_t count = 0;
  for (const Sequence* s : sequences) count += PagesFor(s->source_length());
  pages.resize(static_cast<size_t>(count));
  std::iota(pages.begin(), pages.end(), 0);
  std::span<const int32_t> rest = pages;
  for (const Sequence* s : sequences) {
    const auto index = static_cast<int32_t>(batch.page_tables.size()) / batch.tables;
    const auto own = static_cast<size_t>(PagesFor(s->source_length()));
    batch.page_tables.insert(batch.page_tables.end(), {{}, s->memory.source, rest.first(own)});
    batch.lengths.insert(batch.lengths.end(), {0, s->source_length(), s->source_length()});
    batch.controls.push_back(s->request.routing_control.get());
    rest = rest.subspan(own);
    for (int i = 0; i < s->source_length(); ++i) {
      batch.tokens.push_back(s->request.source[static_cast<size_t>(i)]);
      batch.positions.push_back(i);
      batch.sequence.push_back(index);
      batch.phase.push_back(s->source_encoded ? Phase::kRecompute : Phase::kPrefill);
    }
  }
  const auto none = [](const RoutingControl* control) { return control == nullptr; };
  if (std::ranges::all_of(batch.controls, none)) batch.controls.clear();
  return batch;
}

}  // namespace moeserve

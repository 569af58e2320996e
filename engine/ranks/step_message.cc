#include "engine/ranks/step_message.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "base/error_text.h"

namespace moeserve {
namespace {

constexpr uint32_t kStepMagic = 0x5073656D;  // "mesP"
constexpr uint32_t kStepVersion = 5;

struct StepHeader {
  uint32_t magic = kStepMagic;
  uint32_t version = kStepVersion;
  uint64_t bytes = 0;  // of what follows
  uint64_t checksum = 0;
};

static_assert(sizeof(StepHeader) == internal::kStepHeaderBytes);

// FNV-1a over 8-byte words: finds messages that were cut or mixed up. Neither MPI nor TCP lets
// single bits change.
uint64_t FieldChecksum(std::string_view bytes) {
  uint64_t hash = 14695981039346656037u;
  for (size_t at = 0; at < bytes.size(); at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, std::min<size_t>(8, bytes.size() - at));
    hash = (hash ^ word) * 1099511628211u;
  }
  return hash;
}

class FieldWriter {
 public:
  template <typename T>
  requires std::is_trivially_copyable_v<T>
  void Add(const T& value) { out_.append(reinterpret_cast<const char*>(&value), sizeof(T)); }
  template <typename T>
  void Add(const std::vector<T>& values) {
    Add(static_cast<uint64_t>(values.size()));
    out_.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
  }
  std::string Take() { return std::move(out_); }

 private:
  std::string out_;
};

// Reads fields until one does not fit; from then on, all fields are empty.
class FieldReader {
 public:
  explicit FieldReader(std::string_view bytes) : left_(bytes) {}

  const absl::Status& status() const { return status_; }
  bool ok() const { return status_.ok(); }
  size_t left() const { return left_.size(); }

  template <typename T>
  requires std::is_trivially_copyable_v<T> T Get(const char* what) {
    T value{};
    if (!ok()) return value;
    if (left_.size() < sizeof(T)) {
      Fail(what, Concat(sizeof(T), " bytes"), Concat(left_.size()));
      return value;
    }
    std::memcpy(&value, left_.data(), sizeof(T));
    left_.remove_prefix(sizeof(T));
    return value;
  }
  // Returns a number of elements; the bytes of an element are at least `element_bytes`.
  size_t Count(const char* what, int64_t most, size_t element_bytes) {
    const auto count = Get<uint64_t>(what);
    if (!ok()) return 0;
    if (count > static_cast<uint64_t>(most) || count > left_.size() / element_bytes) {
      Fail(what, Concat("at most ", most, " elements in ", left_.size(), " bytes"), Concat(count));
      return 0;
    }
    return static_cast<size_t>(count);
  }
  template <typename T>
  std::vector<T> Array(const char* what, int64_t most) {
    std::vector<T> values(Count(what, most, sizeof(T)));
    if (!values.empty()) std::memcpy(values.data(), left_.data(), values.size() * sizeof(T));
    left_.remove_prefix(values.size() * sizeof(T));
    return values;
  }
  // Reads an array that has a given length, or is empty if `may_be_empty`.
  template <typename T>
  std::vector<T> ArrayOf(const char* what, size_t length, bool may_be_empty) {
    std::vector<T> values = Array<T>(what, static_cast<int64_t>(length));
    if (ok() && values.size() != length && !(may_be_empty && values.empty())) {
      Fail(what, Concat(length, " elements"), Concat(values.size()));
    }
    return values;
  }
  void Fail(const char* what, std::string_view expected, std::string_view found) {
    if (!ok()) return;
    status_ = absl::InvalidArgumentError(
        Concat("step message: ", what, ": expected ", expected, ", found ", found));
  }

 private:
  std::string_view left_;
  absl::Status status_;
};

// Reads a number below `kinds`.
template <typename Kind>
Kind GetKind(FieldReader& in, const char* what, int kinds) {
  const auto value = in.Get<uint8_t>(what);
  if (value >= kinds) in.Fail(what, Concat("a number below ", kinds), Concat(int{value}));
  return static_cast<Kind>(in.ok() ? value : 0);
}

void AddRoutingChange(FieldWriter& out, const std::optional<RoutingChange>& control) {
  out.Add(static_cast<uint8_t>(control.has_value() ? 1 : 0));
  if (!control.has_value()) return;
  out.Add(static_cast<uint8_t>((control->top_k.has_value() ? 1 : 0) |
                               (control->top_p.has_value() ? 2 : 0)));
  out.Add(int32_t{control->top_k.value_or(0)});
  out.Add(control->top_p.value_or(0.0));
  out.Add(static_cast<uint64_t>(control->experts.size()));
  for (const RoutingChange::Expert& e : control->experts) {
    out.Add(int32_t{e.layer});
    out.Add(static_cast<uint8_t>(e.block));
    out.Add(int32_t{e.expert});
    out.Add(static_cast<uint8_t>(e.bias.has_value() ? 1 : 0));
    out.Add(e.bias.value_or(0.0));
  }
}

std::optional<RoutingChange> GetRoutingChange(FieldReader& in) {
  constexpr int64_t kMostExperts = 1 << 20;
  constexpr size_t kExpertBytes = 4 + 1 + 4 + 1 + 8;
  if (in.Get<uint8_t>("control") == 0) return std::nullopt;
  RoutingChange change;
  const auto set = in.Get<uint8_t>("control's fields");
  const auto top_k = in.Get<int32_t>("top_k");
  const auto top_p = in.Get<double>("top_p");
  if ((set & 1) != 0) change.top_k = top_k;
  if ((set & 2) != 0) change.top_p = top_p;
  change.experts.resize(in.Count("control's experts", kMostExperts, kExpertBytes));
  for (RoutingChange::Expert& e : change.experts) {
    e.layer = in.Get<int32_t>("layer");
    e.block = GetKind<BlockKind>(in, "block", static_cast<int>(BlockKind::kStateSpace) + 1);
    e.expert = in.Get<int32_t>("expert");
    const bool biased = in.Get<uint8_t>("whether there is a bias") != 0;
    const auto bias = in.Get<double>("bias");
    if (biased) e.bias = bias;
  }
  return change;
}

void AddStorageChange(FieldWriter& out, const StorageChange& change) {
  out.Add(static_cast<uint8_t>(change.kind));
  out.Add(change.storage);
  out.Add(change.values);
  out.Add(change.sizes);
}

StorageChange GetStorageChange(FieldReader& in) {
  constexpr int64_t kMostSizes = 16;
  StorageChange change;
  change.kind = GetKind<StorageChange::Kind>(in, "kind of change", StorageChange::kKinds);
  change.storage = in.Get<uint64_t>("changed storage");
  change.values = in.Get<std::array<int32_t, 3>>("change");
  change.sizes = in.Array<int64_t>("sizes of a storage", kMostSizes);
  return change;
}

void AddPageTable(FieldWriter& out, const PageTableChange& table) {
  out.Add(table.base);
  out.Add(table.length);
  out.Add(table.runs);
  out.Add(table.pages);
}

PageTableChange GetPageTable(FieldReader& in, int64_t most) {
  PageTableChange table;
  table.base = in.Get<int32_t>("base of a page table");
  table.length = in.Get<int32_t>("length of a page table");
  if (table.length < 0 || table.length > most) {
    in.Fail("length of a page table", Concat("0 to ", most), Concat(table.length));
  }
  table.runs = in.Array<std::array<int32_t, 2>>("changed parts of a page table", most);
  table.pages = in.Array<int32_t>("pages", most);
  return table;
}

void GetBatchFields(FieldReader& in, const StepLimits& limits, StepMessage& m) {
  m.tokens = in.Array<int32_t>("tokens", limits.tokens);
  const size_t tokens = m.tokens.size();
  m.positions = in.ArrayOf<int32_t>("positions", tokens, false);
  m.sequence = in.ArrayOf<int32_t>("sequences", tokens, false);
  m.long_sequence = in.ArrayOf<uint8_t>("long sequences", tokens, true);
  m.token_types = in.ArrayOf<uint8_t>("token types", tokens, true);
  m.tables = in.Get<int32_t>("page tables of a sequence");  // 0 after an error
  constexpr int32_t kMostTables = 16;
  if (m.tables < 1 || m.tables > kMostTables) {
    in.Fail("page tables of a sequence", Concat("1 to ", kMostTables), Concat(m.tables));
    return;
  }
  constexpr size_t kTableBytes = 4 + 4 + 8 + 8;
  m.page_tables.resize(in.Count("page tables", limits.sequences * m.tables, kTableBytes));
  for (PageTableChange& table : m.page_tables) table = GetPageTable(in, limits.pages);
  if (m.page_tables.size() % static_cast<size_t>(m.tables) != 0) {
    in.Fail("page tables", Concat("a multiple of ", m.tables), Concat(m.page_tables.size()));
  }
  const size_t sequences = m.page_tables.size() / static_cast<size_t>(m.tables);
  // Model::Reserve() runs rows of no sequence, which have no page tables.
  const int64_t least = sequences == 0 ? -2 : 0;
  for (const int32_t s : m.sequence) {
    if (s < least || s >= static_cast<int64_t>(sequences)) {
      in.Fail("sequence of a token", Concat(least, " to ", sequences, " exclusive"), Concat(s));
    }
  }
  m.lengths = in.ArrayOf<int32_t>("lengths", m.page_tables.size(), true);
  m.state_slots = in.ArrayOf<int32_t>("slots of states", sequences, true);
  m.keep = in.ArrayOf<int32_t>("kept states", tokens, true);
  m.snapshot = in.ArrayOf<int32_t>("snapshots", tokens, true);
  m.pending = in.ArrayOf<int32_t>("pending rows", tokens, true);
  m.source_rows = in.ArrayOf<int32_t>("source rows", tokens, true);
  m.predicted = in.Get<uint8_t>("predicted");
  m.divide_rows = in.Get<uint8_t>("division of rows");
  m.timeout_ms = in.Get<uint32_t>("time-out");
  m.logit_rows = in.Array<int32_t>("rows of logits", static_cast<int64_t>(tokens));
  for (size_t i = 0; i < m.logit_rows.size(); ++i) {
    const int32_t least = i == 0 ? 0 : m.logit_rows[i - 1] + 1;
    if (m.logit_rows[i] < least || static_cast<size_t>(m.logit_rows[i]) >= tokens) {
      in.Fail("row of logits", Concat(least, " to ", tokens, " exclusive"),
              Concat(m.logit_rows[i]));
      break;
    }
  }
  const size_t controls = in.Count("controls", limits.sequences, 1);
  const size_t expected = std::max<size_t>(sequences, 1);  // one for rows of no sequence
  if (in.ok() && controls != 0 && controls != expected) {
    in.Fail("controls", Concat(expected), Concat(controls));
  }
  for (size_t i = 0; i < controls && in.ok(); ++i) m.controls.push_back(GetRoutingChange(in));
}

void GetPlacementFields(FieldReader& in, StepMessage& m) {
  constexpr int64_t kMostMoves = 1 << 20;
  constexpr size_t kMoveBytes = 1 + 4 + 4 + 8;
  m.placement_version = in.Get<uint32_t>("version of the placement");
  m.next_version = in.Get<uint32_t>("version of the next placement");
  m.moves.resize(in.Count("moved experts", kMostMoves, kMoveBytes));
  for (ExpertMove& move : m.moves) {
    move.stack = GetKind<Stack>(in, "stack", static_cast<int>(Stack::kPrediction) + 1);
    move.block = in.Get<int32_t>("block of an expert");
    move.expert = in.Get<int32_t>("moved expert");
    move.holders = in.Get<uint64_t>("holders of an expert");
  }
}

}  // namespace

std::string Serialize(const StepMessage& m) {
  FieldWriter body;
  body.Add(m.number);
  body.Add(static_cast<uint8_t>(m.kind));
  body.Add(static_cast<uint64_t>(m.changes.size()));
  for (const StorageChange& change : m.changes) AddStorageChange(body, change);
  body.Add(m.cache);
  body.Add(m.states);
  body.Add(m.tokens);
  body.Add(m.positions);
  body.Add(m.sequence);
  body.Add(m.long_sequence);
  body.Add(m.token_types);
  body.Add(m.tables);
  body.Add(static_cast<uint64_t>(m.page_tables.size()));
  for (const PageTableChange& table : m.page_tables) AddPageTable(body, table);
  body.Add(m.lengths);
  body.Add(m.state_slots);
  body.Add(m.keep);
  body.Add(m.snapshot);
  body.Add(m.pending);
  body.Add(m.source_rows);
  body.Add(m.predicted);
  body.Add(m.divide_rows);
  body.Add(m.timeout_ms);
  body.Add(m.logit_rows);
  body.Add(static_cast<uint64_t>(m.controls.size()));
  for (const std::optional<RoutingChange>& control : m.controls) AddRoutingChange(body, control);
  body.Add(m.placement_version);
  body.Add(m.next_version);
  body.Add(static_cast<uint64_t>(m.moves.size()));
  for (const ExpertMove& move : m.moves) {
    body.Add(static_cast<uint8_t>(move.stack));
    body.Add(move.block);
    body.Add(move.expert);
    body.Add(move.holders);
  }
  return internal::WithHeader(body.Take());
}

std::string internal::WithHeader(std::string_view fields) {
  FieldWriter out;
  out.Add(StepHeader{.bytes = fields.size(), .checksum = FieldChecksum(fields)});
  return out.Take().append(fields);
}

Result<StepMessage> ParseStepMessage(std::string_view bytes, const StepLimits& limits) {
  FieldReader in(bytes);
  const auto header = in.Get<StepHeader>("header");
  MOESERVE_RETURN_IF_ERROR(in.status());
  if (header.magic != kStepMagic || header.version != kStepVersion) {
    return absl::InvalidArgumentError(Concat("step message: expected version ", kStepVersion,
                                             ", found ", header.version, " of kind ",
                                             header.magic));
  }
  if (header.bytes != in.left()) {
    return absl::InvalidArgumentError(
        Concat("step message: expected ", header.bytes, " bytes, found ", in.left()));
  }
  if (header.checksum != FieldChecksum(bytes.substr(sizeof(StepHeader)))) {
    return absl::InvalidArgumentError("step message: the bytes differ from those that were sent");
  }
  StepMessage m;
  m.number = in.Get<uint64_t>("number");
  m.kind = GetKind<StepMessage::Kind>(in, "kind", StepMessage::kKinds);
  constexpr size_t kChangeBytes = 1 + 8 + 12 + 8;
  m.changes.resize(in.Count("changes", limits.changes, kChangeBytes));
  for (StorageChange& change : m.changes) change = GetStorageChange(in);
  m.cache = in.Get<uint64_t>("cache");
  m.states = in.Get<uint64_t>("states");
  GetBatchFields(in, limits, m);
  GetPlacementFields(in, m);
  if (in.ok() && in.left() != 0) in.Fail("end", "no further bytes", Concat(in.left()));
  MOESERVE_RETURN_IF_ERROR(in.status());
  return m;
}

}  // namespace moeserve

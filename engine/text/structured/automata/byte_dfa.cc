#include "engine/text/structured/automata/byte_dfa.h"

#include <algorithm>
#include <deque>
#include <map>
#include <utility>

namespace moeserve::structured {
namespace {

// Largest number of transitions of all automata of one constraint together; limits their memory.
constexpr int64_t kMaxCells = 16 << 20;

// Returns for each state the smallest cost of a path over `usable` byte classes: the number of
// bytes on the path plus the seed of the state where the path ends. `distance` holds the seeds: 0,
// 1, or kUnreachable for a state where no path may end.
std::vector<int64_t> Distances(const ByteDfa& dfa, const std::vector<uint8_t>& usable,
                               std::vector<int64_t> distance,
                               const std::vector<std::vector<int32_t>>& before) {
  // Seeds are 0 or 1, so enqueuing all seeds of 0 before those of 1 visits states in order of
  // distance.
  std::deque<int32_t> queue;
  for (int64_t seed = 0; seed <= 1; ++seed) {
    for (int32_t s = 0; s < dfa.num_states(); ++s) {
      if (distance[s] == seed) queue.push_back(s);
    }
  }
  // A state with a seed of 1 may get a shorter distance later; it is then enqueued again.
  while (!queue.empty()) {
    const int32_t s = queue.front();
    queue.pop_front();
    for (const int32_t p : before[s]) {
      if (distance[p] <= distance[s] + 1) continue;
      bool linked = false;
      for (int c = 0; c < dfa.num_classes && !linked; ++c) {
        linked = usable[c] && dfa.next[static_cast<size_t>(p) * dfa.num_classes + c] == s;
      }
      if (!linked) continue;
      distance[p] = distance[s] + 1;
      queue.push_back(p);
    }
  }
  return distance;
}

}  // namespace

Status CompileBudget::Tick(int64_t work) {
  work_ += work;
  if (work_ < 4096) return absl::OkStatus();
  if (std::chrono::steady_clock::now() < end_) {
    work_ = 0;
    return absl::OkStatus();
  }
  // `work_` stays, so that every later call fails, too, even if a caller tries something else.
  return absl::InvalidArgumentError("the constraint takes too long to compile");
}

Status CompileBudget::AddStates(int64_t count, int num_classes) {
  states_left_ -= count;
  cells_ += count * num_classes;
  if (states_left_ >= 0 && cells_ <= kMaxCells) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "the constraint needs more automaton states than allowed; use smaller bounds, fewer "
      "alternatives or a simpler pattern");
}

int32_t ByteDfa::AddState(bool is_accepting, bool is_boundary) {
  accepting.push_back(is_accepting);
  boundary.push_back(is_boundary);
  next.resize(next.size() + num_classes, kDead);
  return num_states() - 1;
}

bool ByteDfa::Matches(std::string_view text) const {
  int32_t state = kStart;
  for (const char c : text) {
    state = Next(state, static_cast<uint8_t>(c));
    if (state == kDead) return false;
  }
  return accepting[state];
}

Status ByteDfa::Finish(const ByteSet& spellable, CompileBudget* budget) {
  ends_itself = true;
  const int n = num_states();
  std::vector<std::vector<int32_t>> before(n);
  for (int32_t s = 0; s < n; ++s) {
    MOESERVE_RETURN_IF_ERROR(budget->Tick(num_classes));
    for (int c = 0; c < num_classes; ++c) {
      const int32_t t = next[static_cast<size_t>(s) * num_classes + c];
      if (t != kDead && (before[t].empty() || before[t].back() != s)) before[t].push_back(s);
    }
  }

  std::vector<int64_t> seed(n, kUnreachable);
  for (int s = 0; s < n; ++s) {
    if (accepting[s]) seed[s] = 0;
  }
  const std::vector<int64_t> live =
      Distances(*this, std::vector<uint8_t>(num_classes, 1), seed, before);
  MOESERVE_RETURN_IF_ERROR(budget->Tick(static_cast<int64_t>(n) * num_classes));
  for (int32_t& t : next) {
    if (t != kDead && live[t] >= kUnreachable) t = kDead;
  }
  has_next.assign(n, 0);
  for (int s = 0; s < n; ++s) {
    for (int c = 0; c < num_classes; ++c) {
      has_next[s] |= next[static_cast<size_t>(s) * num_classes + c] != kDead;
    }
    if (accepting[s] && has_next[s]) ends_itself = false;
  }

  std::vector<uint8_t> usable(num_classes, 0);
  for (int b = 0; b < 256; ++b) {
    if (spellable[b]) usable[class_of[b]] = 1;
  }
  distance = Distances(*this, usable, seed, before);
  for (int s = 0; s < n; ++s) {
    if (accepting[s] && has_next[s]) seed[s] = 1;
  }
  end_distance = Distances(*this, usable, seed, before);
  MOESERVE_RETURN_IF_ERROR(budget->Tick(static_cast<int64_t>(n) * num_classes));
  max_distance = 0;
  for (const int64_t d : end_distance) {
    if (d < kUnreachable) max_distance = std::max(max_distance, d);
  }
  return absl::OkStatus();
}

Result<ByteDfa> Quoted(const ByteDfa& content, CompileBudget* budget) {
  MOESERVE_RETURN_IF_ERROR(budget->AddStates(content.num_states() + 2, content.num_classes + 1));
  ByteDfa out;
  // Adds a byte class for the quote.
  out.class_of = content.class_of;
  out.num_classes = content.num_classes + 1;
  const int quote = content.num_classes;
  out.class_of['"'] = static_cast<uint8_t>(quote);
  out.AddState(false, false);
  for (int s = 0; s < content.num_states(); ++s) out.AddState(false, content.boundary[s]);
  const int32_t closed = out.AddState(true, false);
  out.SetNext(ByteDfa::kStart, quote, 1 + ByteDfa::kStart);
  for (int s = 0; s < content.num_states(); ++s) {
    for (int c = 0; c < content.num_classes; ++c) {
      const int32_t t = content.next[static_cast<size_t>(s) * content.num_classes + c];
      if (t != kDead) out.SetNext(1 + s, c, 1 + t);
    }
    // A quote after a backslash is part of the content.
    const int32_t escaped = content.Next(s, '"');
    if (escaped != kDead) {
      out.SetNext(1 + s, quote, 1 + escaped);
    } else if (content.accepting[s]) {
      out.SetNext(1 + s, quote, closed);
    }
  }
  return out;
}

Result<ByteDfa> Intersection(const ByteDfa& a, const ByteDfa& b, CompileBudget* budget) {
  ByteDfa out;
  std::map<std::pair<int, int>, int> classes;
  std::vector<std::pair<int, int>> class_pairs;
  for (int byte = 0; byte < 256; ++byte) {
    const std::pair<int, int> key(a.class_of[byte], b.class_of[byte]);
    const auto [it, added] = classes.try_emplace(key, static_cast<int>(class_pairs.size()));
    if (added) class_pairs.push_back(key);
    out.class_of[byte] = static_cast<uint8_t>(it->second);
  }
  out.num_classes = static_cast<int>(class_pairs.size());

  std::map<std::pair<int32_t, int32_t>, int32_t> ids;
  std::vector<std::pair<int32_t, int32_t>> states;
  const auto id_of = [&](int32_t x, int32_t y) {
    const auto [it, added] = ids.try_emplace({x, y}, static_cast<int32_t>(states.size()));
    if (added) {
      states.push_back({x, y});
      out.AddState(a.accepting[x] && b.accepting[y], a.boundary[x] && b.boundary[y]);
    }
    return it->second;
  };
  id_of(ByteDfa::kStart, ByteDfa::kStart);
  for (size_t s = 0; s < states.size(); ++s) {
    MOESERVE_RETURN_IF_ERROR(budget->AddStates(1, out.num_classes));
    MOESERVE_RETURN_IF_ERROR(budget->Tick(8 * out.num_classes));
    const auto [x, y] = states[s];
    for (int c = 0; c < out.num_classes; ++c) {
      const auto [ca, cb] = class_pairs[c];
      const int32_t nx = a.next[static_cast<size_t>(x) * a.num_classes + ca];
      const int32_t ny = b.next[static_cast<size_t>(y) * b.num_classes + cb];
      if (nx != kDead && ny != kDead) out.SetNext(static_cast<int32_t>(s), c, id_of(nx, ny));
    }
  }
  return out;
}

Result<ByteDfa> Difference(const ByteDfa& a, const ByteDfa& b, CompileBudget* budget) {
  MOESERVE_ASSIGN_OR_RETURN(LabeledDfa both, Labeled(a, {b}, budget));
  for (int32_t s = 0; s < both.dfa.num_states(); ++s) {
    if (both.labels[s] != 0) both.dfa.accepting[s] = 0;
  }
  return std::move(both.dfa);
}

Result<LabeledDfa> Labeled(const ByteDfa& all, const std::vector<ByteDfa>& parts,
                           CompileBudget* budget) {
  LabeledDfa out;
  // A state is a list of states: that of `all`, then those of the parts, or kDead.
  using States = std::vector<int32_t>;
  std::map<States, int> classes;
  std::vector<uint8_t> byte_of_class;
  for (int byte = 0; byte < 256; ++byte) {
    States key = {all.class_of[byte]};
    for (const ByteDfa& part : parts) key.push_back(part.class_of[byte]);
    const auto [it, added] = classes.try_emplace(key, static_cast<int>(byte_of_class.size()));
    if (added) byte_of_class.push_back(static_cast<uint8_t>(byte));
    out.dfa.class_of[byte] = static_cast<uint8_t>(it->second);
  }
  out.dfa.num_classes = static_cast<int>(byte_of_class.size());
  std::map<States, int32_t> ids;
  std::vector<States> states;
  const auto id_of = [&](const States& key) {
    const auto [it, added] = ids.try_emplace(key, static_cast<int32_t>(states.size()));
    if (added) {
      states.push_back(key);
      out.dfa.AddState(all.accepting[key[0]], all.boundary[key[0]]);
      uint32_t label = 0;
      for (size_t i = 0; i < parts.size(); ++i) {
        if (key[i + 1] != kDead && parts[i].accepting[key[i + 1]]) label |= uint32_t{1} << i;
      }
      out.labels.push_back(label);
    }
    return it->second;
  };
  id_of(States(parts.size() + 1, ByteDfa::kStart));
  for (size_t s = 0; s < states.size(); ++s) {
    MOESERVE_RETURN_IF_ERROR(budget->AddStates(1, out.dfa.num_classes));
    MOESERVE_RETURN_IF_ERROR(
        budget->Tick(8 * out.dfa.num_classes * static_cast<int64_t>(1 + parts.size())));
    const States from = states[s];
    for (int c = 0; c < out.dfa.num_classes; ++c) {
      const uint8_t byte = byte_of_class[c];
      States to = {all.Next(from[0], byte)};
      if (to[0] == kDead) continue;
      for (size_t i = 0; i < parts.size(); ++i) {
        to.push_back(from[i + 1] == kDead ? kDead : parts[i].Next(from[i + 1], byte));
      }
      out.dfa.SetNext(static_cast<int32_t>(s), c, id_of(to));
    }
  }
  return out;
}

Result<ByteDfa> WithLength(const ByteDfa& dfa, int64_t min, int64_t max, CompileBudget* budget) {
  ByteDfa out;
  out.class_of = dfa.class_of;
  out.num_classes = dfa.num_classes;
  // If there is no largest length, counts above `min` need not be distinguished.
  const int64_t top = max >= kNoLimit ? min : max;
  std::map<std::pair<int32_t, int64_t>, int32_t> ids;
  std::vector<std::pair<int32_t, int64_t>> states;
  const auto id_of = [&](int32_t state, int64_t count) {
    const auto [it, added] = ids.try_emplace({state, count}, static_cast<int32_t>(states.size()));
    if (added) {
      states.push_back({state, count});
      out.AddState(dfa.accepting[state] && count >= min, dfa.boundary[state]);
    }
    return it->second;
  };
  id_of(ByteDfa::kStart, 0);
  for (size_t s = 0; s < states.size(); ++s) {
    MOESERVE_RETURN_IF_ERROR(budget->AddStates(1, out.num_classes));
    MOESERVE_RETURN_IF_ERROR(budget->Tick(8 * out.num_classes));
    const auto [state, count] = states[s];
    for (int c = 0; c < out.num_classes; ++c) {
      const int32_t t = dfa.next[static_cast<size_t>(state) * dfa.num_classes + c];
      if (t == kDead) continue;
      int64_t reached = count;
      if (dfa.boundary[t] && state != ByteDfa::kStart) {
        if (max < kNoLimit && count == max) continue;
        reached = std::min(count + 1, top);
      }
      out.SetNext(static_cast<int32_t>(s), c, id_of(t, reached));
    }
  }
  return out;
}

}  // namespace moeserve::structured

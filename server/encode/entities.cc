#include "server/encode/entities.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "server/encode/label_scores.h"

namespace moeserve::server {
namespace {

constexpr double kNever = -std::numeric_limits<double>::infinity();

// A label, taken apart.
struct LabelParts {
  char place = 'I';       // B, I, E, S or O; I if the label has no such prefix
  std::string_view name;  // empty for O
};

LabelParts PartsOf(std::string_view text) {
  if (text == "O") return {'O', {}};
  const bool prefixed = text.size() > 2 && text[1] == '-' &&
                        std::string_view("BIES").find(text[0]) != std::string_view::npos;
  return prefixed ? LabelParts{text[0], text.substr(2)} : LabelParts{'I', text};
}

bool IsInside(char place) { return place == 'B' || place == 'I'; }
bool IsStart(char place) { return place == 'B' || place == 'S'; }

// Returns what is added where `to` follows `from`; kNever if it cannot.
double Transition(const LabelParts& from, const LabelParts& to, const TransitionBiases& biases) {
  if (IsInside(from.place)) {
    if (to.name != from.name) return kNever;
    if (to.place == 'I') return biases.inside_to_continue;
    return to.place == 'E' ? biases.inside_to_end : kNever;
  }
  if (from.place == 'O') {
    if (to.place == 'O') return biases.background_stay;
    return IsStart(to.place) ? biases.background_to_start : kNever;
  }
  if (to.place == 'O') return biases.end_to_background;
  return IsStart(to.place) ? biases.end_to_start : kNever;
}

// Returns the label of each token of the most probable sequence. `logprobs` [tokens, labels].
std::vector<int> BestPath(const std::vector<double>& logprobs,
                          const std::vector<LabelParts>& labels, const TransitionBiases& biases) {
  const size_t n = labels.size();
  const size_t tokens = logprobs.size() / n;
  if (tokens == 0) return {};
  std::vector<double> transitions(n * n);
  for (size_t a = 0; a < n; ++a) {
    for (size_t b = 0; b < n; ++b)
      transitions[a * n + b] = Transition(labels[a], labels[b], biases);
  }
  std::vector<double> best(n);
  for (size_t b = 0; b < n; ++b) {
    const bool begins = labels[b].place == 'O' || IsStart(labels[b].place);
    best[b] = begins ? logprobs[b] : kNever;
  }
  std::vector<uint16_t> from(tokens * n);
  std::vector<double> next(n);
  for (size_t t = 1; t < tokens; ++t) {
    for (size_t b = 0; b < n; ++b) {
      size_t before = 0;
      for (size_t a = 1; a < n; ++a) {
        if (best[a] + transitions[a * n + b] > best[before] + transitions[before * n + b]) {
          before = a;
        }
      }
      from[t * n + b] = static_cast<uint16_t>(before);
      next[b] = best[before] + transitions[before * n + b] + logprobs[t * n + b];
    }
    best.swap(next);
  }
  size_t last = 0;
  double most = kNever;
  for (size_t b = 0; b < n; ++b) {
    if (IsInside(labels[b].place) || !(best[b] > most)) continue;
    most = best[b];
    last = b;
  }
  std::vector<int> path(tokens);
  for (size_t t = tokens; t-- > 0;) {
    path[t] = static_cast<int>(last);
    if (t > 0) last = from[t * n + last];
  }
  return path;
}

}  // namespace

bool AreBioes(std::span<const std::string> labels) {
  bool ends = false;
  for (const std::string& label : labels) {
    const LabelParts parts = PartsOf(label);
    if (parts.place != 'O' && parts.name.size() == label.size()) return false;
    ends |= parts.place == 'E' || parts.place == 'S';
  }
  return ends && std::ranges::find(labels, "O") != labels.end();
}

std::vector<Entity> FindEntities(std::span<const float> logits, std::span<const uint8_t> skipped,
                                 std::span<const std::string> labels, Aggregation aggregation,
                                 const TransitionBiases& biases) {
  const size_t n = labels.size();
  std::vector<int> tokens;  // those that are not skipped
  std::vector<double> logprobs;
  for (size_t t = 0; t * n < logits.size(); ++t) {
    if (!skipped.empty() && skipped[t] != 0) continue;
    tokens.push_back(static_cast<int>(t));
    const std::vector<double> row = LogSoftmax(logits.subspan(t * n, n));
    logprobs.insert(logprobs.end(), row.begin(), row.end());
  }
  std::vector<LabelParts> parts;
  for (const std::string& label : labels) parts.push_back(PartsOf(label));
  std::vector<int> chosen;
  if (aggregation == Aggregation::kViterbi) {
    chosen = BestPath(logprobs, parts, biases);
  } else {
    for (size_t i = 0; i < tokens.size(); ++i) {
      const auto row = logprobs.begin() + static_cast<std::ptrdiff_t>(i * n);
      chosen.push_back(
          static_cast<int>(std::max_element(row, row + static_cast<std::ptrdiff_t>(n)) - row));
    }
  }
  std::vector<Entity> entities;
  std::optional<Entity> open;  // `score` is the sum
  int members = 0;
  const auto close = [&] {
    if (!open) return;
    open->score /= static_cast<float>(members);
    entities.push_back(*std::move(open));
    open.reset();
  };
  for (size_t i = 0; i < tokens.size(); ++i) {
    const auto label = static_cast<size_t>(chosen[i]);
    const LabelParts& part = parts[label];
    const std::string_view name =
        aggregation == Aggregation::kNone ? std::string_view(labels[label]) : part.name;
    const bool continues = open && aggregation != Aggregation::kNone && !IsStart(part.place) &&
                           part.place != 'O' && open->name == name;
    if (!continues) close();
    if (part.place == 'O') continue;
    if (!continues) {
      open = Entity{.name = std::string(name), .begin = tokens[i]};
      members = 0;
    }
    open->end = tokens[i] + 1;
    open->score += static_cast<float>(std::exp(logprobs[i * n + label]));
    ++members;
  }
  close();
  return entities;
}

}  // namespace moeserve::server

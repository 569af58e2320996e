// The state of one sequence: the matcher's alternatives, and the computation of token masks from
// them.
#include <algorithm>
#include <optional>
#include <span>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "engine/text/structured/compiled.h"
#include "engine/text/structured/ending_search.h"

namespace moeserve::structured {
namespace {

constexpr size_t kMaskCacheBytes = 8 << 20;

// Limit on the work (StackPool::work) for one mask, reached in some milliseconds. Above this limit,
// the alternatives that take longest to complete are left out, and the rest of the walk considers
// only tokens of one byte. Texts with few alternatives stay far below the limit. Accepting a single
// token may take twice as much work, so that every token in a mask is accepted.
constexpr int64_t kMaxMaskWork = 200000;
constexpr int64_t kMaxTokenWork = 2 * kMaxMaskWork;
// Limit on the work of one call, after which the state gives up (overworked()). Above the limits
// before this one only what is bounded remains to be done, so few constraints reach it.
constexpr int64_t kMaxCallWork = 1000000;
// A text whose tokens take more than kTokenWork each on average, mask included, ends when the
// excess reaches kSpareWork. Constraints whose alternatives stay within kMaxMaskWork never do.
constexpr int64_t kTokenWork = 300000;
constexpr int64_t kSpareWork = 10000000;
// Number of alternatives that are kept within a token above that limit.
constexpr size_t kFewAlternatives = 8;

// Number of tokens at the beginning of a planned ending that may have become superfluous.
constexpr size_t kPlanStarts = 8;

// A mask from the cache counts one step per this many nodes of its walk; the number is larger
// because the walk was usually done before. The counted work must not depend on whether a mask was
// cached, so that equal texts have equal masks.
constexpr int64_t kKeptNodesPerStep = 16;
// The same for the nodes after the ends of a scalar, most of which the walk only passes.
constexpr int64_t kKeptEndsPerStep = 64;

class MatcherState : public ConstraintState {
 public:
  explicit MatcherState(std::shared_ptr<const Compiled> compiled)
      : compiled_(std::move(compiled)), tops_{matcher().Start()} {}

  void AllowedTokens(std::span<uint32_t> mask, int64_t tokens_left) override {
    MOESERVE_CHECK(mask.size() == vocabulary().mask_words(), "the mask's size is the vocabulary's");
    std::fill(mask.begin(), mask.end(), 0);
    if (overworked_) return;
    BeginWork();
    const std::vector<Alternative> order = Ordered();
    EndWork();
    const bool hopeless = !order.empty() && order[0].distance > Sum(tokens_left, Reach());
    if (!hopeless) FillMask(order, std::min(tokens_left, kUnreachable) - 1, mask);
    const bool complete = this->complete();
    if (!complete && Empty(mask)) {
      BeginWork();
      const auto ending = EndingSearch(compiled_.get(), &pool_).Find(tops_, tokens_left);
      EndWork();
      if (ending && !ending->empty()) {
        mask[ending->front() / 32] |= uint32_t{1} << (ending->front() % 32);
      } else {
        FillMask(order, kUnreachable - 1, mask);
      }
    }
    if (complete) {
      for (const TokenId id : vocabulary().eos_ids()) mask[id / 32] |= uint32_t{1} << (id % 32);
    }
  }

  bool Accept(TokenId token) override {
    if (vocabulary().IsEos(token)) return AcceptEnd();
    const StackPool::Mark mark = pool_.mark();
    std::optional<std::vector<Frame>> reached = ReachedBy(token, mark);
    if (!reached) return false;
    Advance(token, *std::move(reached));
    return true;
  }

  bool AcceptInTime(TokenId token, int64_t tokens_left) override {
    if (too_late_ || vocabulary().IsEos(token)) return Accept(token);
    const StackPool::Mark mark = pool_.mark();
    std::optional<std::vector<Frame>> reached = ReachedBy(token, mark);
    if (!reached) return false;
    BeginWork();
    const bool in_time = CanEnd(token, *reached, tokens_left);
    const bool refused = !in_time && FindEnding(tops_, tokens_left + 1);
    EndWork();
    if (refused || overworked_) {
      pool_.CutTo(mark);
      return false;
    }
    too_late_ = !in_time;
    Advance(token, *std::move(reached));
    return true;
  }

  int64_t work() const override { return work_; }
  bool overworked() const override { return overworked_; }

  bool complete() const override {
    return std::any_of(tops_.begin(), tops_.end(),
                       [&](const Frame& top) { return matcher().Complete(top, pool_); });
  }

  bool can_continue() const override {
    return std::any_of(tops_.begin(), tops_.end(),
                       [&](const Frame& top) { return matcher().CanContinue(top, pool_); });
  }

  uint64_t StateHash() const override {
    uint64_t sum = 0;  // the order of the alternatives does not matter
    for (const Frame& top : tops_) sum += HashWith(kHashBasis, top.Hash());
    return sum;
  }

  std::unique_ptr<ConstraintState> Clone() const override {
    auto clone = std::make_unique<MatcherState>(compiled_);
    clone->tops_ = tops_;
    clone->pool_ = pool_;
    clone->compact_at_ = compact_at_;
    clone->plan_ = plan_;
    clone->too_late_ = too_late_;
    clone->work_ = work_;
    clone->excess_ = excess_;
    clone->overworked_ = overworked_;
    return clone;
  }

 private:
  bool AcceptEnd() {
    if (!complete()) return false;
    tops_.clear();
    Frame done;
    done.kind = FrameKind::kDone;
    tops_.push_back(done);
    pool_ = StackPool();
    return true;
  }

  // Returns the frames after `token`, or nothing, with the pool cut to `mark`, if the constraint
  // does not allow it.
  std::optional<std::vector<Frame>> ReachedBy(TokenId token, StackPool::Mark mark) {
    std::string_view bytes = vocabulary().Bytes(token);
    const bool special = bytes.empty();
    if (special) bytes = compiled_->TextOf(token);
    if (bytes.empty() || overworked_) return std::nullopt;
    pool_.markers_only = special;
    std::vector<Frame> reached = Reached(bytes, Matcher::kMaxAlternatives);
    if (reached.empty() && !overworked_) {
      // A mask may have followed frames that were dropped here in favour of others.
      pool_.CutTo(mark);
      reached = Reached(bytes, 16 * Matcher::kMaxAlternatives);
    }
    pool_.markers_only = false;
    if (reached.empty()) {
      pool_.CutTo(mark);
      return std::nullopt;
    }
    matcher().Reduce(pool_, &reached);
    return reached;
  }

  void Advance(TokenId token, std::vector<Frame> reached) {
    if (!plan_.empty() && plan_.front() == token) plan_.erase(plan_.begin());
    excess_ = std::max<int64_t>(excess_ - kTokenWork, 0);
    tops_ = std::move(reached);
    if (pool_.frames.size() + pool_.seen.size() > compact_at_) {
      pool_.Compact(&tops_);
      compact_at_ = 2 * (pool_.frames.size() + pool_.seen.size()) + 256;
    }
  }

  // Returns whether the text can be completed within `most` tokens after `tops`, which are the
  // frames after `token`. Tries first what was found for earlier tokens.
  bool CanEnd(TokenId token, const std::vector<Frame>& tops, int64_t most) {
    if (EndingSearch(compiled_.get(), &pool_).EndsWithin(tops, most)) return true;
    const size_t first = !plan_.empty() && plan_.front() == token ? 1 : 0;
    for (size_t begin = first; begin < std::min(plan_.size(), first + kPlanStarts); ++begin) {
      if (Leads(std::span(plan_).subspan(begin), tops, most)) {
        // Advance() removes the first token if it is this one.
        plan_.erase(plan_.begin(), plan_.begin() + static_cast<int64_t>(begin));
        plan_.insert(plan_.begin(), token);
        return true;
      }
    }
    if (!FindEnding(tops, most)) return false;
    plan_.insert(plan_.begin(), token);
    return true;
  }

  // Returns whether `tokens`, or the first of them, lead from `tops` to the end in time.
  bool Leads(std::span<const TokenId> tokens, std::vector<Frame> tops, int64_t most) {
    const StackPool::Mark mark = pool_.mark();
    const EndingSearch search(compiled_.get(), &pool_);
    bool ends = false;
    for (const TokenId token : tokens) {
      std::string_view bytes = vocabulary().Bytes(token);
      pool_.markers_only = bytes.empty();
      if (bytes.empty()) bytes = compiled_->TextOf(token);
      std::vector<Frame> next;
      for (const Frame& top : tops) {
        for (const Frame& frame : After(top, bytes, kFewAlternatives)) next.push_back(frame);
      }
      pool_.markers_only = false;
      matcher().Reduce(pool_, &next, kFewAlternatives);
      tops = std::move(next);
      --most;
      ends = most >= 0 && search.EndsWithin(tops, most);
      if (ends || most < 0 || tops.empty() || Overworked()) break;
    }
    pool_.CutTo(mark);
    return ends;
  }

  // Searches for an ending of at most `most` tokens after `tops`, and keeps its tokens in plan_.
  bool FindEnding(const std::vector<Frame>& tops, int64_t most) {
    auto ending = EndingSearch(compiled_.get(), &pool_).Find(tops, most);
    if (ending) plan_ = *std::move(ending);
    return ending.has_value();
  }

  const Matcher& matcher() const { return compiled_->matcher(); }
  const VocabularyIndex& vocabulary() const { return compiled_->vocabulary(); }

  struct Alternative {
    size_t index;  // into tops_
    int64_t distance;
  };

  static int64_t Sum(int64_t a, int64_t b) {
    return std::min(a, kUnreachable) + std::min(b, kUnreachable);
  }

  // Returns the alternatives sorted by distance, the shortest first.
  std::vector<Alternative> Ordered() const {
    std::vector<Alternative> order;
    for (size_t i = 0; i < tops_.size(); ++i) {
      order.push_back({i, matcher().Distance(tops_[i], pool_)});
    }
    std::stable_sort(order.begin(), order.end(), [](const Alternative& a, const Alternative& b) {
      return a.distance < b.distance;
    });
    return order;
  }

  // Begins a call whose work is limited.
  void BeginWork() {
    pool_.work = 0;
    pool_.work_limit = kMaxCallWork;
  }
  // Ends what BeginWork() began.
  void EndWork() {
    work_ += pool_.work;
    excess_ += pool_.work;
    overworked_ = overworked_ || pool_.exhausted() || excess_ > kSpareWork;
    pool_.work = 0;
  }

  // Returns the frames after `bytes`. Keeps at most `most` alternatives.
  std::vector<Frame> Reached(std::string_view bytes, size_t most) {
    std::vector<Frame> reached;
    // Advances each alternative separately, as FillMask() does. Otherwise Reduce() could drop
    // frames of one alternative in favour of another before the token is complete, and a token that
    // the mask allows could be rejected.
    BeginWork();
    for (const Alternative& alternative : Ordered()) {
      if (!reached.empty() && pool_.work > kMaxTokenWork) break;
      for (const Frame& frame : After(tops_[alternative.index], bytes, most)) {
        if (matcher().Distance(frame, pool_) < kUnreachable) reached.push_back(frame);
      }
      if (reached.size() > 4 * most) matcher().Reduce(pool_, &reached, most);
    }
    EndWork();
    if (overworked_) reached.clear();
    return reached;
  }

  std::vector<Frame> After(const Frame& top, std::string_view bytes, size_t most) {
    std::vector<Frame> now = {top};
    for (const char c : bytes) {
      now = matcher().StepAll(now, static_cast<uint8_t>(c), &pool_);
      matcher().Reduce(pool_, &now, pool_.work > kMaxTokenWork ? kFewAlternatives : most);
      if (now.empty()) break;
    }
    return now;
  }

  static bool Empty(std::span<const uint32_t> mask) {
    return std::all_of(mask.begin(), mask.end(), [](uint32_t word) { return word == 0; });
  }

  bool Overworked() const { return pool_.work > kMaxMaskWork; }

  // Sets the bits of the allowed tokens. `budget` is the number of bytes within which the text must
  // be completable after the token.
  void FillMask(const std::vector<Alternative>& order, int64_t budget, std::span<uint32_t> mask) {
    const StackPool::Mark mark = pool_.mark();
    BeginWork();
    for (const auto& [index, distance] : order) {
      if (index != order[0].index && (Overworked() || distance > Sum(budget, Reach()))) break;
      const Frame& top = tops_[index];
      const bool filled = FillScalar(top, budget, mask) || FillKey(top, budget, mask) ||
                          FillBeginnings(top, budget, mask);
      // Near the limit, the estimated distances in a key may exclude every token; Walk() is exact.
      if (!filled || (distance <= budget + 1 && Empty(mask))) Walk({top}, 0, budget, mask);
      FillSpecial(top, budget, mask);
      pool_.CutTo(mark);
      if (pool_.exhausted()) break;
    }
    EndWork();
  }

  // Sets the bits of the special tokens that may follow `top` as text.
  void FillSpecial(const Frame& top, int64_t budget, std::span<uint32_t> mask) {
    for (const TokenId id : compiled_->text_tokens()) {
      pool_.markers_only = true;
      const std::vector<Frame> after = After(top, compiled_->TextOf(id), Matcher::kMaxAlternatives);
      pool_.markers_only = false;
      if (AnyWithin(after, budget)) mask[id / 32] |= uint32_t{1} << (id % 32);
    }
  }

  bool AnyWithin(const std::vector<Frame>& frames, int64_t budget) const {
    return std::any_of(frames.begin(), frames.end(), [&](const Frame& frame) {
      const int64_t distance = matcher().Distance(frame, pool_);
      return distance <= budget && distance < kUnreachable;
    });
  }

  // Returns how much one token can reduce the distance, plus a margin because distances are
  // estimates.
  int64_t Reach() const { return vocabulary().max_depth() + 64; }

  static void Or(const DfaMask& from, std::span<uint32_t> mask) {
    for (size_t i = 0; i < mask.size(); ++i) mask[i] |= from.tokens[i];
  }

  // If `top` is in a scalar whose automaton alone decides where the scalar ends (see
  // ByteDfa::ends_itself), or in a scalar that is the whole text or a part of a rule, fills the
  // mask from that automaton and returns true. Otherwise returns false.
  bool FillScalar(const Frame& top, int64_t budget, std::span<uint32_t> mask) {
    if (top.kind != FrameKind::kScalar) return false;
    const ByteDfa& dfa = matcher().DfaOf(top);
    const bool last = top.parent < 0;
    const bool follows = !last && !dfa.ends_itself;
    if (follows && pool_.frames[top.parent].kind != FrameKind::kRule) return false;
    // Where the text ends, the distances of the automaton include an end-of-sequence token, unless
    // Frame::tail includes it.
    const bool at_root = last && matcher().grammar().end_cost == 0;
    const ScalarNode& scalar = matcher().ScalarOf(top);
    const int64_t room = scalar.counted ? scalar.max_chars - top.count : kNoLimit;
    const int64_t needed = scalar.counted ? std::max<int64_t>(scalar.min_chars - top.count, 0) : 0;
    const int64_t max_rest = scalar.free ? kUnreachable : budget - top.tail;
    std::shared_ptr<const DfaMask> cached;
    exits_.clear();
    // Inside a character a walk visits few nodes, so a mask that `room` limits is not cached there.
    const bool room_matters = room < vocabulary().max_depth() && !dfa.boundary[top.dfa_state];
    if (!room_matters && max_rest >= Sum(dfa.max_distance, needed)) {
      cached = MaskOf(scalar.dfa, top.dfa_state, at_root, room, mask);
    } else {
      WalkLimits limits;
      limits.counted = scalar.counted;
      limits.count = top.count;
      limits.min_chars = scalar.min_chars;
      limits.max_chars = scalar.max_chars;
      limits.max_rest = max_rest;
      limits.at_root = at_root;
      pool_.work +=
          WalkDfa(vocabulary(), dfa, top.dfa_state, limits, mask, &exits_) / kNodesPerStep;
    }
    std::vector<Frame> behind;
    matcher().Pop(top, pool_, &behind);
    // What follows the value does not depend on the node at which the value ended.
    const bool ends_in_time = matcher().Distance(behind[0], pool_) <= budget;
    for (const auto& [node, chars] : cached ? cached->exits : exits_) {
      if (chars < needed || SkipsExit(node)) continue;
      if (ends_in_time) SetTokens(node, mask);
      Walk(behind, node, budget, mask);
    }
    if (follows) FillAfter(top, behind, budget, mask);
    return true;
  }

  // If the text goes on with one of several values, fills the mask for each of them and returns
  // true; otherwise, or if there are too many, returns false.
  bool FillBeginnings(const Frame& top, int64_t budget, std::span<uint32_t> mask) {
    if (top.kind != FrameKind::kStart && top.kind != FrameKind::kRule) return false;
    std::vector<Frame> scalars;
    ByteSet others;
    pool_.step_work = pool_.work + 4 * Matcher::kMaxStepWork;
    if (!matcher().Expand(top, &pool_, &scalars, &others)) return false;
    matcher().Reduce(pool_, &scalars, Matcher::kMaxStepFrames);
    for (size_t i = 0; i < scalars.size(); ++i) {
      if (i > 0 && Overworked()) break;
      if (!FillScalar(scalars[i], budget, mask)) return false;
    }
    const std::vector<VocabularyIndex::Node>& nodes = vocabulary().nodes();
    for (int32_t i = 1; others.any() && i < static_cast<int32_t>(nodes.size()); i = nodes[i].end) {
      if (others[nodes[i].byte]) WalkInto({top}, i, budget, mask);
    }
    return true;
  }

  // Sets the bits of the tokens in which the scalar `top` ends although it could go on; `behind`
  // are the frames after the scalar.
  void FillAfter(const Frame& top, const std::vector<Frame>& behind, int64_t budget,
                 std::span<uint32_t> mask) {
    const int32_t dfa = matcher().ScalarOf(top).dfa;
    const auto after =
        compiled_->NodesAfter(dfa, top.dfa_state, matcher().NextBytes(behind[0], pool_));
    pool_.work += after->visited / kKeptEndsPerStep;
    for (const int32_t node : after->nodes) {
      if (Overworked() && vocabulary().nodes()[node].depth > 1) continue;
      WalkInto(behind, node, budget, mask);
    }
  }

  // Does what Walk() does for the tokens at or below trie node `node`; `tops` are the frames after
  // the path to the node's parent.
  void WalkInto(const std::vector<Frame>& tops, int32_t node, int64_t budget,
                std::span<uint32_t> mask) {
    const StackPool::Mark mark = pool_.mark();
    std::vector<Frame> now = matcher().StepAll(tops, vocabulary().nodes()[node].byte, &pool_);
    matcher().Reduce(pool_, &now);
    if (!now.empty()) {
      if (AnyWithin(now, budget)) SetTokens(node, mask);
      if (!Overworked()) Walk(now, node, budget, mask);
    }
    pool_.CutTo(mark);
  }

  // Sets the bits of the tokens that stay inside an automaton, and returns the cached mask.
  std::shared_ptr<const DfaMask> MaskOf(int32_t dfa, int32_t state, bool at_root, int64_t room,
                                        std::span<uint32_t> mask) {
    auto cached = compiled_->MaskOf(dfa, state, at_root, room);
    Or(*cached, mask);
    pool_.work += cached->visited / kKeptNodesPerStep;
    return cached;
  }

  bool SkipsExit(int32_t node) const {
    return Overworked() && vocabulary().nodes()[node].depth > 1;
  }

  // If `top` is inside an object key that an automaton may continue, fills the mask and returns
  // true; otherwise returns false.
  bool FillKey(const Frame& top, int64_t budget, std::span<uint32_t> mask) {
    int64_t bound = 0;
    const int32_t keys = matcher().FreeKeyDfa(top, pool_, &bound);
    if (keys < 0) return false;
    const ByteDfa& dfa = *matcher().grammar().dfas[keys];
    std::shared_ptr<const DfaMask> cached;
    if (budget - bound >= dfa.max_distance) {
      cached = MaskOf(keys, top.dfa_state, /*at_root=*/false, kNoLimit, mask);
    } else {
      cached = compiled_->MaskOf(keys, top.dfa_state, /*at_root=*/false, kNoLimit);
      WalkLimits limits;
      limits.max_rest = budget - bound;
      exits_.clear();
      if (limits.max_rest > 0) {
        pool_.work +=
            WalkDfa(vocabulary(), dfa, top.dfa_state, limits, mask, &exits_) / kNodesPerStep;
      }
    }
    const StackPool::Mark mark = pool_.mark();
    // The keys of named properties need not be among those that the automaton accepts.
    if (keys != matcher().grammar().any_string && top.first < top.last) {
      Walk({Matcher::NamedOnly(top)}, 0, budget, mask);
    }
    std::vector<uint8_t> path;
    for (const auto& [node, chars] : cached->exits) {
      if (SkipsExit(node)) continue;
      // What follows the key depends on the key, which may be a named property or already in use.
      path.clear();
      for (int32_t n = node; n > 0; n = vocabulary().nodes()[n].parent) {
        path.push_back(vocabulary().nodes()[n].byte);
      }
      std::vector<Frame> now = {top};
      for (auto it = path.rbegin(); it != path.rend() && !now.empty(); ++it) {
        std::vector<Frame> next;
        matcher().Step(now[0], *it, &pool_, &next);
        now = std::move(next);
      }
      if (!now.empty()) {
        if (matcher().Distance(now[0], pool_) <= budget) SetTokens(node, mask);
        Walk(now, node, budget, mask);
      }
      pool_.CutTo(mark);
    }
    return true;
  }

  void SetTokens(int32_t node, std::span<uint32_t> mask) const {
    for (const TokenId id : vocabulary().TokensAt(node)) mask[id / 32] |= uint32_t{1} << (id % 32);
  }

  // Sets the bits of the allowed tokens whose bytes begin with the path to trie node `from`; `tops`
  // are the frames after that path.
  void Walk(const std::vector<Frame>& tops, int32_t from, int64_t budget,
            std::span<uint32_t> mask) {
    const std::vector<VocabularyIndex::Node>& nodes = vocabulary().nodes();
    const int32_t end = nodes[from].end;
    if (from + 1 >= end) return;
    const int base = nodes[from].depth;
    if (levels_.empty()) {
      levels_.resize(static_cast<size_t>(vocabulary().max_depth()) + 1);
      marks_.resize(levels_.size());
    }
    levels_[0] = tops;
    marks_[0] = pool_.mark();
    for (int32_t i = from + 1; i < end;) {
      // Above the limit, only tokens of one byte are considered.
      if (Overworked() && nodes[i].depth > 1) {
        i = nodes[i].end;
        continue;
      }
      const int depth = nodes[i].depth - base;
      pool_.CutTo(marks_[depth - 1]);
      std::vector<Frame>& now = levels_[depth];
      now.clear();
      for (const Frame& top : levels_[depth - 1]) {
        matcher().Step(top, nodes[i].byte, &pool_, &now);
      }
      matcher().Reduce(pool_, &now);
      if (now.empty()) {
        i = nodes[i].end;
        continue;
      }
      marks_[depth] = pool_.mark();
      if (!vocabulary().TokensAt(i).empty() && AnyWithin(now, budget)) SetTokens(i, mask);
      ++i;
    }
    pool_.CutTo(marks_[0]);
  }

  const std::shared_ptr<const Compiled> compiled_;
  std::vector<Frame> tops_;
  StackPool pool_;
  size_t compact_at_ = 256;
  // Tokens that lead from here to the end of the text, if an ending was searched for.
  std::vector<TokenId> plan_;
  bool too_late_ = false;  // whether the text could not be completed in time

  int64_t work_ = 0;
  int64_t excess_ = 0;  // work beyond kTokenWork for each token so far
  bool overworked_ = false;

  // Scratch memory of walks.
  std::vector<DfaExit> exits_;
  std::vector<std::vector<Frame>> levels_;
  std::vector<StackPool::Mark> marks_;
};

}  // namespace

StringMasks::StringMasks(DfaPtr any_string) : dfa(std::move(any_string)), cache(kMaskCacheBytes) {}

Compiled::Compiled(Grammar grammar, std::shared_ptr<const VocabularyIndex> vocabulary)
    : grammar_(std::move(grammar)),
      vocabulary_(std::move(vocabulary)),
      matcher_(&grammar_),
      masks_(kMaskCacheBytes) {
  for (const VocabularyIndex::Special& special : vocabulary_->specials()) {
    const bool used =
        std::any_of(grammar_.marker_texts.begin(), grammar_.marker_texts.end(),
                    [&](const std::string& text) { return text.find(special.text) != text.npos; });
    if (used) text_tokens_.push_back(special.id);
  }
}

std::string_view Compiled::TextOf(TokenId token) const {
  if (!std::binary_search(text_tokens_.begin(), text_tokens_.end(), token)) return {};
  const auto& specials = vocabulary_->specials();
  return std::lower_bound(
             specials.begin(), specials.end(), token,
             [](const VocabularyIndex::Special& special, TokenId id) { return special.id < id; })
      ->text;
}

std::unique_ptr<ConstraintState> Compiled::NewState() const {
  return std::make_unique<MatcherState>(shared_from_this());
}

size_t Compiled::memory_bytes() const {
  size_t bytes = kMaskCacheBytes;
  for (const DfaPtr& dfa : grammar_.dfas) {
    bytes += sizeof(*dfa) + dfa->next.size() * sizeof(dfa->next[0]) +
             dfa->accepting.size() * (3 + 2 * sizeof(int64_t));
  }
  for (const Node& node : grammar_.nodes) {
    bytes += sizeof(node);
    if (const auto* object = std::get_if<ObjectNode>(&node.value)) {
      for (const Property& property : object->properties) {
        bytes += sizeof(property) + property.name.size() * sizeof(char32_t) +
                 property.suffix_bytes.size() * sizeof(int64_t);
      }
    } else if (const auto* rule = std::get_if<RuleNode>(&node.value)) {
      for (const RuleNode::State& state : rule->states) {
        bytes += sizeof(state) + state.edges.size() * sizeof(RuleNode::Edge);
      }
    }
  }
  for (const std::string& text : grammar_.marker_texts) bytes += sizeof(text) + text.size();
  for (const KeySet& keys : grammar_.key_sets) {
    bytes += sizeof(keys) + keys.value.size() * sizeof(NodeId);
  }
  for (const Trigger& trigger : grammar_.triggers) {
    bytes += sizeof(trigger) + trigger.text.size() +
             (trigger.matched.size() + trigger.border.size()) * sizeof(int32_t);
  }
  return bytes;
}

std::shared_ptr<const DfaMask> Compiled::MaskOf(int32_t dfa, int32_t state, bool at_root,
                                                int64_t room) const {
  const StringMasks& strings = vocabulary_->string_masks();
  if (grammar_.dfas[dfa] == strings.dfa) {
    return strings.cache.Get(*vocabulary_, *strings.dfa, 0, state, at_root, room);
  }
  return masks_.Get(*vocabulary_, *grammar_.dfas[dfa], dfa, state, at_root, room);
}

std::shared_ptr<const NodesAfter> Compiled::NodesAfter(int32_t dfa, int32_t state,
                                                       const ByteSet& bytes) const {
  return masks_.GetAfter(*vocabulary_, *grammar_.dfas[dfa], dfa, state, bytes);
}

}  // namespace moeserve::structured

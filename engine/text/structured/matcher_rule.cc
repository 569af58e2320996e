// Matches rules, and special tokens in the texts of tags.
#include <algorithm>

#include "engine/text/structured/matcher.h"

namespace moeserve::structured {

void Matcher::StepRule(const Frame& top, uint8_t byte, StackPool* pool,
                       std::vector<Frame>* out) const {
  const RuleNode& rule = RuleOf(top);
  const RuleNode::State& state = rule.states[top.dfa_state];
  pool->work += 1 + static_cast<int64_t>(state.edges.size()) / 8;
  for (const RuleNode::Edge& edge : state.edges) {
    if (out->size() >= pool->step_frames || pool->work > pool->step_work) return;
    const Node& node = At(edge.node);
    const RuleNode::State& target = rule.states[edge.target];
    // Not all texts from here may be as shallow as the shortest one.
    if (!node.first[byte] || top.depth + node.height > grammar_.max_depth ||
        top.depth + target.height > grammar_.max_depth) {
      continue;
    }
    if (target.edges.empty()) {
      // The rule ends with this value, so the value takes the rule's place on the stack. Otherwise
      // the stack would grow with each item of a list that a rule describes by referring to itself.
      Site site{nullptr, top.parent, top.tail, top.below, top.depth - 1};
      BeginValue(edge.node, &site, byte, pool, out);
    } else {
      Frame after = top;
      after.dfa_state = edge.target;
      Site site = SiteIn(after);
      BeginValue(edge.node, &site, byte, pool, out);
    }
  }
  if (state.accepting && top.parent >= 0) {
    const Frame parent = pool->frames[top.parent];
    StepFrame(parent, byte, pool, out);
  }
}

bool Matcher::Expand(const Frame& top, StackPool* pool, std::vector<Frame>* scalars,
                     ByteSet* others) const {
  if (top.kind == FrameKind::kStart) {
    Site root;
    root.tail = top.tail;
    return ExpandNode(top.node, &root, pool, scalars, others);
  }
  if (top.kind != FrameKind::kRule) {
    *others |= NextBytes(top, *pool);
    return true;
  }
  const RuleNode& rule = RuleOf(top);
  const RuleNode::State& state = rule.states[top.dfa_state];
  pool->work += 1 + static_cast<int64_t>(state.edges.size()) / 8;
  for (const RuleNode::Edge& edge : state.edges) {
    const RuleNode::State& target = rule.states[edge.target];
    if (top.depth + std::max(At(edge.node).height, target.height) > grammar_.max_depth) continue;
    Frame after = top;
    after.dfa_state = edge.target;
    Site site = SiteIn(after);
    if (target.edges.empty()) site = {nullptr, top.parent, top.tail, top.below, top.depth - 1};
    if (!ExpandNode(edge.node, &site, pool, scalars, others)) return false;
  }
  if (!state.accepting || top.parent < 0) return true;
  const Frame parent = pool->frames[top.parent];
  return Expand(parent, pool, scalars, others);
}

bool Matcher::ExpandNode(NodeId id, Site* site, StackPool* pool, std::vector<Frame>* scalars,
                         ByteSet* others) const {
  if (scalars->size() >= 4 * kMaxStepFrames || pool->work > pool->step_work) return false;
  const Node& node = At(id);
  if (const auto* choice = std::get_if<ChoiceNode>(&node.value)) {
    return std::all_of(choice->options.begin(), choice->options.end(), [&](NodeId option) {
      return ExpandNode(option, site, pool, scalars, others);
    });
  }
  const auto* scalar = std::get_if<ScalarNode>(&node.value);
  const bool rule = std::holds_alternative<RuleNode>(node.value);
  if (!rule && (scalar == nullptr || scalar->counted)) {
    *others |= node.first;
    return true;
  }
  Frame frame;
  frame.node = id;
  frame.kind = rule ? FrameKind::kRule : FrameKind::kScalar;
  frame.dfa_state = rule ? 0 : ByteDfa::kStart;
  if (rule && site->depth + node.height > grammar_.max_depth) return true;
  if (!rule && !DfaOf(frame).has_next[ByteDfa::kStart]) return true;
  Link(site, pool, &frame);
  if (rule) return Expand(frame, pool, scalars, others);
  scalars->push_back(frame);
  return true;
}

// Advances free text by a byte of a special token, which must be a part of the trigger. From then
// on, the trigger must be completed.
void Matcher::StepTrigger(const Frame& top, uint8_t byte, StackPool* pool,
                          std::vector<Frame>* out) const {
  const Trigger& trigger = grammar_.triggers[ScalarOf(top).trigger];
  const auto& literal = std::get<ScalarNode>(At(trigger.literal).value);
  const ByteDfa& dfa = *grammar_.dfas[literal.dfa];
  // The free text so far may end with several prefixes of the trigger, each a border of the longer
  // one.
  for (int32_t read = trigger.matched[top.dfa_state];; read = trigger.border[read]) {
    if (static_cast<uint8_t>(trigger.text[read]) == byte) {
      Frame frame = top;
      frame.node = trigger.literal;
      frame.dfa_state = ByteDfa::kStart;
      for (int32_t i = 0; i < read; ++i) {
        frame.dfa_state = dfa.Next(frame.dfa_state, static_cast<uint8_t>(trigger.text[i]));
      }
      StepScalar(frame, byte, pool, out);
    }
    if (read == 0) return;
  }
}

}  // namespace moeserve::structured

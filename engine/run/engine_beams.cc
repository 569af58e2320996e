// Requests with beam search in the engine: how their beams are computed and end. BeamSearch
// decides which beams run on; see BeamGroup about leaders.
#include <absl/algorithm/container.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

#include "base/check.h"
#include "base/error_text.h"
#include "engine/run/engine_impl.h"

namespace moeserve {
namespace {

// Whether a beam ends with a token that is no end by itself: because of its text.
bool TextEnds(const Sequence& beam, TokenId token) {
  if (beam.sampling.ConstraintEndsAfter(token)) return true;
  if (beam.request.sampling.stop.empty()) return false;
  OutputText text = beam.text;
  text.Push(token);
  return text.matched_stop().has_value();
}

std::function<bool(const BeamCandidate&)> TextEndsOf(const BeamGroup& group) {
  return [&group](const BeamCandidate& candidate) {
    return TextEnds(*group.beams[static_cast<size_t>(candidate.beam)].sequence, candidate.token);
  };
}

}  // namespace

absl::Status EngineImpl::CheckBeams(const std::vector<SequencePtr>& samples) const {
  const std::optional<BeamParams>& beam = samples.front()->request.sampling.beam;
  for (const SequencePtr& s : samples) {
    if (s->request.sampling.beam != beam) {
      return absl::InvalidArgumentError(
          "beam search: expected the same in all samples of a prompt");
    }
  }
  if (!beam.has_value()) return absl::OkStatus();
  if (std::ssize(samples) > beam->num_beams) {
    return absl::InvalidArgumentError(Concat("n: expected at most num_beams (", beam->num_beams,
                                             ") with beam search, found ", samples.size()));
  }
  if (beam->num_beams > options_.max_num_seqs) {
    return absl::InvalidArgumentError(Concat("num_beams: expected at most ", options_.max_num_seqs,
                                             " (max-num-seqs), found ", beam->num_beams));
  }
  return absl::OkStatus();
}

int64_t EngineImpl::MostPages(const Sequence& s, const PageUse& use) {
  if (use.holds == PageUse::Holds::kStep) return 0;
  if (use.holds == PageUse::Holds::kSource) return use.MostPages(s.source_length());
  const int64_t pages = use.MostPages(s.cache_tokens());
  // Beams share the full pages of the prompt, at least.
  const int64_t shared = use.window.has_value() ? 0 : s.prompt_length() / kPageTokens;
  return shared + s.seats() * (pages - shared);
}

SequencePtr EngineImpl::NewBeam(Sequence& leader) {
  Request request = leader.request;
  request.sampling.prompt_logprobs.reset();
  request.prediction.clear();
  auto beam = std::make_unique<Sequence>(std::move(request), nullptr, tokenizer_.get(), eos_,
                                         LongSequencesFrom(model_->spec()));
  beam->leader = &leader;
  return beam;
}

void EngineImpl::StartBeams(Sequence& leader, const SequenceOutput& output) {
  BeamGroup& group = *leader.beams;
  const bool first = group.beams.empty();
  if (first) group.beams.push_back({.sequence = NewBeam(leader)});
  scheduler_.ForkBeams(leader);
  if (!first) return;  // after a preemption, the beams compute their own tokens again
  const auto vocab = static_cast<size_t>(model_->spec().vocab_size);
  StepBeams(leader, {output.logits.values.last(vocab)});
}

size_t EngineImpl::AdvanceBeams(std::span<SequenceOutput> outputs) {
  Sequence* const leader = outputs.front().rows.sequence->leader;
  size_t count = 0;
  while (count < outputs.size() && outputs[count].rows.sequence->leader == leader) ++count;
  try {
    const auto vocab = static_cast<size_t>(model_->spec().vocab_size);
    std::vector<std::span<const float>> logits;
    for (SequenceOutput& output : outputs.first(count)) {
      if (!Computed(output)) {
        FailBeams(leader, NumericFailure());
        return count;
      }
      if (!output.logits.values.empty()) logits.push_back(output.logits.values.last(vocab));
    }
    for (SequenceOutput& output : outputs.first(count)) {
      scheduler_.Complete(output.rows);
      beam_rows_ += static_cast<uint64_t>(output.rows.count);
    }
    // The last tokens of all beams are computed in one step.
    if (!logits.empty()) StepBeams(*leader, logits);
  } catch (const std::bad_alloc&) {
    if (scheduler_.Runs(leader)) {
      FailBeams(leader, OutOfMemory());
    } else {
      ForgetLost();
    }
  }
  return count;
}

absl::Status EngineImpl::ExtendBeams(BeamGroup& group,
                                     const std::vector<std::span<const float>>& logits) {
  bool all_in_time = false;
  while (!all_in_time) {
    group.search.Restart();
    for (size_t b = 0; b < group.beams.size(); ++b) {
      Sequence& beam = *group.beams[b].sequence;
      const bool any = token_step_.Logprobs(beam, logits[b], beam_logprobs_);
      if (beam.sampling.overworked()) return OverworkedError();
      if (any) group.search.Extend(static_cast<int>(b), beam_logprobs_);
    }
    all_in_time = true;
    if (group.beams.front().sequence->sampling.constraint() == nullptr) break;
    // A beam whose structured output could not be completed in time with one of its tokens is
    // extended again, by tokens that keep the limit. That happens once to a beam.
    for (const BeamCandidate& c : group.search.Preview(TextEndsOf(group))) {
      Sequence& beam = *group.beams[static_cast<size_t>(c.beam)].sequence;
      all_in_time = beam.sampling.AllowsInTime(c.token) && all_in_time;
    }
  }
  return absl::OkStatus();
}

void EngineImpl::StepBeams(Sequence& leader, const std::vector<std::span<const float>>& logits) {
  BeamGroup& group = *leader.beams;
  const auto begin = std::chrono::steady_clock::now();
  beam_logprobs_.resize(static_cast<size_t>(model_->spec().vocab_size));
  if (const absl::Status status = ExtendBeams(group, logits); !status.ok()) {
    FailBeams(&leader, status);
    return;
  }
  const BeamStep step = group.search.Advance(TextEndsOf(group));
  if (!leader.first_token_at.has_value()) {
    leader.first_token_at = std::chrono::steady_clock::now();
    histograms_.prefill_seconds.Observe(SecondsBetween(leader.admitted_at, *leader.first_token_at));
  }
  for (const auto& [number, candidate] : step.finished) {
    const auto b = static_cast<size_t>(candidate.beam);
    Hypothesis made = MakeHypothesis(leader, group.beams[b], number);
    made.stopped =
        group.search.IsEnd(candidate.token) || TextEnds(*group.beams[b].sequence, candidate.token);
    made.tokens.push_back(candidate.token);
    made.scored = AddScored(group, group.beams[b], logits[b], candidate.token);
    group.hypotheses.push_back(std::move(made));
  }
  std::erase_if(group.hypotheses, [&](const Hypothesis& h) {
    return absl::c_none_of(group.search.finished(),
                           [&](const FinishedBeam& f) { return f.number == h.number; });
  });
  if (group.search.finished().empty() && step.over) {
    FailBeams(&leader, NoTokenError());
  } else if (step.over) {
    FinishBeams(&leader, false);
  } else {
    ContinueBeams(leader, step.running, logits);
    if (leader.request.sampling.constraint != nullptr) {
      drawing_share_.Drew(leader, SecondsBetween(begin, std::chrono::steady_clock::now()));
    }
  }
}

int EngineImpl::AddScored(BeamGroup& group, const Beam& before, std::span<const float> logits,
                          TokenId token) {
  const std::optional<int>& top = before.sequence->request.sampling.logprobs;
  if (!top.has_value()) return -1;
  group.scored.push_back({before.scored, token_step_.LogprobOf(logits, token, *top)});
  return static_cast<int>(std::ssize(group.scored)) - 1;
}

Hypothesis EngineImpl::MakeHypothesis(const Sequence& leader, const Beam& beam, int number) {
  const Sequence& s = *beam.sequence;
  const std::vector<int32_t>& pages = s.memory.pages();
  Hypothesis made;
  made.number = number;
  made.tokens.assign(s.tokens.begin() + s.prompt_length(), s.tokens.end());
  made.scored = beam.scored;
  made.computed = s.computed();
  if (options_.expert_stats) {
    made.work = routes_.Total(pages);
    made.work.routes += s.memory.released.routes;
    made.work.parameters += s.memory.released.parameters;
    made.source = SourceWork(s.memory.source, leader.source_length());
  }
  if (leader.request.expert_counts) {
    made.expert_counts.resize(recorder_.layout().num_experts);
    routes_.Count(pages, made.expert_counts);
  }
  if (leader.request.routing_record) {
    made.routing = routes_.Record(pages, 0, made.computed);
    made.source_routing = SourceRoutes(s.memory.source, leader.source_length());
    for (const auto& [first, last] : leader.reused) {
      if (first < made.computed) {
        made.routing->reused.emplace_back(first, std::min(last, made.computed));
      }
    }
  }
  return made;
}

void EngineImpl::ContinueBeams(Sequence& leader, const std::vector<BeamCandidate>& running,
                               const std::vector<std::span<const float>>& logits) {
  BeamGroup& group = *leader.beams;
  std::vector<int> children(group.beams.size());
  for (const BeamCandidate& c : running) ++children[static_cast<size_t>(c.beam)];
  // Beams that nothing continues give up their memory before others take more.
  for (size_t b = 0; b < group.beams.size(); ++b) {
    if (children[b] > 0) continue;
    memory_.Release(group.beams[b].sequence->memory);
    group.spare.push_back(std::move(group.beams[b].sequence));
  }
  group.next.reserve(running.size());
  for (const BeamCandidate& c : running) {
    const auto b = static_cast<size_t>(c.beam);
    Beam& parent = group.beams[b];
    const int scored = AddScored(group, parent, logits[b], c.token);
    // The last one that continues a beam takes its place, the others are copies.
    SequencePtr beam =
        --children[b] == 0 ? std::move(parent.sequence) : ForkBeam(leader, *parent.sequence);
    if (!beam->sampling.AcceptInTime(c.token)) beam->sampling.Accept(c.token);
    if (!beam->request.sampling.stop.empty()) beam->text.Push(c.token);
    beam->tokens.push_back(c.token);
    group.next.push_back({.sequence = std::move(beam), .scored = scored});
  }
  group.beams.clear();
  std::swap(group.beams, group.next);
}

SequencePtr EngineImpl::ForkBeam(Sequence& leader, const Sequence& parent) {
  std::vector<SequencePtr>& spare = leader.beams->spare;
  SequencePtr beam;
  if (spare.empty()) {
    beam = NewBeam(leader);
  } else {
    beam = std::move(spare.back());
    spare.pop_back();
  }
  beam->tokens = parent.tokens;
  beam->text = parent.text;
  beam->sampling.Continue(parent.sampling);
  beam->high_water = parent.high_water;
  beam->memory = memory_.Fork(parent.memory);
  return beam;
}

OutputDelta EngineImpl::BeamDelta(const Sequence& leader, const Hypothesis& made,
                                  const FinishedBeam& finished) {
  const SamplingParams& params = leader.request.sampling;
  OutputDelta delta;
  delta.finished = true;
  delta.beam = BeamScore{.cumulative_logprob = finished.sum, .score = finished.score};
  delta.prompt_logprobs = leader.prompt_logprobs;
  for (int at = made.scored; at >= 0; at = leader.beams->scored[static_cast<size_t>(at)].before) {
    delta.logprobs.push_back(leader.beams->scored[static_cast<size_t>(at)].logprob);
  }
  std::reverse(delta.logprobs.begin(), delta.logprobs.end());
  const TokenId last = made.tokens.back();
  const bool eos = token_step_.IsEos(params, last);
  const bool stop_token = !eos && absl::c_linear_search(params.stop_token_ids, last);
  const bool hidden = eos || (stop_token && !params.include_stop);
  OutputText text = leader.text;
  for (size_t i = 0; i < made.tokens.size() - (hidden ? 1 : 0); ++i) {
    delta.text += text.Push(made.tokens[i]);
  }
  delta.text += text.Finish();
  delta.tokens = made.tokens;
  delta.stop_string = text.matched_stop();
  if (stop_token) delta.stop_token = last;
  delta.finish_reason =
      made.stopped || delta.stop_string.has_value() ? FinishReason::kStop : FinishReason::kLength;
  delta.usage = TokenStep::UsageOf(leader);
  delta.usage.completion_tokens = static_cast<int>(made.tokens.size());
  if (options_.expert_stats) {
    delta.usage.routed_tokens = made.computed;
    delta.usage.expert_routes = made.work.routes;
    delta.usage.activated_parameters =
        made.work.parameters +
        static_cast<uint64_t>(made.computed) * static_cast<uint64_t>(always_active_);
    AddSourceWork(made.source, delta.usage);
  }
  delta.expert_counts = made.expert_counts;
  delta.routing = made.routing;
  delta.source_routing = made.source_routing;
  return delta;
}

void EngineImpl::FinishBeams(Sequence* leader, bool cut) {
  BeamGroup& group = *leader->beams;
  if (cut) {
    const std::vector<int> numbers = group.search.Close();
    for (size_t b = 0; b < numbers.size(); ++b) {
      if (numbers[b] < 0) continue;
      group.hypotheses.push_back(MakeHypothesis(*leader, group.beams[b], numbers[b]));
    }
  }
  std::vector<OutputDelta> deltas;
  for (size_t i = 0; i < 1 + leader->samples.size(); ++i) {
    if (i < group.search.finished().size()) {
      const FinishedBeam& finished = group.search.finished()[i];
      const auto made = absl::c_find_if(
          group.hypotheses, [&](const Hypothesis& h) { return h.number == finished.number; });
      deltas.push_back(BeamDelta(*leader, *made, finished));
    } else {
      OutputDelta& delta = deltas.emplace_back();
      delta.finished = delta.absent = true;
      delta.usage = TokenStep::UsageOf(*leader);
      delta.usage.completion_tokens = 0;
    }
    deltas.back().timed_out = cut;
  }
  const std::vector<SequencePtr> ended = TakeBeams(leader);
  const auto now = std::chrono::steady_clock::now();
  {
    const MutexLock lock(mutex_);
    for (size_t i = 0; i < ended.size(); ++i) {
      histograms_.inference_seconds.Observe(SecondsBetween(ended[i]->admitted_at, now));
      histograms_.decode_seconds.Observe(SecondsBetween(*ended.front()->first_token_at, now));
      stats_.prompt_tokens += static_cast<uint64_t>(ended[i]->prompt_length());
      stats_.generation_tokens += deltas[i].tokens.size();
      ++(deltas[i].finish_reason == FinishReason::kStop ? stats_.finished_stop
                                                        : stats_.finished_length);
      Forget(*ended[i]);
    }
    CopySchedulerStats();
  }
  for (size_t i = 0; i < ended.size(); ++i) {
    ended[i]->owes_end = false;
    ended[i]->sink->OnDelta(std::move(deltas[i]));
  }
}

void EngineImpl::FailBeams(Sequence* leader, const absl::Status& status) {
  const bool queued = !leader->admitted;
  const bool has_prompt = leader->beams->search.length() > 0;
  const int computed =
      has_prompt ? leader->prompt_length() : std::min(leader->computed(), leader->prompt_length());
  const std::vector<SequencePtr> ended = TakeBeams(leader);
  const auto now = std::chrono::steady_clock::now();
  if (queued) {
    for (const SequencePtr& s : ended) {
      histograms_.queue_seconds.Observe(SecondsBetween(s->submitted_at, now));
    }
    LeaveQueue(static_cast<int>(ended.size()), ended.front()->prompt_length());
  }
  {
    const MutexLock lock(mutex_);
    const bool abort = absl::IsCancelled(status) || absl::IsDeadlineExceeded(status) ||
                       absl::IsUnavailable(status);
    for (const SequencePtr& s : ended) {
      stats_.prompt_tokens += static_cast<uint64_t>(computed);
      ++(abort ? stats_.finished_abort : stats_.finished_error);
      Forget(*s);
    }
    CopySchedulerStats();
  }
  for (const SequencePtr& s : ended) {
    s->owes_end = false;
    s->sink->OnError(status);
  }
}

std::vector<SequencePtr> EngineImpl::TakeBeams(Sequence* leader) {
  std::vector<SequencePtr> ended;
  ended.reserve(1 + leader->samples.size());
  std::vector<SequencePtr> samples = std::exchange(leader->samples, {});
  ended.push_back(scheduler_.Remove(leader));
  std::move(samples.begin(), samples.end(), std::back_inserter(ended));
  RefreshIfIdle();
  return ended;
}

}  // namespace moeserve

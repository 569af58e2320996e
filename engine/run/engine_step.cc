// The engine's steps: what a step computes, and what becomes of its results.
#include <algorithm>
#include <chrono>
#include <new>
#include <utility>

#include "base/check.h"
#include "engine/model/output_head.h"
#include "engine/run/encode_step.h"
#include "engine/run/engine_impl.h"
#include "engine/run/make_batch.h"

namespace moeserve {
namespace {

// If fewer tokens match, a draft model proposes tokens instead, if there is one: proposals from
// such matches are right less often.
constexpr int kModelInsteadBelow = 4;

// Largest number of tokens without a choice that one step adds to a sequence.
constexpr int kMaxForcedTokens = 1024;

bool AllFinite(std::span<const float> values) {
  // No early exit, so that the loop is vectorised; x - x is 0 unless x is infinite or NaN.
  int bad = 0;
  for (float v : values) bad |= v - v != 0.0f;
  return bad == 0;
}

// Returns the logits of `count` rows from row `first` on.
RowLogits Rows(const RowLogits& logits, size_t first, size_t count) {
  const size_t width =
      logits.positions.empty() ? 0 : logits.values.size() / logits.positions.size();
  return {logits.positions.subspan(first, count),
          logits.values.subspan(first * width, count * width),
          logits.drawn == nullptr ? nullptr : logits.drawn + first};
}

bool Finite(const RowLogits& logits) {
  if (logits.drawn == nullptr) return AllFinite(logits.values);
  return std::all_of(logits.drawn, logits.drawn + logits.positions.size(),
                     [](const SampleResult& drawn) { return drawn.finite != 0; });
}

bool NoneFailed(std::span<const uint8_t> failed) {
  return std::all_of(failed.begin(), failed.end(), [](uint8_t f) { return f == 0; });
}

}  // namespace

void EngineImpl::Step() {
  const auto begin = std::chrono::steady_clock::now();
  drawing_share_.Choose(scheduler_.running());
  const PromptBudget budget =
      options_.max_prompt_rows > 0
          ? PromptBudget::Rows(options_.max_prompt_rows)
          : step_time_.Budget(DecodingWork(scheduler_.running()),
                              static_cast<int>(scheduler_.running().size()));
  if (EncodeSources() && !broken_.ok()) return;
  ProposeDrafts();
  const std::vector<ScheduledRows> scheduled = scheduler_.Plan(options_.max_step_tokens, budget);
  if (scheduled.empty()) return;
  const ModelSpec& spec = model_->spec();
  const bool drafted = std::any_of(scheduled.begin(), scheduled.end(),
                                   [](const ScheduledRows& r) { return r.drafted > 0; });
  Batch batch;
  double forward_seconds = 0.0;
  std::vector<int32_t> positions;
  std::vector<SequenceOutput> outputs;
  try {
    batch = MakeBatch(spec, scheduled, memory_, model_->backend().samples_on_device(), textless_);
    // They never shrink: if they did, resize() would fill the elements that it adds again with
    // zeros in later steps.
    const auto make_room = [](std::vector<float>& floats, int64_t rows, int width) {
      floats.resize(std::max(floats.size(), static_cast<size_t>(rows * width)));
    };
    make_room(logits_, std::ssize(batch.logit_rows), RowOutputs(spec));
    make_room(texts_, batch.num_texts(), TextOutputs(spec));
    StepOptions step = options_.expert_stats ? recorder_.BeginStep(batch.tokens) : StepOptions{};
    step.count_later = drafted && step.counters != nullptr;
    samples_.resize(batch.samples.size());
    if (predictions_ != nullptr) predictions_->BeginStep();
    const auto forward_begin = std::chrono::steady_clock::now();
    StepReport report = model_->Forward(batch, *cache_, step,
                                        {.logits = logits_, .samples = samples_, .texts = texts_});
    forward_seconds = SecondsBetween(forward_begin, std::chrono::steady_clock::now());
    ObserveStep(scheduled, forward_seconds);
    broken_ = model_->CheckFiles();
    if (broken_.ok() && draft_model_ != nullptr) broken_ = draft_model_->CheckFiles();
    if (broken_.ok()) {
      outputs = Outputs(scheduled, batch, report, positions);
      Verify(outputs, batch);
      RememberRows(outputs);
    }
    if (step.count_later) report.routes = model_->CountStep(batch.phase);
    if (options_.expert_stats) recorder_.EndStep(batch, report);
  } catch (const std::bad_alloc&) {
    // Other ranks may wait in the middle of the step, so that none can follow.
    broken_ = model_->CheckFiles();
    if (!broken_.ok()) return StopBroken();
    for (size_t i = 0; i < scheduled.size(); ++i) {
      const Sequence* const leader = scheduled[i].sequence->leader;
      const bool last = i + 1 == scheduled.size() || leader == nullptr ||
                        scheduled[i + 1].sequence->leader != leader;
      if (last) FailForMemory(scheduled[i].sequence);  // once for all beams of a leader
    }
    return;
  }
  if (!broken_.ok()) return StopBroken();
  for (size_t i = 0; i < outputs.size();) {
    if (outputs[i].rows.sequence->leader != nullptr) {
      i += AdvanceBeams(std::span(outputs).subspan(i));
    } else {
      AdvanceOrFail(outputs[i++]);
    }
  }
  drawing_share_.EndStep(forward_seconds);

  const bool decode_only = std::all_of(batch.phase.begin(), batch.phase.end(), [](Phase phase) {
    return phase == Phase::kDecode || phase == Phase::kRejected;
  });
  const double step_seconds = SecondsBetween(begin, std::chrono::steady_clock::now());
  histograms_.step_tokens.Observe(batch.num_tokens());
  histograms_.step_sequences.Observe(static_cast<double>(scheduled.size()));
  (decode_only ? histograms_.decode_step_seconds : histograms_.prefill_step_seconds)
      .Observe(step_seconds);
  const MutexLock lock(mutex_);
  ++stats_.steps;
  stats_.last_step = absl::Now();
  stats_.forward_seconds += forward_seconds;
  stats_.step_seconds += step_seconds;
  stats_.histograms = histograms_;
  stats_.tiers = model_->tier_counts();
}

bool EngineImpl::EncodeSources() {
  const std::vector<Sequence*> planned = scheduler_.PlanSources(options_.max_step_tokens);
  if (planned.empty()) return false;
  std::vector<Sequence*> failed;
  try {
    std::vector<int32_t> pages;
    const Batch batch = MakeSourceBatch(planned, pages);
    StepOptions step;
    if (options_.expert_stats) step = encoder_recorder_->BeginStep(batch.tokens);
    const StepReport report = model_->EncodeSources(batch, *cache_, step);
    broken_ = model_->CheckFiles();
    if (options_.expert_stats) encoder_recorder_->EndStep(batch, report);
    size_t row = 0;
    for (Sequence* s : planned) {
      const auto rows = static_cast<size_t>(s->source_length());
      if (!NoneFailed(report.failed.subspan(row, rows))) failed.push_back(s);
      s->source_ready = s->source_encoded = true;
      row += rows;
    }
  } catch (const std::bad_alloc&) {
    broken_ = model_->CheckFiles();
    if (broken_.ok()) {
      for (Sequence* s : planned) FailForMemory(s);
    } else {
      StopBroken();
    }
    return true;
  }
  for (Sequence* s : failed) FailWithSamples(s, NumericFailure());
  if (!broken_.ok()) StopBroken();
  return true;
}

void EngineImpl::StopBroken() {
  {
    const MutexLock lock(mutex_);
    stats_.healthy = false;
  }
  AbortExpired();  // ends all requests
}

void EngineImpl::ProposeDrafts() {
  if (options_.draft.max_tokens == 0) return;
  std::vector<Sequence*> decoding, without;  // without: too little was found for them
  int rows = 0;
  for (const SequencePtr& s : scheduler_.running()) {
    s->proposal = {};
    s->draft.clear();
    if (!s->decoding() || s->resting) continue;
    if (s->beams != nullptr) {
      rows += s->seats();
      continue;
    }
    rows += s->remaining();
    decoding.push_back(s.get());
    const int most = DraftRoom(*s);
    if (most <= 0) continue;
    if (const ConstraintState* state = s->sampling.constraint(); state != nullptr) {
      s->proposal = constraint_memory_.Propose(s->request.sampling.constraint.get(), s->cache_key,
                                               *state, most);
      if (!s->proposal.tokens.empty()) continue;
    }
    if (options_.draft.prompt_lookup) s->proposal = LookUp(s->LookupText(), most, s->alignment);
    if (s->proposal.matched < kModelInsteadBelow) without.push_back(s.get());
  }
  // Prediction layers also have to compute the rows of the others.
  if (predictions_ != nullptr || (draft_model_ != nullptr && !without.empty())) {
    ProposeByModel(rows, without);
  }
  std::vector<DraftDepth::Candidate> candidates;
  for (const Sequence* s : decoding) {
    candidates.push_back({.proposal = &s->proposal, .record = &s->acceptance});
  }
  draft_depth_.Choose(rows, options_.max_step_tokens - rows, candidates);
  for (size_t i = 0; i < candidates.size(); ++i) {
    const auto& tokens = decoding[i]->proposal.tokens;
    const int64_t chosen = options_.draft.always ? std::ssize(tokens) : candidates[i].chosen;
    decoding[i]->draft.assign(tokens.begin(), tokens.begin() + chosen);
  }
}

int EngineImpl::DraftRoom(const Sequence& s) const {
  // The last token of a response is never computed.
  return std::min({options_.draft.max_tokens, s.request.sampling.max_tokens - s.generated() - 1,
                   options_.max_model_len - s.length() - 1});
}

void EngineImpl::ProposeByModel(int rows, const std::vector<Sequence*>& sequences) {
  const double seconds_per_token = predictions_ != nullptr ? predictions_->seconds_per_token()
                                                           : draft_model_->seconds_per_token();
  int depth = options_.draft.max_tokens;
  if (!options_.draft.always && !sequences.empty()) {
    const auto choose = [&](std::span<const double> shares) {
      return draft_depth_.ChooseModelDepth(rows, shares, options_.draft.max_tokens,
                                           seconds_per_token);
    };
    std::vector<double> shares;
    for (const Sequence* s : sequences) shares.push_back(draft_depth_.ModelShare(s->acceptance));
    depth = choose(shares);
    // Only what was proposed tells whether it is right. So a step in sixteen tries one token,
    // unless drafts would not even be worth it if all were right.
    if (depth == 0 && ++model_drafts_ % 16 == 0) {
      depth = std::min(choose(std::vector<double>(shares.size(), 1.0)), 1);
    }
  }
  std::vector<DraftModel::Wanted> wanted;
  for (Sequence* s : sequences) {
    const int tokens = scheduler_.ReserveDraft(*s, std::min(depth, DraftRoom(*s)));
    if (tokens > 0) wanted.push_back({s, tokens});
  }
  if (predictions_ != nullptr) {
    predictions_->Propose(scheduler_.running(), wanted);
  } else {
    draft_model_->Propose(wanted);
  }
}

void EngineImpl::RememberRows(const std::vector<SequenceOutput>& outputs) {
  if (predictions_ == nullptr) return;
  for (const SequenceOutput& output : outputs) {
    Sequence& s = *output.rows.sequence;
    if (s.beams != nullptr || s.leader != nullptr || s.request.encode.has_value()) continue;
    predictions_->Remember(s, output.first_row, output.rows.begin, output.rows.count);
  }
}

void EngineImpl::ObserveStep(const std::vector<ScheduledRows>& scheduled, double forward_seconds) {
  const StepWork work = WorkOf(scheduled);
  step_time_.Observe(work, forward_seconds);
  if (work.prompt_rows == 0) draft_depth_.ObserveStep(work.decode_rows, forward_seconds);
}

std::vector<EngineImpl::SequenceOutput> EngineImpl::Outputs(
    const std::vector<ScheduledRows>& scheduled, const Batch& batch, const StepReport& report,
    std::vector<int32_t>& positions) {
  const auto width = static_cast<size_t>(RowOutputs(model_->spec()));
  const auto text_width = static_cast<size_t>(TextOutputs(model_->spec()));
  size_t text_row = 0, text_range = 0;
  for (const int32_t row : batch.logit_rows) positions.push_back(batch.positions[row]);
  std::vector<SequenceOutput> outputs;
  int row = 0;
  size_t logit_row = 0;
  for (const ScheduledRows& rows : scheduled) {
    const int end = row + rows.count;
    const size_t first = logit_row;
    while (logit_row < positions.size() && batch.logit_rows[logit_row] < end) ++logit_row;
    SequenceOutput& output = outputs.emplace_back();
    output.rows = rows;
    output.first_row = row;
    output.failed =
        report.failed.subspan(static_cast<size_t>(row), static_cast<size_t>(rows.count));
    output.logits = {std::span<const int32_t>(positions).subspan(first, logit_row - first),
                     {logits_.data() + first * width, (logit_row - first) * width}};
    const size_t first_text = text_row;
    while (text_row < batch.text_rows.size() && batch.text_rows[text_row] < end) ++text_row;
    output.texts = {texts_.data() + first_text * text_width, (text_row - first_text) * text_width};
    if (text_range < batch.pool_ranges.size() && batch.pool_ranges[text_range].begin == row) {
      output.texts = {texts_.data() + (batch.text_rows.size() + text_range++) * text_width,
                      text_width};
    }
    if (first < logit_row && !samples_.empty() && batch.samples[first].row >= 0) {
      output.logits.drawn = &samples_[first];
    }
    row = end;
  }
  return outputs;
}

void EngineImpl::Verify(std::vector<SequenceOutput>& outputs, Batch& batch) {
  for (SequenceOutput& output : outputs) {
    const int drafted = output.rows.drafted;
    if (drafted == 0) continue;
    const auto before = [drafted](const auto& rows) {
      return rows.size() - static_cast<size_t>(drafted);
    };
    if (!NoneFailed(output.failed.first(before(output.failed))) ||
        !Finite(Rows(output.logits, 0, before(output.logits.positions)))) {
      output.drawn = Drawn{.deltas = {}, .status = NumericFailure()};
    } else {
      try {
        output.drawn = Draw(*output.rows.sequence, output);
      } catch (const std::bad_alloc&) {
        output.drawn = Drawn{.deltas = {}, .status = OutOfMemory()};
      }
    }
    const int rejected = drafted - output.drawn->accepted;
    const int end = output.first_row + output.rows.count;
    for (int row = end - rejected; row < end; ++row) batch.phase[row] = Phase::kRejected;
    output.rows.count -= rejected;
    drafted_tokens_ += static_cast<uint64_t>(drafted);
    accepted_tokens_ += static_cast<uint64_t>(output.drawn->accepted);
  }
}

EngineImpl::Drawn EngineImpl::Draw(Sequence& s, const SequenceOutput& output) {
  if (s.sampling.constraint() == nullptr) return DrawTokens(s, output);
  const auto begin = std::chrono::steady_clock::now();
  Drawn drawn = DrawTokens(s, output);
  drawing_share_.Drew(s, SecondsBetween(begin, std::chrono::steady_clock::now()));
  return drawn;
}

EngineImpl::Drawn EngineImpl::DrawTokens(Sequence& s, const SequenceOutput& output) {
  Drawn drawn;
  const int first = s.length();
  const auto drafted = static_cast<size_t>(output.rows.drafted);
  const size_t known_logits = output.logits.positions.size() - drafted;
  const size_t known_rows = output.failed.size() - drafted;
  // `right` is the number of leading drafted tokens that equal the drawn ones. The row of drafted
  // token i yields the token behind it.
  size_t right = 0;
  bool finished = false;
  const int64_t most_work = s.sampling.constraint_work() + kStepWork;
  const auto has_room = [&] { return s.sampling.constraint_work() < most_work; };
  while (!finished && (right == 0 || has_room())) {
    const size_t row = known_logits - 1 + right;
    if (right > 0 &&
        (output.failed[known_rows - 1 + right] != 0 || !Finite(Rows(output.logits, row, 1)))) {
      drawn.status = NumericFailure();
      break;
    }
    Result<OutputDelta> delta = token_step_.Next(s, output.logits, row);
    if (!delta.ok()) {
      drawn.status = delta.status();
      break;
    }
    finished = delta->finished;
    drawn.deltas.push_back(*std::move(delta));
    // Each such token takes a mask, so a step may not take too many.
    for (int i = 0; !finished && options_.forced_tokens && i < kMaxForcedTokens && has_room();
         ++i) {
      std::optional<OutputDelta> forced = token_step_.NextWithoutChoice(s);
      if (!forced.has_value()) break;
      drawn.deltas.push_back(*std::move(forced));
    }
    const auto length = static_cast<size_t>(s.length() - first);
    while (right < std::min(length, drafted) &&
           s.tokens[static_cast<size_t>(first) + right] == s.draft[right]) {
      ++right;
    }
    if (right < length) break;  // no row follows the last token
  }
  // The last token of a response is never part of its rows; nor is one after which there was no
  // room for another, because its logits were not used.
  if (right > 0 && first + static_cast<int>(right) == s.length()) --right;
  drawn.accepted = static_cast<int>(right);
  LearnAcceptance(s, first);
  return drawn;
}

void EngineImpl::LearnAcceptance(Sequence& s, int first) {
  if (s.sampling.constraint() != nullptr) {
    constraint_memory_.Learn(s.request.sampling.constraint.get(), s.cache_key,
                             s.sampling.TakeSteps());
  }
  const auto drawn = std::span<const TokenId>(s.tokens).subspan(static_cast<size_t>(first));
  const std::vector<TokenId>& proposed = s.proposal.tokens;
  bool right = true;
  size_t i = 0;
  for (; right && i < std::min(drawn.size(), proposed.size()); ++i) {
    right = drawn[i] == proposed[i];
    s.acceptance.Add(s.proposal.MatchedBefore(i), right);
    draft_depth_.ObserveToken(s.proposal.MatchedBefore(i), right);
  }
  // The draft model may have computed other tokens than those that follow now.
  s.memory.drafted_until =
      std::min(s.memory.drafted_until, first + static_cast<int>(right ? i : i - 1));
}

bool EngineImpl::Computed(const SequenceOutput& output) {
  return NoneFailed(output.failed) && Finite(output.logits) && AllFinite(output.texts);
}

void EngineImpl::FailWithSamples(Sequence* sequence, const absl::Status& status) {
  if (sequence->leader != nullptr) sequence = sequence->leader;
  if (sequence->beams != nullptr) {
    FailBeams(sequence, status);
    return;
  }
  // Other samples that wait for this prompt to be computed would fail in the same way.
  while (!sequence->samples.empty()) Fail(sequence->samples.back().get(), status);
  Fail(sequence, status);
}

void EngineImpl::FailForMemory(Sequence* sequence) { FailWithSamples(sequence, OutOfMemory()); }

void EngineImpl::AdvanceOrFail(SequenceOutput& output) {
  Sequence* const sequence = output.rows.sequence;
  try {
    Advance(output);
  } catch (const std::bad_alloc&) {
    // The sequence may have ended before the allocation failed, or been lost at its end.
    if (scheduler_.Runs(sequence)) {
      FailForMemory(sequence);
    } else {
      ForgetLost();
    }
  }
}

void EngineImpl::Advance(SequenceOutput& output) {
  Sequence& s = *output.rows.sequence;
  if (output.drawn.has_value()) {
    // The drawn tokens follow the last row that is not a drafted one.
    const int first = output.rows.begin + output.rows.count - output.drawn->accepted;
    // After a failure the cache may hold numbers that are not finite, which no sequence may reuse.
    if (output.drawn->status.ok()) scheduler_.Complete(output.rows);
    Deliver(s, *std::move(output.drawn), first);
    return;
  }
  if (!Computed(output)) {
    FailWithSamples(&s, NumericFailure());
    return;
  }
  if (s.request.encode.has_value()) {
    CollectEncoded(s, output.logits, output.texts, model_->spec());
    scheduler_.Complete(output.rows);
    if (s.remaining() == 0) FinishEncoded(s);
    return;
  }
  token_step_.CollectPromptLogprobs(s, output.logits);
  scheduler_.Complete(output.rows);
  if (s.remaining() > 0) return;  // part of the prompt is still to be computed
  if (s.beams != nullptr) {
    StartBeams(s, output);
    return;
  }
  ForkSamples(s, output);
  const int first = s.length();
  Deliver(s, Draw(s, output), first);
}

void EngineImpl::FinishEncoded(Sequence& s) {
  s.first_token_at = std::chrono::steady_clock::now();
  histograms_.prefill_seconds.Observe(SecondsBetween(s.admitted_at, *s.first_token_at));
  OutputDelta delta;
  delta.finished = true;
  delta.usage = TokenStep::UsageOf(s);
  delta.encoded = std::move(s.encoded);
  if (s.request.routing_record) DeliverRoutes(s, s.computed(), delta);
  Finish(&s, std::move(delta));
}

void EngineImpl::ForkSamples(Sequence& s, const SequenceOutput& output) {
  // If an allocation fails, the samples that are left fail with the sequence.
  while (!s.samples.empty()) {
    Sequence& forked = *s.samples.front();
    scheduler_.Fork(s, std::move(s.samples.front()));
    s.samples.erase(s.samples.begin());
    const int first = forked.length();
    if (forked.remaining() == 0) Deliver(forked, Draw(forked, output), first);
  }
}

void EngineImpl::Deliver(Sequence& s, Drawn drawn, int first) {
  if (!drawn.deltas.empty() && !s.first_token_at.has_value()) {
    s.first_token_at = std::chrono::steady_clock::now();
    histograms_.prefill_seconds.Observe(SecondsBetween(s.admitted_at, *s.first_token_at));
  }
  for (OutputDelta& delta : drawn.deltas) {
    if (s.request.routing_record) DeliverRoutes(s, std::min(first++, s.computed()), delta);
    if (delta.finished) {
      Finish(&s, std::move(delta));
      return;
    }
    s.sink->OnDelta(std::move(delta));
  }
  if (!drawn.status.ok()) FailWithSamples(&s, drawn.status);
}

std::optional<RoutingRecord> EngineImpl::SourceRoutes(std::span<const int32_t> pages,
                                                      int tokens) const {
  if (source_routes_ == nullptr) return std::nullopt;
  return source_routes_->Record(pages, 0, tokens);
}

void EngineImpl::DeliverRoutes(Sequence& s, int end, OutputDelta& delta) {
  if (s.routes_delivered == 0)
    delta.source_routing = SourceRoutes(s.memory.source, s.source_length());
  const int begin = std::exchange(s.routes_delivered, end);
  delta.routing = routes_.Record(s.memory.pages(), begin, end);
  for (const auto& [first, last] : s.reused) {
    if (last > begin && first < end) {
      delta.routing->reused.emplace_back(std::max(first, begin), std::min(last, end));
    }
  }
}

}  // namespace moeserve

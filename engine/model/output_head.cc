#include "engine/model/output_head.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error_text.h"
#include "engine/weights/expert_placement.h"
#include "kernels/rank_ops.h"

namespace moeserve {
namespace {

// The ranges of the vocabulary begin at multiples of this, so that products have whole tiles.
constexpr int kColumnsOfRange = 16;

}  // namespace

int RowOutputs(const ModelSpec& spec) {
  if (HasVocabulary(spec.head.kind)) return spec.vocab_size;
  const bool of_rows =
      HasLabels(spec.head.kind) && spec.head.kind != HeadKind::kSequenceClassification;
  return of_rows ? static_cast<int>(spec.head.labels.size()) : 0;
}

int TextOutputs(const ModelSpec& spec) {
  if (!spec.pooling.has_value()) return 0;
  if (spec.head.kind == HeadKind::kSequenceClassification) {
    return static_cast<int>(spec.head.labels.size());
  }
  return spec.pooling->dense.empty() ? spec.hidden_size : spec.pooling->dense.back().width;
}

Result<std::unique_ptr<OutputHead>> OutputHead::Load(LoadContext& load, const ModelSpec& spec) {
  auto head = std::make_unique<OutputHead>();
  head->spec_ = spec;
  head->spec_.blocks.clear();
  const int d = spec.hidden_size;
  if (HasVocabulary(spec.head.kind)) {
    const LinearPart part{spec.tie_word_embeddings ? "embed" : "head", spec.vocab_size,
                          spec.head_bias, "head"};
    const bool divided = load.ranks != nullptr && load.ranks->divide_head;
    if (divided) {
      MOESERVE_ASSIGN_OR_RETURN(head->range_, LoadRange(load, part, d));
    }
    if (!divided || spec.tie_word_embeddings) {
      MOESERVE_ASSIGN_OR_RETURN(head->matrix_, LoadLinear(load, d, {part}));
    }
    const Quantization quantization =
        QuantizationOf(part.prefix + ".weight", {spec.vocab_size, d}, load.quantization);
    if (load.compute == DType::kBF16 && quantization == Quantization::kNone &&
        load.backend.rounds_head_input()) {
      head->input_ = DType::kBF16;
    }
  } else if (HasLabels(spec.head.kind)) {
    const auto labels = static_cast<int>(spec.head.labels.size());
    MOESERVE_ASSIGN_OR_RETURN(head->matrix_,
                              LoadLinear(load, d, {{"classifier", labels, spec.head.bias}}));
  }
  if (spec.norm.HasFinal()) {
    LoadContext load_final = load;
    load_final.norm.eps = spec.norm.final_eps.value_or(spec.norm.eps);
    MOESERVE_ASSIGN_OR_RETURN(
        head->final_norm_,
        LoadRowNorm(load_final, std::string(TensorPrefix(spec.stack)) + "norm", d));
  }
  if (const auto& layer = spec.head.layer; layer.has_value()) {
    head->layer_ = {nullptr, layer->activation, d};
    MOESERVE_ASSIGN_OR_RETURN(head->layer_.matrix,
                              LoadLinear(load, d, {{"head.layer", d, layer->bias}}));
    if (layer->norm) {
      LoadContext load_norm = load;
      load_norm.norm.eps = spec.norm.outer_eps.value_or(spec.norm.eps);
      MOESERVE_ASSIGN_OR_RETURN(head->layer_norm_, LoadNorm(load_norm, {"head.layer_norm"}, {d}));
    }
  }
  if (!spec.pooling.has_value()) return head;
  int in = d;
  for (const DenseSpec& dense : spec.pooling->dense) {
    const std::string name = Concat("pooling.dense.", head->dense_.size());
    MOESERVE_ASSIGN_OR_RETURN(std::unique_ptr<LinearBank> matrix,
                              LoadLinear(load, in, {{name, dense.width, dense.bias}}));
    head->dense_.push_back({std::move(matrix), dense.activation, dense.width});
    in = dense.width;
  }
  return head;
}

void OutputHead::Normalize(Backend& backend, const RowsView& rows, const RowsView& to) const {
  if (final_norm_ != nullptr) {
    backend.Norm({.bank = final_norm_.get(), .input = rows, .output = to});
  } else if (rows.data != to.data) {
    backend.Convert(rows, to);
  }
}

void OutputHead::RunRows(Backend& backend, Workspace& workspace, const RowsView& rows,
                         const RowsView& outputs, StepTimes* times) const {
  const Workspace::Scope scope(workspace);
  const bool scaled = spec_.output_scale != 1.0;
  if (layer_.matrix == nullptr && input_ != DType::kF32 && !scaled) {
    const RowsView rounded = workspace.TakeDense(rows.rows, rows.cols, input_);
    Normalize(backend, rows, rounded);
    RunHead(backend, workspace, rounded, outputs, times);
  } else {
    Normalize(backend, rows, rows);
    if (scaled) backend.Scale(rows, static_cast<float>(spec_.output_scale));
    RunHead(backend, workspace, rows, outputs, times);
  }
}

void OutputHead::RunHead(Backend& backend, Workspace& workspace, const RowsView& rows,
                         const RowsView& outputs, StepTimes* times) const {
  const Workspace::Scope scope(workspace);
  RowsView last = rows;
  if (layer_.matrix != nullptr) {
    last = workspace.TakeDense(rows.rows, rows.cols, DType::kF32);
    backend.Linear({.bank = layer_.matrix.get(),
                    .input = rows,
                    .output = last,
                    .activation = layer_.activation});
    if (layer_norm_ != nullptr) {
      backend.Norm({.bank = layer_norm_.get(), .input = last, .output = last});
    }
  }
  if (input_ != last.dtype) {
    const RowsView rounded = workspace.TakeDense(rows.rows, rows.cols, input_);
    backend.Convert(last, rounded);
    last = rounded;
  }
  if (range_.exchange == nullptr) {
    const PartTimer timer(times, &StepTimes::head);
    backend.Linear({.bank = matrix_.get(), .input = last, .output = outputs});
    if (HasVocabulary(spec_.head.kind)) Finish(backend, outputs);
    return;
  }
  const RowsView part = workspace.TakeDense(rows.rows, range_.width, DType::kF32);
  if (range_.columns > 0) {
    const PartTimer timer(times, &StepTimes::head);
    const RowsView logits = part.Columns(0, range_.columns);
    backend.Linear({.bank = range_.matrix.get(), .input = last, .output = logits});
    Finish(backend, logits);
  }
  backend.rank_ops()->GatherColumns(part, outputs, *range_.exchange);
}

void OutputHead::Finish(Backend& backend, const RowsView& logits) const {
  if (spec_.logit_scale != 1.0) backend.Scale(logits, static_cast<float>(spec_.logit_scale));
  if (spec_.logit_soft_cap > 0.0) {
    backend.SoftCapRows(logits, static_cast<float>(spec_.logit_soft_cap));
  }
}

Result<OutputHead::Range> OutputHead::LoadRange(LoadContext& load, const LinearPart& part, int d) {
  Range range;
  range.exchange = load.ranks->exchange;
  const int ranks = range.exchange->ranks();
  range.width = ((part.out_features + ranks - 1) / ranks + kColumnsOfRange - 1) / kColumnsOfRange *
                kColumnsOfRange;
  const int first = range.exchange->rank() * range.width;
  range.columns = std::clamp(part.out_features - first, 0, range.width);
  if (range.columns == 0) return range;
  MOESERVE_ASSIGN_OR_RETURN(range.matrix, LoadLinearOutputs(load, d, part, first, range.columns));
  return range;
}

void OutputHead::RunTexts(Backend& backend, Workspace& workspace, const RowsView& rows,
                          const RowsView& all, const RowsView& outputs) const {
  const Workspace::Scope scope(workspace);
  const bool with_head = spec_.head.kind == HeadKind::kSequenceClassification;
  const bool last = !with_head && dense_.empty();
  RowsView texts =
      last ? outputs : workspace.TakeDense(outputs.rows, spec_.hidden_size, DType::kF32);
  if (rows.rows > 0) Normalize(backend, rows, texts.Rows(0, rows.rows));
  if (texts.rows > rows.rows) {
    const RowsView normed = workspace.TakeDense(all.rows, all.cols, DType::kF32);
    Normalize(backend, all, normed);
    backend.PoolRows(
        {.kind = spec_.pooling->kind == PoolingKind::kMax ? PoolKind::kMax : PoolKind::kMean,
         .input = normed,
         .output = texts.Rows(rows.rows, texts.rows - rows.rows)});
  }
  if (with_head) return RunHead(backend, workspace, texts, outputs);
  for (const Layer& dense : dense_) {
    const RowsView to = &dense == &dense_.back()
                            ? outputs
                            : workspace.TakeDense(texts.rows, dense.width, DType::kF32);
    backend.Linear(
        {.bank = dense.matrix.get(), .input = texts, .output = to, .activation = dense.activation});
    texts = to;
  }
}

}  // namespace moeserve

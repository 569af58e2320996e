#include "engine/layers/recurrent_mixer.h"

#include <cmath>
#include <utility>

namespace moeserve {
namespace {

// Loads the RMS norm `name` of vectors of `width`, in `parts` parts.
Result<std::unique_ptr<NormBank>> LoadOutputNorm(LoadContext& load, const std::string& name,
                                                 int width, int parts) {
  MOESERVE_ASSIGN_OR_RETURN(HostTensor scale, load.source.Get(name + ".weight", {width}));
  return load.backend.NewNormBank({.layer = false, .eps = load.norm.eps, .parts = parts},
                                  {&scale, 1}, {});
}

// Loads the rates of the decays, the exponentials of the tensor `name`.
Result<std::unique_ptr<DeviceBuffer>> LoadRates(LoadContext& load, const std::string& name,
                                                int heads) {
  MOESERVE_ASSIGN_OR_RETURN(const HostTensor tensor, load.source.Get(name, {heads}));
  std::vector<float> rates;
  for (int h = 0; h < heads; ++h) {
    rates.push_back(static_cast<float>(std::exp(double{ElementAsF32(tensor, h)})));
  }
  return load.backend.Upload(rates);
}

}  // namespace

absl::Status RecurrentMixer::AddPart(LoadContext& load, const std::string& name, int width,
                                     int rank, bool bias, std::vector<LinearPart>& projection,
                                     Part& part) {
  part.first = columns_;
  part.width = width;
  part.columns = rank > 0 ? rank : width;
  columns_ += part.columns;
  if (rank == 0) {
    projection.push_back({name, width, bias});
    return absl::OkStatus();
  }
  projection.push_back({name + "_down", rank, bias});
  MOESERVE_ASSIGN_OR_RETURN(part.second, LoadLinear(load, rank, {{name, width, false}}));
  return absl::OkStatus();
}

absl::Status RecurrentMixer::LoadRest(LoadContext& load, const ModelSpec& model, int block,
                                      const std::vector<LinearPart>& projection,
                                      const std::vector<LinearPart>& convolution, int taps,
                                      const std::string& bias_name, bool bias) {
  const std::string prefix = model.blocks[static_cast<size_t>(block)].name();
  const int d = model.hidden_size;
  state_ = StateIndex(model, block);
  MOESERVE_ASSIGN_OR_RETURN(projection_, StackedLinear::Load(load, d, projection));
  MOESERVE_ASSIGN_OR_RETURN(convolution_, Convolution::Load(load, convolution, taps));
  MOESERVE_ASSIGN_OR_RETURN(rate_, LoadRates(load, prefix + ".decay_log", shape_.heads));
  MOESERVE_ASSIGN_OR_RETURN(decay_bias_,
                            LoadVector(load, prefix + bias_name, shape_.decay_width()));
  MOESERVE_ASSIGN_OR_RETURN(output_,
                            LoadLinear(load, shape_.value_width(), {{prefix + ".o", d, bias}}));
  return absl::OkStatus();
}

Result<std::unique_ptr<RecurrentMixer>> RecurrentMixer::Load(LoadContext& load,
                                                             const ModelSpec& model, int block,
                                                             const DeltaSpec& spec) {
  auto m = std::make_unique<RecurrentMixer>();
  const std::string prefix = model.blocks[static_cast<size_t>(block)].name();
  const int d = model.hidden_size;
  const StateShape state = spec.State(d);
  m->shape_ = state.recurrence;
  m->settings_ = {
      .delta = true, .form = spec.decay_form, .bound = static_cast<float>(spec.decay_bound)};
  m->gate_activation_ = spec.gate_activation;
  const int keys = m->shape_.key_width();
  const int values = m->shape_.value_width();
  m->keys_ = keys;
  m->values_ = 2 * int64_t{keys};
  m->columns_ = state.cols;
  std::vector<LinearPart> parts = {
      {prefix + ".q", keys, false}, {prefix + ".k", keys, false}, {prefix + ".v", values, false}};
  MOESERVE_RETURN_IF_ERROR(
      m->AddPart(load, prefix + ".gate", values, spec.gate_rank, false, parts, m->gate_));
  MOESERVE_RETURN_IF_ERROR(m->AddPart(load, prefix + ".decay", m->shape_.decay_width(),
                                      spec.decay_rank, false, parts, m->decay_));
  MOESERVE_RETURN_IF_ERROR(
      m->AddPart(load, prefix + ".beta", m->shape_.heads, 0, false, parts, m->strength_));
  MOESERVE_RETURN_IF_ERROR(m->LoadRest(load, model, block, parts,
                                       {{prefix + ".q_conv", keys, false},
                                        {prefix + ".k_conv", keys, false},
                                        {prefix + ".v_conv", values, false}},
                                       spec.taps, ".decay_bias", false));
  MOESERVE_ASSIGN_OR_RETURN(m->norm_,
                            LoadOutputNorm(load, prefix + ".out_norm", spec.value_dim, 1));
  return m;
}

Result<std::unique_ptr<RecurrentMixer>> RecurrentMixer::Load(LoadContext& load,
                                                             const ModelSpec& model, int block,
                                                             const StateSpaceSpec& spec) {
  auto m = std::make_unique<RecurrentMixer>();
  const std::string prefix = model.blocks[static_cast<size_t>(block)].name();
  const int d = model.hidden_size;
  const StateShape state = spec.State(d);
  m->shape_ = state.recurrence;
  m->settings_.step_low = static_cast<float>(spec.step_low);
  if (spec.step_high.has_value()) m->settings_.step_high = static_cast<float>(*spec.step_high);
  m->gate_first_ = true;
  const int keys = m->shape_.key_width();
  const int values = m->shape_.value_width();
  m->keys_ = values;
  m->queries_ = int64_t{values} + keys;
  m->columns_ = state.cols;
  std::vector<LinearPart> parts = {{prefix + ".x", values, spec.bias},
                                   {prefix + ".b", keys, spec.bias},
                                   {prefix + ".c", keys, spec.bias}};
  MOESERVE_RETURN_IF_ERROR(
      m->AddPart(load, prefix + ".gate", values, 0, spec.bias, parts, m->gate_));
  MOESERVE_RETURN_IF_ERROR(
      m->AddPart(load, prefix + ".step", m->shape_.heads, 0, spec.bias, parts, m->decay_));
  MOESERVE_RETURN_IF_ERROR(m->LoadRest(load, model, block, parts,
                                       {{prefix + ".conv", state.cols, spec.conv_bias}}, spec.taps,
                                       ".step_bias", spec.bias));
  MOESERVE_ASSIGN_OR_RETURN(m->skip_, LoadVector(load, prefix + ".skip", m->shape_.heads));
  MOESERVE_ASSIGN_OR_RETURN(m->norm_,
                            LoadOutputNorm(load, prefix + ".out_norm", values, spec.groups));
  return m;
}

RowsView RecurrentMixer::RowsOf(StepContext& ctx, const Part& part, const RowsView& all) {
  const RowsView columns = all.Columns(part.first, part.columns);
  if (part.second == nullptr) return columns;
  const RowsView rows = ctx.workspace.Take(all.rows, part.width, DType::kF32);
  RowsView input = columns;
  if (ctx.activation != DType::kF32) {
    input = ctx.workspace.Take(all.rows, part.columns, ctx.activation);
    ctx.backend.Convert(columns, input);
  }
  ctx.backend.Linear({.bank = part.second.get(), .input = input, .output = rows});
  return rows;
}

RecurrentMixer::Inputs RecurrentMixer::Gather(StepContext& ctx, const Inputs& own,
                                              int64_t tokens) const {
  if (!ctx.division.divided()) return own;
  const int64_t columns = own.columns.cols, decays = own.decays.cols;
  const RowsView all = ctx.TakeGathered(tokens, columns + decays + own.strengths.cols, DType::kF32);
  const auto parts = [&](const RowsView& rows) -> Inputs {
    return {rows.Columns(0, columns), rows.Columns(columns, decays),
            rows.Columns(columns + decays, own.strengths.cols)};
  };
  const Inputs to = parts(ctx.division.Own(all));
  ctx.backend.Convert(own.columns, to.columns);
  ctx.backend.Convert(own.decays, to.decays);
  if (settings_.delta) ctx.backend.Convert(own.strengths, to.strengths);
  ctx.division.Gather(ctx.backend, all);
  return parts(all);
}

void RecurrentMixer::Forward(StepContext& ctx, const RowsView& x, const RowsView& output) const {
  const Workspace::Scope scope(ctx.workspace);
  Backend& backend = ctx.backend;
  const RowsView own = ctx.division.Own(x);
  const RowsView all = ctx.workspace.Take(own.rows, columns_, DType::kF32);
  projection_.Run(backend, own, all);
  const RowsView gate = RowsOf(ctx, gate_, all);
  const RowsView decays = RowsOf(ctx, decay_, all);
  const RowsView strengths = settings_.delta
                                 ? RowsOf(ctx, strength_, all)
                                 : ctx.workspace.Take(own.rows, shape_.heads, DType::kF32);
  const int64_t width = 2 * int64_t{shape_.key_width()} + shape_.value_width();
  const Inputs inputs = Gather(ctx, {all.Columns(0, width), decays, strengths}, x.rows);
  const RowsView mixed = ctx.workspace.Take(x.rows, width, DType::kF32);
  convolution_.Run(ctx, state_, false, inputs.columns, mixed);
  const RowsView outputs = mixed.Columns(values_, shape_.value_width());
  backend.Recurrence({.states = ctx.batch.states.storage,
                      .block = state_,
                      .settings = settings_,
                      .rate = static_cast<const float*>(rate_->data()),
                      .bias = static_cast<const float*>(decay_bias_->data()),
                      .skip = skip_ == nullptr ? nullptr : static_cast<const float*>(skip_->data()),
                      .queries = mixed.Columns(queries_, shape_.key_width()),
                      .keys = mixed.Columns(keys_, shape_.key_width()),
                      .values = outputs,
                      .decays = inputs.decays,
                      .strengths = inputs.strengths,
                      .output = outputs});
  const RowsView heads = ctx.division.Own(outputs);
  const RowsView result = ctx.activation == DType::kF32
                              ? heads
                              : ctx.workspace.Take(own.rows, heads.cols, ctx.activation);
  if (gate_first_) {
    backend.MultiplyByGate(heads, gate, gate_activation_);
    backend.Norm({.bank = norm_.get(), .input = heads, .output = result});
  } else {
    backend.Norm({.bank = norm_.get(), .segments = shape_.heads, .input = heads, .output = heads});
    backend.MultiplyByGate(heads, gate, gate_activation_);
    if (result.data != heads.data) backend.Convert(heads, result);
  }
  backend.Linear({.bank = output_.get(), .input = result, .output = ctx.division.Own(output)});
  ctx.division.Gather(backend, output);
}

}  // namespace moeserve

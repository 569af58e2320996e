#include "engine/layers/layer_input.h"

#include <string>
#include <utility>

#include "base/error_text.h"

namespace moeserve {

Result<std::unique_ptr<LayerInputs>> LayerInputs::Load(LoadContext& load, const ModelSpec& spec) {
  auto inputs = std::make_unique<LayerInputs>();
  inputs->spec_ = *spec.layer_input;
  const std::string prefix = TensorPrefix(spec.stack);
  const int d = spec.hidden_size, width = spec.layer_input->width;
  const int all = width * spec.num_layers();
  MOESERVE_ASSIGN_OR_RETURN(const HostTensor table, load.source.Get(prefix + "embed_layers.weight",
                                                                    {load.vocabulary, all}));
  MOESERVE_ASSIGN_OR_RETURN(inputs->table_, load.backend.NewEmbeddingTable(table));
  if (load.files_in_use != nullptr) load.files_in_use->Add(inputs->table_->read_in_place());
  const std::string name = prefix + "layer_input";
  MOESERVE_ASSIGN_OR_RETURN(inputs->projection_, LoadLinear(load, d, {{name, all, false}}));
  MOESERVE_ASSIGN_OR_RETURN(inputs->norm_, LoadRmsNorm(load, name + ".norm", width, 1));
  for (int i = 0; i < spec.num_layers(); ++i) {
    const std::string of_layer = Concat(prefix, "blocks.", i, ".input");
    Layer layer;
    MOESERVE_ASSIGN_OR_RETURN(layer.gate,
                              LoadLinear(load, d, {{of_layer + ".gate", width, false}}));
    MOESERVE_ASSIGN_OR_RETURN(layer.down,
                              LoadLinear(load, width, {{of_layer + ".down", d, false}}));
    MOESERVE_ASSIGN_OR_RETURN(layer.norm, LoadRmsNorm(load, of_layer + ".norm", d, 1));
    inputs->layers_.push_back(std::move(layer));
  }
  return inputs;
}

RowsView LayerInputs::Compute(StepContext& ctx, const RowsView& embeddings) const {
  Backend& backend = ctx.backend;
  const auto layers = static_cast<int>(layers_.size());
  const int64_t all = int64_t{layers} * spec_.width;
  const RowsView inputs = ctx.workspace.TakeDense(embeddings.rows, all, DType::kF32);
  const Workspace::Scope scope(ctx.workspace);
  const RowsView own = ctx.division.Own(embeddings);
  RowsView rows = own;
  if (ctx.activation != DType::kF32) {
    rows = ctx.workspace.Take(own.rows, own.cols, ctx.activation);
    backend.Convert(own, rows);
  }
  backend.Linear({.bank = projection_.get(), .input = rows, .output = ctx.division.Own(inputs)});
  ctx.division.Gather(backend, inputs);
  if (spec_.projection_scale != 1.0) {
    backend.Scale(inputs, static_cast<float>(spec_.projection_scale));
  }
  backend.Norm({.bank = norm_.get(), .segments = layers, .input = inputs, .output = inputs});
  const RowsView of_tokens = ctx.workspace.TakeDense(embeddings.rows, all, DType::kF32);
  backend.Embed({.tokens = table_.get(),
                 .scale = static_cast<float>(spec_.token_scale),
                 .output = of_tokens});
  backend.AddScaled(inputs, of_tokens, nullptr, 1.0f);
  if (spec_.scale != 1.0) backend.Scale(inputs, static_cast<float>(spec_.scale));
  return inputs;
}

void LayerInputs::Add(StepContext& ctx, const RowsView& inputs, int layer,
                      const RowsView& x) const {
  Backend& backend = ctx.backend;
  const Workspace::Scope scope(ctx.workspace);
  const Layer& own = layers_[static_cast<size_t>(layer)];
  const RowsView own_x = ctx.division.Own(x);
  RowsView rows = own_x;
  if (ctx.activation != DType::kF32) {
    rows = ctx.workspace.Take(own_x.rows, x.cols, ctx.activation);
    backend.Convert(own_x, rows);
  }
  const RowsView hidden = ctx.workspace.TakeDense(own_x.rows, spec_.width, DType::kF32);
  backend.Linear(
      {.bank = own.gate.get(), .input = rows, .output = hidden, .activation = spec_.activation});
  const RowsView own_inputs = ctx.division.Own(inputs);
  backend.MultiplyByGate(hidden, own_inputs.Columns(int64_t{layer} * spec_.width, spec_.width),
                         GateActivation::kNone);
  RowsView rounded = hidden;
  if (ctx.activation != DType::kF32) {
    rounded = ctx.workspace.Take(own_x.rows, spec_.width, ctx.activation);
    backend.Convert(hidden, rounded);
  }
  const RowsView output = ctx.workspace.TakeDense(x.rows, x.cols, DType::kF32);
  const RowsView own_output = ctx.division.Own(output);
  backend.Linear({.bank = own.down.get(), .input = rounded, .output = own_output});
  backend.Norm({.bank = own.norm.get(), .input = own_output, .output = own_output});
  ctx.division.Gather(backend, output);
  backend.AddScaled(x, output, nullptr, 1.0f);
}

}  // namespace moeserve

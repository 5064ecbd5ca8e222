#pragma once

#include <optional>

#include "pretrained/layers.h"
#include "pretrained/names.h"

/// Model directories in which the blocks' linear layers are nn::Cola. No dense weight computes the same, so
/// their files hold the factors, "<module>.a" [rank, in] and "<module>.b" [out, rank], in place of
/// "<module>.weight". In config.json model_type is kColaField, a type that other programs refuse, as ours do
/// unless they ask for it; the field of that name has ranks, activation, and the model_type of the model.

namespace tessera::pretrained {

inline constexpr const char* kColaField = "tessera_cola";

struct ColaConfig {
  int64_t attention_rank = 0,
          mlp_rank = 0;  // of the modules of attention and of the MLPs; 0: these are dense
  ops::Activation activation = ops::Activation::silu;
};

/// The table of such a model.
NameTable with_cola(const NameTable& table, const ColaConfig& cola);

/// Of a model with such layers, or nothing if it has none. Throws if those of attention, or of the MLPs, are
/// not of one rank, or if activations differ.
template <class Model>
std::optional<ColaConfig> cola_of(const Model& model);
extern template std::optional<ColaConfig> cola_of(const models::Gpt&);
extern template std::optional<ColaConfig> cola_of(const models::Llama&);
extern template std::optional<ColaConfig> cola_of(const models::Bert&);

/// Gives the linear layers of a dense model the form nn::Cola, with factors that are still to be filled.
void make_cola(const LinearModules& modules, const ColaConfig& cola);

}  // namespace tessera::pretrained

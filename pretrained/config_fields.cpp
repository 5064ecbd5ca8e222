#include <nlohmann/json.hpp>

#include "pretrained/config_families_internal.h"
#include "runtime/error.h"

namespace tessera::pretrained {
namespace {

using nlohmann::json;
using ops::Activation;

constexpr int64_t kMostLayers =
    10'000;  // ten times the deepest model; names of all are listed before weights are read

struct ActivationName {
  const char* name;
  Activation activation;
};
/// First the name that is written, then others of the same function.
constexpr ActivationName kActivations[] = {{"gelu", Activation::gelu},
                                           {"gelu_python", Activation::gelu},
                                           {"gelu_new", Activation::gelu_tanh},
                                           {"gelu_fast", Activation::gelu_tanh},
                                           {"gelu_accurate", Activation::gelu_tanh},
                                           {"gelu_python_tanh", Activation::gelu_tanh},
                                           {"gelu_pytorch_tanh", Activation::gelu_tanh},
                                           {"relu", Activation::relu},
                                           {"relu2", Activation::relu_squared},
                                           {"silu", Activation::silu},
                                           {"swish", Activation::silu}};

}  // namespace

Activation read_activation(ConfigReader& reader, const char* key, const char* fallback) {
  const std::string name = reader.text(key, fallback);
  for (const ActivationName& known : kActivations)
    if (name == known.name) return known.activation;
  fail_at(Site::here(), reader.where(), ": ", key, " is \"", name,
          "\"; expected gelu, gelu_python, gelu_new, gelu_fast, gelu_accurate, gelu_python_tanh, "
          "gelu_pytorch_tanh, relu, relu2, silu or swish");
}

const char* activation_name(Activation activation) {
  for (const ActivationName& known : kActivations)
    if (known.activation == activation) return known.name;
  fail_at(Site::here(), "config: activation ", ops::name_of(activation), " has no name in transformers");
}

int64_t read_layers(ConfigReader& reader, const char* key, int64_t fallback) {
  const int64_t count = reader.integer(key, fallback);
  check(count <= kMostLayers, reader.where(), ": ", key, " is ", count, ", more than ", kMostLayers);
  return count;
}

const char* dtype_name(DType dtype) {
  return dtype == DType::bf16 ? "bfloat16" : dtype == DType::f16 ? "float16" : "float32";
}

json common_fields(const char* type, const std::string& architecture, DType dtype) {
  return {{"model_type", type}, {"architectures", {architecture}}, {"torch_dtype", dtype_name(dtype)}};
}

}  // namespace tessera::pretrained

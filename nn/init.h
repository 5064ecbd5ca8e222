#pragma once

#include "runtime/rng.h"
#include "tensor/tensor.h"

/// Initial values of parameters. Each call reserves one stream of the generator and element i (row-major)
/// takes its i-th number, drawn on the host and copied: a model gets the same numbers on every device.

namespace tessera::nn {

/// Initialisation of a weight of shape [..., out, in].
enum class Init : uint8_t {
  fan_in,            // U(-1/sqrt(in), 1/sqrt(in)): PyTorch's default for linear layers
  kaiming_uniform,   // U(-b, b), b = sqrt(6/in)           He et al., arXiv:1502.01852, equation 10
  kaiming_normal,    // N(0, 2/in)
  xavier_uniform,    // U(-b, b), b = sqrt(6/(in + out))   Glorot, Bengio, AISTATS 2010, equation 16
  xavier_normal,     // N(0, 2/(in + out))
  truncated_normal,  // N(0, 0.02^2) without values beyond two standard deviations: transformers
  zeros
};

namespace init {

void zeros(const Tensor& tensor);
void ones(const Tensor& tensor);
/// U(low, high).
void uniform(const Tensor& tensor, const Rng& rng, double low, double high);
/// N(mean, deviation^2), Box and Muller.
void normal(const Tensor& tensor, const Rng& rng, double mean = 0, double deviation = 1);
/// The same, drawn again while further than `limit` deviations from the mean. Throws unless limit >= 0.1
/// (below that nearly every draw would be thrown away).
void truncated_normal(const Tensor& tensor, const Rng& rng, double mean, double deviation, double limit = 2);
/// Throws for tensors of rank 0 and 1, which have no fan, unless the choice is zeros.
void apply(Init choice, const Tensor& tensor, const Rng& rng);

}  // namespace init
}  // namespace tessera::nn

#pragma once

#include "datasets/prior.h"
#include "datasets/prior_math.h"

namespace tessera::datasets {

/// What a sampler needs; pointers are of the device that draws.
struct PriorDraw {
  prior_math::TaskStream stream;
  prior_math::BatchView out;
  double noise;  // standard deviation of observations, of a Gaussian process
  double scale;  // s
  double rate;   // lambda of the Matern process
  double frequency;
  int64_t harmonics;
  const double* amplitude;  // [harmonics + 1]
  // Scratch of the Matern process on a GPU, by rank of x within the task.
  int64_t* order;      // the point of that rank
  float* sorted_x;     // its x
  double* increments;  // [4]: what is added to the state there, and the noise of the observation
};

void draw_cpu(PriorKind kind, const PriorDraw& draw);
void draw_cuda(Device device, PriorKind kind, const PriorDraw& draw);

}  // namespace tessera::datasets

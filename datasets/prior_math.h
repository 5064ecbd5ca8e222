#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

#include "runtime/config.h"
#include "runtime/philox.h"

/// The arithmetic of the synthetic priors (datasets/prior.h), shared by the CPU and the CUDA samplers: f64
/// throughout, rounded to f32 once, where a value is stored. The two samplers consume the same random words
/// and differ only in the last bits of log, sin, cos and exp, and of sums taken in another order.

namespace tessera::datasets::prior_math {

/// A model initialised from the same seed must not consume the same random words.
inline constexpr uint64_t kDomain = 0x7072696F72000002;  // "prior", second stream of tasks

/// Philox blocks are addressed by (seed, index of the batch, purpose, element).
enum class Purpose : uint64_t {
  point,     // element: point of the batch; word 0: x of a process, words 2 and 3: its observation noise
  position,  // element: four features of a point; x of the linear prior
  weight,    // element: four weights of a task
  process    // element: point of the batch; the noise that drives a state-space process
};

struct TaskStream {
  uint64_t seed, index;
  TESSERA_HD Uint4 words(Purpose purpose, int64_t element) const {
    return philox(seed, index, uint64_t(purpose) << 60 | uint64_t(element));
  }
};

/// sin and cos of 2 pi `turns`.
TESSERA_HD void sin_cos_turns(double turns, double& sine, double& cosine) {
#if defined(__CUDA_ARCH__)
  sincospi(2 * turns, &sine, &cosine);
#else
  const double angle = 2 * std::numbers::pi * (turns - std::rint(turns));
  sine = std::sin(angle), cosine = std::cos(angle);
#endif
}

/// Two independent standard normal values (Box, Muller, Ann. Math. Stat. 29, 1958), at most 6.7 in size.
struct NormalPair {
  double first, second;
};
TESSERA_HD NormalPair normal_pair(uint32_t radius_word, uint32_t angle_word) {
  const double radius = sqrt(-2 * log((double(radius_word) + 1) * 0x1p-32));  // of (0, 1]: finite
  double sine, cosine;
  sin_cos_turns(double(angle_word) * 0x1p-32, sine, cosine);
  return {radius * cosine, radius * sine};
}

/// Four independent standard normal values from one Philox block.
struct Normals {
  double value[4];
};
TESSERA_HD Normals normals(const TaskStream& stream, Purpose purpose, int64_t element) {
  const Uint4 random = stream.words(purpose, element);
  const NormalPair a = normal_pair(random.word[0], random.word[1]),
                   b = normal_pair(random.word[2], random.word[3]);
  return {{a.first, a.second, b.first, b.second}};
}

/// x of a Gaussian process as an integer: x = 2^-22 key - 2 is uniform on [-2, 2) and exact in f32.
TESSERA_HD uint32_t position_key(const TaskStream& stream, int64_t point) {
  return stream.words(Purpose::point, point).word[0] >> 8;
}
TESSERA_HD double position_of(uint32_t key) {
  return double(key) * 0x1p-22 - 2;
}
/// Standard normal noise of an observation.
TESSERA_HD double observation_noise(const Uint4& point_words) {
  return normal_pair(point_words.word[2], point_words.word[3]).first;
}

/// Where a batch goes: packed f32 [B, M, F], [B, M, 1], [B, N, F], [B, N, 1]. Points of a task are counted
/// through the context, then the targets.
struct BatchView {
  float *xc, *yc, *xt, *yt;
  int64_t tasks, context, targets, features;

  TESSERA_HD int64_t points() const { return context + targets; }
  TESSERA_HD float* x(int64_t task, int64_t i) const {
    return i < context ? xc + (task * context + i) * features
                       : xt + (task * targets + i - context) * features;
  }
  TESSERA_HD float* y(int64_t task, int64_t i) const {
    return i < context ? yc + task * context + i : yt + task * targets + i - context;
  }
};

// ---- linear ----

/// y = b0 + x . beta + sigma eps in kLanes partial sums, of which lane l takes features 4 l ... 4 l + 3
/// modulo 4 kLanes and the last lane the intercept and the noise; they are added as (0 + 1) + (2 + 3). Lanes
/// of a GPU share a point in this way; the CPU adds in the same order.
inline constexpr int kLanes = 4;

struct LinearTask {
  TaskStream stream;
  int64_t features;
  double log_noise_mean, log_noise_deviation;

  /// Blocks of four features.
  TESSERA_HD int64_t blocks() const { return (features + 3) / 4; }
  /// Weights 4 b ... 4 b + 3 of the task.
  TESSERA_HD Normals weights(int64_t task, int64_t block) const {
    return normals(stream, Purpose::weight, task * (blocks() + 1) + block);
  }
  /// Intercept, and the standard deviation of the noise.
  TESSERA_HD void rest(int64_t task, double& intercept, double& sigma) const {
    const Normals random = weights(task, blocks());
    intercept = random.value[0];
    sigma = exp(log_noise_mean + log_noise_deviation * random.value[1]);
  }
  /// Draws four features of a point into x and returns their share of y.
  TESSERA_HD double term(float* x, int64_t point, int64_t block, const Normals& weight) const {
    const Normals position = normals(stream, Purpose::position, point * blocks() + block);
    double sum = 0;
    for (int i = 0; i < 4; ++i) {
      if (block * 4 + i >= features) break;
      x[block * 4 + i] = float(position.value[i]);
      sum += position.value[i] * weight.value[i];
    }
    return sum;
  }
};

// ---- Fourier series ----

/// w_0 + sum_k w_(2k-1) cos(2 pi k turns) + w_(2k) sin(2 pi k turns), k = 1 ... harmonics. The harmonics
/// follow each other by rotation, whose rounding errors grow by 1e-16 per harmonic.
TESSERA_HD double fourier_sum(const double* w, int64_t harmonics, double turns) {
  double sine, cosine;
  sin_cos_turns(turns, sine, cosine);
  double s = sine, c = cosine, sum = w[0];
  for (int64_t k = 1; k <= harmonics; ++k) {
    sum += w[2 * k - 1] * c + w[2 * k] * s;
    const double next = c * cosine - s * sine;
    s = s * cosine + c * sine;
    c = next;
  }
  return sum;
}

/// Weights 4 b ... 4 b + 3 of a task, scaled: amplitude[0] of the constant, amplitude[k] of both functions of
/// harmonic k.
TESSERA_HD void fourier_weights(const TaskStream& stream, int64_t task, const double* amplitude,
                                int64_t harmonics, int64_t block, double* w) {
  const int64_t functions = 2 * harmonics + 1;
  const Normals random = normals(stream, Purpose::weight, task * ((functions + 3) / 4) + block);
  for (int64_t i = 0; i < 4; ++i) {
    const int64_t j = block * 4 + i;
    if (j < functions) w[j] = amplitude[(j + 1) / 2] * random.value[i];
  }
}

}  // namespace tessera::datasets::prior_math

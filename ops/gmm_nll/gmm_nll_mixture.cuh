#pragma once

#include "gpu/pack.cuh"
#include "ops/reduce/exponential.cuh"

/// One token's mixture on a GPU: how its parameters come to registers, and what a thread makes of them.

namespace tessera::ops {

/// y [count], in the parameters' dtype T or in f32; the same for its gradient.
template <class T>
struct Targets {
  void* data;
  bool single;  // f32

  __device__ float load(int64_t i) const {
    return single ? static_cast<const float*>(data)[i] : float(static_cast<const T*>(data)[i]);
  }
  __device__ void store(int64_t i, float value) const {
    if (single)
      static_cast<float*>(data)[i] = value;
    else
      static_cast<T*>(data)[i] = T(value);
  }
};

/// One component at y: its logit below the largest one, and the exponents of the joint density's sum.
struct GmmTerm {
  float logit, z, inverse_sigma, joint;

  template <class T>
  __device__ __forceinline__ GmmTerm(const T* params, float y, float top_logit)
      : GmmTerm(float(params[0]) - top_logit, float(params[1]), float(params[2]), y) {}
  __device__ __forceinline__ GmmTerm(float logit, float mu, float log_sigma, float y)
      // At most the largest number, so that z is 0, not 0 times infinity, at y = mu. A NaN is in `joint` too.
      : logit(logit), inverse_sigma(fminf(expf(-log_sigma), 3.402823466e38f)) {
    z = (y - mu) * inverse_sigma;
    joint = logit - 0.5f * z * z - log_sigma - 0.91893853320467274178f;  // log(2 pi) / 2
  }
};

/// Up to kMost components (logit, mu, log_sigma) of one token in registers; those beyond the token's own have
/// weight 0.
template <int kMost>
struct Components {
  float logit[kMost], mu[kMost], log_sigma[kMost];

  /// From `count` components at `from`. In 16 bits, a pair of them is three words where `count` is even.
  template <class T>
  __device__ __forceinline__ void load(const T* from, int count) {
    if (sizeof(T) == 2 && count % 2 == 0) {
#pragma unroll
      for (int k = 0; k < kMost; k += 2) {
        if (k < count) {
          const auto a = gpu::load_pack<2>(from + 3 * k), b = gpu::load_pack<2>(from + 3 * k + 2),
                     c = gpu::load_pack<2>(from + 3 * k + 4);
          logit[k] = float(a.at[0]), mu[k] = float(a.at[1]), log_sigma[k] = float(b.at[0]);
          logit[k + 1] = float(b.at[1]), mu[k + 1] = float(c.at[0]), log_sigma[k + 1] = float(c.at[1]);
        } else {
          clear(k), clear(k + 1);
        }
      }
    } else {
#pragma unroll
      for (int k = 0; k < kMost; ++k) {
        if (k < count)
          logit[k] = float(from[3 * k]), mu[k] = float(from[3 * k + 1]),
          log_sigma[k] = float(from[3 * k + 2]);
        else
          clear(k);
      }
    }
  }

  template <class T>
  __device__ __forceinline__ void store(T* to, int count) const {
    if (sizeof(T) == 2 && count % 2 == 0) {
#pragma unroll
      for (int k = 0; k < kMost; k += 2) {
        if (k >= count) continue;
        gpu::store_pack<2>(to + 3 * k, gpu::Pack<T, 2>{T(logit[k]), T(mu[k])});
        gpu::store_pack<2>(to + 3 * k + 2, gpu::Pack<T, 2>{T(log_sigma[k]), T(logit[k + 1])});
        gpu::store_pack<2>(to + 3 * k + 4, gpu::Pack<T, 2>{T(mu[k + 1]), T(log_sigma[k + 1])});
      }
    } else {
#pragma unroll
      for (int k = 0; k < kMost; ++k) {
        if (k >= count) continue;
        to[3 * k] = T(logit[k]), to[3 * k + 1] = T(mu[k]), to[3 * k + 2] = T(log_sigma[k]);
      }
    }
  }

  /// The loss at y. With kGradients, the components become their own gradients, `g` times, and dy is set.
  template <class T, bool kGradients>
  __device__ __forceinline__ float solve(float y, float g, float& dy) {
    float joint[kMost];
    float top_logit = -INFINITY, top_joint = -INFINITY;
#pragma unroll
    for (int k = 0; k < kMost; ++k) top_logit = fmaxf(top_logit, logit[k]);
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      const GmmTerm term(logit[k] - top_logit, mu[k], log_sigma[k], y);
      joint[k] = term.joint;
      top_joint = fmaxf(top_joint, joint[k]);
      logit[k] = term.logit, mu[k] = term.z, log_sigma[k] = term.inverse_sigma;
    }
    // All of them -inf: the sum is 0, the loss infinite.
    const float base = top_joint == -INFINITY ? 0.0f : top_joint;
    float weight_sum = 0, joint_sum = 0;
#pragma unroll
    for (int k = 0; k < kMost; ++k) {
      logit[k] = exponential<T>(logit[k]);
      joint[k] = exponential<T>(joint[k] - base);
      weight_sum += logit[k], joint_sum += joint[k];
    }
    const float loss = logf(weight_sum) - (top_joint + logf(joint_sum));
    if constexpr (kGradients) {
      const float per_weight = g / weight_sum, per_joint = g / joint_sum;
      dy = 0;
#pragma unroll
      for (int k = 0; k < kMost; ++k) {
        // z or its square may be infinite where r = 0, and 0 times infinity is NaN.
        const float z = joint[k] == 0.0f ? 0.0f : mu[k], r = joint[k] * per_joint,
                    pull = r * z * log_sigma[k];
        logit[k] = logit[k] * per_weight - r;
        mu[k] = -pull;
        log_sigma[k] = r * (1.0f - z * z);
        dy += pull;
      }
    }
    return loss;
  }

 private:
  __device__ __forceinline__ void clear(int k) {
    logit[k] = -INFINITY, mu[k] = 0, log_sigma[k] = 0;
  }
};

}  // namespace tessera::ops

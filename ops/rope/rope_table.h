#pragma once

#include <string_view>
#include <vector>

#include "tensor/tensor.h"

namespace tessera::ops {

/// How the angles of positions beyond those of training are made smaller. With w_i = base^(-2i / R):
///   none     w_i
///   linear   w_i / factor                                   Chen et al., arXiv:2306.15595
///   dynamic  base' = base (factor L / M - factor + 1)^(R / (R - 2)) for L = max(length, M) positions
///            instead of base: "dynamic NTK" of transformers; a longer sequence has other angles throughout
///   llama3   wavelengths 2 pi / w_i longer than M / low_freq_factor by factor, shorter ones than
///            M / high_freq_factor not at all, between them interpolated: Grattafiori et al.,
///            arXiv:2407.21783, section 3.2, with the constants of its reference code
///   yarn     Peng et al., arXiv:2309.00071, section 3.2: a ramp over i between beta_fast and beta_slow
///            rotations within M positions blends w_i and w_i / factor; cosines and sines are multiplied by
///            attention_factor, 0.1 log(factor) + 1 unless given
///   longrope w_i / short_factor[i] in sequences of up to M tokens, w_i / long_factor[i] throughout longer
///            ones: Ding et al., arXiv:2402.13753; cosines and sines are multiplied by attention_factor,
///            sqrt(1 + log(factor) / log(M)) unless given
/// where M is `trained_length`.
enum class RopeScaling : uint8_t { none, linear, dynamic, llama3, yarn, longrope };

struct RopeOptions {
  double base = 10000;
  RopeScaling scaling = RopeScaling::none;
  double factor = 1;           // 1 or more; of every scaling
  int64_t trained_length = 0;  // M; dynamic, llama3, yarn, longrope
  double low_freq_factor = 1, high_freq_factor = 4;
  double beta_fast = 32, beta_slow = 1;
  double attention_factor = 0;  // 0: from `factor`, in yarn and longrope; 1 in all others
  std::vector<double> short_factor = {}, long_factor = {};  // longrope: R / 2 positive numbers each

  void fields(auto&& visit) {
    visit("base", base), visit("scaling", scaling), visit("factor", factor);
    visit("trained_length", trained_length), visit("low_freq_factor", low_freq_factor);
    visit("high_freq_factor", high_freq_factor), visit("beta_fast", beta_fast);
    visit("beta_slow", beta_slow), visit("attention_factor", attention_factor);
    visit("short_factor", short_factor), visit("long_factor", long_factor);
  }
  /// Throws, naming the option, unless a table can be made of them.
  void validate() const;
};

const char* name_of(RopeScaling scaling);                  // "llama3"
RopeScaling parse_rope_scaling(std::string_view name);     // throws, naming the choices
double rope_attention_factor(const RopeOptions& options);  // what cosines and sines are multiplied by

/// Whether sequences of `a` tokens and of `b` tokens are rotated by the same angles. They are, except that
/// with dynamic the angles beyond M tokens depend on the length, and with longrope on whether it exceeds M.
bool rope_same_angles(const RopeOptions& options, int64_t a, int64_t b);

/// The R / 2 angles of position 1 in a sequence of `length` tokens (only dynamic and longrope ask). f64.
/// Throws if longrope has another number of factors.
std::vector<double> rope_frequencies(const RopeOptions& options, int64_t rotary, int64_t length);

/// [positions, R]: cosines and sines of all positions of a sequence of `positions` tokens, as ops::rope wants
/// them (and of shorter sequences, where rope_same_angles). Angles and
/// their functions are computed in f64 on the host and rounded once to `dtype` (f32 or f64): at position
/// 131,071 an angle rounded to f32 first, as in transformers, is off by up to 0.004.
Tensor rope_table(const RopeOptions& options, int64_t rotary, int64_t positions, DType dtype = DType::f32,
                  Device device = Device::cpu(), Site site = Site::here());

}  // namespace tessera::ops

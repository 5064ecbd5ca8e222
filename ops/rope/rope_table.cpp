#include "ops/rope/rope_table.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "runtime/call_site.h"
#include "runtime/parallel.h"
#include "runtime/text.h"

namespace tessera::ops {
namespace {

constexpr const char* kNames[] = {"none", "linear", "dynamic", "llama3", "yarn", "longrope"};

double llama3(double frequency, const RopeOptions& options) {
  const double trained = double(options.trained_length), wavelength = 2 * std::numbers::pi / frequency;
  if (wavelength < trained / options.high_freq_factor) return frequency;
  if (wavelength > trained / options.low_freq_factor) return frequency / options.factor;
  const double smooth =
      (trained / wavelength - options.low_freq_factor) / (options.high_freq_factor - options.low_freq_factor);
  return (1 - smooth) * frequency / options.factor + smooth * frequency;
}

/// The pair of elements that turns `rotations` times within the trained positions.
double yarn_pair(const RopeOptions& options, int64_t rotary, double rotations) {
  return double(rotary) * std::log(double(options.trained_length) / (rotations * 2 * std::numbers::pi)) /
         (2 * std::log(options.base));
}

void check_rotary(int64_t rotary) {
  check(rotary >= 2 && rotary % 2 == 0, "rope: ", rotary, " rotated elements; expected an even number");
}

}  // namespace

const char* name_of(RopeScaling scaling) {
  return kNames[size_t(scaling)];
}

RopeScaling parse_rope_scaling(std::string_view name) {
  return parse_name<RopeScaling>("rope: there is no scaling", kNames, name);
}

void RopeOptions::validate() const {
  check(base > 1 && std::isfinite(base), "rope: base is ", base, "; expected more than 1");
  check(scaling == RopeScaling::none || (factor >= 1 && std::isfinite(factor)), "rope: factor is ", factor,
        "; expected 1 or more");
  const bool needs_length = scaling != RopeScaling::none && scaling != RopeScaling::linear;
  check(!needs_length || trained_length >= 1, "rope: scaling ", name_of(scaling),
        " needs the length of training; trained_length is ", trained_length);
  check(scaling != RopeScaling::llama3 ||
            (low_freq_factor > 0 && high_freq_factor > low_freq_factor && std::isfinite(high_freq_factor)),
        "rope: low_freq_factor is ", low_freq_factor, " and high_freq_factor ", high_freq_factor,
        "; expected 0 < low < high");
  check(scaling != RopeScaling::yarn || (beta_slow > 0 && beta_fast > beta_slow && std::isfinite(beta_fast)),
        "rope: beta_slow is ", beta_slow, " and beta_fast ", beta_fast, "; expected 0 < slow < fast");
  check(attention_factor >= 0 && std::isfinite(attention_factor), "rope: attention_factor is ",
        attention_factor, "; expected 0 (the scaling's own) or more");
  if (scaling != RopeScaling::longrope) return;
  check(trained_length >= 2, "rope: longrope needs a length of training of 2 or more; trained_length is ",
        trained_length);
  for (const auto& [name, factors] :
       {std::pair("short_factor", &short_factor), std::pair("long_factor", &long_factor)})
    for (size_t i = 0; i < factors->size(); ++i)
      check((*factors)[i] > 0 && std::isfinite((*factors)[i]), "rope: ", name, "[", i, "] is ", (*factors)[i],
            "; expected a positive number");
}

double rope_attention_factor(const RopeOptions& options) {
  const bool yarn = options.scaling == RopeScaling::yarn;
  if (!yarn && options.scaling != RopeScaling::longrope) return 1;
  if (options.attention_factor > 0) return options.attention_factor;
  const double log_factor = std::log(options.factor);
  return yarn ? 0.1 * log_factor + 1 : std::sqrt(1 + log_factor / std::log(double(options.trained_length)));
}

bool rope_same_angles(const RopeOptions& options, int64_t a, int64_t b) {
  const int64_t trained = options.trained_length;
  if (options.scaling == RopeScaling::dynamic) return std::max(a, trained) == std::max(b, trained);
  return options.scaling != RopeScaling::longrope || (a > trained) == (b > trained);
}

std::vector<double> rope_frequencies(const RopeOptions& options, int64_t rotary, int64_t length) {
  options.validate();
  check_rotary(rotary);
  double base = options.base;
  if (options.scaling == RopeScaling::dynamic && length > options.trained_length) {
    check(rotary > 2, "rope: dynamic scaling needs more than 2 rotated elements");
    const double trained = double(options.trained_length);
    base *= std::pow(options.factor * double(length) / trained - (options.factor - 1),
                     double(rotary) / double(rotary - 2));
  }
  double low = 0, high = 0;  // of yarn's ramp
  if (options.scaling == RopeScaling::yarn) {
    low = std::max(std::floor(yarn_pair(options, rotary, options.beta_fast)), 0.0);
    high = std::min(std::ceil(yarn_pair(options, rotary, options.beta_slow)), double(rotary - 1));
    if (low == high) high += 0.001;  // as the reference has it: a ramp needs some length
  }
  const std::vector<double>& factors =
      length > options.trained_length ? options.long_factor : options.short_factor;
  check(options.scaling != RopeScaling::longrope || int64_t(factors.size()) == rotary / 2,
        "rope: longrope has ", factors.size(), " factors for sequences of ", length, " tokens; expected ",
        rotary / 2, ", one for each pair of the ", rotary, " rotated elements");
  std::vector<double> frequencies(size_t(rotary / 2));
  for (int64_t i = 0; i < rotary / 2; ++i) {
    double frequency = std::pow(base, -2.0 * double(i) / double(rotary));
    if (options.scaling == RopeScaling::linear) frequency /= options.factor;
    if (options.scaling == RopeScaling::longrope) frequency /= factors[size_t(i)];
    if (options.scaling == RopeScaling::llama3) frequency = llama3(frequency, options);
    if (options.scaling == RopeScaling::yarn) {
      const double ramp = std::clamp((double(i) - low) / (high - low), 0.0, 1.0);
      frequency = frequency / options.factor * ramp + frequency * (1 - ramp);
    }
    frequencies[size_t(i)] = frequency;
  }
  return frequencies;
}

Tensor rope_table(const RopeOptions& options, int64_t rotary, int64_t positions, DType dtype, Device device,
                  Site site) {
  const CallScope call(site);
  check(dtype == DType::f32 || dtype == DType::f64, "rope_table: dtype ", dtype, "; expected f32 or f64");
  check(positions >= 0, "rope_table: ", positions, " positions");
  const std::vector<double> frequencies = rope_frequencies(options, rotary, positions);
  const double amplitude = rope_attention_factor(options);
  const int64_t half = rotary / 2;
  std::vector<double> values(size_t(positions * rotary));
  parallel_for(positions, std::max<int64_t>(1, 4096 / rotary), [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p)
      for (int64_t i = 0; i < half; ++i) {
        const double angle = double(p) * frequencies[size_t(i)];
        values[size_t(p * rotary + i)] = amplitude * std::cos(angle);
        values[size_t(p * rotary + half + i)] = amplitude * std::sin(angle);
      }
  });
  return Tensor::from(values, {positions, rotary}).to(dtype).to(device);
}

}  // namespace tessera::ops

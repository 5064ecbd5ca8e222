#pragma once

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "runtime/error.h"
#include "runtime/f32_math.h"
#include "tensor/dtype.h"
#include "tensor/fields.h"

/// A job, any struct that lists its settings in fields(), as the JSON of run.json and of checkpoints. A
/// setting of the type F32Math is written only if it is tf32, so that jobs from before it existed keep their
/// meaning.

namespace tessera::train {

template <class Job>
nlohmann::json settings_to_json(const Job& job) {
  nlohmann::json out = nlohmann::json::object();
  for_each_field(job, [&](const std::string& name, const auto& value) {
    using T = std::remove_cvref_t<decltype(value)>;
    if constexpr (std::is_same_v<T, F32Math>) {
      if (value != F32Math::ieee) out[name] = name_of(value);
    } else if constexpr (std::is_same_v<T, DType>) {
      out[name] = name_of(value);
    } else {
      out[name] = value;
    }
  });
  return out;
}

/// Whether `value` is what settings_to_json writes for a T: the library's own conversions take 3.7 and true
/// for 3 and 1.
template <class T>
bool is_setting_of(const nlohmann::json& value) {
  if constexpr (std::is_same_v<T, bool>) {
    return value.is_boolean();
  } else if constexpr (std::is_unsigned_v<T>) {
    return value.is_number_unsigned();
  } else if constexpr (std::is_integral_v<T>) {
    // Above 2^63 the parser gives an unsigned one.
    return value.is_number_integer() && (!value.is_number_unsigned() || value.get<int64_t>() >= 0);
  } else if constexpr (std::is_floating_point_v<T>) {
    return value.is_number() && std::isfinite(value.get<double>());
  } else {
    return value.is_string();
  }
}

/// Throws, beginning with `what` and naming the key that is missing, unknown or of a wrong type. Then the
/// job's validate(). `job`: what is no field is already set.
template <class Job>
Job settings_from_json(const nlohmann::json& in, const char* what, Job job = {}) {
  check(in.is_object(), what, ": expected an object of settings");
  std::vector<std::string> known;
  for_each_field(job, [&](const std::string& name, auto& value) {
    using T = std::remove_cvref_t<decltype(value)>;
    known.push_back(name);
    if constexpr (std::is_same_v<T, F32Math>) {
      if (!in.contains(name)) return;
      check(in[name] == name_of(F32Math::tf32), what, ": \"", name, "\" is ", in[name].dump(),
            "; expected \"tf32\", or no such setting");
      value = F32Math::tf32;
    } else {
      check(in.contains(name), what, ": \"", name, "\" is missing");
      constexpr bool kDType = std::is_same_v<T, DType>;
      check(is_setting_of<std::conditional_t<kDType, std::string, T>>(in[name]), what, ": \"", name, "\" is ",
            in[name].dump(), ", which is of another type or out of range");
      if constexpr (kDType) {
        value = parse_dtype(in[name].template get<std::string>());
      } else {
        value = in[name].template get<T>();
      }
    }
  });
  for (const auto& [name, value] : in.items())
    check(std::find(known.begin(), known.end(), name) != known.end(), what, ": \"", name,
          "\" is not a setting");
  job.validate();
  return job;
}

/// Throws, naming the checkpoint `file` and the setting, unless the job written in it is `ours`; only the
/// number of steps may differ.
inline void check_same_job(const std::string& file, const std::string& stored, const nlohmann::json& ours) {
  using nlohmann::json;
  const json theirs = json::parse(stored, nullptr, false);
  check(theirs.is_object(), file, ": its \"job\" is not a JSON object");
  for (const auto& [name, value] : ours.items())
    check(name == "steps" || theirs.value(name, json()) == value, file, ": it is of another job: \"", name,
          "\" is ", theirs.value(name, json()).dump(), " in it, ", value.dump(),
          " here; restore run.json, or start a new run");
  for (const auto& [name, value] : theirs.items())
    check(ours.contains(name), file, ": it is of another job: \"", name, "\" is ", value.dump(),
          " in it, and missing here; restore run.json, or start a new run");
}

}  // namespace tessera::train

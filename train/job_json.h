#pragma once

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tensor/fields.h"

/// A job is a struct of settings that lists its fields; as JSON it is an object of plain values, by name.
/// What is read back is checked key by key, for the file may have been edited.

namespace tessera::train {

/// Whether `value` is what job_to_json writes for a T: the library's own conversions take 3.7 and true for 3
/// and 1.
template <class T>
bool is_of(const nlohmann::json& value) {
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

template <class Job>
nlohmann::json job_to_json(const Job& job) {
  nlohmann::json out = nlohmann::json::object();
  for_each_field(job, [&](const std::string& name, const auto& value) { out[name] = value; });
  return out;
}

/// Sets every field of `job`. Throws, beginning with `what`, for a key that is missing, of a wrong type, or
/// unknown and not in `others`.
template <class Job>
void job_from_json(const char* what, const nlohmann::json& in, Job& job,
                   const std::vector<std::string>& others = {}) {
  check(in.is_object(), what, ": expected an object of settings");
  std::vector<std::string> known = others;
  for_each_field(job, [&](const std::string& name, auto& value) {
    using T = std::remove_cvref_t<decltype(value)>;
    known.push_back(name);
    check(in.contains(name), what, ": \"", name, "\" is missing");
    check(is_of<T>(in[name]), what, ": \"", name, "\" is ", in[name].dump(),
          ", which is of another type or out of range");
    value = in[name].get<T>();
  });
  for (const auto& [name, value] : in.items())
    check(std::find(known.begin(), known.end(), name) != known.end(), what, ": \"", name,
          "\" is not a setting");
}

}  // namespace tessera::train

#include "train/setting.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "runtime/error.h"

namespace tessera::train {

using nlohmann::json;

namespace {

template <class T>
json json_of(const T& value) {
  if constexpr (std::is_same_v<T, DType> || std::is_same_v<T, F32Math>)
    return name_of(value);
  else
    return value;
}

/// Whether `stored` is what json_of writes for a T: the library's own conversions take 3.7 and true for 3 and
/// 1.
template <class T>
bool is_json_of(const json& stored) {
  if constexpr (std::is_same_v<T, bool>) {
    return stored.is_boolean();
  } else if constexpr (std::is_unsigned_v<T>) {
    return stored.is_number_unsigned();
  } else if constexpr (std::is_integral_v<T>) {
    // Above 2^63 the parser gives an unsigned one.
    return stored.is_number_integer() && (!stored.is_number_unsigned() || stored.get<int64_t>() >= 0);
  } else if constexpr (std::is_floating_point_v<T>) {
    return stored.is_number() && std::isfinite(stored.get<double>());
  } else {
    return stored.is_string();
  }
}

template <class T>
bool take_value(const json& stored, T& value) {
  if constexpr (std::is_same_v<T, bool> || std::is_arithmetic_v<T> || std::is_same_v<T, std::string>) {
    if (!is_json_of<T>(stored)) return false;
    value = stored.get<T>();
    return true;
  } else if constexpr (std::is_same_v<T, DType>) {
    if (!stored.is_string()) return false;
    try {
      value = parse_dtype(stored.get<std::string>());
    } catch (const Error&) {  // the caller names the key
      return false;
    }
    return true;
  } else if constexpr (std::is_same_v<T, F32Math>) {
    for (const F32Math math : {F32Math::ieee, F32Math::tf32})
      if (stored == name_of(math)) return value = math, true;
    return false;
  } else {
    return false;
  }
}

}  // namespace

json Setting::json() const {
  if (on_off) return *std::get<bool*>(value) ? "on" : "off";
  if (const auto* const own = std::get_if<JsonValue>(&value)) return own->get();
  return std::visit(
      [](const auto& held) -> nlohmann::json {
        if constexpr (std::is_pointer_v<std::remove_cvref_t<decltype(held)>>)
          return json_of(*held);
        else
          return nullptr;
      },
      value);
}

bool Setting::take(const nlohmann::json& stored) {
  if (const auto* const own = std::get_if<JsonValue>(&value)) return own->set(stored), true;
  if (!fits(stored)) return false;
  if (on_off) return *std::get<bool*>(value) = stored == "on", true;
  return std::visit(
      [&](auto& held) {
        if constexpr (std::is_pointer_v<std::remove_cvref_t<decltype(held)>>)
          return take_value(stored, *held);
        else
          return false;
      },
      value);
}

bool Setting::fits(const nlohmann::json& stored) const {
  for (const nlohmann::json& other : {absent, unset})
    if (!other.is_null() && stored == other) return true;
  if (!choices.empty())
    return std::ranges::any_of(choices, [&](const std::string& choice) { return stored == choice; });
  if (std::isinf(most) || !stored.is_number()) return true;
  if (std::holds_alternative<double*>(value))
    return stored.get<double>() >= least && stored.get<double>() <= most;
  const bool is_huge = stored.is_number_unsigned() && stored.get<uint64_t>() > uint64_t(INT64_MAX);
  if (is_huge || stored.get<int64_t>() < whole_least || stored.get<int64_t>() > whole_most) return false;
  return !power_of_two || std::has_single_bit(stored.get<uint64_t>());
}

std::string Setting::limits() const {
  std::string all;
  for (size_t i = 0; i < choices.size(); ++i)
    all += (i == 0 ? "" : i + 1 == choices.size() ? " or " : ", ") + choices[i];
  if (!choices.empty()) return all;
  if (std::holds_alternative<double*>(value)) return fmt::format("{} to {}", least, most);
  return fmt::format("{} to {}{}", whole_least, whole_most, power_of_two ? ", a power of two" : "");
}

std::string SettingList::flag_of(const std::string& key) {
  std::string flag = "--" + key.substr(key.rfind('.') + 1);
  std::ranges::replace(flag, '_', '-');
  return flag;
}

Setting& SettingList::put(Setting setting) {
  setting.group = group_, setting.kept = kept_;
  return settings_.emplace_back(std::move(setting));
}

void SettingList::append(const SettingList& other) {
  settings_.insert(settings_.end(), other.settings_.begin(), other.settings_.end());
}

void check_needs(const Given& given, std::initializer_list<const char*> flags, bool is_there,
                 const std::string& needed, const std::string& add) {
  for (const char* const flag : flags)
    check(is_there || !given.contains(flag), flag, " needs ", needed, "; add ", add, ", or leave ", flag,
          " out");
}

void check_is_for(const Given& given, std::initializer_list<const char*> flags, bool has_effect,
                  const std::string& of, const std::string& setting, const std::string& value) {
  for (const char* const flag : flags)
    check(has_effect || !given.contains(flag), flag, " is for ", of, ", and ", setting, " is ", value,
          "; leave it out");
}

json to_json(const SettingList& list, Kept kept) {
  json out = json::object();
  for (const Setting& setting : list.all()) {
    if (setting.kept != kept) continue;
    json value = setting.json();
    if (setting.absent.is_null() || value != setting.absent) out[setting.key] = std::move(value);
  }
  return out;
}

void check_values(const SettingList& list, const std::string& what) {
  for (const Setting& setting : list.all()) {
    const json value = setting.json();
    if (setting.fits(value)) continue;
    fail_at(Site::here(), what, ": ", setting.key, setting.flag.empty() ? "" : " (" + setting.flag + ")",
            " is ", value.is_number_float() ? fmt::format("{}", value.get<double>()) : value.dump(),
            "; expected ", setting.limits());
  }
}

void take_job(SettingList& list, const json& in, const std::string& what) {
  check(in.is_object(), what, ": expected an object of settings");
  std::set<std::string> known;
  for (Setting& setting : list.all()) {
    if (setting.kept != Kept::job) continue;
    known.insert(setting.key);
    const auto found = in.find(setting.key);
    check(found != in.end() || !setting.absent.is_null(), what, ": \"", setting.key, "\" is missing");
    const json& stored = found != in.end() ? *found : setting.absent;
    check(setting.take(stored), what, ": \"", setting.key, "\" is ", stored.dump(),
          setting.fits(stored) ? ", which is of another type" : "; expected " + setting.limits());
  }
  for (const auto& [name, value] : in.items())
    check(known.contains(name), what, ": \"", name, "\" is not a setting");
}

void rename_settings(json& stored, const json& ours) {
  constexpr std::pair<const char*, const char*> kRenamed[] = {{"clip_norm", "max_grad_norm"},
                                                              {"final_lr", "min_lr_ratio"}};
  for (const auto& [old, now] : kRenamed) {
    const auto found = stored.find(old);
    if (found == stored.end() || ours.contains(old) || stored.contains(now)) continue;
    stored[now] = *found;
    stored.erase(old);
  }
}

void take_options(SettingList& list, const json& run, const std::string& path, const Given& given) {
  const auto options = run.find("options");
  if (options == run.end()) return;
  check(options->is_object(), path, ": \"options\" is not an object");
  for (Setting& setting : list.all()) {
    if (setting.kept != Kept::option || given.contains(setting.flag)) continue;
    const auto found = options->find(setting.key);
    if (found == options->end()) continue;
    check(setting.take(*found), path, ": options: \"", setting.key, "\" is ", found->dump(),
          ", which is not a valid value of ", setting.flag);
  }
}

}  // namespace tessera::train

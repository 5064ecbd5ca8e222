#pragma once

#include <functional>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "runtime/error.h"
#include "runtime/f32_math.h"
#include "tensor/dtype.h"

/// The settings of a run, each declared once: where its value lives, its name in run.json, its help and its
/// limits. From the declaration follow the flag and the TOML key (cli/setting_flags.h), the entry in
/// run.json, what a resumed run takes from there and what it refuses.
///
///   SettingList TnpSettings::list() {
///     SettingList list;
///     list.group("Training");
///     list.add("lr", lr, "Peak learning rate").range(1e-30, 1e30);
///     ...

namespace tessera::train {

/// A value with its own JSON form (the configuration of a model).
struct JsonValue {
  std::function<nlohmann::json()> get;
  std::function<void(const nlohmann::json&)> set;
};

using SettingValue = std::variant<bool*, int64_t*, uint64_t*, double*, std::string*,
                                  std::vector<std::string>*, DType*, F32Math*, JsonValue>;

/// Where run.json keeps a setting.
enum class Kept {
  job,     // under "job", and in checkpoints: --resume cannot change it
  option,  // under "options": --resume keeps it unless it is given again
  never    // it concerns only the start, or only one call
};

/// One setting; the members are set by the functions below, which return it.
struct Setting {
  std::string key;  // in run.json; parts of a model have dots: "model.d_model"
  SettingValue value;
  std::string help = {}, group = {};
  Kept kept = Kept::job;
  std::string flag = {};                    // "--batch-size"; "": none
  std::vector<std::string> old_flags = {};  // names that are still understood
  double least = -std::numeric_limits<double>::infinity(), most = std::numeric_limits<double>::infinity();
  int64_t whole_least = 0, whole_most = std::numeric_limits<int64_t>::max();  // of whole numbers
  std::vector<std::string> choices = {};                                      // of a text; empty: any
  std::optional<std::string> shown = {};  // in the help, in place of the default value
  bool changeable = false;                // of a job: may be given with --resume
  bool power_of_two = false, may_be_empty = false, on_off = false;
  nlohmann::json absent = {};  // a value that is not written but assumed where the key is missing; null: none
  nlohmann::json unset = {};   // a value outside the limits that says that none was given; null: none

  Setting& named(std::string other_flag) { return flag = std::move(other_flag), *this; }
  Setting& formerly(std::string old) { return old_flags.push_back(std::move(old)), *this; }
  template <class Number>
  Setting& range(Number from, std::type_identity_t<Number> to) {
    if constexpr (std::is_integral_v<Number>) whole_least = from, whole_most = to;
    return least = double(from), most = double(to), *this;
  }
  Setting& one_of(std::vector<std::string> texts) { return choices = std::move(texts), *this; }
  /// Instead of the default, which depends on other settings.
  Setting& shown_as(std::string text) { return shown = std::move(text), *this; }
  Setting& may_change() { return changeable = true, *this; }
  Setting& of_powers_of_two() { return power_of_two = true, *this; }
  Setting& may_be_without_text() { return may_be_empty = true, *this; }
  /// A bool that is written "on" or "off".
  Setting& as_on_off() { return on_off = true, choices = {"on", "off"}, *this; }
  /// For a setting that came later than runs that are still read.
  Setting& absent_means(nlohmann::json usual) { return absent = std::move(usual), *this; }
  Setting& unset_is(nlohmann::json none) { return unset = std::move(none), *this; }

  nlohmann::json json() const;
  /// Takes a value that json() could have written. Returns false, changing nothing, for another type or a
  /// value outside the limits.
  bool take(const nlohmann::json& stored);
  /// Whether a value as json() gives it is within the limits. The values of `absent` and `unset` are.
  bool fits(const nlohmann::json& stored) const;
  /// The limits: "1 to 64", "cosine or linear".
  std::string limits() const;
};

/// Settings in the order in which they are shown.
class SettingList {
 public:
  explicit SettingList(Kept kept = Kept::job) : kept_(kept) {}
  /// The heading in the help for those added from here on: "Data", "Model", "Training", "Run".
  void group(std::string name) { group_ = std::move(name); }
  /// A setting with a flag: "--batch-size" for the key "batch_size", of "model.d_model" "--d-model".
  template <class T>
  Setting& add(const std::string& key, T& value, std::string help) {
    return put({.key = key, .value = &value, .help = std::move(help), .flag = flag_of(key)});
  }
  /// A setting without one.
  template <class T>
  Setting& add_hidden(const std::string& key, T& value) {
    return put({.key = key, .value = &value});
  }
  Setting& add_json(const std::string& key, JsonValue value) {
    return put({.key = key, .value = std::move(value)});
  }
  void append(const SettingList& other);

  std::vector<Setting>& all() { return settings_; }
  const std::vector<Setting>& all() const { return settings_; }

 private:
  static std::string flag_of(const std::string& key);
  Setting& put(Setting setting);
  Kept kept_;
  std::string group_ = "Options";
  std::vector<Setting> settings_;
};

/// Flags that were given, on the command line or in a file, by their present names.
using Given = std::set<std::string>;

/// Throws, naming the flag, if one of `flags` is given and what it needs is not there: "--rows needs --slice;
/// add --slice MODE, or leave --rows out".
void check_needs(const Given& given, std::initializer_list<const char*> flags, bool is_there,
                 const std::string& needed, const std::string& add);
/// Likewise of flags that are for other values of a setting: "--density is for --form sltrain, and --form is
/// lost; leave it out".
void check_is_for(const Given& given, std::initializer_list<const char*> flags, bool has_effect,
                  const std::string& of, const std::string& setting, const std::string& value);

/// The settings of one kind, as run.json has them.
nlohmann::json to_json(const SettingList& list, Kept kept);
/// Throws, beginning with `what` and naming the setting, for the first value outside the limits that its
/// setting declares. What settings need of each other, their owner's validate() checks.
void check_values(const SettingList& list, const std::string& what);
/// Takes the settings of a job. Throws, beginning with `what` and naming the key that is missing, unknown or
/// of a wrong type, or whose value is outside its limits.
void take_job(SettingList& list, const nlohmann::json& in, const std::string& what);
/// The settings of a bundled job as run.json has them under "job". Settings: TrainingSettings and more, with
/// list(), validate(), and a name of the job for messages, kJob.
template <class Settings>
requires requires {
  Settings::kJob;
}
nlohmann::json to_json(const Settings& settings) {
  return to_json(Settings(settings).list(), Kept::job);
}
/// A new job's settings by what to_json() gave of others. Throws, naming the key that is missing, unknown or
/// of a wrong type.
template <class Settings>
Settings job_settings(const nlohmann::json& in) {
  Settings settings;
  SettingList list = settings.list();
  take_job(list, in, Settings::kJob);
  settings.validate();
  return settings;
}
/// Those of the run.json `run` at `path`, which `tessera train <command>` made. Throws, naming the file.
template <class Settings>
Settings settings_of_run(const std::string& path, const nlohmann::json& run, const std::string& command) {
  check(run.contains("job"), path, ": it has no \"job\"; not a run of `train ", command, "`");
  try {
    return job_settings<Settings>(run["job"]);
  } catch (const Error& error) {
    fail_at(Site::here(), path, ": ", error.what());
  }
}
/// Gives settings that an earlier version wrote under other names their present ones, unless `ours` has a
/// setting of the old name.
void rename_settings(nlohmann::json& stored, const nlohmann::json& ours = {});
/// Takes the options of the run.json at `path` that are not given again. Those that it lacks stay as they
/// are.
void take_options(SettingList& list, const nlohmann::json& run, const std::string& path, const Given& given);

}  // namespace tessera::train

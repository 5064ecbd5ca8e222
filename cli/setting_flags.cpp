#include "cli/setting_flags.h"

#include <algorithm>
#include <bit>

#include "io/utf8.h"

namespace tessera::cli {
namespace {

using train::Setting;

CLI::Validator power_of_two(int64_t least, int64_t most) {
  return CLI::Validator(
      [=](std::string& text) {
        const std::string wrong = whole(least, most)(text);
        if (!wrong.empty()) return wrong;
        return std::has_single_bit(std::stoull(text)) ? std::string() : text + " is not a power of two";
      },
      "", "power of two");
}

/// With choices that contain a comma in quotation marks, so that the help shows where each ends.
CLI::Validator one_of(const std::vector<std::string>& choices) {
  std::string shown;
  for (const std::string& choice : choices)
    shown +=
        (shown.empty() ? "{" : ",") + (choice.find(',') == std::string::npos ? choice : "\"" + choice + "\"");
  shown += "}";
  return {[choices, shown](const std::string& text) {
            return std::ranges::find(choices, text) == choices.end() ? text + " not in " + shown : "";
          },
          shown};
}

/// Adds the flag for a value of type T.
template <class T>
CLI::Option* add_flag(CLI::App& command, const std::string& names, const Setting& setting, T& value) {
  if constexpr (std::is_same_v<T, bool>) {
    if (!setting.on_off) return command.add_flag(names, value, setting.help);
    auto* const option = command.add_option_function<std::string>(
        names, [&value](const std::string& text) { value = text == "on"; }, setting.help);
    option->default_str(value ? "on" : "off")->type_name("TEXT");
    return option->check(CLI::IsMember(setting.choices));
  } else {
    auto* const option = command.add_option(names, value, setting.help);
    if constexpr (std::is_integral_v<T>)
      option->check(setting.power_of_two ? power_of_two(setting.whole_least, setting.whole_most)
                                         : whole(setting.whole_least, setting.whole_most));
    if constexpr (std::is_floating_point_v<T>)
      option->check(kFinite)->check(between(setting.least, setting.most));
    if (!setting.choices.empty()) option->check(one_of(setting.choices));
    if (setting.may_be_empty) option->check(kMayBeEmpty);
    return option;
  }
}

}  // namespace

void add_flags(CLI::App& command, const train::SettingList& list) {
  for (const Setting& setting : list.all()) {
    if (setting.flag.empty()) continue;
    std::string names = setting.flag;
    for (const std::string& old : setting.old_flags) names += "," + old;
    std::visit(
        [&](const auto& held) {
          using Held = std::remove_cvref_t<decltype(held)>;
          if constexpr (std::is_pointer_v<Held>) {
            using T = std::remove_pointer_t<Held>;
            if constexpr (!std::is_same_v<T, DType> && !std::is_same_v<T, F32Math>) {
              CLI::Option* const option = add_flag(command, names, setting, *held);
              option->group(setting.group);
              if (setting.shown) option->default_str(*setting.shown);
            }
          }
        },
        setting.value);
  }
}

train::Given given_flags(const CLI::App& command) {
  train::Given given;
  for (const CLI::Option* option : command.get_options())
    if (option->count() > 0) given.insert(option->get_name());
  return given;
}

bool is_setting(const CLI::Option& option) {
  const std::string& group = option.get_group();
  return group == "Model" || group == "Data" || group == "Training";
}

void refuse_settings(const CLI::App& command, const char* mode, const std::vector<std::string>& allowed,
                     const train::SettingList& list) {
  const auto may_change = [&](const std::string& flag) {
    return std::ranges::find(allowed, flag) != allowed.end() ||
           std::ranges::any_of(list.all(), [&](const Setting& s) { return s.changeable && s.flag == flag; });
  };
  for (const CLI::Option* option : command.get_options())
    if (is_setting(*option) && option->count() > 0 && !may_change(option->get_name()))
      throw UsageError(std::string(mode) + "; " + option->get_name() + " cannot change it");
}

void check_kept_text(const char* flag, const std::string& text) {
  if (!io::is_utf8(text))
    throw UsageError(std::string(flag) + ": \"" + io::utf8_text(text) +
                     "\" is not UTF-8, so run.json cannot store it; rename the folder, or give a link to it");
}

void check_kept_texts(const train::SettingList& list) {
  for (const Setting& setting : list.all())
    if (const auto* const text = std::get_if<std::string*>(&setting.value);
        text && setting.kept == train::Kept::option)
      check_kept_text(setting.flag.c_str(), **text);
}

}  // namespace tessera::cli

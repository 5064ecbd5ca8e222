#pragma once

#include "cli/commands.h"
#include "train/setting.h"

namespace tessera::cli {

/// Adds a flag for each setting that has one, with its help, its limits and its default, in the group that
/// it names. The values, which the flags write to, must outlive the command's parsing.
void add_flags(CLI::App& command, const train::SettingList& list);

/// The flags that the command line or a file gave, by their present names.
train::Given given_flags(const CLI::App& command);

/// Whether the flag, of a group that decides what is trained, is in the help's groups Data, Model or
/// Training.
bool is_setting(const CLI::Option& option);
/// Throws a UsageError, beginning with `mode`, for the first setting given that is neither in `allowed` nor,
/// of the list, one that may change.
void refuse_settings(const CLI::App& command, const char* mode, const std::vector<std::string>& allowed,
                     const train::SettingList& list = train::SettingList());
/// A resumed run reads in run.json where its data and its first weights lie, and JSON is UTF-8. Throws a
/// UsageError, naming the flag, for a path or text that is not.
void check_kept_text(const char* flag, const std::string& text);
/// The same for every text of the list that run.json keeps as an option.
void check_kept_texts(const train::SettingList& list);

}  // namespace tessera::cli

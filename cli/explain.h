#pragma once

#include <CLI/CLI.hpp>
#include <memory>
#include <string>
#include <vector>

namespace tessera::cli {

/// Help of one line an option: name, kind or choices, default, what it is. Ranges are left to the messages.
std::shared_ptr<CLI::Formatter> compact_help();

/// One line on what is wrong with a command line, the nearest name that would be right, where help is.
std::string explain(const CLI::App& app, const CLI::ParseError& error, const std::vector<std::string>& words);

}  // namespace tessera::cli

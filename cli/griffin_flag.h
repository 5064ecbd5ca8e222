#pragma once

#include <CLI/CLI.hpp>
#include <charconv>
#include <optional>
#include <string>

#include "cli/commands.h"

namespace tessera::cli {

/// --griffin of commands that run a dense language model.
inline void add_griffin(CLI::App& command, std::optional<double>& share) {
  command
      .add_option(
          "--griffin", share,
          "Drop this share of each feed-forward network's neurons, selected by the prompt\n(Griffin); eval "
          "ppl: selected by the first half of each window, for its second half")
      ->check(kFinite)
      ->check(between(0, 1))
      ->check(CLI::Validator(
          [](std::string& text) {
            double share = 0;
            std::from_chars(text.data(), text.data() + text.size(), share);
            return share < 1 ? "" : "expected less than 1, so that neurons are left";
          },
          "", "less than 1"));
}

}  // namespace tessera::cli

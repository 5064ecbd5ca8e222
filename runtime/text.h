#pragma once

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>

/// Texts of messages and settings: numbers as they are written, and names as they are read.

namespace tessera {

/// A number as printf writes it with "%.*f" or, in std::chars_format::scientific, "%.*e", but always with a
/// point: a program that calls setlocale() may have chosen a comma, which printf writes then.
std::string decimals(double value, int digits, std::chars_format format = std::chars_format::fixed);

/// "1.5 GiB", "12 MiB", "340 B".
std::string format_bytes(size_t bytes);

/// The seconds that an environment variable gives, 0 for no limit, or `absent`. Throws for anything else. The
/// decimal separator is a point, also in a program that called setlocale().
double seconds_of_environment(const char* name, double absent);

/// The texts one after the other, with commas between them.
template <class Texts>
std::string joined(const Texts& texts) {
  std::string all;
  for (const auto& text : texts) all += (all.empty() ? "" : ", ") + std::string(text);
  return all;
}

/// A name from a file as a message shows it: cut short, and without control characters.
std::string shown(const std::string& name);

/// How many characters have to be inserted, removed or replaced to make b of a.
size_t edit_distance(std::string_view a, std::string_view b);

/// Nearest of `names` to `word` by edit distance, or "" if none is near.
template <class Names>
std::string nearest(std::string_view word, const Names& names) {
  std::string best;
  size_t least = std::max<size_t>(2, word.size() / 3) + 1;
  for (const auto& name : names)
    if (const size_t distance = edit_distance(word, name); distance < least) best = name, least = distance;
  return best;
}

/// "; did you mean gelu?", or "" if no name is near.
template <class Names>
std::string did_you_mean(std::string_view word, const Names& names) {
  const std::string near = nearest(word, names);
  return near.empty() ? "" : "; did you mean " + near + "?";
}

/// The index of `text` among `names`. Otherwise throws as parse_name does.
size_t parse_index(const char* what, std::span<const char* const> names, std::string_view text);

/// The enumerator whose name `text` is; names[i] is that of Enum(i). Otherwise throws an Error that begins
/// with `what` and gives the choices: parse_name<Kind>("gate: there is no kind", {"none", "top_k"}, "topk")
/// says
///   gate: there is no kind "topk"; expected none or top_k; did you mean top_k?
template <class Enum, size_t kCount>
Enum parse_name(const char* what, const char* const (&names)[kCount], std::string_view text) {
  return Enum(parse_index(what, names, text));
}

}  // namespace tessera

#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <string>

#include "runtime/error.h"

/// What tests say of errors.

namespace tessera {

/// The message of the error that `f` throws, without the place it was called from; "" if it throws none.
template <class F>
std::string message_of(F&& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.message();
  }
  return "";
}

/// The same with the user's line and the part of the model.
template <class F>
std::string report_of(F&& f) {
  try {
    f();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

inline void expect_parts(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
}

/// `f` throws an error whose message has all the parts.
template <class F>
void expect_error(F&& f, std::initializer_list<const char*> parts) {
  const std::string text = message_of(f);
  EXPECT_FALSE(text.empty()) << "nothing was thrown";
  expect_parts(text, parts);
}

}  // namespace tessera

#include "nn/form.h"

#include "runtime/capture.h"

namespace tessera::nn {

const char* name_of(const Form& form) {
  return std::visit([](const auto& one) { return std::decay_t<decltype(one)>::kKind; }, form);
}

void note_form(const Form& form) {
  CaptureSession* const session = CaptureSession::current();
  if (!session) [[likely]]
    return;
  session->add({.key = &form, .still_matches = [&form, captured = form] { return form == captured; }});
}

}  // namespace tessera::nn

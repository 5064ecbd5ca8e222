#include "nn/form.h"

#include "runtime/capture.h"

namespace tessera::nn {

const char* name_of(const Form& form) {
  return std::visit([](const auto& one) { return std::decay_t<decltype(one)>::kKind; }, form);
}

bool Weights24::operator==(const Weights24& other) const {
  return mask.same_elements(other.mask) && active == other.active && mvue == other.mvue;
}

bool Factors::operator==(const Factors& other) const {
  return a.same_elements(other.a) && b.same_elements(other.b) && rows == other.rows;
}

bool SparsePlusLowRank::operator==(const SparsePlusLowRank& other) const {
  return factors == other.factors && values.same_elements(other.values) &&
         support.same_elements(other.support) && scale == other.scale;
}

bool ColumnsPlusLowRank::operator==(const ColumnsPlusLowRank& other) const {
  return factors == other.factors && c.same_elements(other.c) && columns.same_elements(other.columns) &&
         gamma == other.gamma;
}

double multiply_adds(const Form& form, int64_t in, int64_t out) {
  const double dense = double(in) * double(out);
  return std::visit(
      [&](const auto& one) {
        if constexpr (requires {
                        one.factors;
                        one.scale;
                      })
          return dense;  // its weight is made again, whatever the number of tokens
        else if constexpr (requires { one.c; })
          return double(one.factors.a.count() + one.factors.b.count() + one.c.count());
        else if constexpr (requires { one.factors; })
          return double(one.factors.a.count() + one.factors.b.count());
        else
          return dense;
      },
      form);
}

void note_form(const Form& form) {
  CaptureSession* const session = CaptureSession::current();
  if (!session) [[likely]]
    return;
  session->add({.key = &form, .still_matches = [&form, captured = form] { return form == captured; }});
}

}  // namespace tessera::nn

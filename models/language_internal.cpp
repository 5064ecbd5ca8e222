#include "models/language_internal.h"

#include "ops/embedding/embedding.h"
#include "ops/shape/shape.h"

namespace tessera::models::language_internal {
namespace {

void check_index(const char* model, const Tensor& tokens) {
  check(tokens.defined(), model, ": tokens is undefined");
  check(tokens.dtype() == DType::i64 || tokens.dtype() == DType::i32, model, ": tokens is ", describe(tokens),
        "; expected i64 or i32");
}

}  // namespace

void check_sizes(const char* model, std::initializer_list<Size> sizes) {
  for (const auto& [name, size] : sizes)
    check(size >= 1, model, ": ", name, " is ", size, "; it must be at least 1");
}

Tensor flat_tokens(const char* model, const Tensor& tokens) {
  check_index(model, tokens);
  check(tokens.rank() == 2, model, ": tokens is ", describe(tokens), "; expected [B, T]");
  return tokens.packed().reshape({tokens.count()});
}

nn::Sequences sequences_of(const Tensor& tokens) {
  return nn::Sequences::uniform(tokens.size(0), tokens.size(1));
}

void check_packed(const char* model, const Tensor& tokens, const nn::Sequences& sequences, int64_t most) {
  check_index(model, tokens);
  check(tokens.rank() == 1, model, ": tokens is ", describe(tokens), "; expected [N]");
  sequences.check_tokens(model, tokens.size(0));
  check(sequences.longest() <= most, model, ": a sequence has ", sequences.longest(),
        " tokens; the model has ", most, " positions");
}

Residual last_rows(const Residual& x, const nn::Sequences& sequences) {
  const int64_t count = sequences.count(), length = sequences.longest();
  const auto last = [&](const Tensor& rows) {
    const int64_t width = rows.size(1);
    if (sequences.is_uniform())
      return ops::reshape(ops::slice(ops::reshape(rows, {count, length, width}), 1, length - 1, length),
                          {count, width});
    std::vector<int64_t> ends;
    for (const int64_t one : sequences.lengths) ends.push_back((ends.empty() ? -1 : ends.back()) + one);
    return ops::embedding(rows, Tensor::from(ends, {count}, rows.device()));
  };
  return {last(x.sum), last(x.branch)};
}

Tensor flat_targets(const char* model, const Tensor& targets, int64_t tokens) {
  check(targets.defined() && targets.count() == tokens, model, ": targets is ",
        targets.defined() ? targets.count() : 0, " numbers for ", tokens, " tokens");
  return targets.packed().reshape({targets.count()});
}

void draw(const nn::Linear& linear, const Rng& rng, double deviation) {
  nn::init::normal(linear.weight, rng, 0, deviation);
  if (linear.bias.defined()) nn::init::zeros(linear.bias);
}

Tensor run_or_undo(const std::function<Tensor()>& pass, const std::function<void()>& undo) {
  try {
    return pass();
  } catch (...) {
    try {
      undo();
    } catch (const Error&) {  // the device is lost, or captures: the first error says more
    }
    throw;
  }
}

}  // namespace tessera::models::language_internal

#pragma once

#include "nn/dropout.h"

namespace tessera::train {

/// Turns the model's dropout off while it lives, also if the evaluation throws.
template <class Model>
class Evaluating {
 public:
  explicit Evaluating(Model& model) : model_(model) { nn::set_training(model_, false); }
  ~Evaluating() { nn::set_training(model_, true); }
  Evaluating(const Evaluating&) = delete;

 private:
  Model& model_;
};

}  // namespace tessera::train

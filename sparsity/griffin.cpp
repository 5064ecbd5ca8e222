#include "sparsity/griffin.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "nn/observe.h"
#include "ops/gather/gather.h"

namespace tessera::sparsity {

/// The layers of one feed-forward network with some of its neurons.
class ChosenNeurons {
 public:
  ChosenNeurons(nn::Mlp& mlp, int64_t keep) : mlp_(&mlp), keep_(keep) {
    const Tensor up = mlp.up.weight.detach(), down = mlp.down.weight.detach();
    const auto like = [&](const Shape& shape) { return Tensor::empty(shape, up.dtype(), up.device()); };
    up_ = like({halves() * keep, mlp.up.in}), down_ = like({mlp.down.out, keep});
    if (mlp.up.bias.defined()) bias_ = like({halves() * keep});
  }

  int64_t keep() const { return keep_; }
  /// In place, so that a captured step stays valid.
  void choose(const std::vector<int64_t>& neurons) const {
    const int64_t hidden = mlp_->down.in;
    const Tensor index = Tensor::from(neurons, {keep_}, up_.device());
    const Tensor up = mlp_->up.weight.detach(), down = mlp_->down.weight.detach();
    for (int64_t half = 0; half < halves(); ++half) {
      const int64_t from = half * hidden, to = half * keep_;
      up_.slice(0, to, to + keep_).copy_from(ops::gather_rows(up.slice(0, from, from + hidden), index));
      if (bias_.defined())
        bias_.slice(0, to, to + keep_)
            .copy_from(ops::gather_rows(
                           mlp_->up.bias.detach().slice(0, from, from + hidden).reshape({hidden, 1}), index)
                           .reshape({keep_}));
    }
    down_.copy_from(ops::gather_rows(down.transpose(0, 1).clone(), index).transpose(0, 1));
  }

  /// Puts them in place of the network's own layers; again, takes them out.
  void swap() {
    std::swap(mlp_->up.weight, up_), std::swap(mlp_->down.weight, down_);
    if (bias_.defined()) std::swap(mlp_->up.bias, bias_);
    std::swap(mlp_->up.out, up_rows_), std::swap(mlp_->down.in, down_columns_);
  }

 private:
  int64_t halves() const { return mlp_->gated ? 2 : 1; }
  nn::Mlp* mlp_;
  int64_t keep_;
  Tensor up_, bias_, down_;
  int64_t up_rows_ = halves() * keep_, down_columns_ = keep_;
};

namespace {

/// While it lives, the networks have their chosen neurons.
class Scope {
 public:
  explicit Scope(std::span<ChosenNeurons> chosen) : chosen_(chosen) {
    for (ChosenNeurons& one : chosen_) one.swap();
  }
  ~Scope() {
    for (ChosenNeurons& one : chosen_) one.swap();
  }
  Scope(const Scope&) = delete;

 private:
  std::span<ChosenNeurons> chosen_;
};

std::string name_of_feed(size_t block, const char* layer) {
  return "blocks." + std::to_string(block) + ".mlp." + layer;
}

/// Of each block's feed-forward network.
std::vector<ChosenNeurons> chosen_neurons(models::LanguageRef model, double share) {
  std::vector<ChosenNeurons> chosen;
  model.visit([&](auto& held) {
    for (auto& block : held.blocks) chosen.emplace_back(block.mlp, neurons_kept(block.mlp.down.in, share));
  });
  return chosen;
}

/// Adds the statistics of prompts, rows of z one after the other.
void add_statistics(std::vector<double>& sums, const Tensor& z, const nn::Sequences& prompts,
                    const std::string& layer) {
  int64_t begin = 0;
  sums.resize(size_t(z.size(1)), 0);
  for (const int64_t length : prompts.lengths) {
    const std::vector<double> one = neuron_statistic(z.slice(0, begin, begin + length), layer);
    for (size_t j = 0; j < sums.size(); ++j) sums[j] += one[j] / std::sqrt(double(length));
    begin += length;
  }
}

template <class Model>
class Griffin {
 public:
  Griffin(Model& model, double share) : model_(model), chosen_(chosen_neurons(model, share)) {}

  void choose(const Tensor& tokens, const nn::Sequences& prompts) const {
    const NoTape no_tape;
    const nn::AttentionPass pass = model_.begin(tokens, prompts);
    models::Residual x = model_.embed(tokens, pass);
    for (size_t i = 0; i < chosen_.size(); ++i) {
      std::vector<double> sums;
      const std::string down = name_of_feed(i, "down");
      const nn::Observe scope(model_.blocks[i],
                              {.forward =
                                   [&](const nn::LinearCall& call) {
                                     if (call.name == down) add_statistics(sums, call.input, prompts, down);
                                   }},
                              "blocks." + std::to_string(i));
      x = model_.block(int64_t(i), x, pass);
      chosen_[i].choose(largest_neurons(sums, chosen_[i].keep()));
    }
  }
  Tensor step(const Tensor& tokens, nn::KvCache& cache) {
    const Scope scope(chosen_);
    return model_.step(tokens, cache);
  }
  /// How such a step runs: fewer neurons may be a shape that another kernel takes.
  std::string step_variant(const nn::KvCache& cache) {
    const Scope scope(chosen_);
    return model_.step_variant(cache);
  }

 private:
  Model& model_;
  std::vector<ChosenNeurons> chosen_;
};

template <class Model>
models::DecodingModel decoding_model(Model& model, int64_t batch, int64_t capacity, double share) {
  models::DecodingModel decoding(model, batch, capacity);
  const auto griffin = std::make_shared<Griffin<Model>>(model, share);
  decoding.variant = griffin->step_variant(decoding.cache);
  decoding.prefill = [&model, griffin](const Tensor& tokens, const nn::Sequences& prompts,
                                       nn::KvCache& cache) {
    griffin->choose(tokens, prompts);
    return model.prefill(tokens, prompts, cache);
  };
  decoding.step = [griffin](const Tensor& tokens, nn::KvCache& cache) {
    return griffin->step(tokens, cache);
  };
  return decoding;
}

/// As GriffinTexts::loss.
template <class Model>
Tensor loss_of(const Model& model, std::vector<ChosenNeurons>& networks, const Tensor& tokens,
               const Tensor& targets, const nn::Sequences& sequences) {
  const nn::AttentionPass pass = model.begin(tokens, sequences);
  models::Residual x = model.embed(tokens, pass);
  for (size_t i = 0; i < networks.size(); ++i) {
    const auto& block = model.blocks[i];
    const models::Residual stream = block.attend(x, pass, int64_t(i));
    const auto rows_of = [](const models::Residual& all, int64_t begin, int64_t end) {
      return models::Residual{all.sum.slice(0, begin, end),
                              all.branch.defined() ? all.branch.slice(0, begin, end) : Tensor()};
    };
    models::Residual y{Tensor::empty(stream.sum.shape(), stream.sum.dtype(), stream.sum.device()), {}};
    y.branch = Tensor::empty(y.sum.shape(), y.sum.dtype(), y.sum.device());
    const auto put = [&](const models::Residual& rows, int64_t begin, int64_t end) {
      y.sum.slice(0, begin, end).copy_from(rows.sum), y.branch.slice(0, begin, end).copy_from(rows.branch);
    };
    int64_t begin = 0;
    for (const int64_t length : sequences.lengths) {
      const int64_t middle = begin + (length + 1) / 2, end = begin + length;
      std::vector<double> sums;
      const std::string down = name_of_feed(i, "down");
      {
        const nn::Observe scope(block,
                                {.forward =
                                     [&](const nn::LinearCall& call) {
                                       if (call.name == down) sums = neuron_statistic(call.input, down);
                                     }},
                                "blocks." + std::to_string(i));
        put(block.feed(rows_of(stream, begin, middle)), begin, middle);
      }
      if (middle < end) {
        ChosenNeurons& chosen = networks[i];
        chosen.choose(largest_neurons(sums, chosen.keep()));
        const Scope scope(std::span(&chosen, 1));
        put(block.feed(rows_of(stream, middle, end)), middle, end);
      }
      begin = end;
    }
    x = y;
  }
  return model.finish(x, targets);
}

}  // namespace

struct GriffinTexts::State {
  models::LanguageRef model;
  std::vector<ChosenNeurons> chosen;
};

GriffinTexts::GriffinTexts(models::LanguageRef model, double share) {
  check_griffin(model, share);
  state_ = std::make_unique<State>(State{model, chosen_neurons(model, share)});
}
GriffinTexts::~GriffinTexts() = default;

Tensor GriffinTexts::loss(const Tensor& tokens, const Tensor& targets, const nn::Sequences& sequences) const {
  const NoTape no_tape;
  return state_->model.visit(
      [&](const auto& model) { return loss_of(model, state_->chosen, tokens, targets, sequences); });
}

std::vector<double> neuron_statistic(const Tensor& z, const std::string& layer) {
  const int64_t hidden = z.size(1);
  const std::vector<double> values = z.detach().to(Device::cpu()).clone().to_vector<double>();
  std::vector<double> squares(size_t(hidden), 0);
  for (size_t begin = 0; begin < values.size(); begin += size_t(hidden)) {
    double whole = 0;
    for (size_t j = 0; j < size_t(hidden); ++j) whole += values[begin + j] * values[begin + j];
    check(
        std::isfinite(whole), "griffin: the inputs of ", layer,
        " are not finite; the model's weights are damaged, or its activations overflow (load it with a dtype "
        "of a larger range: --dtype bf16 or f32)");
    if (whole == 0) continue;
    for (size_t j = 0; j < size_t(hidden); ++j) squares[j] += values[begin + j] * values[begin + j] / whole;
  }
  for (double& one : squares) one = std::sqrt(one);
  return squares;
}

std::vector<int64_t> largest_neurons(const std::vector<double>& statistic, int64_t keep) {
  std::vector<int64_t> order(statistic.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order, std::greater(), [&](int64_t j) { return statistic[size_t(j)]; });
  order.resize(size_t(keep));
  std::ranges::sort(order);
  return order;
}

int64_t neurons_kept(int64_t hidden, double share) {
  return std::max<int64_t>(1, hidden - int64_t(double(hidden) * share));
}

void check_griffin(models::LanguageRef model, double share) {
  check(share >= 0 && share < 1, "griffin: a share of ", share,
        " of the neurons; expected 0 or more and less than 1");
  model.visit([](const auto& held) {
    for (size_t i = 0; i < held.blocks.size(); ++i)
      for (const auto& [layer, name] :
           {std::pair(&held.blocks[i].mlp.up, "up"), {&held.blocks[i].mlp.down, "down"}})
        check(nn::is_dense(layer->form), "griffin: layer ", name_of_feed(i, name), " is ",
              nn::name_of(layer->form),
              "; neurons are chosen among dense weights: take the dense model, without gates");
  });
}

models::DecodingModel griffin(models::LanguageRef model, int64_t batch, int64_t capacity, double share) {
  check_griffin(model, share);
  return model.visit([&](auto& held) { return decoding_model(held, batch, capacity, share); });
}

}  // namespace tessera::sparsity

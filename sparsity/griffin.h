#pragma once

#include <memory>
#include <vector>

#include "models/generate.h"
#include "models/language_model.h"

/// Griffin (Dong et al., arXiv:2404.01365): whole neurons of each feed-forward network are chosen by what the
/// prompt makes of them, and the others are left out of what follows it. A baseline for gates, which choose
/// for each token: nothing is calibrated, and the weights that are left are dense.

namespace tessera::sparsity {

/// The statistic of each neuron: the L2 norm over a prompt's tokens of its activation relative to the
/// token's, z_j / ||z||. z [tokens, hidden], what the network's second layer multiplies -> f64 [hidden],
/// summed in f64 on the host; a token of zeros counts nothing. Throws, naming `layer`, unless z is finite.
std::vector<double> neuron_statistic(const Tensor& z, const std::string& layer);

/// The `keep` largest of them, ties to the lowest index, in ascending order.
std::vector<int64_t> largest_neurons(const std::vector<double>& statistic, int64_t keep);

/// Number of hidden neurons that stay when a share of them is left out: at least one.
int64_t neurons_kept(int64_t hidden, double share);

/// Throws, naming the layer, unless the share is in [0, 1) and all feed-forward networks are dense.
void check_griffin(models::LanguageRef model, double share);

/// For models::Generator: each prompt runs dense, and each step with the neurons that the prompts chose. The
/// statistics of several prompts are added, each divided by the root of its tokens (section 4.2 of the
/// paper). The prompts run twice: the last block of a prefill is only run for their last tokens. The model
/// must outlive it and not be used meanwhile by another thread; between steps its weights are as they were.
/// Not run on a GPU yet.
models::DecodingModel griffin(models::LanguageRef model, int64_t batch, int64_t capacity, double share);

/// For eval::measure_perplexity: of each window the first half, rounded up, is the prompt.
class GriffinTexts {
 public:
  GriffinTexts(models::LanguageRef model, double share);
  ~GriffinTexts();
  GriffinTexts(const GriffinTexts&) = delete;
  /// tokens [N], targets [N] -> the mean loss, as Model::loss.
  Tensor loss(const Tensor& tokens, const Tensor& targets, const nn::Sequences& sequences) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera::sparsity

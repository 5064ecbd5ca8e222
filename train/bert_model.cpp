#include "train/bert_model.h"

namespace tessera::train {

models::Bert load_bert_as(const models::BertConfig& config, const std::string& folder, const Rng& rng,
                          Device device, pretrained::LoadReport* report) {
  models::Bert model = pretrained::load_bert(folder, rng, device,
                                             {.config = {.head = config.head, .labels = config.labels},
                                              .dtype = config.dtype,
                                              .fresh_classes = config.head != models::BertHead::masked_lm},
                                             report);
  // Dropout may be the run's own; everything else is what the folder says.
  model.config.hidden_dropout = config.hidden_dropout;
  model.config.attention_dropout = config.attention_dropout;
  model.config.classifier_dropout = config.classifier_dropout;
  nn::for_each<nn::Dropout>(model, [&](const std::string& name, nn::Dropout& layer) {
    layer.p = name.ends_with("attention.dropout") ? config.attention_dropout
              : name.starts_with("classifier.")   ? config.classifier_dropout
                                                  : config.hidden_dropout;
  });
  check(pretrained::config_text(model.config) == pretrained::config_text(config), "bert: ", folder,
        " holds another model than the one that this run began with");
  return model;
}

void check_bert_forms(const FormSettings& factors, const models::BertConfig& config, bool has_weights) {
  factors.validate(has_weights);
  check(!factors.needs_gradient(),
        "bert: --columns gradient chooses by a first batch of a language model; take random or residual");
  plan::count_block_weights(config, factors.forms(has_weights));  // throws for a rank that is too large
}

}  // namespace tessera::train

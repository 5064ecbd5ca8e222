#include "train/mlm_settings.h"

#include <nlohmann/json.hpp>

#include "pretrained/config.h"
#include "runtime/error.h"
#include "train/bert_model.h"
#include "train/masking.h"

namespace tessera::train {

using nlohmann::json;

SettingList MlmSettings::list() {
  SettingList list;
  list.group("Data");
  list.add_hidden("task", task);
  list.add_hidden("data", data);
  list.add_hidden("fingerprint", fingerprint);
  list.add_hidden("max_length", max_length).range(int64_t{3}, kLargest);  // [CLS], [SEP] and a token of text
  list.add_hidden("batch", batch).range(int64_t{1}, kLargest);
  list.add("mask", mask, "--task mlm: share of the tokens to mask and predict").range(0.0001, 0.9);
  list.group("Model");
  list.add_hidden("model", model);
  list.add_json("config", {.get = [this] { return json::parse(pretrained::config_text(bert)); },
                           .set =
                               [this](const json& stored) {
                                 const auto config = pretrained::parse_config("mlm job", stored.dump(), {});
                                 const auto* const found = std::get_if<models::BertConfig>(&config.model);
                                 check(found != nullptr, "mlm job: config is of a model of type ",
                                       config.type, "; expected bert or roberta");
                                 bert = *found;
                               }});
  factors.add_to(list);
  add_to(list);
  add_ranks(list).absent_means(1);
  add_data_order(list);
  return list;
}

plan::BertStep MlmSettings::planned_step(Device device) const {
  return {.batch = batch,
          .length = max_length,
          .masked = masked_tokens(text_length(), mask),
          .forms = factors.forms(!model.empty()),
          .on_gpu = device.is_cuda()};
}

plan::Memory MlmSettings::planned(Device device) const {
  const plan::BertStep step = planned_step(device);
  return with_states(plan::count_memory(bert, step), plan::hidden_matrices(bert, step.forms), bert.dtype,
                     device);
}

void MlmSettings::validate() const {
  check(task == "mlm", "mlm: task is \"", task, "\"; expected mlm");
  bert.validate();
  check_values(MlmSettings(*this).list(), "mlm");
  check_training("mlm", bert.dtype);
  check(bert.head == models::BertHead::masked_lm, "mlm: the model has no masked language head");
  check(max_length <= bert.longest(), "mlm: --max-length is ", max_length, "; the model has positions for ",
        bert.longest());
  check_bert_forms(factors, bert, !model.empty());
  check_optimizer_form(optimizer, factors);
  check(warmup <= steps, "mlm: warmup is ", warmup, " of ", steps, " steps");
}

}  // namespace tessera::train

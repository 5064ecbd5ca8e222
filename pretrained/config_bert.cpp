#include <nlohmann/json.hpp>

#include "pretrained/config_families_internal.h"
#include "runtime/error.h"

namespace tessera::pretrained {
namespace {

using models::BertConfig;
using models::BertFamily;
using models::BertHead;
using nlohmann::json;

/// What `architectures` says that the weights are of, without the family's own name.
std::string architecture(ConfigReader& reader, std::string_view family) {
  const json* const list = reader.any("architectures");
  if (!list || !list->is_array() || list->empty() || !(*list)[0].is_string()) return "Model";
  const std::string name = (*list)[0].get<std::string>();
  return name.starts_with(family) ? name.substr(family.size()) : name;
}

BertHead bert_head(ConfigReader& reader, BertFamily family, int64_t labels) {
  const std::string kind = architecture(reader, family == BertFamily::bert ? "Bert" : "Roberta");
  if (kind == "Model") return BertHead::none;
  if (kind == "ForMaskedLM" || kind == "ForPreTraining") return BertHead::masked_lm;
  check(kind == "ForSequenceClassification", reader.where(), ": architectures names ", kind,
        "; expected Model, ForMaskedLM, ForPreTraining or ForSequenceClassification");
  const std::string problem =
      reader.text("problem_type", labels == 1 ? "regression" : "single_label_classification");
  if (problem == "regression") {
    check(labels == 1, reader.where(), ": regression of ", labels, " numbers; only one is supported");
    return BertHead::regress;
  }
  check(problem == "single_label_classification", reader.where(), ": problem_type is \"", problem,
        "\"; expected regression or single_label_classification");
  return BertHead::classify;
}

}  // namespace

BertConfig read_bert(ConfigReader& reader, BertFamily family, const ConfigOptions& options) {
  const bool roberta = family == BertFamily::roberta;
  BertConfig c{.family = family,
               .vocabulary = reader.integer("vocab_size", roberta ? 50265 : 30522),
               .positions = reader.integer("max_position_embeddings", 512),
               .types = reader.integer("type_vocab_size", 2),
               .d_model = reader.integer("hidden_size", 768),
               .d_ff = reader.integer("intermediate_size", 3072),
               .heads = reader.integer("num_attention_heads", 12),
               .layers = read_layers(reader, "num_hidden_layers", 12),
               .pad_token = reader.integer("pad_token_id", roberta ? 1 : 0),
               .activation = read_activation(reader, "hidden_act", "gelu"),
               .eps = reader.number("layer_norm_eps", 1e-12),
               .hidden_dropout = reader.number("hidden_dropout_prob", 0.1),
               .attention_dropout = reader.number("attention_probs_dropout_prob", 0.1),
               .init_deviation = reader.number("initializer_range", 0.02)};
  c.classifier_dropout = reader.number("classifier_dropout", c.hidden_dropout);
  const json* const names = reader.object("id2label");
  c.labels = reader.integer("num_labels", names ? int64_t(names->size()) : 2);
  if (options.labels) c.labels = *options.labels;
  c.head = options.head ? *options.head : bert_head(reader, family, c.labels);
  reader.expect("position_embedding_type", "absolute", "positions are added to the tokens");
  reader.expect("tie_word_embeddings", true, "the masked language head uses the token table");
  // A pooler of old files, which no head here has.
  reader.ignore({"directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
                 "pooler_size_per_head", "pooler_type"});
  return c;
}

std::string config_text(const BertConfig& c) {
  const bool roberta = c.family == BertFamily::roberta;
  const std::string kind = c.head == BertHead::none        ? "Model"
                           : c.head == BertHead::masked_lm ? "ForMaskedLM"
                                                           : "ForSequenceClassification";
  json text = common_fields(roberta ? "roberta" : "bert", (roberta ? "Roberta" : "Bert") + kind, c.dtype);
  text.update({{"vocab_size", c.vocabulary},
               {"max_position_embeddings", c.positions},
               {"type_vocab_size", c.types},
               {"hidden_size", c.d_model},
               {"intermediate_size", c.d_ff},
               {"num_attention_heads", c.heads},
               {"num_hidden_layers", c.layers},
               {"pad_token_id", c.pad_token},
               {"hidden_act", activation_name(c.activation)},
               {"layer_norm_eps", c.eps},
               {"hidden_dropout_prob", c.hidden_dropout},
               {"attention_probs_dropout_prob", c.attention_dropout},
               {"classifier_dropout", c.classifier_dropout},
               {"initializer_range", c.init_deviation}});
  if (kind == "ForSequenceClassification") {
    json names = json::object(), numbers = json::object();
    for (int64_t i = 0; i < c.outputs(); ++i) {
      const std::string name = "LABEL_" + std::to_string(i);
      names[std::to_string(i)] = name;
      numbers[name] = i;
    }
    text.update({{"id2label", names}, {"label2id", numbers}});
    text["problem_type"] = c.head == BertHead::regress ? "regression" : "single_label_classification";
  }
  return text.dump(2) + "\n";
}

}  // namespace tessera::pretrained

#include "pretrained/load.h"

#include <algorithm>
#include <cstring>

#include "nn/load.h"
#include "nn/narrowed.h"
#include "pretrained/shares.h"
#include "pretrained/sparse_file.h"
#include "tensor/equal.h"

namespace tessera::pretrained {
namespace {

using io::shown;

std::string text_of(const Shape& shape) {
  MessageStream text;
  text << shape;
  return text.str();
}

/// Whether only the number of rows is another one: classes of a head.
bool differs_in_rows(const Shape& a, const Shape& b) {
  if (a.rank() != b.rank() || a.rank() == 0 || a[0] == b[0]) return false;
  for (int64_t d = 1; d < a.rank(); ++d)
    if (a[d] != b[d]) return false;
  return true;
}

/// BERT's first files called a norm's weight gamma and its bias beta.
std::string modern(const std::string& name) {
  const auto renamed = [&](const char* old_end, const char* end) {
    return name.substr(0, name.size() - std::strlen(old_end)) + end;
  };
  if (name.ends_with(".LayerNorm.gamma")) return renamed(".gamma", ".weight");
  if (name.ends_with(".LayerNorm.beta")) return renamed(".beta", ".bias");
  return name;
}

template <class Test>
bool any_of(const std::vector<std::string>& list, Test&& test) {
  return std::any_of(list.begin(), list.end(), test);
}

}  // namespace

std::string name_of_other(const NameTable& table, const std::string& in_file) {
  const std::string name = modern(in_file), full = table.prefix + name;
  const auto is_start_of = [&](const std::string& text) {
    return any_of(table.others, [&](const std::string& start) { return text.starts_with(start); });
  };
  if (any_of(table.buffers, [&](const std::string& end) { return name.ends_with(end); })) return "";
  return is_start_of(name) ? name : is_start_of(full) ? full : "";
}

Matched match_names(const NameTable& table, const io::WeightSource& source, bool fresh_head,
                    bool fresh_classes) {
  std::map<std::string, const NameRule::Part*> wanted;
  for (const NameRule& rule : table.rules)
    for (const NameRule::Part& part : rule.parts) wanted.emplace(part.theirs, &part);
  Matched matched;
  nn::Misfits wrong;
  for (const io::WeightEntry& entry : source.entries()) {
    const std::string name = modern(entry.name);
    const auto is_tied = [&](const std::string& tied) { return name == tied; };
    const std::string full =
        wanted.contains(name) || any_of(table.tied, is_tied) ? name : table.prefix + name;
    if (wanted.contains(full) || any_of(table.tied, is_tied)) {
      if (!matched.names.emplace(full, entry.name).second)
        wrong.add("twice", shown(full) + ": as '" + shown(matched.names.at(full)) + "' and '" +
                               shown(entry.name) + "'");
    } else if (any_of(table.buffers, [&](const std::string& end) { return full.ends_with(end); }) ||
               !name_of_other(table, entry.name).empty()) {
      matched.report.ignored.push_back(entry.name);
    } else {
      wrong.add("unexpected", shown(entry.name) + " " + text_of(entry.shape));
    }
  }
  for (const NameRule& rule : table.rules) {
    for (const NameRule::Part& part : rule.parts) {
      const auto found = matched.names.find(part.theirs);
      if (found != matched.names.end()) {
        const io::WeightEntry& entry = source.entry(found->second);
        if (fresh_classes && rule.is_head && differs_in_rows(entry.shape, part.shape)) {
          matched.report.fresh.push_back(rule.ours);
          matched.report.ignored.push_back(entry.name);
          matched.names.erase(found);
          continue;
        }
        if (entry.shape != part.shape)
          wrong.add("mis-shaped",
                    shown(entry.name) + " " + text_of(entry.shape) + ", expected " + text_of(part.shape));
        if (!is_floating(entry.dtype))
          wrong.add("mis-typed",
                    shown(entry.name) + " " + name_of(entry.dtype) + ", expected a floating dtype");
      } else if (rule.is_head && fresh_head) {
        matched.report.fresh.push_back(rule.ours);
      } else {
        wrong.add("missing", part.theirs + " " + text_of(part.shape));
      }
    }
  }
  if (wrong.empty()) return matched;
  fail_at(Site::here(), "weights: ", source.path(), " does not fit the model of config.json:", wrong.lines());
}

void copy_weights(const std::vector<nn::NamedParameter>& parameters, const NameTable& table,
                  const Matched& matched, const io::WeightSource& source) {
  std::map<std::string, const NameRule*> rules;
  for (const NameRule& rule : table.rules) rules.emplace(rule.ours, &rule);
  for (const auto& [name, parameter] : parameters) {
    const auto found = rules.find(name);
    check(found != rules.end(), "weights: the table of names has no '", name, "'");
    const NameRule& rule = *found->second;
    int64_t end = 0;
    for_each_part(rule, [&, &parameter = parameter](const NameRule::Part& part, int64_t row, int64_t rows) {
      end = row + rows;
      const auto theirs = matched.names.find(part.theirs);
      if (theirs == matched.names.end()) return;
      const Tensor tensor = source.load(theirs->second);
      nn::copy_narrowed(parameter.detach().slice(0, row, end),
                        rule.transposed ? tensor.transpose(0, 1) : tensor, theirs->second);
    });
    check(end == parameter.size(0), "weights: '", name, "' is ", describe(parameter), ", but the table has ",
          end, " rows");
  }
  for (const std::string& tied : table.tied) {
    const auto theirs = matched.names.find(tied);
    if (theirs == matched.names.end()) continue;
    const std::string& first = matched.names.at(table.rules[0].parts[0].theirs);  // the token table leads
    check(equal_bits(source.load(theirs->second), source.load(first)), "weights: ", source.path(), ": '",
          shown(theirs->second), "' differs from '", shown(first),
          "', but config.json ties them; set tie_word_embeddings to false");
  }
}

DType stored_dtype(const io::WeightSource& source) {
  const DType dtype = source.dtype();
  return dtype == DType::bf16 || dtype == DType::f16 ? dtype : DType::f32;
}

DType stored_dtype(const std::string& folder) {
  return is_sparse_folder(folder) ? SparseFile(folder).dtype() : stored_dtype(io::WeightSource(folder));
}

namespace {

template <class Model, class ModelConfig>
Model load(const char* what, const std::string& folder, const Rng& rng, Device device,
           const LoadOptions& options, LoadReport* report) {
  const Config config = read_config(folder, options.config);
  const auto* const found = std::get_if<ModelConfig>(&config.model);
  check(found != nullptr, "load: ", folder, " holds a model of type ", config.type, ", not ", what);
  ModelConfig wanted = *found;
  const io::WeightSource source(folder);
  wanted.dtype = options.dtype ? *options.dtype : stored_dtype(source);
  const NameTable plain = name_table(wanted), table = config.cola ? with_cola(plain, *config.cola) : plain;
  const Matched matched = match_names(table, source, options.fresh_head, options.fresh_classes);
  if constexpr (std::is_same_v<Model, models::Llama>) {
    if (options.ranks.shares()) {
      check(!config.cola, "load: ", folder, " has factors (cola) in place of weights, which ",
            options.ranks.size(), " ranks cannot share out; run it on one rank");
      Model model(wanted, rng, device, models::Start::blank, options.ranks);
      copy_shares(model, table, matched, source);
      nn::set_training(model, false);
      if (report) *report = matched.report;
      return model;
    }
  } else {
    check(!options.ranks.shares(), "load: ", folder, " holds a ", config.type, ", which ",
          options.ranks.size(),
          " ranks cannot share out; llama, mistral, qwen2, qwen3, phi3 and arcee can be");
  }
  Model model(wanted, rng, device,
              matched.report.fresh.empty() ? models::Start::blank : models::Start::drawn);
  if (config.cola) make_cola(linear_modules(model), *config.cola);
  copy_weights(nn::parameters(model), table, matched, source);
  nn::set_training(model, false);
  if (report) *report = matched.report;
  return model;
}

}  // namespace

models::Gpt load_gpt(const std::string& folder, const Rng& rng, Device device, const LoadOptions& options,
                     LoadReport* report) {
  return load<models::Gpt, models::GptConfig>("gpt2 or opt", folder, rng, device, options, report);
}
models::Llama load_llama(const std::string& folder, const Rng& rng, Device device, const LoadOptions& options,
                         LoadReport* report) {
  return load<models::Llama, models::LlamaConfig>("llama, mistral, qwen2, qwen3, phi3 or arcee", folder, rng,
                                                  device, options, report);
}
models::Bert load_bert(const std::string& folder, const Rng& rng, Device device, const LoadOptions& options,
                       LoadReport* report) {
  return load<models::Bert, models::BertConfig>("bert or roberta", folder, rng, device, options, report);
}

}  // namespace tessera::pretrained

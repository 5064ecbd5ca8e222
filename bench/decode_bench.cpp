#include "bench/decode_bench.h"

#include <fmt/format.h>

#include <chrono>
#include <cstdlib>
#include <map>

#include "io/utf8.h"
#include "models/generate.h"
#include "models/llama.h"
#include "ops/random/random.h"
#include "ops/variant.h"
#include "plan/plan.h"
#include "pretrained/language_model.h"
#include "report/facts.h"
#include "runtime/text.h"

namespace tessera::bench {
namespace {

const std::map<std::string, models::LlamaConfig>& shapes() {
  static const auto& all = *new std::map<std::string, models::LlamaConfig>{
      {"llama-130m",
       {.positions = 2048, .d_model = 768, .d_ff = 2048, .heads = 12, .kv_heads = 12, .layers = 12}},
      {"llama-2-7b", {}},
      {"llama-3-8b",
       {.vocabulary = 128256, .positions = 8192, .d_ff = 14336, .kv_heads = 8, .rope = {.base = 500000}}},
      {"llama-tiny",
       {.vocabulary = 512, .d_model = 128, .d_ff = 344, .heads = 4, .kv_heads = 2, .layers = 2}},
      {"mistral-7b",
       {.family = models::LlamaFamily::mistral,
        .vocabulary = 32768,
        .positions = 32768,
        .d_ff = 14336,
        .kv_heads = 8,
        .rope = {.base = 1e6}}},
      {"qwen2.5-7b",
       {.family = models::LlamaFamily::qwen2,
        .vocabulary = 152064,
        .positions = 131072,
        .d_model = 3584,
        .d_ff = 18944,
        .heads = 28,
        .kv_heads = 4,
        .layers = 28,
        .eps = 1e-6,
        .rope = {.base = 1e6}}},
      {"qwen3-8b",
       {.family = models::LlamaFamily::qwen3,
        .vocabulary = 151936,
        .positions = 40960,
        .d_ff = 12288,
        .kv_heads = 8,
        .head_dim = 128,
        .layers = 36,
        .eps = 1e-6,
        .rope = {.base = 1e6}}},
      {"qwen3-tiny",
       {.family = models::LlamaFamily::qwen3,
        .vocabulary = 512,
        .d_model = 128,
        .d_ff = 344,
        .heads = 4,
        .kv_heads = 2,
        .head_dim = 48,
        .layers = 2}}};
  return all;
}

/// What a step reads of the model: all but the token embedding, of which it reads a row (unless it is the LM
/// head).
double bytes_of_step(const models::LanguageModel& model) {
  return model.visit([](const auto& held) {
    double bytes = 0;
    for (const auto& [name, parameter] : nn::parameters(held))
      if (!parameter.shares_storage(held.token.weight) || held.lm_head.tied())
        bytes += double(parameter.bytes());
    return bytes;
  });
}

double elapsed(std::chrono::steady_clock::time_point begin, std::chrono::steady_clock::time_point end) {
  return std::chrono::duration<double, std::milli>(end - begin).count();
}

std::string text_of(const ops::Sampling& sampling) {
  return fmt::format("T={} k={} p={}", sampling.temperature, sampling.top_k, sampling.top_p);
}

/// What a record says of compressed weights and gates.
std::string text_of(const DecodeSparse& sparse) {
  const std::string format = sparse.format ? name_of(*sparse.format) : "dense-columns";
  return fmt::format("{} w={} x={}", format, sparse.weight_sparsity, sparse.activation_sparsity);
}

models::Generator::Texts prompts_of(int64_t batch, int64_t tokens, int64_t vocabulary) {
  Rng rng(2);
  const Tensor drawn = Tensor::empty({batch, tokens}, DType::i64, Device::cpu());
  ops::fill_integers(drawn, vocabulary, rng);
  models::Generator::Texts prompts;
  for (int64_t b = 0; b < batch; ++b) prompts.push_back(drawn.select(0, b).to_vector<int64_t>());
  return prompts;
}

/// Milliseconds of each repeat, to the first token and for each after it, and the new tokens of the last one.
struct TextTimes {
  std::vector<double> first, rest;
  models::Generator::Texts texts;
};
TextTimes time_texts(models::Generator& generator, const models::Generator::Texts& prompts,
                     const models::GenerateOptions& generation, const DecodeBenchOptions& options) {
  TextTimes times;
  for (int repeat = 0; repeat < options.warmups + options.repeats; ++repeat) {
    options.device.synchronize();
    options.world.host().barrier();
    const auto begin = std::chrono::steady_clock::now();
    auto middle = begin, end = begin;
    times.texts = generator(prompts, generation, [&](int64_t text, int64_t) {
      end = std::chrono::steady_clock::now();
      if (middle == begin && text + 1 == options.batch) middle = end;
      return true;
    });
    if (repeat < options.warmups) continue;
    times.first.push_back(elapsed(begin, middle));
    times.rest.push_back(elapsed(middle, end) / double(options.new_tokens - 1));
  }
  return times;
}

/// Prompt lengths to time, all of which fit the model.
std::vector<int64_t> prompt_lengths(const DecodeBenchOptions& options, int64_t longest) {
  const auto fits = [&](int64_t prompt) { return prompt + options.new_tokens - 1 <= longest; };
  std::vector<int64_t> prompts = options.prompts;
  if (prompts.empty()) prompts = fits(2048) ? std::vector<int64_t>{32, 2048} : std::vector<int64_t>{32};
  for (const int64_t prompt : prompts)
    check(fits(prompt), "decode: a prompt of ", prompt, " tokens and ", options.new_tokens,
          " new ones; the model takes ", longest, ": give a smaller --prompt-tokens or --new-tokens");
  return prompts;
}

void measure_model(models::LanguageModel& model, const std::string& name, const DecodeBenchOptions& options,
                   const std::vector<pretrained::SparseModule>& modules, std::vector<Record>& records) {
  const plan::LanguageConfig config = models::LanguageRef(model).config();
  for (const int64_t prompt : prompt_lengths(options, model.longest())) {
    models::Generator generator(model, options.batch, prompt + options.new_tokens - 1);
    const models::Generator::Texts prompts = prompts_of(options.batch, prompt, model.vocabulary());
    const std::vector<bool> modes = options.device.is_cpu() ? std::vector<bool>{false} : options.graph;
    for (const bool graph : modes) {
      options.listener.begin(fmt::format("decode {}: {} times {} + {} tokens", name,
                                         options.warmups + options.repeats, prompt, options.new_tokens));
      const models::GenerateOptions generation{
          .most_tokens = options.new_tokens, .sampling = options.sampling, .graph = graph};
      auto [first, rest, texts] = time_texts(generator, prompts, generation, options);
      // Gates are counted on the host: on the last tokens that were run.
      for (size_t b = 0; b < texts.size(); ++b) {
        texts[b].insert(texts[b].begin(), prompts[b].begin(), prompts[b].end());
        texts[b].pop_back();
        texts[b].erase(texts[b].begin(), texts[b].end() - std::min<int64_t>(64, int64_t(texts[b].size())));
      }
      Record record;
      record.matmuls = matmuls_of(model, modules, texts);
      const double ranks = options.world.size(),
                   weights = ranks * bytes_of_step(model) + compressed_bytes(record.matmuls);
      record.op = "decode " + name;
      record.shape = {{"B", options.batch}, {"prompt", prompt}, {"new", options.new_tokens}};
      if (ranks > 1) {
        record.shape["ranks"] = options.world.size();
        record.does["sums over ranks"] = name_of(options.ranks.ranks().exchange());
      }
      if (options.sampling.temperature > 0) record.attrs["sampling"] = text_of(options.sampling);
      if (options.sparse.is_sparse()) record.attrs["sparse"] = text_of(options.sparse);
      if (options.model_sparse) record.attrs["sparse"] = "of the model";
      record.dtype = name_of(model.dtype());
      record.device = options.device.name();
      record.gpu = options.device.info().name;
      record.does["host"] = "reads every token while the next is computed";
      record.implementation = graph ? "tessera graph" : "tessera eager";
      record.build = report::kRevision;
      record.time = report::utc_now();
      const Ceilings& best = ceilings(options.device, size_of(model.dtype()) == 2 ? DType::bf16 : DType::f32);

      const plan::Generation first_token = plan::prefill(config, weights, options.batch, prompt);
      record.mode = "ttft";
      record.ms = percentiles(first);
      record.flops = first_token.flops;
      record.bytes = first_token.bytes;
      record.ceiling_share =
          std::max(record.tflops() / best.tflops, weights / best.copy_gbs / record.ms.p50 / 1e6) / ranks;
      options.listener.add(record, records);

      const double cached = double(prompt) + double(options.new_tokens) / 2;
      const plan::Generation token = plan::decode(config, weights, options.batch, cached);
      record.mode = "tpot";
      record.variant = generator.variant();
      record.ms = percentiles(rest);
      record.flops = token.flops;
      record.bytes = token.bytes;
      record.ceiling_share = record.gbs() / best.copy_gbs / ranks;
      record.tokens_per_s = double(options.batch) / record.ms.p50 * 1e3;
      options.listener.add(record, records);
    }
  }
}

models::Llama random_model(const models::LlamaConfig& config, const Rng& rng,
                           const DecodeBenchOptions& options) {
  models::Llama model(config, rng, options.device, models::Start::blank, options.ranks);
  for (const auto& [name, parameter] : nn::parameters(model))
    if (parameter.rank() >= 2) ops::fill_normal(parameter.detach(), 0, 0.02, rng);
  return model;
}

/// Sets layer_us of the records of tpot from `begin` on; leaves the model with its first block alone.
void time_layers(models::Llama& model, const DecodeBenchOptions& options, std::vector<Record>& records,
                 size_t begin) {
  const int64_t layers = model.config.layers;
  if (layers < 2) return;
  while (model.blocks.size() > 1) model.blocks.pop_back();
  model.config.layers = 1;
  for (size_t i = begin; i < records.size(); ++i) {
    Record& record = records[i];
    if (record.mode != "tpot") continue;
    const int64_t prompt = record.shape.at("prompt");
    models::Generator generator(model, options.batch, prompt + options.new_tokens - 1);
    const TextTimes one = time_texts(generator, prompts_of(options.batch, prompt, model.config.vocabulary),
                                     {.most_tokens = options.new_tokens,
                                      .sampling = options.sampling,
                                      .graph = record.implementation == "tessera graph"},
                                     options);
    record.layer_us = 1e3 * (record.ms.p50 - percentiles(one.rest).p50) / double(layers - 1);
  }
}

void measure_row(const models::LlamaConfig& config, const DecodeRow& row, const DecodeBenchOptions& given,
                 std::vector<Record>& records) {
  std::optional<ops::ForceVariant> composed;
  if (row.composed) composed.emplace("decoder_layers", "composed");
  DecodeBenchOptions options = given;
  options.sparse = row.sparse;
  options.listener.on_record = {};  // they are complete with the time of a layer
  Rng rng(1);
  models::LanguageModel model = random_model(config, rng, options);
  models::Llama& llama = *model.get_if<models::Llama>();
  std::vector<pretrained::SparseModule> modules;
  if (row.sparse.is_sparse()) modules = make_sparse(llama, row.sparse, options.batch);
  const size_t begin = records.size();
  measure_model(model, options.shape, options, modules, records);
  for (size_t i = begin; i < records.size(); ++i) {
    records[i].attrs["row"] = row.text;
    if (row.composed && records[i].mode == "tpot") records[i].variant = "composed";
  }
  time_layers(llama, options, records, begin);
  if (given.listener.on_record)
    for (size_t i = begin; i < records.size(); ++i) given.listener.on_record(records[i]);
}

}  // namespace

std::vector<std::string> decode_shapes() {
  std::vector<std::string> names;
  for (const auto& [name, config] : shapes()) names.push_back(name);
  return names;
}

std::vector<Record> bench_decode(const DecodeBenchOptions& options) {
  std::vector<Record> records;
  Rng rng(1);
  if (!options.model.empty()) {
    check(!options.ranks.shares() || !pretrained::is_sparse_folder(options.model), "decode: the layers in ",
          options.model, " are compressed, which ranks cannot share out; make it dense (tessera convert)");
    pretrained::LoadedLanguageModel loaded =
        pretrained::load_language(options.model, rng, options.device,
                                  {.dtype = options.dtype, .ranks = options.ranks}, options.model_sparse);
    const std::string name = io::utf8_name(options.name.empty() ? options.model : options.name);
    measure_model(loaded.model, name, options, loaded.sparse, records);
    return records;
  }
  const auto found = shapes().find(options.shape);
  check(found != shapes().end(), "decode: there is no shape \"", options.shape, "\"; expected one of ",
        joined(decode_shapes()));
  models::LlamaConfig config = found->second;
  config.dtype = options.dtype;
  for (const DecodeRow& row : options.rows) measure_row(config, row, options, records);
  if (!options.rows.empty()) return records;
  models::LanguageModel model = random_model(config, rng, options);
  std::vector<pretrained::SparseModule> modules;
  if (options.sparse.is_sparse())
    modules = make_sparse(*model.get_if<models::Llama>(), options.sparse, options.batch);
  measure_model(model, options.shape, options, modules, records);
  return records;
}

DecodeRow parse_decode_row(const std::string& text) {
  DecodeRow row{.text = text};
  row.composed = text == "composed" || text.starts_with("composed:");
  if (text == "composed" || text == "dense") return row;
  std::vector<std::string> parts{""};
  for (const char c : text)
    if (c == ':')
      parts.emplace_back();
    else
      parts.back() += c;
  if (row.composed) parts.erase(parts.begin());
  const auto share = [&](const std::string& given) {
    char* end = nullptr;
    const double value = std::strtod(given.c_str(), &end);
    check(!given.empty() && *end == 0 && value >= 0 && value < 1, "decode: row \"", text, "\": \"", given,
          "\" is no share of 0 or more and less than 1");
    return value;
  };
  check(parts.size() == 2 || parts.size() == 3, "decode: row \"", text,
        "\": expected dense, composed, FORMAT:W or FORMAT:W:X, such as sell-delta4:0.5 or "
        "dense-columns:0:0.75, or composed: before a format");
  row.sparse.format = ops::parse_sparse_format(parts[0]);
  row.sparse.weight_sparsity = share(parts[1]);
  if (parts.size() == 3) row.sparse.activation_sparsity = share(parts[2]);
  return row;
}

std::string decode_rows_text(const std::vector<Record>& records) {
  std::vector<std::vector<std::string>> rows{{"row", "prompt", "step", "ttft ms", "tpot ms", "p10", "p90",
                                              "us per layer", "GB per token", "faster"}};
  std::map<int64_t, double> base;  // of each prompt length
  double first_token = 0;
  for (const Record& r : records) {
    if (r.mode == "ttft") {
      first_token = r.ms.p50;
      continue;
    }
    const int64_t prompt = r.shape.at("prompt");
    const double against = base.emplace(prompt, r.ms.p50).first->second;
    rows.push_back({r.attrs.at("row"), std::to_string(prompt), r.variant, fmt::format("{:.2f}", first_token),
                    fmt::format("{:.3f}", r.ms.p50), fmt::format("{:.3f}", r.ms.p10),
                    fmt::format("{:.3f}", r.ms.p90), r.layer_us > 0 ? fmt::format("{:.1f}", r.layer_us) : "-",
                    fmt::format("{:.2f}", r.bytes / 1e9), fmt::format("{:.2f}x", against / r.ms.p50)});
  }
  return format_rows(rows, 3);
}

}  // namespace tessera::bench

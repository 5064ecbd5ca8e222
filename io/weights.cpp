#include "io/weights.h"

#include <algorithm>
#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <regex>
#include <set>

#include "io/safetensors_internal.h"
#include "io/shard_index.h"
#include "runtime/interrupt.h"
#include "runtime/text.h"

namespace tessera::io {
namespace {

constexpr std::array kNames = {"model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
                               "pytorch_model.bin.index.json"};
constexpr uint64_t kLargestIndex = uint64_t{16} << 20;  // 70,000 tensors of 200 bytes: far beyond any model

bool exists(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::exists(std::filesystem::symlink_status(path, ignored));
}

std::string weights_in(const std::string& path) {
  if (!is_folder(path)) return path;
  check_no_adapter(path);
  for (const char* const name : kNames)
    if (exists(path + "/" + name)) return path + "/" + name;
  check(!exists(path + "/sparse.safetensors"), "weights: ", path,
        " holds compressed weights (sparse.safetensors); make them dense first: tessera convert ", path,
        " FOLDER --format dense");
  fail_at(Site::here(), "weights: ", path, " has none of model.safetensors, model.safetensors.index.json, ",
          "pytorch_model.bin and pytorch_model.bin.index.json");
}

std::string folder_of(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

/// "model" and "-of-00003.safetensors" of "model-00002-of-00003.safetensors"; empty for another name.
std::pair<std::string, std::string> set_of_shard(const std::string& name) {
  static const std::regex kShard("(.+)-[0-9]+(-of-[0-9]+\\.[a-z]+)");
  std::smatch parts;
  if (!std::regex_match(name, parts, kShard)) return {};
  return {parts[1], parts[2]};
}

/// Throws if a file next to the shards that `index` names is one of them by its name: its tensors would not
/// be read.
void check_shards_named(const std::string& index, const std::set<std::string>& shards) {
  std::set<std::pair<std::string, std::string>> sets;
  for (const std::string& shard : shards) sets.insert(set_of_shard(shard));
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator(folder_of(index), ignored)) {
    const std::string name = entry.path().filename().string();
    const auto set = set_of_shard(name);
    check(set.first.empty() || shards.contains(name) || !sets.contains(set), "weights: ", index,
          " names no tensor of ", shown(name),
          ", which lies next to the other shards; the index is incomplete, or the "
          "file does not belong there");
  }
}

}  // namespace

WeightSource::WeightSource(const std::string& given) : path_(weights_in(given)) {
  if (path_.ends_with(".json")) {
    const auto files = parse_shard_index(path_, read_file(path_, kLargestIndex));
    std::set<std::string> shards;
    for (const auto& [name, file] : files) shards.insert(file);
    check_shards_named(path_, shards);
    for (const std::string& shard : shards) add(open_shard(folder_of(path_), shard), &files, shard);
    for (const auto& [name, file] : files)
      check(index_.contains(name), "weights: ", path_, " says that '", shown(name), "' lies in ", file,
            ", which has no such tensor");
  } else {
    add(InputFile(path_), nullptr, "");
  }
  std::vector<size_t> order(entries_.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return entries_[a].name < entries_[b].name; });
  std::vector<WeightEntry> sorted;
  for (const size_t i : order) sorted.push_back(entries_[i]);
  entries_ = std::move(sorted);
  for (size_t i = 0; i < entries_.size(); ++i) index_.at(entries_[i].name).entry = i;
}

void WeightSource::add(InputFile file, const std::map<std::string, std::string>* files,
                       const std::string& own_name) {
  const auto keep = [&](const std::string& name, DType dtype, const Shape& shape) {
    if (files) {
      const auto listed = files->find(name);
      check(listed != files->end() && listed->second == own_name, "weights: ", own_name, " holds '",
            shown(name), "', which ", path_,
            listed == files->end() ? " does not list" : " says lies in " + listed->second);
    }
    index_.emplace(name, Place{entries_.size(), files_.size()});
    entries_.push_back({name, dtype, shape});
  };
  if (is_torch_file(file)) {
    TorchFile torch(std::move(file));
    for (const PickledTensor& tensor : torch.entries()) keep(tensor.name, tensor.dtype, tensor.layout.shape);
    others_.insert(others_.end(), torch.others().begin(), torch.others().end());
    files_.emplace_back(std::move(torch));
  } else {
    SafetensorsFile tensors(std::move(file));
    for (const SafetensorsEntry& entry : tensors.entries()) keep(entry.name, entry.dtype, entry.shape);
    files_.emplace_back(std::move(tensors));
  }
}

const WeightEntry& WeightSource::entry(const std::string& name) const {
  const auto found = index_.find(name);
  if (found == index_.end()) {
    std::vector<std::string> names;
    for (const WeightEntry& entry : entries_) names.push_back(entry.name);
    const std::string near = nearest(name, names);
    fail_at(Site::here(), "weights: ", path_, " has no tensor '", shown(name), "' among its ",
            entries_.size(), near.empty() ? "" : "; did you mean '" + shown(near) + "'?");
  }
  return entries_[found->second.entry];
}

DType WeightSource::dtype() const {
  std::map<DType, int64_t> counts;
  for (const WeightEntry& entry : entries_)
    if (is_floating(entry.dtype)) counts[entry.dtype] += entry.shape.count();
  const auto most = std::ranges::max_element(
      counts, {}, [](const auto& found) { return std::pair(found.second, size_of(found.first)); });
  return most == counts.end() ? DType::f32 : most->first;
}

Tensor WeightSource::load(const std::string& name) const {
  entry(name);
  return std::visit([&](const auto& file) { return file.load(name); }, files_[index_.at(name).file]);
}

Tensor WeightSource::load_rows(const std::string& name, int64_t begin, int64_t end) const {
  entry(name);
  const auto& file = files_[index_.at(name).file];
  if (const auto* const safetensors = std::get_if<SafetensorsFile>(&file))
    return safetensors->load_rows(name, begin, end);
  return load(name).slice(0, begin, end);
}

std::map<std::string, Tensor> load_weights(const std::string& path, Device device) {
  const WeightSource source(path);
  std::map<std::string, Tensor> tensors;
  for (const WeightEntry& entry : source.entries())
    tensors.emplace(entry.name, on_device(source.load(entry.name), device));
  return tensors;
}

void check_no_adapter(const std::string& folder) {
  check(!exists(folder + "/adapter_config.json"), "weights: ", folder,
        " holds an adapter of peft (adapter_config.json), which is not read; merge it into its base model "
        "(merge_and_unload() of peft), save that, and name its folder");
}

void check_no_weights(const std::string& folder) {
  for (const char* const name : kNames)
    check(!exists(folder + "/" + name), "save_weights: ", folder, " has ", name,
          " already; weights in two files are ambiguous: name another folder or remove it");
}

void save_weights(const std::string& folder, const std::vector<WeightToWrite>& weights,
                  uint64_t shard_bytes) {
  check(shard_bytes > 0, "save_weights: shards of 0 bytes");
  AtomicFolder files(folder, AtomicFolder::Existing::merge, check_no_weights);
  std::vector<std::vector<const WeightToWrite*>> shards(1);
  uint64_t in_shard = 0, total = 0;
  for (const WeightToWrite& weight : weights) {
    const uint64_t bytes = uint64_t(weight.entry.shape.count()) * size_of(weight.entry.dtype);
    if (in_shard > 0 && in_shard + bytes > shard_bytes) {
      shards.emplace_back();
      in_shard = 0;
    }
    shards.back().push_back(&weight);
    in_shard += bytes;
    total += bytes;
  }
  const auto name_of_shard = [&](size_t number) -> std::string {
    if (shards.size() == 1) return "model.safetensors";
    const auto digits = [](size_t value) {
      const std::string text = std::to_string(value);
      return std::string(5 - std::min<size_t>(5, text.size()), '0') + text;
    };
    return "model-" + digits(number + 1) + "-of-" + digits(shards.size()) + ".safetensors";
  };
  nlohmann::json map = nlohmann::json::object();
  for (size_t number = 0; number < shards.size(); ++number) {
    NamedTensors tensors;
    for (const WeightToWrite* weight : shards[number]) {
      check_interrupt();
      Tensor tensor = weight->make();
      check(tensor.dtype() == weight->entry.dtype && tensor.shape() == weight->entry.shape, "save_weights: '",
            weight->entry.name, "' is ", describe(tensor), ", expected ", weight->entry.dtype,
            weight->entry.shape);
      tensors.emplace_back(weight->entry.name, std::move(tensor));
      map[weight->entry.name] = name_of_shard(number);
    }
    // Without the format transformers does not say which framework's the tensors are.
    save_safetensors(files.path() + "/" + name_of_shard(number), tensors, {{"format", "pt"}});
  }
  if (shards.size() > 1) {
    const nlohmann::json index = {{"metadata", {{"total_size", total}}}, {"weight_map", map}};
    write_file(files.path() + "/model.safetensors.index.json", index.dump(2) + "\n");
  }
  files.publish();
}

}  // namespace tessera::io

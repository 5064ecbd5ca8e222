#include <algorithm>
#include <array>
#include <charconv>

#include "bench/layers_bench.h"
#include "runtime/error.h"

namespace tessera::bench {
namespace {

constexpr const char* kFeedForward = "feed-forward";

/// In the order of the model; those of a feed-forward network after it.
constexpr std::array kKinds = {"embeddings", "query/key/value",
                               "attention",  "attention output",
                               kFeedForward, "intermediate",
                               "activation", "output",
                               "norms",      "head"};

/// Of a path within a block.
std::string kind_of(const std::string& op, const std::string& path) {
  if (path == "attention.qkv") return "query/key/value";
  if (path == "attention.out") return "attention output";
  if (path == "mlp.up") return "intermediate";
  if (path == "mlp.down") return "output";
  if (path == "mlp") return op == "mlp" ? kFeedForward : "activation";
  if (path.starts_with("norm")) return "norms";
  return "attention";
}

/// Embeddings, the layers by their numbers, the head.
std::pair<int, int64_t> order_of_layer(const std::string& layer) {
  if (layer == kAllParts) return {0, 0};
  if (layer == "embeddings") return {1, 0};
  if (layer == "head") return {3, 0};
  int64_t index = 0;
  std::from_chars(layer.data(), layer.data() + layer.size(), index);
  return {2, index};
}

int64_t order_of_kind(const std::string& kind) {
  return std::ranges::find(kKinds, kind) - kKinds.begin();
}

/// 0: all; 1: layers; 2: kinds; 3: kinds of a layer.
int section_of(const Part& part) {
  const bool all_layers = part.layer == kAllParts, all_kinds = part.kind == kAllParts;
  return all_layers && all_kinds ? 0 : all_kinds ? 1 : all_layers ? 2 : 3;
}

}  // namespace

std::vector<Part> parts_of(const std::string& op, const std::string& layer, bool entered) {
  const std::string blocks = "blocks.";
  Part own{.layer = entered ? "head" : "embeddings", .kind = entered ? "head" : "embeddings"};
  if (layer.starts_with(blocks)) {
    const size_t dot = std::min(layer.find('.', blocks.size()), layer.size());
    own.layer = layer.substr(blocks.size(), dot - blocks.size());
    own.kind = kind_of(op, layer.substr(std::min(dot + 1, layer.size())));
  }
  std::vector<Part> parts{{kAllParts, kAllParts}, {own.layer, kAllParts}, {kAllParts, own.kind}, own};
  if (own.kind == "intermediate" || own.kind == "activation" || own.kind == "output")
    parts.push_back({kAllParts, kFeedForward}), parts.push_back({own.layer, kFeedForward});
  return parts;
}

std::map<Part, PartTimes> part_times(const std::vector<PassTimes>& repeats) {
  check(!repeats.empty(), "bench layers: nothing was timed");
  struct Sums {
    std::vector<double> forward, backward;
  };
  std::map<Part, Sums> sums;
  for (size_t i = 0; i < repeats.size(); ++i) {
    const PassTimes& pass = repeats[i];
    // What each entry counts for follows from the forward pass; so does its backward pass.
    std::map<size_t, std::vector<Part>> parts;
    bool entered = false;
    for (const TimedOp& op : pass.forward) {
      entered = entered || std::string_view(op.layer).starts_with("blocks.");
      parts[op.entry] = parts_of(op.op, op.layer, entered);
    }
    const auto add = [&](const TimedOp& op, std::vector<double> Sums::*direction) {
      for (const Part& part : parts[op.entry]) {
        Sums& of = sums[part];
        of.forward.resize(repeats.size()), of.backward.resize(repeats.size());
        (of.*direction)[i] += op.ms;
      }
    };
    for (const TimedOp& op : pass.forward) add(op, &Sums::forward);
    for (const TimedOp& op : pass.backward) add(op, &Sums::backward);
  }
  std::map<Part, PartTimes> times;
  for (auto& [part, of] : sums)
    times[part] = {percentiles(std::move(of.forward)), percentiles(std::move(of.backward))};
  return times;
}

std::vector<Part> in_order(const std::map<Part, PartTimes>& parts) {
  std::vector<Part> order;
  for (const auto& [part, times] : parts) order.push_back(part);
  std::ranges::sort(order, {}, [](const Part& part) {
    return std::tuple(section_of(part), order_of_layer(part.layer), order_of_kind(part.kind));
  });
  // Every embedding and head is one kind: its section 3 would repeat it.
  std::erase_if(order, [](const Part& part) {
    return section_of(part) == 3 && (part.layer == "embeddings" || part.layer == "head");
  });
  return order;
}

}  // namespace tessera::bench

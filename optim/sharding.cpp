#include "optim/sharding.h"

#include <algorithm>

namespace tessera::optim {

std::vector<Bucket> buckets_of(const Packing& packing, double bucket_mb) {
  check(bucket_mb > 0, "buckets of ", bucket_mb, " MiB of gradients; expected more than 0");
  const double most = bucket_mb * (1 << 20) / double(size_of(packing.compute_dtype()));
  std::vector<Bucket> buckets;
  for (size_t at = packing.arrangement().size(); at-- > 0;) {
    const PackedRange range = packing.range(at, at + 1);
    if (buckets.empty() || double(buckets.back().end - buckets.back().begin) >= most)
      buckets.push_back({range.first, range.first + range.elements, {}, {}});
    buckets.back().begin = range.first;
    buckets.back().parameters.push_back(packing.arrangement()[at]);
  }
  return buckets;
}

void cut_buckets(std::vector<Bucket>& buckets, const Packing& packing, int parts) {
  // The squares of a norm block are one rank's, and so are the elements of a chunk.
  std::vector<int64_t> cuts, blocks;
  for (const NormBlock& block : packing.norm_blocks()) blocks.push_back(block.offset);
  std::ranges::sort(blocks);
  std::ranges::set_intersection(blocks, packing.chunk_offsets(), std::back_inserter(cuts));
  for (Bucket& bucket : buckets) {
    bucket.ends.clear();
    for (int part = 1; part < parts; ++part) {
      const int64_t ideal = bucket.begin + (bucket.end - bucket.begin) * part / parts;
      const auto next = std::ranges::lower_bound(cuts, ideal);
      int64_t end = next == cuts.end() || *next > bucket.end ? bucket.end : *next;
      if (next != cuts.begin() && *(next - 1) >= bucket.begin && ideal - *(next - 1) < end - ideal)
        end = *(next - 1);
      bucket.ends.push_back(std::max(end, bucket.ends.empty() ? bucket.begin : bucket.ends.back()));
    }
    bucket.ends.push_back(bucket.end);
  }
}

std::vector<StateShard> state_shards_of(const std::vector<Bucket>& buckets, const Packing& packing, int part,
                                        const PackedRange& range) {
  std::vector<StateShard> state_shards;
  int64_t at = 0, own_at = 0, master_at = 0;
  for (size_t b = buckets.size(); b-- > 0;) {  // buckets begin at the end of the arena
    const std::vector<int64_t>& ends = buckets[b].ends;
    const int64_t first = part == 0 ? buckets[b].begin : ends[size_t(part - 1)], last = ends[size_t(part)];
    const int64_t begin = std::max(first, range.first), end = std::min(last, range.first + range.elements);
    const int64_t first_master = packing.masters_before(first), last_master = packing.masters_before(last);
    if (begin < end) {
      const int64_t first_chunk = packing.chunk_from(begin), own_master = packing.masters_before(begin);
      state_shards.push_back(
          {.range = {begin, end - begin, first_chunk, packing.chunk_from(end) - first_chunk},
           .at = at,
           .own_at = own_at + begin - first,
           .master_at = master_at + own_master - first_master,
           .first_master = own_master,
           .masters = packing.masters_before(end) - own_master});
      at += end - begin;
    }
    own_at += last - first;
    master_at += last_master - first_master;
  }
  return state_shards;
}

std::vector<WeightShard> weight_shards_of(const std::vector<Bucket>& buckets, const Packing& packing) {
  std::vector<WeightShard> weight_shards;
  for (const Bucket& bucket : buckets)
    for (const size_t parameter : bucket.parameters) {
      const int64_t offset = packing.places()[parameter].offset, width = packing.weight_elements(parameter);
      int64_t begin = bucket.begin;
      for (size_t rank = 0; rank < bucket.ends.size(); begin = bucket.ends[rank++]) {
        const int64_t from = std::max(begin, offset), to = std::min(bucket.ends[rank], offset + width);
        if (from >= to) continue;
        const Tensor& weight = packing.parameters()[parameter].tensor;
        Layout layout = Layout::packed({to - from});
        layout.offset = weight.layout().offset + from - offset;
        weight_shards.push_back(
            {Tensor::view_of(weight.storage(), layout, weight.dtype()), from, parameter, int(rank)});
      }
    }
  return weight_shards;
}

}  // namespace tessera::optim

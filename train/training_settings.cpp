#include "train/training_settings.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "plan/ranks.h"
#include "runtime/allocator.h"
#include "runtime/error.h"
#include "runtime/text.h"
#include "train/random_purpose.h"

namespace tessera::train {

void TrainingSettings::add_states(SettingList& list) {
  const TrainingSettings usual;
  list.group("Training");
  list.add("optimizer", optimizer,
           "Optimizer; muon and galore update hidden matrices, loro factors, AdamW the rest")
      .one_of(optim::optimizer_names())
      .absent_means("adamw");
  list.add("momentum", momentum, "Momentum of sgd and muon")
      .range(0.0, 0.9999999)
      .absent_means(usual.momentum);
  list.add("optimizer_states", optimizer_states,
           "Moments of adamw and sgd; bf16: no f32 masters either, 6 of 14 bytes")
      .one_of({"f32", "bf16"})
      .absent_means(usual.optimizer_states);
  list.add("galore_rank", galore_rank, "galore: rank of the projected gradients")
      .range(int64_t{1}, kLargest)
      .absent_means(usual.galore_rank);
  list.add("galore_projection", galore_projection, "galore: side of the projection; std: the shorter one")
      .one_of({"std", "reverse_std", "right", "left", "full"})
      .absent_means(usual.galore_projection);
}

void TrainingSettings::add_to(SettingList& list) {
  list.group("Data");
  list.add("seed", seed, "Random seed of initialisation, data order and dropout")
      .range(int64_t{0}, std::numeric_limits<int64_t>::max() - 1000);
  list.group("Training");
  list.add("steps", steps, "Number of training steps").range(int64_t{1}, kLargest).may_change();
  add_states(list);
  const TrainingSettings usual;
  list.add("momentum_reset", momentum_reset,
           "Steps between resets of the moments of adamw, galore and loro to zero; 0: never")
      .range(int64_t{0}, kLargest)
      .absent_means(usual.momentum_reset);
  list.add("galore_every", galore_every, "galore: steps between decompositions of the gradients")
      .range(int64_t{1}, kLargest)
      .absent_means(usual.galore_every);
  list.add("galore_scale", galore_scale, "galore: scale of the projected update")
      .range(1e-6, 1e6)
      .absent_means(usual.galore_scale);
  list.add("galore_svd", galore_svd, "galore: exact decomposition, or a random sketch, which is faster")
      .one_of({"exact", "sketch"})
      .absent_means(usual.galore_svd);
  list.add("loro_every", loro_every, "loro: steps between exact steps on the product of the factors; 0: none")
      .range(int64_t{0}, kLargest)
      .absent_means(usual.loro_every);
  list.add("loro_lr_scale", loro_lr_scale,
           "loro: factor of the learning rate in steps on the factors; -1: rank / size")
      .range(-1.0, 1e6)
      .absent_means(usual.loro_lr_scale);
  list.add("loro_moments", loro_moments,
           "loro: reset the factors' moments after an exact step; reset_all: all moments")
      .one_of({"reset", "reset_all", "keep"})
      .absent_means(usual.loro_moments);
  list.add("loro_singular", loro_singular,
           "loro: at a singular factor, end the run (error) or step on both factors (cheap)")
      .one_of({"error", "cheap"})
      .absent_means(usual.loro_singular);
  list.add("refactor_every", refactor_every, "loro: steps between balancing the factors by an SVD; 0: never")
      .range(int64_t{0}, kLargest)
      .absent_means(usual.refactor_every);
  list.add("lr", lr, "Peak learning rate").range(1e-30, 1e30);
  list.add("warmup", warmup, "Steps of linear warm-up, at most half of --steps").range(int64_t{0}, kLargest);
  list.add("schedule", schedule, "Learning rate schedule after warm-up")
      .one_of({"constant", "linear", "cosine", "wsd", "cosine_restarts", "cosine_warmups"});
  list.add("restarts", restarts,
           "Restarts of cosine_restarts (each from --lr) and cosine_warmups (up to one cosine)")
      .range(int64_t{0}, kLargest)
      .absent_means(usual.restarts);
  list.add("restart_warmup", restart_warmup, "Steps of linear warm-up after each restart")
      .range(int64_t{0}, kLargest)
      .absent_means(usual.restart_warmup);
  list.add("weight_decay", weight_decay,
           "Decoupled weight decay (not of norms and biases, nor embeddings of gpt and llama)")
      .range(0.0, 1e6);
  list.add("max_grad_norm", max_grad_norm, "Maximum gradient norm; 0: no clipping")
      .formerly("--clip-norm")
      .formerly("--clip")
      .range(0.0, 1e30);
  list.add_hidden("f32_math", f32_math).absent_means(name_of(F32Math::ieee));
}

Setting& TrainingSettings::add_ranks(SettingList& list) {
  list.add("order", order,
           "Order of sums: global (same bits on any number of ranks; default on several), world")
      .one_of({"world", "global"})
      .shown_as("")
      .absent_means("world");
  return list
      .add("accumulate", accumulate, "Micro-batches per step, on all ranks together; default: one per rank")
      .range(int64_t{1}, int64_t{1} << 20)
      .shown_as("");
}

void TrainingSettings::set_ranks(int ranks, const Given& given, bool resumed) {
  if (!resumed && !given.contains("--accumulate")) accumulate = std::max<int64_t>(accumulate, ranks);
  if (!resumed && !given.contains("--order")) order = ranks > 1 ? "global" : "world";
  const int64_t each = accumulate / ranks;
  check(accumulate % ranks == 0, "train: --accumulate ", accumulate, " micro-batches per step on ", ranks,
        " ranks; expected a multiple of ", ranks, ", such as ", std::max<int64_t>(1, each) * ranks,
        resumed ? "; continue the run on a number of ranks that divides it" : "");
  check(order == "world" || ranks == 1 || (each & (each - 1)) == 0, "train: --accumulate ", accumulate,
        " on ", ranks, " ranks is ", each,
        " micro-batches each; --order global needs a power of two, such as ", 2 * ranks,
        " in all (or --order world, whose bits are those of one number of ranks)");
  check(missing_grad == "zero" || (ranks == 1 && order == "world"), "train: --missing-grad ", missing_grad,
        ranks > 1 ? fmt::format(" on {} ranks", ranks) : " with --order global",
        ": a rank knows only which gradients arrived in its own last pass; use --missing-grad zero, or one "
        "rank with --order world");
}

void TrainingSettings::check_zero(int64_t zero, int ranks) const {
  if (zero == 0) return;
  check(optimizer == "adamw" || optimizer == "sgd", "train: --zero ", zero, " with --optimizer ", optimizer,
        ", whose updates need whole states, of which each rank would have a part; use adamw or sgd, or "
        "--zero 0");
  check(
      momentum_reset == 0 || optimizer != "adamw", "train: --zero ", zero, " with --momentum-reset ",
      momentum_reset,
      ": resets work on the moments of whole tensors, of which each rank would have a part; use --zero 0, or "
      "--momentum-reset 0");
  check(zero < 2 || order == "world" || accumulate == ranks || std::has_single_bit(unsigned(ranks)),
        "train: --zero 2 on ", ranks, " ranks with ", accumulate / ranks,
        " micro-batches each: its sums begin with those over the ranks, which --order global needs to be a "
        "power of two; use --zero 1, or --order world");
}

std::string TrainingSettings::step_line() const {
  if (accumulate == 1) return {};
  return fmt::format("  step      {} micro-batches, sums in the {} order\n", accumulate, order);
}

std::string TrainingSettings::memory_line(const plan::Memory& one, const plan::ArenaSizes& sizes,
                                          Device device, int ranks, int64_t each) const {
  const plan::RankOptions options{.ranks = ranks,
                                  .zero = sharding.parts == 1  ? 0
                                          : sharding.gradients ? 2
                                                               : 1,
                                  .micro_batches = accumulate * each / ranks,
                                  .bucket_mb = sharding.bucket_mb,
                                  .global_order = order == "global",
                                  .copies = device.is_cuda(),
                                  .rate = 1};  // of times, which are not asked for
  return fmt::format("  memory    {} planned a step{}\n",
                     format_bytes(size_t(plan::plan_ranks(one, 1, sizes, options).memory.total())),
                     ranks > 1 ? " on each rank" : "");
}

optim::Schedule TrainingSettings::make_schedule() const {
  return optim::Schedule({.kind = optim::parse_schedule(schedule),
                          .lr = lr,
                          .steps = steps,
                          .warmup = std::min(warmup, steps / 2),
                          .min_lr_ratio = min_lr_ratio,
                          .restarts = restarts,
                          .restart_warmup = restart_warmup});
}

optim::Optimizer TrainingSettings::make_optimizer(std::vector<nn::NamedParameter> parameters,
                                                  DType activations, double beta2,
                                                  std::vector<optim::Group> groups,
                                                  optim::ModelStructure structure) const {
  const MemoryTag tag("optimizer");
  return optim::make_optimizer(optimizer, std::move(parameters),
                               {.lr = lr,
                                .weight_decay = weight_decay,
                                .max_grad_norm = max_grad_norm,
                                .momentum = momentum,
                                .beta2 = beta2,
                                .momentum_reset = momentum_reset,
                                .structure = std::move(structure),
                                .galore = {.rank = galore_rank,
                                           .every = galore_every,
                                           .scale = galore_scale,
                                           .projection = optim::parse_galore_projection(galore_projection),
                                           .svd = optim::parse_galore_svd(galore_svd)},
                                .loro = {.every = loro_every,
                                         .lr_scale = loro_lr_scale,
                                         .moments = optim::parse_loro_moments(loro_moments),
                                         .refactor_every = refactor_every,
                                         .singular = optim::parse_singular_factor(loro_singular)},
                                .groups = std::move(groups),
                                .loss_scale = optim::default_loss_scale(activations),
                                .missing = optim::parse_missing_grad(missing_grad),
                                .states = parse_dtype(optimizer_states),
                                .rounding_seed = seed_for(RandomPurpose::rounding, seed),
                                .sharding = sharding});
}

void TrainingSettings::check_optimizer_flags(const Given& given) const {
  const auto only = [&](std::initializer_list<const char*> flags, bool has_effect, const char* of) {
    check_is_for(given, flags, has_effect, std::string("--optimizer ") + of, "--optimizer", optimizer);
  };
  only({"--galore-rank", "--galore-every", "--galore-scale", "--galore-projection", "--galore-svd"},
       optimizer == "galore", "galore");
  only({"--loro-every", "--loro-lr-scale", "--loro-moments", "--loro-singular", "--refactor-every"},
       optimizer == "loro", "loro");
  only({"--momentum"}, optimizer == "sgd" || optimizer == "muon", "sgd and muon");
  only({"--beta2"}, optimizer != "sgd", "adamw, muon, galore and loro");
  check(schedule != "constant" || !given.contains("--min-lr-ratio"),
        "--min-lr-ratio says how far the learning rate falls, and --schedule is constant; leave it out");
  only({"--momentum-reset"}, optimizer == "adamw" || optimizer == "galore" || optimizer == "loro",
       "adamw, galore and loro");
}

void TrainingSettings::check_training(const char* family, DType dtype) const {
  check(f32_math == F32Math::ieee || dtype == DType::f32, family, ": f32_math is ", name_of(f32_math),
        ", but the model is ", dtype, "; only f32 has it");
  check(data_order >= 1 && data_order <= datasets::kDataOrder, family, ": \"data_order\" is ", data_order,
        "; this build knows 1 to ", datasets::kDataOrder);
  // The range of the setting cannot say that nothing lies between -1 and 0.
  check(loro_lr_scale == -1 || loro_lr_scale > 0, family, ": loro_lr_scale (--loro-lr-scale) is ",
        loro_lr_scale, "; expected more than 0, or -1: rank / size");
  check(loro_moments != "reset_all" || momentum_reset == 0, family,
        ": --loro-moments reset_all with --momentum-reset ", momentum_reset,
        "; both say when all moments are reset, so leave one of them out");
  check(optimizer_states == "f32" || optimizer == "adamw" || optimizer == "sgd", family,
        ": optimizer_states (--optimizer-states) is ", optimizer_states, ", and the optimizer is ", optimizer,
        ", which works on f32 states; take adamw or sgd, or f32 states");
  check(optimizer_states == "f32" || dtype != DType::f16, family,
        ": optimizer_states (--optimizer-states) is bf16, which f16 weights cannot have; take --precision "
        "bf16, or f32 states");
  make_schedule();
}

}  // namespace tessera::train

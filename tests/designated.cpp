#include "bench/bert_bench.h"
#include "bench/collective_bench.h"
#include "bench/compare.h"
#include "bench/decode_bench.h"
#include "bench/ffn_bench.h"
#include "bench/layers_bench.h"
#include "bench/op_bench.h"
#include "bench/optim_bench.h"
#include "bench/step_bench.h"
#include "bench/sweep.h"
#include "sparsity/gradient_tasks.h"
#include "tessera.h"
#include "train/form_settings.h"
#include "train/glue_run.h"
#include "train/language_job.h"
#include "train/run.h"
#include "train/slice_settings.h"
#include "train/sparse24_settings.h"

/// Structs that a program makes with the members that it needs, each by name: GCC's -Wextra warns if another
/// member has no default. The build treats that as an error here.

namespace tessera {

void use(const auto&...) {}

void make_all() {
  const Device device = Device::cpu();
  use(comm::RendezvousOptions{.rank = 1, .size = 2, .port = 29500}, comm::TcpOptions{.grace = 1},
      dist::Place{.rank = 1, .size = 2}, dist::LaunchOptions{.ranks = 2, .command = {"a"}});
  use(nn::Sparse24{.active = false}, nn::AttentionPass{.sequences = {}, .fills_cache = true},
      nn::PrefixBlockOptions{.heads = 4}, io::BpeTraining{.vocab_size = 300},
      pretrained::Gates{.gates = {}, .column_norms = true}, datasets::TokenWindowsOptions{.length = 8});
  use(bench::BertBenchOptions{.device = device}, bench::CollectiveOptions{.least = 8},
      bench::CompareOptions{.any_gpu = true}, bench::DecodeBenchOptions{.device = device},
      bench::FfnBenchOptions{.device = device}, bench::LayersBenchOptions{.device = device},
      bench::OpBenchOptions{.device = device}, bench::OptimBenchOptions{.device = device},
      bench::StepBenchOptions{.device = device}, bench::LanguageStepOptions{.device = device},
      bench::SweepOptions{.device = device});
  use(train::SliceSettings{.mode = "first"}, train::FormSettings{.rank = 4},
      train::Sparse24Settings{.method = "naive"}, train::LanguageWatch{.eval_tokens = 8},
      train::RunRequest{.device = device}, train::GlueStart{.size = "mini"},
      sparsity::GradientTasks{.model = "a", .batch = 2});
}

}  // namespace tessera

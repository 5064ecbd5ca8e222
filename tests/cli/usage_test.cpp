#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "tests/cli/command.h"

// Command lines that are wrong in themselves: exit code 2 and one line that names what is wrong, at once,
// with no file made and none opened.

namespace tessera::cli::test {
namespace {

struct BadLine {
  const char* line;
  const char* says;  // parts of the message, separated by |
};

constexpr BadLine kBadLines[] = {
    // subcommands
    {"", "a subcommand is needed|doctor|train|--help"},
    {"trian tnp", "unknown subcommand \"trian\"|did you mean train?"},
    {"train", "a subcommand is needed|tnp"},
    {"--device cpu train tnp", "--device comes too early|after the subcommand|tnp"},
    {"train --steps 3 tnp", "--steps comes too early|tnp"},
    {"--json doctor", "--json comes too early|doctor"},
    {"train -- tnp", "tnp|follow \"--\""},
    {"op -- relu --in a --out b", "unexpected argument \"--\""},
    {"train tpn", "unknown subcommand \"tpn\"|did you mean tnp?"},
    {"train resnet --steps 3", "unknown subcommand \"resnet\"|tnp"},
    {"bench", "a subcommand is needed|compare"},
    {"bench compair a b", "unknown subcommand \"compair\"|did you mean compare?"},
    {"bench step", "a subcommand is needed|tnp"},
    {"plan", "a subcommand is needed|tnp"},
    {"convert", "FROM"},
    {"convert a", "TO"},
    {"convert a b c", "c"},
    {"convert a b --dtype i64", "--dtype|i64"},
    {"convert a b --shard-mb 0", "--shard-mb|0 not in range"},
    {"convert a b --shard-mb 1.5", "--shard-mb|1.5 is not a whole number"},
    {"eval", "a subcommand is needed|tnp"},
    {"train tnp extra", "unexpected argument \"extra\"|tessera train tnp --help"},
    {"eval ppl --model m --text t --json e.json",
     "unexpected argument \"e.json\"; here --json takes no file"},
    {"doctor now", "unexpected argument \"now\""},
    {"op relu tanh --in a --out b", "unexpected argument \"tanh\""},
    // DropBP
    {"train bert --task sst2 --data d --scratch --dropbp 1", "--dropbp|0 to below 1"},
    {"train bert --task sst2 --data d --scratch --dropbp=-0.1", "--dropbp|0 to below 1"},
    {"train bert --task sst2 --data d --scratch --dropbp nan", "--dropbp"},
    {"train bert --task sst2 --data d --scratch --dropbp half", "--dropbp"},
    {"train bert --task sst2 --data d --scratch --dropbp 0.95 --dropbp-rates sensitivity", "at most 0.9"},
    {"train bert --task sst2 --data d --scratch --dropbp 0.5 --dropbp-rates best", "--dropbp-rates|best"},
    {"train bert --task sst2 --data d --scratch --dropbp-rates sensitivity", "add --dropbp P"},
    {"train bert --task mlm --text t --scratch --train head", "--train|trains every parameter"},
    {"train bert --task mlm --text t --scratch --dropbp 0.5", "--dropbp|fine-tuning only"},
    {"bench step bert --dropbp 2", "--dropbp|0 to below 1"},
    {"bench step bert --dropbp 0.5 --graph on", "--graph|--graph off"},
    {"bench step bert --slice first --rows 5 --probe-gradient 5", "--probe-gradient|train bert"},
    {"train bert --task sst2 --data d --scratch --probe-gradient 5", "--probe-gradient needs --slice"},
    {"train bert --task sst2 --data d --scratch --slice first --rows 5 --probe-gradient=-1",
     "--probe-gradient"},
    // slices
    {"train bert --task sst2 --data d --scratch --slice best --rows 5", "--slice|best"},
    {"train bert --task sst2 --data d --scratch --slice first", "--slice|--rows N or --rows 10%"},
    {"train bert --task sst2 --data d --scratch --slice first --rows=-1", "n = -1|1 or more rows"},
    {"train bert --task sst2 --data d --scratch --slice first --rows 0", "n = 0|1 or more rows"},
    {"train bert --task sst2 --data d --scratch --slice first --rows 150%", "share of 1.5|at most 1"},
    {"train bert --task sst2 --data d --scratch --slice first --rows 0%", "share of 0|above 0"},
    {"train bert --task sst2 --data d --scratch --slice first --rows ten", "--rows|\"ten\"|such as 50|10%"},
    {"train bert --task sst2 --data d --scratch --slice first --rows 5x", "--rows|\"5x\""},
    {"train bert --task sst2 --data d --scratch --slice first --rows nan%", "share of nan"},
    {"train bert --task sst2 --data d --scratch --rows 5", "--rows needs --slice|add --slice MODE"},
    {"train bert --task sst2 --data d --scratch --weight-grad none", "--weight-grad needs --slice"},
    {"train bert --task sst2 --data d --scratch --slice-layers all", "--slice-layers needs --slice"},
    {"train bert --task sst2 --data d --scratch --slice first --rows 5 --weight-grad half",
     "--weight-grad|half"},
    {"train bert --task sst2 --data d --scratch --slice threshold", "needs --slice-threshold NORM"},
    {"train bert --task sst2 --data d --scratch --slice threshold --slice-threshold -1", "--slice-threshold"},
    {"train bert --task sst2 --data d --scratch --slice threshold --slice-threshold 1 --rows 5",
     "the threshold decides|leave --rows out"},
    {"train bert --task sst2 --data d --scratch --slice first --rows 5 --slice-threshold 1",
     "--slice-threshold|leave it out"},
    {"train bert --task sst2 --data d --scratch --slise first", "unknown flag --slise|did you mean --slice?"},
    {"bench step bert --slice first", "--slice|--rows N or --rows 10%"},
    {"bench step bert --rows 5", "--rows needs --slice"},
    {"bench step bert --slice importance --rows auto", "bench step bert|--rows auto|train bert"},
    {"bench layers bert --slice importance --rows auto", "bench layers|--rows auto|train bert"},
    {"train bert --task sst2 --data d --scratch --rows auto", "--rows needs --slice|add --slice MODE"},
    {"train bert --task sst2 --data d --scratch --slice random --rows auto", "--rows|--slice importance"},
    {"train bert --task sst2 --data d --scratch --slice top_norm --rows auto", "--rows|--slice importance"},
    {"train bert --task sst2 --data d --scratch --slice importance --rows automatic",
     "\"automatic\"|or auto"},
    {"train bert --task sst2 --data d --scratch --slice importance --rows auto --weight-grad none",
     "--weight-grad none|slice or full"},
    {"train bert --task sst2 --data d --scratch --slice importance --rows auto --variance 0", "--variance"},
    {"train bert --task sst2 --data d --scratch --slice importance --rows auto --variance nan", "--variance"},
    {"train bert --task sst2 --data d --scratch --slice importance --rows auto --estimate-every 0",
     "--estimate-every"},
    {"train bert --task sst2 --data d --scratch --slice importance --rows 10% --variance 0.1",
     "--variance needs --rows auto"},
    {"train bert --task sst2 --data d --scratch --slice importance --rows 10% --estimate-every 5",
     "--estimate-every needs --rows auto"},
    {"train bert --task sst2 --data d --scratch --slice importance --rows auto --dropbp 0.5",
     "--rows auto|--dropbp|leave one of them out"},
    {"train bert --task mlm --text t --scratch --variance 0.1", "--variance|fine-tuning only"},
    // unknown flags
    {"--vresion", "unknown flag --vresion|did you mean --version?"},
    {"train tnp --stpes 3", "unknown flag --stpes|did you mean --steps?"},
    {"train tnp --steps3 5", "unknown flag --steps3|did you mean --steps?"},
    {"train tnp --batch_size=3", "unknown flag --batch_size|did you mean --batch-size?"},
    {"train tnp -steps 3", "unknown flag -steps|did you mean --steps?"},
    {"train tnp --absolutely-not 3", "unknown flag --absolutely-not"},
    {"train tnp --STEPS 3", "unknown flag --STEPS"},
    {"doctor --jsn", "unknown flag --jsn|did you mean --json?"},
    {"op --lsit", "unknown flag --lsit|did you mean --list?"},
    {"op relu --in a --out b --gard", "unknown flag --gard|did you mean --grad?"},
    {"bench op linear --dtpye f32", "unknown flag --dtpye|did you mean --dtype?"},
    {"bench host --jsno x", "unknown flag --jsno|did you mean --json?"},
    {"bench step tnp --grpah on", "unknown flag --grpah|did you mean --graph?"},
    {"bench compare a b --hmtl c", "unknown flag --hmtl|did you mean --html?"},
    {"plan tnp --d-modle 8", "unknown flag --d-modle|did you mean --d-model?"},
    {"plan tnp --steps 8", "unknown flag --steps"},
    {"eval tnp runs/a --taks 3", "unknown flag --taks|did you mean --tasks?"},
    // repeated, without a value, with one too many
    {"train tnp --steps 1 --steps 2", "--steps|received 2"},
    {"train tnp --lr 1 --lr 1", "--lr|received 2"},
    {"train tnp --pre-norm --pre-norm", "--pre-norm|received 2"},
    {"op relu --in a --in b --out c", "--in: given more than once; received 2"},
    {"op --list --list", "--list|received 2"},
    {"bench op linear --mode fwd --mode bwd", "--mode|received 2"},
    {"train tnp --steps", "--steps|missing"},
    {"train tnp --lr --steps 5", "--lr|--steps is not a number"},
    {"train tnp --lr=", "--lr|missing"},
    {"op relu --out b --in", "--in|missing"},
    {"op relu --in a --out --grad", "--out|a value is missing|--grad is a flag"},
    {"train tnp --name --quiet --steps 5", "--name|a value is missing|--quiet is a flag"},
    {"generate --model m --prompt a --json --max-tokens 4",
     "--json|a value is missing|--max-tokens is a flag"},
    {"data glue --out -h", "--out|a value is missing|-h is a flag"},
    {"eval tnp", "run|required"},
    {"bench compare a", "B|required"},
    {"bench op", "name|required"},
    {"train tnp --pre-norm=3", "pre-norm"},
    {"train tnp --quiet=banana", "quiet"},
    // empty, as a shell's variable that was never set
    {"convert a ''", "TO|value is empty"},
    {"convert '' b", "FROM|value is empty"},
    {"train tnp --resume ''", "--resume|value is empty"},
    {"train tnp --name ''", "--name|value is empty"},
    {"op relu --in a --out ''", "--out|value is empty"},
    {"bench copy --json ''", "--json|value is empty"},
    {"data glue --out ''", "--out|value is empty"},
    {"report r --out ''", "--out|value is empty"},
    // numbers
    {"train tnp --lr 1e-3x", "--lr|1e-3x is not a number"},
    {"train tnp --lr nan", "--lr|nan is not finite"},
    {"train tnp --lr inf", "--lr|inf is not finite"},
    {"train tnp --lr=-inf", "--lr|-inf is not finite"},
    {"train tnp --lr 0", "--lr|0 not in range 1e-30 to 1e+30"},
    {"train tnp --lr=-1e-3", "--lr|-1e-3 not in range"},
    {"train tnp --lr 1e400", "--lr|1e400"},
    {"train tnp --lr 0x1p-3", "--lr|0x1p-3 is not a number"},
    {"train tnp --lr fast", "--lr|fast is not a number"},
    {"train tnp --lr 1,5", "--lr|1,5 is not a number"},
    {"train tnp --steps 0", "--steps|0 not in range"},
    {"train tnp --steps -5", "--steps|-5 not in range"},
    {"train tnp --steps 10.5", "--steps|10.5 is not a whole number"},
    {"train tnp --steps 1_0", "--steps: 1_0 is not a whole number in decimal digits (see"},
    {"train tnp --steps 1e3", "--steps|1e3 is not a whole number"},
    {"train tnp --steps 10x", "--steps|10x is not a whole number"},
    {"train tnp --steps 010", "--steps|010 is not a whole number"},
    {"train tnp --steps 0x10", "--steps|0x10 is not a whole number"},
    {"train tnp --steps 99999999999999999999", "--steps|too large"},
    {"train tnp --seed -1", "--seed|-1 not in range"},
    {"train tnp --seed 18446744073709551616", "--seed|too large"},
    {"train tnp --seed 1.5", "--seed|1.5 is not a whole number"},
    {"train tnp --batch-size 0", "--batch-size|0 not in range"},
    {"train tnp --m -3", "--m|-3 not in range"},
    {"train tnp --n 2000000000", "--n|2000000000 not in range"},
    {"train tnp --warmup -1", "--warmup|-1 not in range"},
    {"train tnp --weight-decay=-0.1", "--weight-decay|-0.1 not in range"},
    {"train tnp --clip-norm nan", "--clip-norm|nan is not finite"},
    {"train tnp --log-every 0", "--log-every|0 not in range"},
    {"train tnp --keep 0", "--keep|0 not in range"},
    {"train tnp --loss-scale 1000 --precision f16", "--loss-scale|1000 is not a power of two"},
    {"train tnp --loss-scale 0 --precision f16", "--loss-scale|0 not in range"},
    {"train tnp --loss-scale 1024 --precision bf16",
     "--loss-scale is for --precision f16|the run is in bf16"},
    {"train tnp --loss-scale-interval 0 --precision f16", "--loss-scale-interval|0 not in range"},
    {"train tnp --save-every -1", "--save-every|-1 not in range"},
    {"train tnp --eval-tasks 3000000000", "--eval-tasks|not in range"},
    {"train tnp --d-model 1000000000 --n-head 8", "d_model|1000000000|at most"},
    {"plan tnp --memory 4GiB", "--memory|4GiB is not a number"},
    {"plan tnp --memory 1e300", "--memory|1e300 not in range"},
    {"plan tnp --memory nan", "--memory|nan is not finite"},
    {"report", "runs|required"},
    {"report r --last 0", "--last|0 not in range"},
    {"train gpt --text a --ema 1", "--ema|1 not in range 0 to 0.9999999"},
    {"eval tnp r --tasks 0", "--eval-tasks|0 not in range"},
    {"eval tnp r --most-gap nan", "--most-gap|nan is not finite"},
    {"bench op linear --seconds 0", "--seconds|0 not in range"},
    {"bench op linear --seconds inf", "--seconds|inf is not finite"},
    // choices
    {"train tnp --prior rbg", "--prior|rbg not in|rbf"},
    {"train tnp --schedule cosin", "--schedule|cosin not in|cosine"},
    {"train tnp --precision f64", "--precision|f64 not in|bf16"},
    {"train tnp --graph maybe", "--graph|maybe not in|on,off"},
    {"train tnp --device gpu", "--device|\"gpu\"|cuda:<index>"},
    {"train tnp --device cuda:x", "--device|\"cuda:x\""},
    {"train tnp --device cuda:-1", "--device|\"cuda:-1\""},
    {"train tnp --device cpu:0", "--device|\"cpu:0\""},
    {"op relu --in a --out b --device CUDA", "--device|\"CUDA\""},
    {"bench step tnp --graph maybe", "--graph|\"maybe\"|on or off"},
    {"bench step tnp --checkpoint on,", "--checkpoint|empty part"},
    {"bench step tnp --precision bf17", "--precision|bf17"},
    // flags that contradict each other
    {"train tnp --resume r --lr 1", "--resume|--lr cannot change it"},
    {"train tnp --resume r --seed 1", "--resume|--seed cannot change it"},
    {"train tnp --resume r --d-model 8", "--resume|--d-model cannot change it"},
    {"train tnp --resume r --batch-size 8", "--resume|--batch-size cannot change it"},
    {"train tnp --resume r --name n", "--resume|--name"},
    {"train tnp --resume r --runs n", "--resume|--runs"},
    {"train tnp --resume r --demo", "--resume|--demo"},
    {"train tnp --resume r --find-max-batch", "--resume|--find-max-batch"},
    {"train tnp --demo --lr 1", "--demo|--lr cannot change it"},
    {"train tnp --demo --d-model 8", "--demo|--d-model cannot change it"},
    {"train tnp --demo --find-max-batch", "--demo|--find-max-batch"},
    {"train tnp --prior rbf --features 3", "rbf|one-dimensional|3"},
    {"train tnp --prior periodic --features 10", "periodic|one-dimensional|10"},
    {"train tnp --d-model 10 --n-head 3", "d_model 10|heads 3"},
    {"plan tnp --d-model 10 --n-head 3", "d_model 10|heads 3"},
    {"bench step tnp --d-model 10 --n-head 3", "d_model 10|heads 3"},
    {"train tnp --name ../n", "--name|../n|plain name"},
    {"train tnp --name a/b", "--name|a/b|plain name"},
    {"train tnp --name ..", "--name|..|plain name"},
    {"op --json", "--json requires --list"},
    {"op relu --list", "excludes --list"},
    {"op --list --grad", "--list|--grad"},
    {"op --list --in a", "--list|--in"},
    // language models
    {"train gptt", "unknown subcommand \"gptt\"|did you mean gpt?"},
    {"train gpt", "there is no training data|--text FILE|--data DIR"},
    {"train llama", "there is no training data|--text FILE|--data DIR"},
    {"train gpt --txet a", "unknown flag --txet|did you mean --text?"},
    {"train gpt --text", "--text|missing"},
    {"train gpt --text a --data d", "--data|--text|give one of them"},
    {"train gpt --data d --vocab-size 300", "--vocab-size and --data"},
    {"train gpt --data d --tokenizer-kind bpe", "--tokenizer-kind and --data"},
    {"train gpt --data d --validation 0.2", "--validation and --data"},
    {"train gpt --data d --piece 100", "--piece and --data"},
    {"train llama --text a --piece 1.5", "--piece|1.5 is not a whole number"},
    {"train llama --text a --piece -1", "--piece|-1 not in range"},
    {"train gpt --text a --tokenizer t --vocab-size 300", "--vocab-size and --tokenizer"},
    {"train gpt --text a --vocab-size 300", "--vocab-size|only for|character"},
    {"train gpt --text a --tokenizer-kind word", "--tokenizer-kind|word not in|bpe"},
    {"train gpt --text a --model m --layers 3", "--model and --layers|the model directory defines"},
    {"train llama --text a --model m --kv-heads 3", "--model and --kv-heads"},
    {"train llama --text a --model m --type qwen2", "--model and --type|the model directory defines"},
    {"train llama --text a --type gemma", "--type|gemma not in|mistral"},
    {"train gpt --text a --type qwen2", "unknown flag --type"},
    {"plan llama --heads 4 --head-dim 5", "heads of 5|even"},
    {"train gpt --text a --kv-heads 2", "unknown flag --kv-heads"},
    {"train llama --text a --dropout 1", "--dropout|1 not in range"},
    {"train llama --text a --model m --dropout 0.1", "--model and --dropout|the model directory defines"},
    {"train gpt --text a --size huge", "--size|huge not in|demo,small"},
    {"train llama --text a --size small", "--size|small not in|demo,60m"},
    {"train gpt --text a --steps 3 --epochs 2", "--steps|--epochs|give one of them"},
    {"train gpt --text a --steps 3 --minutes 2", "--steps|--minutes|give one of them"},
    {"train gpt --text a --epochs nan", "--epochs|nan is not finite"},
    {"train gpt --text a --minutes -1", "--minutes|-1 not in range"},
    {"train gpt --text a --heads 3", "d_model 128|heads 3"},
    {"train llama --text a --d-model 30 --heads 10", "heads of 3|even"},
    {"train llama --text a --heads 4 --kv-heads 3", "4 heads|3 kv_heads"},
    {"train gpt --text a --length 0", "--length|0 not in range"},
    {"train gpt --text a --length 1000000 --batch 100000", "100000 sequences of 1000000|at most"},
    {"train gpt --text a --batch 1 --batch-size 2", "--batch|received 2"},
    {"train gpt --text a --accumulate 0", "--accumulate|0 not in range"},
    {"train gpt --text a --dropout 1", "--dropout|1 not in range"},
    {"train gpt --text a --sample-tokens 0 --sample-prompt x", "--sample-prompt|--sample-tokens 0"},
    {"train gpt --text a --sample-tokens 0 --sample-every 5", "--sample-every|--sample-tokens 0"},
    {"train gpt --text a --epochs 0", "--epochs|0 not in range"},
    {"train llama --text a --minutes 0", "--minutes|0 not in range"},
    {"train gpt --text a --validation 0.95", "--validation|0.95 not in range"},
    {"train gpt --text a --final-lr 2", "--final-lr|2 not in range"},
    {"train gpt --text a --precision f64", "--precision|f64 not in|bf16"},
    {"train gpt --text a --ngram 17", "--ngram|17 not in range"},
    {"train gpt --text a --ema 1", "--ema|1 not in range"},
    {"train gpt --text a --ema nan", "--ema|nan is not finite"},
    {"train gpt --text a --eval-stride 0", "--eval-stride|0 not in range"},
    {"train gpt --text a --export worst", "--export|worst not in|best"},
    {"train gpt --text a --patience -1", "--patience|-1"},
    {"train gpt --text a --patience 3", "--patience: without --eval-every"},
    {"train gpt --resume r --ema 0.9", "--resume|--ema cannot change it"},
    {"train gpt --text a --d-model 4194304 --heads 4", "d_model|4194304|at most"},
    {"train gpt --resume r --text a", "--resume|--text cannot change it"},
    {"train gpt --resume r --lr 1", "--resume|--lr cannot change it"},
    {"train gpt --resume r --minutes 1", "--resume|--minutes cannot change it"},
    {"train gpt --resume r --model m", "--resume|--model cannot change it"},
    {"train llama --resume r --name n", "--resume|--name"},
    {"train gpt --text a --name a/b", "--name|a/b|plain name"},
    {"plan gpt --d-modle 8", "unknown flag --d-modle|did you mean --d-model?"},
    {"plan gpt --text a", "unknown flag --text"},
    {"plan llama --size small", "--size|small not in|130m"},
    {"plan gpt --heads 7", "d_model 768|heads 7"},
    {"bench step gpt --vocab-size 0", "--vocab-size|0 not in range"},
    {"bench step gpt --precision bf17", "--precision|bf17"},
    {"bench step llama --checkpoint on", "unknown flag --checkpoint"},
    // fine-tuning
    {"train bert", "--task is required"},
    {"train bert --task sst2", "--data is required"},
    {"train bert --task sst2 --data d", "--model FOLDER is required, or --scratch"},
    {"train bert --task sst2 --data d --model m --scratch", "--model|--scratch|give one"},
    {"train bert --task sst3 --data d --scratch", "\"sst3\"|did you mean sst2?"},
    {"train bert --task sst2 --data d --scratch --pad --packed", "--pad and --packed"},
    {"train bert --task sst2 --data d --model m --layers 2", "--layers is for --scratch"},
    {"train bert --task sst2 --data d --model m --size mini", "--size is for --scratch"},
    {"train bert --task sst2 --data d --scratch --d-model 10 --n-head 3", "d_model 10|heads 3"},
    {"train bert --task sst2 --data d --scratch --epochs 2 --steps 9", "--epochs|--steps"},
    {"train bert --task sst2 --data d --scratch --epochs 0", "--epochs|0 not in range"},
    {"train bert --task sst2 --data d --scratch --seeds 0", "--seeds|0 not in range"},
    {"train bert --task sst2 --data d --scratch --lr nan", "--lr|nan is not finite"},
    {"train bert --task sst2 --data d --scratch --dropout 1", "--dropout|1 not in range"},
    {"train bert --task sst2 --data d --scratch --vocab-size 260", "--vocab-size|260 not in range"},
    {"train bert --task sst2 --data d --scratch --precision f8", "--precision|f8 not in"},
    {"train bert --taks sst2", "unknown flag --taks|did you mean --task?"},
    {"train bert --resume r --lr 1", "--resume|--lr cannot change it"},
    {"train bert --resume r --task sst2", "--resume|--task cannot change it"},
    {"train bert --resume r --name n", "--resume|--name"},
    {"bench step bert --shape 32", "--shape|\"32\"|TEXTSxTOKENS"},
    {"bench step bert --shape 2x513", "--shape|\"2x513\"|512"},
    {"bench step bert --dropout 1", "--dropout|\"1\"|below 1"},
    {"bench step bert --d-model 10 --n-head 3", "d_model 10"},
    // operators and attributes
    {"op", "name an operator|--list"},
    {"op rleu --in a --out b", "\"rleu\"|did you mean relu?"},
    {"op convolution_of_everything --in a --out b", "\"convolution_of_everything\"|op --list"},
    {"op relu", "--in and --out are needed"},
    {"op relu --in a", "--in and --out are needed"},
    {"op relu --out b", "--in and --out are needed"},
    {"op select --in a --out b --set mode=largest", "select|\"mode\" is \"largest\"|top_norm"},
    {"op select --in a --out b --set threshold=nan", "select|\"threshold\" must be finite"},
    {"op select --in a --out b --set n=1.5", "select|\"n\" is an integer"},
    {"op select --in a --out b --grad", "select|no gradient"},
    {"op select --in a --out b --variant blok --device cuda", "--variant \"blok\"|select has block, grid"},
    {"op layernorm --in a --out b --set epz=1", "layernorm|\"epz\"|did you mean eps?"},
    {"op layernorm --in a --out b --set eps=small", "eps|a number|small"},
    {"op layernorm --in a --out b --set eps=nan", "eps|finite"},
    {"op layernorm --in a --out b --set eps=1e-5x", "eps|a number|1e-5x"},
    {"op layernorm --in a --out b --set eps", "\"eps\"|key=value"},
    {"op layernorm --in a --out b --set =1", "layernorm|\"\""},
    {"op layernorm --in a --out b --set eps=1 --set eps=2", "eps|given twice"},
    {"op relu --in a --out b --set x=1", "relu|\"x\" does not exist"},
    {"op attention --in a --out b --set causal=yes", "causal|true or false|yes"},
    {"op gmm_nll --in a --out b --set reduction=avg", "reduction|\"avg\"|mean, sum, none"},
    {"op sum --in a --out b --set dim=1.5", "dim|an integer|1.5"},
    {"op sum --in a --out b --set dim=99999999999999999999", "dim|an integer"},
    {"op relu --in a --out b --variant wgmma", "--variant \"wgmma\"|relu has no variants"},
    {"op attention --in a --out b --variant wgma", "--variant \"wgma\"|attention has mma, wgmma"},
    {"op attention --in a --out b --variant mma",
     "--variant mma|the CPU has no kernel variants|--device cuda"},
    {"op linear_swiglu --in a --out b --grad", "linear_swiglu|has no gradient|without --grad"},
    // benchmarks
    {"bench sweep lineer", "\"lineer\"|did you mean linear?"},
    {"bench sweep cast", "cast declares no random problems"},
    {"bench sweep relu --count 0", "--count|0 not in range"},
    {"bench sweep relu --mode back", "--mode|\"back\"|fwd or bwd"},
    {"bench sweep relu --dtype f99", "--dtype|f99"},
    {"bench optim --parameters 0", "--parameters|0 not in range"},
    {"bench compare a b --peer (", "--peer|\"(\"|regular expression"},
    {"bench optim --clip maybe", "--clip|\"maybe\"|on or off"},
    {"bench op lineer", "\"lineer\"|did you mean linear?"},
    {"bench op linear --set q=1", "linear|\"q\" does not exist"},
    {"bench op linear --shape T", "--shape|\"T\"|NAME=SIZE"},
    {"bench op linear --shape T=x", "--shape|\"T=x\"|NAME=SIZE"},
    {"bench op linear --shape T=-1", "--shape|\"T=-1\""},
    {"bench op linear --shape T=4x", "--shape|\"T=4x\""},
    {"bench op linear --shape =4", "--shape|\"=4\""},
    {"bench op linear --shape T=99999999999999999999", "--shape|T=99999999999999999999"},
    {"bench op linear --shape T=1,T=2", "--shape|\"T\" is given twice"},
    {"bench op linear --shape T=1,,in=2", "--shape|empty part"},
    {"bench op linear --shape Q=3", "--shape|\"Q\"|in, out"},
    {"bench op linear --mode fwd,back", "--mode|\"back\"|fwd or bwd"},
    {"bench op linear --mode fwd,", "--mode|empty part"},
    {"bench op linear --dtype f99", "--dtype|f99"},
    {"bench op linear --dtype i32", "--dtype|i32|expected f64, f32"},
    {"bench op linear --dtype f32,", "--dtype|empty part"},
    {"bench op linear --variant most",
     "--variant \"most\"|linear has cublas, cublas padded, wgmma, narrow, gemv"},
    {"bench op attention --device cpu --variant all", "--variant|the CPU has no kernel variants"},
    {"bench op attention --device cpu --variant mma", "--variant|the CPU has no kernel variants"},
    // generation
    {"generate --model m --prompt a --seed -1", "--seed|-1 not in range"},
    {"bench sweep relu --seed -1", "--seed|-1 not in range"},
    {"generate --model m --prompt a --top-p 0", "--top-p|0: expected more than 0 and at most 1"},
    {"generate --model m --prompt a --top-p 1.5", "--top-p|1.5: expected more than 0 and at most 1"},
    {"generate --model m --prompt a --top-p nan", "--top-p|nan is not finite"},
    {"tokenizer train --text a --out b --kind byte --vocab-size 300", "--vocab-size|only for|byte"},
};

void PrintTo(const BadLine& bad, std::ostream* out) {
  *out << bad.line;
}

class UsageError : public ::testing::TestWithParam<BadLine> {};

TEST_P(UsageError, ExitsWithTwoAtOnceAndNamesIt) {
  const Workplace workplace;
  const Outcome outcome = run(workplace, GetParam().line);
  EXPECT_EQ(outcome.code, 2) << outcome.out << outcome.err;
  // Processor time, not the clock: a busy machine must not fail the test, a library that is set up first
  // must.
  EXPECT_LT(outcome.cpu_seconds, 1.0);
  EXPECT_EQ(outcome.out, "");
  EXPECT_TRUE(outcome.err.starts_with("tessera: ")) << outcome.err;
  EXPECT_EQ(outcome.err.find('\n'), outcome.err.size() - 1) << "one line: " << outcome.err;
  EXPECT_TRUE(holds_all(outcome.err, GetParam().says)) << outcome.err << "expected " << GetParam().says;
  EXPECT_EQ(workplace.files(), std::vector<std::string>());
}

INSTANTIATE_TEST_SUITE_P(Lines, UsageError, ::testing::ValuesIn(kBadLines), [](const auto& info) {
  std::string name = std::to_string(info.index);
  for (const std::string& word : words_of(info.param.line)) {
    name += '_';
    for (const char c : word)
      if (std::isalnum(static_cast<unsigned char>(c))) name += c;
  }
  return name.substr(0, 60);
});

/// Flags that were called otherwise are still understood, on the command line and in a file; the help has
/// the present names alone.
TEST(OldFlags, MeanWhatTheNewOnesMean) {
  const Workplace at;
  at.put("text",
         std::string(40, 'a') + "\nbc de fg hi jk lm no pq rs tu vw xy za bc de fg hi jk lm no pq rs\n");
  const auto job = [&](const std::string& name, const std::string& flags) {
    const Outcome outcome =
        run(at,
            "train gpt --text text --layers 1 --d-model 8 --d-ff 8 --length 4 --steps 1 --device cpu "
            "--quiet --sample-tokens 0 --ngram 0 --validation 0 --name " +
                name + " " + flags);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    return nlohmann::json::parse(at.get("runs/" + name + "/run.json")).at("job");
  };
  const nlohmann::json now = job("new", "--batch-size 3 --n-head 4 --clip-norm 0.5 --json new.json");
  EXPECT_EQ(now.at("batch"), 3);
  EXPECT_EQ(now.at("clip_norm"), 0.5);
  EXPECT_EQ(job("old", "--batch 3 --heads 4 --clip 0.5 --json-out old.json"), now);
  at.put("run.toml", "batch = 3\nheads = 4\nclip = 0.5\njson-out = \"toml.json\"\n");
  EXPECT_EQ(job("toml", "--config run.toml"), now);
  for (const char* file : {"new.json", "old.json", "toml.json"}) EXPECT_TRUE(fs::exists(at / file)) << file;
  const std::string help = run(at, "train gpt --help").out + run(at, "train bert --help").out;
  for (const char* old : {"--batch ", "--batch,", "--heads", "--clip ", "--clip,", "--json-out", "--preset"})
    EXPECT_EQ(help.find(old), std::string::npos) << old;
  EXPECT_TRUE(holds_all(help, "--batch-size|--n-head|--clip-norm|--json |--size"));
}

}  // namespace
}  // namespace tessera::cli::test

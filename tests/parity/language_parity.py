"""Small random models of every kind, written by transformers, loaded and trained by dump_language, and compared.

usage: python language_parity.py DUMP_LANGUAGE [--only WORD] [--golden FOLDER]

transformers runs in f32 on the CPU. Limits: logits 1e-4 absolute; the gradient of every parameter 1e-3 of its largest element;
the loss of each of 20 AdamW steps 1e-4. Greedy generation over the cache gives the same tokens, also of prompts of different
lengths together; perplexity by windows and by sliding windows is within 1e-5 of its value. What tessera saves, in one
file and in several, transformers loads with the same logits; the same weights as pytorch_model.bin, and in shards of it, are
read by tessera with the same results bit for bit. Exit status 77: no transformers here, skipped. --golden writes
smaller models of some kinds and what transformers computed: the files of tests/pretrained/golden.
"""
import argparse
import collections
import copy
import json
import math
import os
import subprocess
import sys
import tempfile

from needs import needs

with needs("torch, transformers and safetensors"):
    import torch
    import torch.nn.functional as F
    import transformers
    from safetensors.torch import load_file, save_file
    from transformers import (ArceeConfig, ArceeForCausalLM, AutoModel, BertConfig, BertForMaskedLM, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel,
                              LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, OPTConfig, OPTForCausalLM, Phi3Config,
                              Phi3ForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM, RobertaConfig,
                              RobertaForMaskedLM, RobertaForSequenceClassification)

parser = argparse.ArgumentParser()
parser.add_argument("dump")
parser.add_argument("--only", default="")
parser.add_argument("--golden", default="")
args = parser.parse_args()
torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()
STEPS, BATCH, LENGTH, LEARNING_RATE, DECAY = 20, 3, 13, 1e-3, 0.1  # the last two those of language_run.h
VOCABULARY, COMMON = 61, 20  # tokens, and those that texts are made of: there is something to learn
LIMITS = {"logits": 1e-4, "gradient": 1e-3, "loss": 1e-4, "saved": 1e-5, "perplexity": 1e-5}

GPT = dict(vocab_size=VOCABULARY, n_positions=24, n_embd=24, n_layer=2, n_head=3, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
OPT = dict(vocab_size=VOCABULARY, max_position_embeddings=24, hidden_size=24, word_embed_proj_dim=24, ffn_dim=40, num_hidden_layers=2,
           num_attention_heads=3, dropout=0.0)
LLAMA = dict(vocab_size=VOCABULARY, max_position_embeddings=32, hidden_size=24, intermediate_size=37, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=4, head_dim=6)
BERT = dict(vocab_size=VOCABULARY, max_position_embeddings=24, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
            num_attention_heads=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)

if args.golden:
    STEPS, LENGTH, VOCABULARY, COMMON = 3, 6, 21, 12
    for sizes, names in ((GPT, ("n_embd", "n_layer", "n_head")), (OPT, ("hidden_size", "num_hidden_layers", "num_attention_heads"))):
        sizes |= dict(zip(names, (8, 1, 2)), vocab_size=VOCABULARY)
    OPT |= dict(word_embed_proj_dim=8, ffn_dim=12)
    LLAMA |= dict(hidden_size=8, intermediate_size=11, num_hidden_layers=1, head_dim=4, vocab_size=VOCABULARY)
    BERT |= dict(hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2, vocab_size=VOCABULARY)


def scaled(kind, **more):
    return {"rope_parameters": dict(rope_type=kind, rope_theta=10000.0, **more)}


def longrope(length, rotary=6):
    """Short factors for texts of up to `length` tokens, long ones beyond."""
    pairs = range(rotary // 2)
    return scaled("longrope", factor=4.0, original_max_position_embeddings=length, short_factor=[1.0 + 0.1 * i for i in pairs],
                  long_factor=[1.5 + i for i in pairs])


def phi3(length, **more):
    """Longrope as its files have it: `length` stands next to the scaling and within."""
    head = PHI3["hidden_size"] // PHI3["num_attention_heads"]
    rotary = int(head * more.get("partial_rotary_factor", 1.0))
    return PHI3 | longrope(length, rotary) | dict(original_max_position_embeddings=length) | more


GROUPED = LLAMA | dict(num_key_value_heads=2)
QWEN2 = {key: value for key, value in GROUPED.items() if key != "head_dim"}
PHI3 = QWEN2 | dict(pad_token_id=0) | (dict(num_attention_heads=2) if args.golden else {})
MODELS = {
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**GPT)),
    "gpt2-untied": lambda: GPT2LMHeadModel(GPT2Config(**GPT, tie_word_embeddings=False, activation_function="relu", n_inner=31)),
    "opt": lambda: OPTForCausalLM(OPTConfig(**OPT)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
    "llama-grouped": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA | dict(num_key_value_heads=2, head_dim=8), tie_word_embeddings=True)),
    "llama-one-key-head": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA | dict(num_key_value_heads=1), attention_bias=True,
                                                             mlp_bias=True)),
    "llama-relu2": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, hidden_act="relu2")),
    "llama-linear": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, **scaled("linear", factor=2.0))),
    "llama-dynamic": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA | dict(max_position_embeddings=8), **scaled("dynamic", factor=2.0))),
    "llama-3": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA | dict(num_key_value_heads=2), **scaled(
        "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16))),
    "llama-yarn": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, **scaled("yarn", factor=4.0, original_max_position_embeddings=8))),
    "llama-longrope": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, **longrope(16))),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**GROUPED | dict(head_dim=10), sliding_window=None)),
    "mistral-window": lambda: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=24, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**QWEN2)),
    "qwen2-tied": lambda: Qwen2ForCausalLM(Qwen2Config(**QWEN2, tie_word_embeddings=True, use_sliding_window=True, sliding_window=20,
                                                      max_window_layers=1)),
    "qwen2-yarn": lambda: Qwen2ForCausalLM(Qwen2Config(**QWEN2, **scaled("yarn", factor=4.0, original_max_position_embeddings=8))),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**GROUPED | dict(head_dim=10))),
    "qwen3-tied": lambda: Qwen3ForCausalLM(Qwen3Config(**GROUPED, tie_word_embeddings=True, attention_bias=True)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**PHI3)),
    "arcee": lambda: ArceeForCausalLM(ArceeConfig(**LLAMA)),
    "arcee-tied": lambda: ArceeForCausalLM(ArceeConfig(**LLAMA, tie_word_embeddings=True, mlp_bias=True, attention_bias=True)),
    "phi3-partial": lambda: Phi3ForCausalLM(Phi3Config(**phi3(16, partial_rotary_factor=0.7, sliding_window=32))),
    "phi3-longrope": lambda: Phi3ForCausalLM(Phi3Config(**phi3(8))),
    "phi3-long": lambda: Phi3ForCausalLM(Phi3Config(**phi3(3), tie_word_embeddings=True)),
    "bert-classify": lambda: BertForSequenceClassification(BertConfig(**BERT, num_labels=3)),
    "bert-regress": lambda: BertForSequenceClassification(BertConfig(**BERT, num_labels=1)),
    "bert-masked": lambda: BertForMaskedLM(BertConfig(**BERT)),
    "roberta-classify": lambda: RobertaForSequenceClassification(RobertaConfig(**BERT | dict(type_vocab_size=1), num_labels=2)),
    "roberta-masked": lambda: RobertaForMaskedLM(RobertaConfig(**BERT | dict(type_vocab_size=1))),
}
GOLDEN = ("gpt2", "opt", "llama-3", "qwen2-tied", "qwen3", "phi3-partial", "bert-classify", "bert-regress", "roberta-masked")
LENGTHS = [LENGTH, 5, 9 if LENGTH > 9 else 3]  # of BERT's sequences


def batches(name, model):
    g = torch.Generator().manual_seed(7)
    tokens = torch.randint(3, COMMON, (STEPS, BATCH, LENGTH), generator=g)
    if not name.startswith(("bert", "roberta")):
        targets = torch.cat([tokens[:, :, 1:], torch.full((STEPS, BATCH, 1), -100)], -1)
        return {"tokens": tokens, "targets": targets}
    lengths = [LENGTH] * BATCH if name == "bert-masked" else LENGTHS  # the one case of equal lengths
    here = torch.arange(LENGTH)[None] < torch.tensor(lengths)[:, None]
    pad = model.config.pad_token_id
    tokens = torch.where(here[None], tokens, pad)
    out = {"tokens": tokens, "lengths": torch.tensor(lengths)}
    if model.config.type_vocab_size > 1:
        out["types"] = torch.randint(0, 2, (STEPS, BATCH, LENGTH), generator=g)
    if name.endswith("masked"):
        masked = torch.rand(tokens.shape, generator=g) < 0.4
        masked[:, :, 0] = True
        out["targets"] = torch.where(masked & here[None], tokens, -100)
    elif name.endswith("regress"):
        out["targets"] = torch.randn((STEPS, BATCH), generator=g)
    else:
        out["targets"] = torch.randint(0, model.config.num_labels, (STEPS, BATCH), generator=g)
    return out


def logits_of(model, batch, step):
    if "lengths" not in batch:
        return model(batch["tokens"][step]).logits
    here = torch.arange(LENGTH)[None] < batch["lengths"][:, None]
    more = {"token_type_ids": batch["types"][step]} if "types" in batch else {}
    y = model(batch["tokens"][step], attention_mask=here.long(), **more).logits
    return y[here] if y.dim() == 3 else y


def loss_of(model, batch, step):
    y, targets = logits_of(model, batch, step), batch["targets"][step]
    if targets.is_floating_point():
        return ((y[:, 0] - targets) ** 2).mean()
    if "lengths" in batch and targets.dim() == 2:
        targets = targets[torch.arange(LENGTH)[None] < batch["lengths"][:, None]]
    return F.cross_entropy(y.flatten(0, -2), targets.flatten(), ignore_index=-100)


def generated(model, prompt, count):
    """Exactly so many more tokens, whatever they are. On a copy: dynamic scaling remembers the longest text it has seen."""
    return copy.deepcopy(model).generate(prompt, attention_mask=torch.ones(prompt.shape), do_sample=False, min_new_tokens=count,
                                         max_new_tokens=count, eos_token_id=None, pad_token_id=0)[0, prompt.shape[1]:]


def generated_together(model, prompts, count):
    """As one batch, padded on the left."""
    longest = max(len(x) for x in prompts)
    batch = torch.stack([F.pad(x, (longest - len(x), 0)) for x in prompts])
    mask = torch.stack([F.pad(torch.ones(len(x)), (longest - len(x), 0)) for x in prompts])
    return list(copy.deepcopy(model).generate(batch, attention_mask=mask, do_sample=False, min_new_tokens=count, max_new_tokens=count,
                                              eos_token_id=None, pad_token_id=0)[:, longest:])


@torch.no_grad()
def nats(model, text, length=7, stride=3):
    """Of the two protocols, as the papers' programs have them: labels are shifted by transformers. Windows below 8 tokens, where
    dynamic scaling forgets the longer texts it has seen."""
    windows = [text[i:i + length][None] for i in range(0, len(text) - length + 1, length)]
    plain = torch.stack([model(x, labels=x).loss for x in windows]).double().mean()
    losses = []
    for begin in range(0, len(text) - length + 1, stride):
        labels = text[begin:begin + length][None].clone()
        labels[:, :-stride] = -100
        losses.append(model(text[begin:begin + length][None], labels=labels).loss)
    return torch.stack([plain, torch.stack(losses).double().mean()])


def truth(name, model, batch):
    results = {"logits": logits_of(model, batch, 0).detach().clone()}
    if "lengths" not in batch:
        results["generated"] = generated(model, batch["tokens"][0, :1, :4], 12)
        if not args.golden:
            prompts = [batch["tokens"][0, number, :length] for number, length in enumerate((4, 1, 6))]
            # Longrope turns all texts of a batch by the length of the longest.
            together = model.config.model_type == "phi3" and model.config.rope_parameters["rope_type"] == "longrope"
            texts = generated_together(model, prompts, 8) if together else [generated(model, x[None], 8) for x in prompts]
            results |= {f"generated.{number}": text for number, text in enumerate(texts)}
            results["nats"] = nats(model, batch["tokens"].flatten())
    optimizer = torch.optim.AdamW([{"params": [x for x in model.parameters() if x.dim() >= 2], "weight_decay": DECAY},
                                   {"params": [x for x in model.parameters() if x.dim() < 2], "weight_decay": 0.0}],
                                  lr=LEARNING_RATE)
    losses = []
    with torch.no_grad():
        results["untrained"] = loss_of(model, batch, STEPS - 1).double()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, batch, step)
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            results |= {"gradient." + n: x.grad.clone() for n, x in model.named_parameters() if x.grad is not None}
        optimizer.step()
    return results | {"loss": torch.tensor(losses, dtype=torch.float64)}


def dump(folder):
    out = os.path.join(folder, "out.safetensors")
    done = subprocess.run([args.dump, folder, out], capture_output=True, text=True)
    if done.returncode:
        print(f"FAILED {folder}: {done.stderr.strip()}")
        return None
    return load_file(out)


def as_torch_files(source, folder, batch, shards):
    """The same model with its weights as torch.save writes them, as one file or as several with an index."""
    os.makedirs(folder)
    for name in ("config.json", "batch.safetensors"):
        with open(os.path.join(source, name), "rb") as a, open(os.path.join(folder, name), "wb") as b:
            b.write(a.read())
    state = load_file(os.path.join(source, "model.safetensors"))
    if shards == 1:
        state = collections.OrderedDict(state)  # as state_dict() makes it: with an attribute, and parameters
        state._metadata = collections.OrderedDict({"": {"version": 1}})
        first = next(iter(state))
        state[first] = torch.nn.Parameter(state[first])
        torch.save(state, os.path.join(folder, "pytorch_model.bin"))
        return
    names = sorted(state)
    files = {n: f"pytorch_model-{1 + i * shards // len(names):05}-of-{shards:05}.bin" for i, n in enumerate(names)}
    for file in set(files.values()):
        torch.save({n: state[n] for n in names if files[n] == file}, os.path.join(folder, file))
    with open(os.path.join(folder, "pytorch_model.bin.index.json"), "w") as index:
        json.dump({"metadata": {"total_size": 0}, "weight_map": files}, index)


passed = failed = 0


def expect(good, what):
    global passed, failed
    passed, failed = passed + bool(good), failed + (not good)
    if not good:
        print(f"FAILED {what}")


def relative(got, want):
    scale = float(want.double().abs().max())
    error = float((got.double() - want.double()).abs().max())
    return error / scale if scale > 0 else error


def moved(model):
    """Biases and norms away from 0 and 1, where they would hide."""
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(torch.randn(x.shape, generator=g) * 0.1)
    return model.eval()


print(f"transformers {transformers.__version__}")
print(f"{'model':<20}{'logits':>9}{'gradient':>10}{'loss':>9}{'saved':>9}{'perplex.':>9}  gradients, the worst")
for name, make in MODELS.items():
    if args.only not in name or (args.golden and name not in GOLDEN):
        continue
    with tempfile.TemporaryDirectory() as temporary:
        folder = os.path.join(args.golden or temporary, name)
        torch.manual_seed(11)
        model = moved(make())
        model.save_pretrained(folder)
        batch = batches(name, model)
        save_file({key: x.contiguous() for key, x in batch.items()}, os.path.join(folder, "batch.safetensors"))
        kind = type(model)
        want = truth(name, model, batch)
        if args.golden:
            save_file({key: x.contiguous() for key, x in want.items()}, os.path.join(folder, "truth.safetensors"))
            for left in set(os.listdir(folder)) - {"config.json", "model.safetensors", "batch.safetensors", "truth.safetensors"}:
                os.unlink(os.path.join(folder, left))
            if name == "gpt2":
                as_torch_files(folder, folder + "-torch", batch, 3)
                os.unlink(os.path.join(folder + "-torch", "batch.safetensors"))
            continue
        ours = dump(folder)
        if ours is None:
            failed += 1
            continue
        worst = {"logits": float((ours["logits"].flatten() - want["logits"].flatten()).abs().max())}
        gradients = {key: relative(ours[key], x) for key, x in want.items() if key.startswith("gradient.") and key in ours}
        expect(set(gradients) == {key for key in want if key.startswith("gradient.")},
               f"{name}: gradients are missing: {[k for k in want if k.startswith('gradient.') and k not in ours][:5]}")
        # A bias of keys changes no softmax: its gradient is 0 but for rounding, and relative to nothing.
        silent = [key for key in gradients if float(want[key].abs().max()) < 1e-6]
        for key in silent:
            expect(float(ours[key].abs().max()) < 1e-6, f"{name} {key}: not 0")
            del gradients[key]
        at = max(gradients, key=gradients.get)
        worst["gradient"] = gradients[at]
        worst["loss"] = float((ours["loss"] - want["loss"]).abs().max())
        expect(abs(float(want["loss"][-1] - want["untrained"])) > 100 * LIMITS["loss"],
               f"{name}: training hardly changed the last loss; agreement says nothing")
        for key in (key for key in want if key.startswith("generated")):
            expect(torch.equal(ours[key], want[key]), f"{name}: {key} {ours[key].tolist()}, expected {want[key].tolist()}")
        worst["perplexity"] = float((ours["nats"] - want["nats"]).exp().sub(1).abs().max()) if "nats" in want else 0.0
        again = []
        for saved in ("saved", "sharded"):
            path = os.path.join(folder, saved)
            expect((saved == "sharded") == os.path.exists(os.path.join(path, "model.safetensors.index.json")), f"{name}: {saved}")
            loaded, info = kind.from_pretrained(path, output_loading_info=True)
            expect(not any(info.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), f"{name} {saved}: {info}")
            with torch.no_grad():
                again.append(float((logits_of(loaded.eval(), batch, 0) - want["logits"]).abs().max()))
        worst["saved"] = max(again)
        for shards in (1, 3):
            path = os.path.join(temporary, f"torch-{shards}")
            as_torch_files(folder, path, batch, shards)
            theirs = dump(path)
            expect(theirs is not None and all(torch.equal(theirs[key], x) for key, x in ours.items()),
                   f"{name}: {shards} .bin file(s) give other results")
        print(f"{name:<20}{worst['logits']:>9.1e}{worst['gradient']:>10.1e}{worst['loss']:>9.1e}{worst['saved']:>9.1e}{worst['perplexity']:>9.1e}  "
              f"{len(gradients)}, {at[9:]}")
        for what, error in worst.items():
            expect(math.isfinite(error) and error <= LIMITS[what], f"{name} {what}: {error:.3g}, limit {LIMITS[what]:g}")
print(f"{passed} passed, {failed} failed")
sys.exit(1 if failed else 0)

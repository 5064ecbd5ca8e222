"""`tessera train gpt` and `train llama` from weights that transformers wrote (of llama, mistral, qwen2, qwen3 and phi3), and the
same training in transformers.

usage: python train_parity.py TESSERA

The text is one batch of windows, so every step sees all of them, in whatever order. Text to tokens, targets, warm-up and
cosine, clipping, what weight decay leaves out, and AdamW are compared by the loss of each of 20 steps (1e-4) and the held-out
loss at the end (1e-4); with two micro-batches a step, too. transformers then loads the exported folder with its tokenizer:
its held-out loss there is that of tessera (1e-5), and text goes through the tokenizer and back. Exit status 77: no
transformers here, skipped.
"""
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
    from transformers import (AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM,
                              MistralConfig, MistralForCausalLM, Phi3Config, Phi3ForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config,
                              Qwen3ForCausalLM)

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()
STEPS, WARMUP, BATCH, LENGTH, RATE, FINAL, DECAY, CLIP, BETA2 = 20, 5, 4, 24, 3e-3, 0.1, 0.1, 0.5, 0.95
LIMITS = {"loss": 1e-4, "held out": 1e-4, "exported": 1e-5}
LLAMA = dict(vocab_size=257, max_position_embeddings=32, hidden_size=24, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2)
MODELS = {
    "gpt": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=257, n_positions=32, n_embd=24, n_layer=2, n_head=3, embd_pdrop=0.0,
                                              attn_pdrop=0.0, resid_pdrop=0.0)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**LLAMA, head_dim=10, sliding_window=24)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**LLAMA, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**LLAMA, head_dim=10)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(**LLAMA, pad_token_id=0, original_max_position_embeddings=16, rope_parameters=dict(
        rope_type="longrope", rope_theta=10000.0, factor=2.0, original_max_position_embeddings=16, partial_rotary_factor=0.7,
        short_factor=[1.0, 1.1], long_factor=[1.5, 3.0])))}


def rate(step):
    if step < WARMUP:
        return RATE * (step + 1) / WARMUP
    share = (step - WARMUP) / (STEPS - WARMUP)
    return RATE * (FINAL + (1 - FINAL) * (1 + math.cos(math.pi * share)) / 2)


def windows(tokens, count):
    rows = [tokens[i * LENGTH:(i + 1) * LENGTH + 1] for i in range(count)]
    return torch.tensor([row[:-1] for row in rows]), torch.tensor([row[1:] for row in rows])


def held_out_loss(model, before, tokens, stride):
    """Each token once, `stride` by a window of LENGTH + 1 that ends with the last of them."""
    text, sum_, at = before + tokens, 0.0, len(before)
    while at < len(text):
        end = min(at + stride, len(text))
        window = torch.tensor([text[max(0, end - LENGTH - 1):end]])
        logits = model(window[:, :-1]).logits[0, -(end - at):]
        sum_ += F.cross_entropy(logits, window[0, -(end - at):], reduction="sum").item()
        at = end
    return sum_ / len(tokens)


def loss_of(model, inputs, targets):
    return F.cross_entropy(model(inputs).logits.flatten(0, 1), targets.flatten())


failed = 0
for kind, make in MODELS.items():
    for accumulate in (1, 2) if kind in ("gpt", "llama") else (1,):
        with tempfile.TemporaryDirectory() as folder:
            def tessera(*words):
                done = subprocess.run([os.path.abspath(sys.argv[1]), *words], cwd=folder, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(f"FAILED {words[:3]}: {done.stderr.strip()}")

            train = "".join(f"clause {i}: a copy is free\n" for i in range(9))[:BATCH * LENGTH - 1] + "\n"
            held = "everyone may copy this text; " * 2 + "\n"
            with open(os.path.join(folder, "text"), "w") as file:
                file.write(train + held)
            torch.manual_seed(5)
            model = make()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
            model.save_pretrained(os.path.join(folder, "start"))
            tessera("tokenizer", "train", "--kind", "byte", "--text", "text", "--out", "t.json")
            share = len(held) / len(train + held)
            tessera("train", "gpt" if kind == "gpt" else "llama", "--text", "text", "--validation", str(share), "--tokenizer", "t.json", "--model", "start", "--device", "cpu",
                    "--steps", str(STEPS), "--warmup", str(WARMUP), "--length", str(LENGTH), "--stride", str(LENGTH), "--batch", str(BATCH // accumulate),
                    "--accumulate", str(accumulate), "--lr", str(RATE), "--min-lr-ratio", str(FINAL), "--weight-decay", str(DECAY),
                    "--max-grad-norm", str(CLIP), "--beta2", str(BETA2), "--log-every", "1", "--quiet", "--name", "r")
            lines = [json.loads(line) for line in open(os.path.join(folder, "runs/r/metrics.jsonl"))]

            tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=os.path.join(folder, "t.json"))
            end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
            inputs, targets = windows(tokenizer.encode(train) + [end], BATCH)
            held_tokens = tokenizer.encode(held) + [end]
            tables = {"transformer.wte.weight", "transformer.wpe.weight", "model.embed_tokens.weight"}
            decays = [x for n, x in model.named_parameters() if x.dim() >= 2 and n not in tables]
            others = [x for n, x in model.named_parameters() if x.dim() < 2 or n in tables]
            optimizer = torch.optim.AdamW([{"params": decays, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}], lr=RATE,
                                          betas=(0.9, BETA2))
            worst = 0.0
            for step in range(STEPS):
                for group in optimizer.param_groups:
                    group["lr"] = rate(step)
                optimizer.zero_grad()
                loss = loss_of(model, inputs, targets)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                worst = max(worst, abs(loss.item() - lines[step]["loss"]))
            exported = AutoModelForCausalLM.from_pretrained(os.path.join(folder, "runs/r/model")).eval()
            again = AutoTokenizer.from_pretrained(os.path.join(folder, "runs/r/model"))
            with torch.no_grad():
                # What is held out follows the end of the training part, which is its context.
                held_out = [held_out_loss(m, tokenizer.encode(train)[-LENGTH:], held_tokens, LENGTH // 2) for m in (model, exported)]
                errors = {"loss": worst, "held out": abs(held_out[0] - lines[-1]["eval_nll"]),
                          "exported": abs(held_out[1] - lines[-1]["eval_nll"])}
            print(f"{kind:<8} {accumulate} micro-batch(es)  " + "  ".join(f"{name} {error:.1e}" for name, error in errors.items())
                  + f"  ({lines[0]['loss']:.3f} to {lines[-1]['loss']:.3f})")
            good = len(lines) == STEPS and lines[-1]["loss"] < lines[0]["loss"] - 0.5 and again.decode(again.encode(train)) == train
            good &= all(math.isfinite(error) and error <= LIMITS[name] for name, error in errors.items())
            failed += not good
            if not good:
                print(f"FAILED {kind} {accumulate}")
sys.exit(1 if failed else 0)

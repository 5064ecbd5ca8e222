"""Compares the tokenizers of tessera with the library `tokenizers` of Hugging Face and with SentencePiece, token for token.

usage: python tokenizer_parity.py DUMP_TOKENS [--texts N] [--seed N] [--only NAME,...] [--keep FOLDER]

Tokenizers of each kind are trained here on the licence texts of the system: byte-level BPE with GPT-2's and LLaMA-3's
expressions, RoBERTa's processing, WordPiece, BPE with byte fallback and metaspaces in both forms of LLaMA-2, and SentencePiece
models. Then N random Unicode strings (all planes, combining marks, emoji sequences, control characters, bytes that are no
UTF-8), licence texts and package documents are encoded, alone and as pairs cut to a length, and decoded, by both.
Exit status 77: a library is missing, skipped.
"""
import argparse
import contextlib
import glob
import os
import random
import struct
import subprocess
import sys
import tempfile
import time

from needs import needs

with needs("tokenizers and sentencepiece"):
    import sentencepiece
    import tokenizers
    from tokenizers import (AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers)

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
          r"\s+(?!\S)|\s+")
MOST = 40  # tokens of a pair
SIZE = 1.0  # of the vocabularies, as a factor


def sized(vocabulary):
    return int(vocabulary * SIZE)


EMOJI = ["\U0001F468\u200D\U0001F469\u200D\U0001F467\u200D\U0001F466", "\U0001F3F3\uFE0F\u200D\U0001F308", "\U0001F1E9\U0001F1EA",
         "\U0001F44D\U0001F3FD", "1\uFE0F\u20E3", "\u2764\uFE0F", "\U0001FAE8", "\U0001F3F4\U000E0067\U000E0062\U000E007F"]
WORDS = ["the", "The", "licence", " ", "  ", "\n", "\n\n", "\t", "\r\n", "don't", "WE'LL", "it's", "can\u2019t", "2024", "3.14",
         "1,000", "...", "--", "foo_bar", "http://a.b/c?d=e", "\u0130stanbul", "Stra\u00dfe", "na\u00efve", "\u4e2d\u6587", "\u65e5\u672c",
         "\ud55c\uad6d\uc5b4", "\u0939\u093f\u0928\u094d\u0926\u0940", "\u0627\u0644\u0639\u0631\u0628\u064a\u0629", "\u05e2\u05d1",
         "\u0e44\u0e17\u0e22", "\u2581", "\u2581the", "\u00a0", "\u3000", "\u200b", "\ufeff", "\ufffd", "\x00", "\x7f", "\u0345", "\u1e9e",
         "'\u017f", "'S", "\u2126", "\u212b", "\ufb01", "<s>", "</s>", "[CLS]", "[MASK]", "<mask>", "<|endoftext|>", "<unk>", " <mask> ",
         "foo bar", "NewTok", "word<mask>word", "\u180e", "\x1c", "\x85", "e\u0301\u0323", "\u0344", "a" * 130, "ab" * 120, "-" * 70]


def random_text(rng):
    """A string, or bytes that are no UTF-8."""
    kind = rng.randrange(10)
    parts = []
    for _ in range(rng.randrange(1, 14)):
        pick = rng.randrange(12)
        if pick < 3:
            parts.append(rng.choice(WORDS))
        elif pick == 3:
            parts.append(rng.choice(EMOJI))
        elif pick == 4:
            parts.append(chr(rng.randrange(0x20, 0x7f)) * rng.randrange(1, 5))
        elif pick == 5:
            parts.append(chr(rng.randrange(0x300, 0x370)))
        elif pick == 6:
            parts.append(chr(rng.randrange(0, 0x20)) if rng.random() < 0.5 else " " * rng.randrange(1, 6))
        elif pick == 7:
            parts.append(chr(rng.choice([rng.randrange(0x80, 0x800), rng.randrange(0x800, 0xD800), rng.randrange(0xE000, 0x10000)])))
        elif pick == 8:
            parts.append(chr(rng.randrange(0x10000, 0x110000)))
        elif pick == 9:
            parts.append(chr(rng.randrange(0x10000, 0x20000)))
        elif pick == 10:
            parts.append("".join(rng.choice("abcdefghijklmnopqrstuvwxyzABCDEF0123456789.,'") for _ in range(rng.randrange(1, 12))))
        else:
            base = rng.choice(["\u0900", "\u0600", "\u0400", "\u3040", "\u4e00", "\uac00", "\u1f00", "\u2000", "\u2100", "\ufb00", "\uff00"])
            parts.append("".join(chr(ord(base) + rng.randrange(0x100)) for _ in range(rng.randrange(1, 6))))
    raw = (rng.choice(["", " "]) if kind < 8 else "").join(parts).encode("utf-8", "surrogatepass")
    if kind == 0:  # broken: bytes changed, cut, put in
        raw = bytearray(raw)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(raw) + 1)
            raw[at:at + rng.randrange(0, 2)] = bytes(rng.choice([0x80, 0xC0, 0xE2, 0xED, 0xF0, 0xF5, 0xFF, rng.randrange(256)])
                                                     for _ in range(rng.randrange(0, 3)))
        raw = bytes(raw)
    return raw


def documents():
    """Licence texts and package documents of the system."""
    found = sorted(glob.glob("/usr/share/common-licenses/*"))
    found += sorted(glob.glob("/usr/share/doc/*/copyright")) + sorted(glob.glob("/usr/share/doc/*/README*"))
    texts, seen = [], set()
    for path in found:
        if path.endswith(".gz") or not os.path.isfile(path) or os.path.realpath(path) in seen:
            continue
        seen.add(os.path.realpath(path))
        texts.append(open(path, "rb").read()[: 1 << 20])
    return texts


def byte_level(pre_tokenizer, training, vocabulary=2000, special=("<|endoftext|>",)):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=sized(vocabulary), special_tokens=list(special), show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(training, trainer)
    return tokenizer


def gpt2(training):
    tokenizer = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), training)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def llama3(training):
    pre = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
                                   pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer = byte_level(pre, training, 3000, ("<|begin_of_text|>", "<|end_of_text|>"))
    text = tokenizer.to_str().replace('"ignore_merges":false', '"ignore_merges":true')
    tokenizer = Tokenizer.from_str(text)
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=True),
        processors.TemplateProcessing(single="<|begin_of_text|> $A", pair="<|begin_of_text|> $A <|begin_of_text|>:1 $B:1",
                                      special_tokens=[("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))])])
    return tokenizer


def qwen2(training):
    """Also Qwen3's: NFC before LLaMA-3's expression, whose numbers are single digits here."""
    pre = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3.replace("{1,3}", "")), "isolated"),
                                   pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer = byte_level(pre, training, 2500, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def roberta(training):
    tokenizer = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True), training, 1500, ("<s>", "<pad>", "</s>", "<unk>"))
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", tokenizer.token_to_id("</s>")),
                                                            ("<s>", tokenizer.token_to_id("<s>")))
    return tokenizer


def bert(training, lowercase=True):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    extra = [chr(c) for c in range(0xA1, 0x250)] + [chr(c) for c in range(0x4E00, 0x4E00 + sized(256))] + list("\u0430\u0431\u0432\u0e44\u0939\u0928")
    tokenizer.train_from_iterator(training, trainers.WordPieceTrainer(
        vocab_size=sized(3000), special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"], show_progress=False, initial_alphabet=extra))
    cls, sep = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
                                                             special_tokens=[("[CLS]", cls), ("[SEP]", sep)])
    return tokenizer


def bytes_of_bpe(training, legacy=True):
    """As transformers writes LLaMA-2: `legacy` with normalizers, else with the pre-tokenizer Metaspace."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    prepare = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = prepare
    trained.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    special = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    trained.train_from_iterator(training, trainers.BpeTrainer(vocab_size=sized(2500), special_tokens=special, show_progress=False,
                                                              limit_alphabet=120))
    import json
    model = json.loads(trained.to_str())["model"]
    whole = json.loads(tokenizer.to_str())
    whole["model"]["vocab"], whole["model"]["merges"] = model["vocab"], model["merges"]
    tokenizer = Tokenizer.from_str(json.dumps(whole))
    if legacy:
        tokenizer.normalizer = prepare
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(t, normalized=legacy) for t in ("<unk>", "<s>", "</s>")])
    tokenizer.add_tokens(["foo bar"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)])
    return tokenizer


def mixed(training):
    """Steps that no well-known model has together."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]", continuing_subword_prefix="##", end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Strip(), normalizers.NFD(), normalizers.StripAccents(),
                                                 normalizers.Lowercase(), normalizers.Replace(Regex(r"\d\d+"), "#")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True),
                                                       pre_tokenizers.Punctuation("merged_with_previous")])
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    tokenizer.train_from_iterator(training, trainers.BpeTrainer(
        vocab_size=sized(1500), special_tokens=["[UNK]"], show_progress=False, continuing_subword_prefix="##", end_of_word_suffix="</w>"))
    tokenizer.add_tokens([AddedToken("licence", single_word=True), AddedToken("the", single_word=True, rstrip=True), "foo_", "NewTok"])
    return tokenizer


def word_level(training):
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("contiguous")])
    tokenizer.train_from_iterator(training, trainers.WordLevelTrainer(vocab_size=sized(1000), special_tokens=["<unk>"], show_progress=False))
    return tokenizer


class Piece:
    """A SentencePiece model with the interface that is needed here."""

    def __init__(self, folder, training, kind):
        text = os.path.join(folder, "training.txt")
        with open(text, "w") as file:
            file.write("\n".join(line for document in training for line in document.split("\n")))
        prefix = os.path.join(folder, f"sp_{kind}")
        options = dict(byte_fallback=True, split_digits=True, normalization_rule_name="identity") if kind == "bpe" else {}
        with contextlib.chdir(folder):  # the model keeps the names it was given: bare ones
            sentencepiece.SentencePieceTrainer.Train(input="training.txt", model_prefix=f"sp_{kind}", vocab_size=sized(1200),
                                                     model_type=kind, max_sentence_length=100000, minloglevel=2, **options)
        self.path = prefix + ".model"
        self.processor = sentencepiece.SentencePieceProcessor(model_file=self.path)


def make(name, folder, training):
    if name.startswith("sp_"):
        return Piece(folder, training, name[3:])
    makers = {"gpt2": gpt2, "llama3": llama3, "qwen2": qwen2, "roberta": roberta, "bert": bert, "bert_cased": lambda t: bert(t, False),
              "llama2": bytes_of_bpe, "llama2_metaspace": lambda t: bytes_of_bpe(t, False), "mixed": mixed, "word_level": word_level}
    return makers[name](training)


NAMES = ["gpt2", "llama3", "qwen2", "roberta", "bert", "bert_cased", "llama2", "llama2_metaspace", "mixed", "word_level", "sp_bpe", "sp_unigram"]


class Records:
    """What dump_tokens wrote, record by record."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def next(self):
        (n,) = struct.unpack_from("<I", self.data, self.at)
        ids = list(struct.unpack_from(f"<{n}i", self.data, self.at + 4))
        types = list(struct.unpack_from(f"<{n}i", self.data, self.at + 4 + 4 * n))
        self.at += 4 + 8 * n
        (n,) = struct.unpack_from("<I", self.data, self.at)
        text = self.data[self.at + 4:self.at + 4 + n].decode()
        self.at += 4 + n
        return ids, types, text


def chunks(items, size):
    return (items[i:i + size] for i in range(0, len(items), size))


def compare(name, tokenizer, path, raws, program, folder):
    source, result = os.path.join(folder, "texts"), os.path.join(folder, "tokens")
    with open(source, "wb") as file:
        for raw in raws:
            file.write(struct.pack("<I", len(raw)) + raw)
    run = subprocess.run([program, path, source, result, str(MOST)], capture_output=True, text=True)
    if run.returncode:
        print(f"{name}: {run.stderr.strip()}")
        return 1
    with open(result, "rb") as file:
        records = Records(file.read())
    texts = [raw.decode("utf-8", "replace") for raw in raws]
    is_piece = isinstance(tokenizer, Piece)
    special = set() if is_piece else {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    begin, wrong, tokens = time.time(), 0, 0

    def report(what, text, ours, theirs):
        nonlocal wrong
        wrong += 1
        if wrong <= 8:
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs)) if a != b), min(len(ours), len(theirs)))
            print(f"{name}: {what} of {text[:200]!r} differ at {at}: {ours[max(0, at - 2):at + 6]!r}, "
                  f"expected {theirs[max(0, at - 2):at + 6]!r}")

    for some in chunks(texts, 512):
        if is_piece:
            wanted = [([tokenizer.processor.bos_id()] + tokenizer.processor.EncodeAsIds(text), None) for text in some]
            decoded = [tokenizer.processor.DecodeIds(ids) for ids, _ in wanted]
        else:
            wanted = [(e.ids, e.type_ids) for e in tokenizer.encode_batch(some)]
            # 0.23 keeps special tokens in the text if they are "normalized"; here special tokens are left out, whatever they are.
            decoded = tokenizer.decode_batch([[i for i in ids if i not in special] for ids, _ in wanted])
        for text, (want, want_types), want_back in zip(some, wanted, decoded):
            ids, types, back = records.next()
            tokens += len(ids)
            # Equally likely cuts fall differently in SentencePiece 0.1.97 (Debian's) and 0.2: other pieces, as many.
            if ids != want and not (name == "sp_unigram" and len(ids) == len(want)):
                report("tokens", text, ids, want)
            elif want_types is not None and types != want_types:
                report("types", text, types, want_types)
            elif back != want_back:
                report("decoded text", text, back, want_back)
    if not is_piece:
        tokenizer.enable_truncation(MOST)
        for some in chunks(list(zip(texts[0::2], texts[1::2])), 512):
            # Of what is cut off the library keeps every combination: for documents that is more than there is memory.
            short = [len(pair[0]) + len(pair[1]) < 2000 for pair in some]
            wanted = iter(tokenizer.encode_batch([pair for pair, is_short in zip(some, short) if is_short]))
            for pair, is_short in zip(some, short):
                ids, types, _ = records.next()
                want = next(wanted) if is_short else None
                if want and (ids, types) != (want.ids, want.type_ids):
                    report("pair", " / ".join(pair), ids + types, want.ids + want.type_ids)
    if not run.stdout.strip().endswith(", 0 decoded otherwise as a stream"):
        wrong += 1
    print(f"{name}: {len(raws)} texts, {sum(map(len, raws))} bytes, {tokens} tokens, {wrong} differ; {run.stdout.strip()} "
          f"({time.time() - begin:.1f} s)", flush=True)
    return wrong


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--texts", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--keep", default="")
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    rng = random.Random(arguments.seed)
    papers = documents()
    raws = [b"", b" ", b"  a"] + [random_text(rng) for _ in range(arguments.texts)] + papers
    training = [p.decode("utf-8", "replace") for p in papers[:12]]
    names = arguments.only.split(",") if arguments.only else NAMES
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or temporary
        for name in names:
            tokenizer = make(name, folder, training)
            path = os.path.join(folder, f"{name}.json")
            if isinstance(tokenizer, Piece):
                path = tokenizer.path
            else:
                tokenizer.save(path)
            wrong += compare(name, tokenizer, path, raws, arguments.program, folder)
    print(f"tokenizer_parity: tokenizers {tokenizers.__version__}, sentencepiece {sentencepiece.__version__}: "
          f"{len(names)} tokenizers, {len(raws)} texts each, {wrong} differences")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

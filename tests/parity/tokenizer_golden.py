"""Writes tests/io/tokenizers: small tokenizers made by the library of Hugging Face and by SentencePiece, and what they give.

usage: python tokenizer_golden.py        needs tokenizers 0.23 and sentencepiece

The ordinary tests compare with these files; tokenizer_parity.py compares far more, where the libraries are.
"""
import json
import os
import random
import sys

import tokenizer_parity as parity

FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "io", "tokenizers")
NAMES = ["gpt2", "llama3", "roberta", "bert", "bert_cased", "llama2", "llama2_metaspace", "mixed", "word_level", "sp_bpe"]


def main():
    os.makedirs(FOLDER, exist_ok=True)
    with open("/usr/share/common-licenses/GPL-3") as file:
        training = [file.read()[:12000]]
    parity.SIZE = 0.25
    rng = random.Random(11)
    raws = [b"", b" ", b"  a", b"The licence isn't free; WE'LL see 12345 things.\n\n  End.", b"caf\xc3\xa9 \xff\xfe \xe2\x82"]
    raws += [word.encode() for word in parity.WORDS] + [parity.random_text(rng) for _ in range(60)]
    cases = {}
    for name in NAMES:
        parity.SIZE = {"sp_bpe": 0.4, "llama3": 0.15, "roberta": 0.25}.get(name, 0.2)
        tokenizer = parity.make(name, FOLDER, training)
        entry = {"texts": [], "pairs": []}
        is_piece = isinstance(tokenizer, parity.Piece)
        if not is_piece:
            tokenizer.save(os.path.join(FOLDER, name + ".json"), pretty=False)
            special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        for raw in raws:
            text = raw.decode("utf-8", "replace")
            if is_piece:
                ids = [tokenizer.processor.bos_id()] + tokenizer.processor.EncodeAsIds(text)
                back, types = tokenizer.processor.DecodeIds(ids), None
            else:
                encoding = tokenizer.encode(text)
                ids, types = encoding.ids, encoding.type_ids
                back = tokenizer.decode([i for i in ids if i not in special])
            entry["texts"].append({"text": raw.hex(), "ids": ids, "decoded": back.encode().hex()})
        if not is_piece:
            tokenizer.enable_truncation(parity.MOST)
            for first, second in zip(raws[3::3], raws[4::3]):
                encoding = tokenizer.encode(first.decode("utf-8", "replace"), second.decode("utf-8", "replace"))
                entry["pairs"].append({"first": first.hex(), "second": second.hex(), "ids": encoding.ids, "types": encoding.type_ids})
        cases[name] = entry
    for name in ("training.txt", "sp_bpe.vocab"):
        os.remove(os.path.join(FOLDER, name))
    with open(os.path.join(FOLDER, "golden.json"), "w") as file:
        json.dump(cases, file, separators=(",", ":"))
    print(f"tokenizer_golden: {len(NAMES)} tokenizers, {len(raws)} texts each")


sys.exit(main())

"""Compresses a small pruned model with `tessera convert --format` and compares every array with that of an encoder in numpy, which
follows the descriptions of the formats (docs/ops/sparse_linear.md) element by element and shares no code with the library.

usage: python sparse_formats.py TESSERA

The matrices have edges in both directions, empty groups, rows and columns, and weights of -0, which become 0. Exit status 77: no numpy
here, skipped.
"""
import json
import os
import struct
import subprocess
import sys
import tempfile

from needs import needs

with needs("numpy"):
    import numpy as np

TESSERA = os.path.abspath(sys.argv[1])
D, FF, LAYERS, HEADS, KV_HEADS, VOCABULARY = 96, 300, 2, 4, 2, 16
TYPES = {"F16": np.float16, "I64": np.int64, "I32": np.int32}


def write(path, tensors):
    header, data = {}, b""
    for name in sorted(tensors):
        raw = tensors[name].tobytes()
        header[name] = {"dtype": "F16", "shape": list(tensors[name].shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


def read(path):
    with open(path, "rb") as file:
        size = struct.unpack("<Q", file.read(8))[0]
        header, data = json.loads(file.read(size)), file.read()
    metadata = header.pop("__metadata__")
    arrays = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        arrays[name] = np.frombuffer(data[begin:end], TYPES[entry["dtype"]]).reshape(entry["shape"])
    return arrays, metadata


def word(bits):
    """64 booleans, the first in the lowest bit, as a signed number."""
    value = sum(1 << i for i, bit in enumerate(bits) if bit)
    return value - (1 << 64) if value >> 63 else value


def padded(matrix, rows, columns):
    return np.pad(matrix, ((0, -matrix.shape[0] % rows), (0, -matrix.shape[1] % columns)))


def close_group(values, offsets):
    values.extend([0] * (-len(values) % 8))
    offsets.append(len(values))


def tca_bme(matrix):
    values, bitmaps, offsets, info, most = [], [], [0], [], 0
    whole = padded(matrix, 64, 64)
    for top in range(0, whole.shape[0], 64):
        for left in range(0, whole.shape[1], 64):
            start = len(values)
            for median in range(4):
                info.append(len(values) - start)
                for tile in range(4):
                    for right in (0, 8):  # column-major: top left, bottom left, top right, bottom right
                        for down in (0, 8):
                            r, c = top + median * 16 + down, left + tile * 16 + right
                            block = whole[r:r + 8, c:c + 8].reshape(-1)
                            bitmaps.append(word(block != 0))
                            values.extend(block[block != 0])
            most = max(most, -(-(len(values) - start) // 64) * 64)
            close_group(values, offsets)
    return values, bitmaps, offsets, info, most


def tiled_cbc(matrix):
    values, bitmaps, offsets, info = [], [], [0], []
    whole = padded(matrix, 256, 64)
    for top in range(0, whole.shape[0], 256):
        for left in range(0, whole.shape[1], 64):
            start = len(values)
            for column in range(left, left + 64):
                tile = whole[top:top + 256, column]
                info.append((len(values) - start) << 9 | int(np.count_nonzero(tile)))
                for quarter in range(0, 256, 64):
                    bitmaps.append(word(tile[quarter:quarter + 64] != 0))
                values.extend(tile[tile != 0])
            close_group(values, offsets)
    return values, bitmaps, offsets, info, 0


def sell_delta4(matrix):
    values, gaps, offsets, info = [], [], [0], []
    parts = max(n for n in (1, 2, 4, 8) if n == 1 or matrix.shape[1] // n >= 128)
    width = -(-(-(-matrix.shape[1] // parts)) // 8) * 8
    for top in range(0, matrix.shape[0], 256):
        groups = []  # of the window: the entries of each row, part by part
        for left in range(0, parts * width, width):
            rows = []
            for row in padded(matrix[top:top + 256, left:left + width], 256, 1):
                entries, at = [], 0
                for column in np.flatnonzero(row):
                    entries += [(15, 0)] * ((column - at) // 16)
                    entries.append(((column - at) % 16, row[column]))
                    at = column + 1
                rows.append(entries)
            groups.append(rows)
        order = sorted(range(256), key=lambda r: -sum(len(rows[r]) for rows in groups))
        info += [sum(order[slot + i] << 8 * i for i in range(4)) for slot in range(0, 256, 4)]
        for rows in groups:
            for first in range(0, 256, 32):
                chunks = -(-max(len(rows[row]) for row in order[first:first + 32]) // 8)
                offsets.append(offsets[-1] + chunks)
                for chunk in range(chunks):
                    for row in order[first:first + 32]:
                        entries = (rows[row] + [(0, 0)] * (8 * chunks))[8 * chunk:8 * chunk + 8]
                        gaps.append(sum(gap << 4 * i for i, (gap, _) in enumerate(entries)))
                        values += [value for _, value in entries]
    return {"values": np.array(values, np.float16), "gaps": np.array(gaps, np.uint32).view(np.int32),
            "offsets": np.array(offsets, np.int32), "info": np.array(info, np.uint32).view(np.int32)}, 0


def mma_delta4(matrix):
    out, width = matrix.shape
    tiles, values, gaps, offsets, info = -(-width // 16), [], [], [0], []
    parts = -(-tiles // 32)
    whole = padded(matrix, 256, 16)
    for top in range(0, whole.shape[0], 256):
        for part in range(parts):
            first, end = (p * tiles // parts for p in (part, part + 1))
            half = 8 * (end - first)
            # Rows by stream: [stream][row, tile, column of the tile].
            streams = [whole[top:top + 256, first * 16 + s * half:first * 16 + (s + 1) * half].reshape(256, end - first, 8) for s in (0, 1)]
            # Elements of a row by stream and lane: columns 2t and 2t + 1 of each tile.
            counts = np.stack([np.count_nonzero(s.reshape(256, -1, 4, 2), axis=(1, 3)) for s in streams], axis=1)
            free, pairs = list(range(256)), []
            for a in sorted(range(256), key=lambda r: -counts[r].max()):
                if a not in free:
                    continue
                free.remove(a)
                lengths = (counts[a] + counts[free]).max(axis=2)
                chunks = -(-lengths // 8)
                best = int(np.argmin(64 * chunks.sum(axis=1) + lengths.sum(axis=1)))
                pairs.append((-int(chunks[best].sum()), -int(lengths[best, 0]), a, free.pop(best)))
            pairs.sort(key=lambda pair: pair[:2])
            rows = [pair[2 + low] for s in range(0, 128, 8) for low in (0, 1) for pair in pairs[s:s + 8]]
            places = np.empty(256, np.uint8)
            places[rows] = np.arange(256)
            info += list(places.view(np.uint32))
            for strip in range(0, 256, 16):
                for s in (0, 1):
                    lanes = []
                    for g in range(8):
                        for t in range(4):
                            both = streams[s][[rows[strip + g], rows[strip + g + 8]]][:, :, 2 * t:2 * t + 2]
                            lane = both.transpose(1, 0, 2).reshape(-1)
                            lane = np.concatenate([lane, np.zeros(-len(lane) % 8, lane.dtype)])
                            chosen, last = set(), -1
                            for position in np.flatnonzero(lane):
                                while position - last > 16:
                                    last += 16
                                    chosen.add(last)
                                chosen.add(last := int(position))
                            lanes.append((lane, chosen))
                    chunks = -(-max(len(chosen) for _, chosen in lanes) // 8)
                    entries = []
                    for lane, chosen in lanes:
                        chosen |= set([p for p in range(len(lane)) if p not in chosen][:8 * chunks - len(chosen)])
                        entries.append((lane, sorted(chosen)))
                    for chunk in range(chunks):
                        for lane, chosen in entries:
                            here = chosen[8 * chunk:8 * chunk + 8]
                            before = [chosen[8 * chunk - 1] if chunk else -1] + here
                            gaps.append(sum((p - q - 1) << 4 * i for i, (p, q) in enumerate(zip(here, before))))
                            values += list(lane[here] + np.float16(0))  # what fills a lane up may be -0 here
                    offsets.append(offsets[-1] + chunks)
    return {"values": np.array(values, np.float16), "gaps": np.array(gaps, np.uint32).view(np.int32),
            "offsets": np.array(offsets, np.int32), "info": np.array(info, np.uint32).view(np.int32)}, 0


def with_bitmaps(encode, matrix):
    values, bitmaps, offsets, info, most = encode(matrix)
    return {"values": np.array(values, np.float16), "bitmaps": np.array(bitmaps, np.int64), "offsets": np.array(offsets, np.int32),
            "info": np.array(info, np.int32)}, most


ENCODERS = {"tca-bme": lambda matrix: with_bitmaps(tca_bme, matrix), "tiled-cbc": lambda matrix: with_bitmaps(tiled_cbc, matrix),
            "sell-delta4": sell_delta4, "mma-delta4": mma_delta4}


def model(rng):
    tensors = {"model.embed_tokens.weight": rng.normal(size=(VOCABULARY, D)), "model.norm.weight": np.ones(D),
               "lm_head.weight": rng.normal(size=(VOCABULARY, D))}
    kv = D // HEADS * KV_HEADS
    shapes = {"self_attn.q_proj": (D, D), "self_attn.k_proj": (kv, D), "self_attn.v_proj": (kv, D), "self_attn.o_proj": (D, D),
              "mlp.gate_proj": (FF, D), "mlp.up_proj": (FF, D), "mlp.down_proj": (D, FF)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        tensors[at + "input_layernorm.weight"] = tensors[at + "post_attention_layernorm.weight"] = np.ones(D)
        for name, shape in shapes.items():
            matrix = rng.normal(size=shape)
            matrix[rng.random(shape) < (0.5, 0.93)[layer]] *= 0  # half of the zeros are -0
            matrix[3], matrix[:, 5] = 0, 0
            matrix[:64, :64] *= layer  # an empty group
            tensors[at + name + ".weight"] = matrix
    return {name: tensor.astype(np.float16) for name, tensor in tensors.items()}


tensors = model(np.random.default_rng(1))
compared = 0
with tempfile.TemporaryDirectory() as folder:
    os.makedirs(folder + "/dense")
    write(folder + "/dense/model.safetensors", tensors)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": D,
              "intermediate_size": FF, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
              "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "float16",
              "tie_word_embeddings": False}
    with open(folder + "/dense/config.json", "w") as file:
        json.dump(config, file)
    for name, encode in ENCODERS.items():
        subprocess.run([TESSERA, "convert", folder + "/dense", f"{folder}/{name}", "--format", name], check=True,
                       stdout=subprocess.DEVNULL)
        arrays, metadata = read(f"{folder}/{name}/sparse.safetensors")
        layers = json.loads(metadata["layers"])
        for layer, about in layers.items():
            wanted, most = encode(tensors[layer + ".weight"])
            for array, expected in wanted.items():
                got = arrays[f"{layer}.weight.{array}"]
                assert got.dtype == expected.dtype and got.tobytes() == expected.tobytes(), f"{name}: {layer}: {array} differs"
                compared += 1
            assert about["most"] == most and about["stored"] == np.count_nonzero(tensors[layer + ".weight"]), (name, layer, about)
        assert len(layers) == 7 * LAYERS
print(f"{compared} arrays are those of the encoder in numpy")

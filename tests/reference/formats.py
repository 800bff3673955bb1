"""Writes tests/golden/formats.bin: random blocks of every weight format and what the `gguf` package decodes them to.

    pip install gguf==0.19.0 && python tests/reference/formats.py

Layout, little-endian, formats until the end of the file:
    u8 length of name, name, u32 blocks, u32 block_bytes, u32 block_len,
    u8 [blocks, block_bytes], f32 [blocks, block_len]
"""

import struct
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

# Byte offsets of the f16 numbers of a block: random bits there would be NaN or infinite once in 32 times.
F16_AT = {
    "F16": [0],
    "Q8_0": [0],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ2_XXS": [0],
}
FORMATS = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "MXFP4"]
# Zeros, the subnormals' ends, one, the largest, and negatives: every format meets each as a scale.
EXTREMES = np.array([0x0000, 0x8000, 0x0001, 0x03FF, 0x0400, 0x3C00, 0x7BFF, 0xFBFF, 0x8001], dtype=np.uint16)


def blocks_of(name: str, rng: np.random.Generator) -> np.ndarray:
    block_len, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    n = {1: 256, 32: 80, 256: 32}[block_len]
    blocks = rng.integers(0, 256, size=(n, block_bytes), dtype=np.uint8)
    for column, at in enumerate(F16_AT.get(name, [])):
        bits = rng.integers(0, 1 << 16, size=n, dtype=np.uint16)
        infinite = bits & 0x7C00 == 0x7C00
        bits[infinite] ^= 0x4000
        # Each extreme once as the first number; as the second one they come in another order.
        bits[: len(EXTREMES)] = np.roll(EXTREMES, 4 * column)
        blocks[:, at : at + 2] = bits.astype("<u2").view(np.uint8).reshape(n, 2)
    if name == "F32":
        words = blocks.view("<u4")
        words[words & 0x7F800000 == 0x7F800000] ^= 0x40000000
    if name == "BF16":
        words = blocks.view("<u2")
        words[words & 0x7F80 == 0x7F80] ^= 0x4000
    if name == "MXFP4":
        blocks[:7, 0] = [0, 1, 2, 127, 128, 254, 255]
    if name == "IQ2_XXS":
        # The first eight blocks visit all 256 patterns, the next four all 128 sign indices.
        groups = blocks[:, 2:].reshape(n, 8, 8)
        groups[:8, :, :4] = np.arange(256, dtype=np.uint8).reshape(8, 8, 4)
        signs = np.arange(128, dtype=np.uint32).reshape(4, 8, 4) << np.array([0, 7, 14, 21], dtype=np.uint32)
        words = np.bitwise_or.reduce(signs, axis=-1) | rng.integers(0, 16, size=(4, 8), dtype=np.uint32) << 28
        groups[8:12, :, 4:] = words.astype("<u4").view(np.uint8).reshape(4, 8, 4)
    return blocks


def main() -> None:
    rng = np.random.default_rng(20260)
    out = bytearray()
    for name in FORMATS:
        qtype = GGMLQuantizationType[name]
        blocks = blocks_of(name, rng)
        with np.errstate(over="ignore"):
            values = dequantize(blocks, qtype).astype("<f4")
        assert not np.isnan(values).any(), name
        block_len, block_bytes = GGML_QUANT_SIZES[qtype]
        label = name.lower().encode()
        out += struct.pack("<B", len(label)) + label + struct.pack("<III", len(blocks), block_bytes, block_len)
        out += blocks.tobytes() + values.tobytes()
    path = Path(__file__).parent.parent / "golden" / "formats.bin"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(out)
    print(f"{path.name}: {len(out):,} bytes")


if __name__ == "__main__":
    main()

"""Writes tests/golden/gguf_<model>.txt: metadata and tensors of a GGUF file as the `gguf` package reads them.

    pip install gguf==0.19.0 && python tests/reference/gguf_listing.py MODEL.gguf ...

One line per metadata entry and tensor, sorted by name. Arrays and tensors are given by length and CRC-32: of the
elements as the file stores them (strings: UTF-8, each followed by a zero byte), and of the tensor's bytes.
"""

import sys
import zlib
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType

NAMES = {"UINT": "u", "INT": "i", "FLOAT": "f"}


def type_name(value_type: GGUFValueType) -> str:
    name = value_type.name
    for long, short in NAMES.items():
        if name.startswith(long):
            return short + name[len(long) :]
    return name.lower()


def metadata_line(field) -> str:
    kind = field.types[0]
    if kind == GGUFValueType.ARRAY:
        element = field.types[1]
        data = b"".join(bytes(field.parts[i]) + b"\0" * (element == GGUFValueType.STRING) for i in field.data)
        return f"meta {field.name} [{type_name(element)}; {len(field.data)}] {zlib.crc32(data):08x}"
    if kind == GGUFValueType.STRING:
        data = bytes(field.parts[-1])
        return f"meta {field.name} string {len(data)} {zlib.crc32(data):08x}"
    value = field.parts[-1][0]
    if kind == GGUFValueType.FLOAT32:
        return f"meta {field.name} f32 {np.float32(value).view(np.uint32):08x}"
    return f"meta {field.name} {type_name(kind)} {str(value).lower()}"


def tensor_line(tensor) -> str:
    shape = "x".join(str(dim) for dim in reversed(tensor.shape.tolist()))
    kind = GGMLQuantizationType(tensor.tensor_type).name.lower()
    crc = zlib.crc32(tensor.data.tobytes())
    return f"tensor {tensor.name} {kind} {shape} {tensor.data_offset} {tensor.n_bytes} {crc:08x}"


def main() -> None:
    for path in map(Path, sys.argv[1:]):
        reader = GGUFReader(path)
        fields = (field for name, field in reader.fields.items() if not name.startswith("GGUF."))
        lines = [metadata_line(field) for field in sorted(fields, key=lambda field: field.name)]
        lines += [tensor_line(tensor) for tensor in sorted(reader.tensors, key=lambda tensor: tensor.name)]
        golden = Path(__file__).parent.parent / "golden" / f"gguf_{path.stem}.txt"
        golden.write_text("\n".join(lines) + "\n")
        print(f"{golden.name}: {len(lines)} lines")


if __name__ == "__main__":
    main()

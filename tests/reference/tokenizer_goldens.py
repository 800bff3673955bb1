"""Writes token ids of reference tokenizers over the hard corpus: crates/arc/tests/golden/text/<name>.json.

    ARC_TEST_MODELS=<folder> python tokenizer_goldens.py [name ...]

The folder holds what fetch_tokenizers.sh puts there and the two GGUF models of the tests. References:

smollm2          `tokenizers`, put together from the arrays of the GGUF file
llama3, qwen3, gemma3, deepseek-v4
                 `tokenizers`, from the model's own tokenizer.json
gemma3-gguf      `sentencepiece`, put together from the arrays of the GGUF file (it has no way to parse control tokens)
gemma3-prefix    the same with a dummy space in front of each text

Each file: "parse" and "text", the ids with control tokens in the text read as such and as ordinary text. In each:
"lines": ids per line of the corpus; "random" and "points": a hash per 50 random texts and per 256 code points.
"text" has null for a line that equals "parse".
"""

import json
import os
import pathlib
import sys

from text_corpus import GOLDEN, code_point_texts, random_texts

MODELS = pathlib.Path(os.environ["ARC_TEST_MODELS"])
SMOLLM2 = MODELS / "smollm2-135m-instruct-q4_1.gguf"
GEMMA3 = MODELS / "gemma-3-270m-q4_k_m.gguf"


def gguf_fields(path):
    from gguf import GGUFReader

    fields = GGUFReader(path).fields
    return {name.split(".")[-1]: f.contents() for name, f in fields.items() if name.startswith("tokenizer.")}


def smollm2():
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    fields = gguf_fields(SMOLLM2)
    vocab = {text: i for i, text in enumerate(fields["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in fields["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    control = [t for t, kind in zip(fields["tokens"], fields["token_type"]) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return hugging_face(tokenizer)


def from_json(name):
    from tokenizers import Tokenizer

    spec = json.loads((MODELS / name / "tokenizer.json").read_text(encoding="utf-8"))
    template = json.loads((MODELS / name / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template", "")
    # Arc also takes these for control tokens when they stand in a user's text.
    for token in spec["added_tokens"]:
        text = token["content"]
        bracketed = len(text) > 2 and text[0] + text[-1] in ("<>", "[]")
        is_written = (bracketed and text in template) or text in ("<think>", "</think>")
        if "｜" in text or (text[:2] == "<|" and text[-2:] == "|>") or is_written:
            token["special"] = True
    return hugging_face(Tokenizer.from_str(json.dumps(spec)))


def hugging_face(tokenizer):
    def encode(text, parse):
        tokenizer.encode_special_tokens = not parse
        return tokenizer.encode(text, add_special_tokens=False).ids

    return encode


def gemma3_gguf(prefix):
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2 as pb

    fields = gguf_fields(GEMMA3)
    model = pb.ModelProto()
    for i, (text, score, kind) in enumerate(zip(fields["tokens"], fields["scores"], fields["token_type"])):
        piece = model.pieces.add()
        piece.piece, piece.score = text.replace(" ", "▁"), score
        piece.type = 2 if i == fields["unknown_token_id"] else kind
    model.trainer_spec.model_type = pb.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = True
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = prefix
    model.normalizer_spec.remove_extra_whitespaces = False
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
    return lambda text, parse: None if parse else processor.encode(text)


REFERENCES = {
    "smollm2": smollm2,
    "llama3": lambda: from_json("llama3"),
    "qwen3": lambda: from_json("qwen3"),
    "gemma3": lambda: from_json("gemma3"),
    "deepseek-v4": lambda: from_json("deepseek-v4"),
    "gemma3-gguf": lambda: gemma3_gguf(False),
    "gemma3-prefix": lambda: gemma3_gguf(True),
}


def fnv(ids_of_texts):
    """FNV-1a, 64 bits, over the ids as little-endian u32, each text ended by 0xFFFFFFFF."""
    value = 0xCBF29CE484222325
    for ids in ids_of_texts:
        for byte in b"".join(i.to_bytes(4, "little") for i in [*ids, 0xFFFFFFFF]):
            value = (value ^ byte) * 0x100000001B3 % 2**64
    return f"{value:016x}"


def golden(corpus, encode):
    result, lines = {}, {}
    for mode, parse in (("parse", True), ("text", False)):
        if encode("a", parse) is None:
            continue
        lines[mode] = [encode(text, parse) for text in corpus["lines"]]
        if mode == "text" and "parse" in lines:
            shown = [None if ids == other else ids for ids, other in zip(lines["text"], lines["parse"])]
        else:
            shown = lines[mode]
        texts = list(random_texts(corpus["palette"], 2000, seed=1))
        chunks = [texts[at : at + 50] for at in range(0, len(texts), 50)]
        result[mode] = {
            "lines": shown,
            "random": [fnv(encode(text, parse) for text in chunk) for chunk in chunks],
            "points": [fnv([encode(text, parse)]) for text in code_point_texts(corpus["assigned"])],
        }
    return result


if __name__ == "__main__":
    corpus = json.loads((GOLDEN / "corpus.json").read_text(encoding="utf-8"))
    for name in sys.argv[1:] or REFERENCES:
        with open(GOLDEN / f"{name}.json", "w") as out:
            json.dump(golden(corpus, REFERENCES[name]()), out, separators=(",", ":"))
            out.write("\n")
        print("wrote", name)

"""Writes the hard corpus for tokenizers: crates/arc/tests/golden/text/corpus.json.

lines     texts compared id by id
palette   pieces from which the tests build random texts, the same way in Rust and in Python (see `random_texts`)
assigned  inclusive ranges of code points assigned in Unicode 14 or before (surrogates and private use left out), each
          of which is tried between letters, digits and spaces
"""

import json
import pathlib
import unicodedata

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "crates/arc/tests/golden/text"

LINES = [
    "", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "a", "Hello, world!", " Hello", "Hello ",
    "The quick brown fox jumps over the lazy dog.",
    "I'm you're he'll we've they'd it's don't CAN'T I'LL YOU'VE o'clock 'tis ''quoted''",
    "naïve café coöperate Ærøskøbing Übergrößenträger façade",
    # digits
    "0", "12", "123", "1234", "12345", "1234567890", "3.14159", "1,234,567.89", "-42", "+7", "1e-10", "0xDEADBEEF",
    "2024-02-29T23:59:59.999Z", "v1.2.3-rc4", "½ ¾ ² ³ ① Ⅷ ٣٤٥ १२३ 四五六 𝟘𝟙𝟚 ௧௨", "a1b2c3", "1 2  3   4", "٠١٢٣٤٥٦٧٨٩",
    # code
    "def f(x):\n    return x**2  # square\n\n\nclass A:\n\tpass\n",
    "for (int i = 0; i < n; ++i) {\n\t\tsum += a[i] * b[i];\n\t}\n",
    "fn main() { println!(\"{:?}\", vec![1u8; 3]); } // ok\r\n",
    "SELECT * FROM `t` WHERE a<>'b''c' AND x IS NOT NULL;",
    "<div class=\"x\"><p>Hi&nbsp;there</p></div><!-- c --><br/>",
    "{\"k\": [1, 2.5, null, true, \"\\u00e9\\n\"]}", "$\\sum_{i=0}^{n} x_i^2 \\leq \\frac{1}{2}$",
    "https://example.org/a/b?c=d&e=%20f#g user@example.com C:\\Users\\x\\y.txt /usr/bin/env",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case dot.case", "a+b=c;d*e/f%g^h&i|j~k`l",
    "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", "!!! ??? ... --- === *** ### ///", ".foo !bar #baz @qux $x %y &z *w",
    # white space
    "a b  c   d    e     f", "   leading", "trailing   ", "a\n b\n  c\n   d", "a\nb\n\nc\n\n\nd\n\n\n\ne", "a\r\nb\r\n\r\nc\rd\r\re",
    "\t\ta\t b \tc\t\t", " \n \n ", "\n \n\t\n", "x \n", "x  \n  y", "a\u00a0b\u2003c\u2028d\u2029e\u0085f\u200bg\ufeffh",
    "a\x0bb\x0cc", "                                        x", "\n" * 40 + "x", "\t" * 35 + "x", " " * 17 + "\n" + " " * 33,
    "▁", "a▁b", "▁▁a ▁ b▁", "Ġ ĠĠ Ċ ĉ Ä", "<0x41> <0x0A>",
    # control bytes
    "\x00", "a\x00b", "\x01\x02\x03", "\x04\x06\x13\x14\x16\x1d", "\x1b[31mred\x1b[0m", "\x7f\x80\x9f", "a\x08\x07b", "\x1f a\x1f1\x1f",
    "\ufffd \ufffe \uffff \ufdd0 \U0010ffff \U000e0001",
    # scripts
    "Съешь же ещё этих мягких французских булок, да выпей чаю.", "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία.",
    "דג סקרן שט בים מאוכזב ולפתע מצא לו חברה", "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر", "بِسْمِ ٱللَّٰهِ",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण", "আমি বাংলায় গান গাই", "ਪੰਜਾਬੀ ਗੁਰਮੁਖੀ", "ગુજરાતી", "தமிழ் மொழி",
    "తెలుగు భాష", "ಕನ್ನಡ ಭಾಷೆ", "മലയാളം", "සිංහල", "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า", "ພາສາລາວ", "བོད་སྐད།", "မြန်မာဘာသာ",
    "ქართული ენა", "Հայոց լեզու", "አማርኛ ፊደል", "ភាសាខ្មែរ", "ᠮᠣᠩᠭᠣᠯ", "ᏣᎳᎩ", "ᐃᓄᒃᑎᑐᑦ", "ⵜⴰⵎⴰⵣⵉⵖⵜ", "ꦧꦱꦗꦮ", "𐌰𐌱 𐎀𐎁 𒀀𒀁 𓀀𓀁",
    "我能吞下玻璃而不伤身体。", "私はガラスを食べられます。それは私を傷つけません。", "나는 유리를 먹을 수 있어요. 그래도 아프지 않아요", "各個「測試」、標點：？！",
    "漢字カタカナひらがなﾊﾝｶｸ全角ＡＢＣ１２３", "㐀㐁 𠀀𠀁 龥龦龧 豈更", "ゝゞ々〆ヵヶー・゠゛゜", "中文English混合123数字，。", "ㄅㄆㄇ ㄱㄴㄷ", "Tiếng Việt có dấu",
    "abc שלום def سلام ghi", "\u200fאב\u200e \u202bגד\u202c \u2066x\u2069",
    # combining marks, normalisation
    "e\u0301 é", "a\u0300\u0301\u0302\u0303\u0304", "\u0301", " \u0301a", "a \u0301b", "Z\u0351\u0352\u0353\u0354a\u0315\u031bl\u0321go",
    "ﬁ ﬂ ﬀ ſ ß ẞ İ ı ŉ", "'ſ 'ſo it'ſ 'S 'ST 'K", "\u1100\u1161\u11a8 각", "Å Å Å", "\u0344\u0374\u037e\u2126\u212a\u212b", "ｶﾞ が が",
    # emoji
    "😀😃😄", "👍🏽👋🏿", "👨‍👩‍👧‍👦 👩🏾‍🚀 🏳️‍🌈 🏴‍☠️", "🇩🇪🇫🇷🇯🇵", "1️⃣ #️⃣ *️⃣", "❤️ ❤ ☺︎ ☺️", "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f", "a😀b 😀 c😀😀",
    "™ © ® ° § ¶ † ‡ • … ‰ ′ ″ ‹ › « » “ ” ‘ ’ – — ― ¡ ¿", "€ £ ¥ ₹ ₿ ¢ ∑ ∏ √ ∞ ≠ ≤ ≥ ± × ÷ → ⇒ ∀ ∃ ∈ ⊂ ℝ ℕ", "█▓▒░ ┌─┐│└┘ ♠♥♦♣ ♪♫ ☀☁☂ ⠿⠇",
    # what looks like a control token
    "<|im_start|>user\nhi<|im_end|>\n", "<|im_start|><|im_end|><|endoftext|>", "<|im_start |> <|im_start| > <| im_start|>", "a<|endoftext|>b <|endoftext|> c",
    "<<|im_end|>>", "<|im_<|im_end|>end|>", "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nx<|eot_id|>", "<|reserved_special_token_0|>",
    "<bos><start_of_turn>user\nhi<end_of_turn>\n<eos>", "<pad> <unk> <mask> [multimodal] <unused0> <unused99>", "<table><tr><td>x</td></tr></table> <h1>t</h1>",
    "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>ok<｜end▁of▁sentence｜>", "<think>\nhm\n</think>\n\nok", "<think></think><tool_call>{}</tool_call>",
    "｜DSML｜ <｜DSML｜invoke name=\"f\"> </｜DSML｜invoke>", "<tool_response>\nx\n</tool_response>", "<｜▁pad▁｜> <｜place▁holder▁no▁0｜>", "<｜fim▁hole｜><|fim_prefix|>",
    "<s>[INST] x [/INST]</s>", "<repo_name> <file_sep> <gh_stars>", "<image_soft_token><start_of_image>", "<|im_end", "im_end|>", "<|", "|>", "<", "<｜",
    # long words
    "a" * 300, "ab" * 200, "aaab" * 100, "0" * 200, "-" * 200, "=" * 77 + " " + "=" * 78, "😀" * 60, "é" * 100, "的" * 120, "\u0301" * 60, "x\u0301" * 60,
    "Donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft", "pneumonoultramicroscopicsilicovolcanoconiosis" * 4,
    "GATTACACATTAGGACCATGA" * 20, "QWxhZGRpbjpvcGVuIHNlc2FtZQ==" * 8, "f" * 64 + "0123456789abcdef" * 8, "lorem" * 50 + " " + "ipsum" * 50, "!?" * 80, "\r\n" * 40, " a" * 60,
]

PALETTE = [
    " ", " ", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\r", "\t", "\u00a0", "\u3000", "\u2028", "\u0085", "\x0b", "a", "b", "s", "t", "re", "ll", "the", " the", "The", "ing",
    "tion", "hello", " world", "I", "'", "'", "’", "\"", ".", ",", "!", "?", ";", ":", "(", ")", "[", "]", "{", "}", "<", ">", "|", "/", "\\", "-", "_", "=", "+", "*", "&",
    "#", "@", "$", "%", "^", "~", "`", "0", "1", "9", "42", "123", "2024", "٣", "½", "Ⅷ", "é", "e\u0301", "\u0301", "\u0308", "ß", "ſ", "ж", "привет", " мир", "α", "ω",
    "א", "שלום", "ع", "مرحبا", "\u064b", "अ", "क्ष", "\u093f", "ก", "ั", "あ", "ア", "ー", "・", "゛", "漢", "字", "的", "龦", "한", "글", "\u1100", "\u1161", "😀", "👍🏽", "\u200d",
    "❤️", "\ufe0f", "🇩🇪", "™", "→", "∑", "€", "—", "…", "「", "」", "。", "，", "\x00", "\x01", "\x1b", "\x7f", "\u200b", "\ufeff", "\ufffd", "▁", "▁▁", "Ġ", "<|", "|>", "<｜", "｜>", "｜",
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<bos>", "<eos>", "<end_of_turn>", "<table>", "</td>", "<think>", "</think>", "<tool_call>", "<｜User｜>",
    "<｜end▁of▁sentence｜>", "｜DSML｜", "𝟘", "𠀀", "𓀀",
]


def assigned():
    """Inclusive ranges of code points with a category in Python's Unicode tables, which are those of version 14 or later."""
    ranges = []
    for code in range(0x110000):
        if unicodedata.category(chr(code)) in ("Cn", "Cs", "Co"):
            continue
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return ranges


def random_texts(palette, count, seed):
    """`count` texts of 1 to 40 pieces. A 64-bit linear congruential generator, so that Rust can do the same."""
    state = seed

    def below(n):
        nonlocal state
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (state >> 33) % n

    for _ in range(count):
        yield "".join(palette[below(len(palette))] for _ in range(1 + below(40)))


def code_point_texts(ranges):
    """One text for each 256 code points: every one between letters, digits, spaces and itself."""
    blocks = {}
    for first, last in ranges:
        for code in range(first, last + 1):
            c = chr(code)
            blocks.setdefault(code >> 8, []).append(f"a{c}b {c}{c} .{c}1{c}\n")
    return ["".join(blocks[block]) for block in sorted(blocks)]


if __name__ == "__main__":
    if not unicodedata.unidata_version.startswith("14."):
        raise SystemExit("run with Python 3.11, whose Unicode tables are those of version 14")
    GOLDEN.mkdir(parents=True, exist_ok=True)
    corpus = {"lines": LINES, "palette": PALETTE, "assigned": assigned()}
    with open(GOLDEN / "corpus.json", "w", encoding="utf-8") as out:
        out.write("{\n" + ",\n".join(f'"{k}": {json.dumps(v, separators=(",", ":"))}' for k, v in corpus.items()) + "\n}\n")

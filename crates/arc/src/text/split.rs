//! Pre-tokenizers: where a text is cut before merging. No merge crosses a cut.
//!
//! Each splitter is the hand-written form of the regular expressions in a model's `tokenizer.json`, quoted beside it.
//! By hand because the expressions look ahead (`\s+(?!\S)`), which linear regex engines do not, and backtracking
//! engines spend most of an encode here. Every scan moves forward, so the cost is linear in any text.

use unicode_general_category::{GeneralCategory as G, get_general_category};

/// A known pre-tokenizer, by its name in `tokenizer.ggml.pre`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Splitter {
    /// `smollm`: every digit alone, then GPT-2's expression between digits.
    SmolLm,
    /// `llama-bpe`: Llama 3's expression, numbers in groups of three.
    LlamaBpe,
    /// `qwen2`: Llama 3's expression, every digit alone.
    Qwen2,
    /// `joyai-llm`: three expressions in turn, as in DeepSeek-V3 and V4.
    JoyAiLlm,
}

impl Splitter {
    pub(super) fn from_name(pre: &str) -> Option<Self> {
        match pre {
            "smollm" => Some(Self::SmolLm),
            "llama-bpe" => Some(Self::LlamaBpe),
            "qwen2" => Some(Self::Qwen2),
            "joyai-llm" => Some(Self::JoyAiLlm),
            _ => None,
        }
    }

    /// Hands the words of `text` to `word`, in order and without gaps. No word is empty.
    pub(super) fn split<'a>(self, text: &'a str, mut word: impl FnMut(&'a str)) {
        match self {
            // \p{N} | the rest through GPT-2's expression
            Self::SmolLm => {
                let mut rest = text;
                while let Some(c) = rest.chars().next() {
                    let len = if is_number(c) { c.len_utf8() } else { run(rest, |c| !is_number(c)) };
                    let (segment, tail) = rest.split_at(len);
                    each(segment, gpt2, &mut word);
                    rest = tail;
                }
            }
            Self::LlamaBpe => each(text, |t| llama3(t, 3), &mut word),
            Self::Qwen2 => each(text, |t| llama3(t, 1), &mut word),
            // \p{N}{1,3}, then [一-龥぀-ゟ゠-ヿ]+, then the third expression on what lies between and on both
            Self::JoyAiLlm => {
                let mut rest = text;
                while let Some(c) = rest.chars().next() {
                    let len = if is_number(c) {
                        run_up_to(rest, 3, is_number)
                    } else if is_han_or_kana(c) {
                        run(rest, is_han_or_kana)
                    } else {
                        run(rest, |c| !is_number(c) && !is_han_or_kana(c))
                    };
                    let (segment, tail) = rest.split_at(len);
                    deepseek_segment(segment, &mut word);
                    rest = tail;
                }
            }
        }
    }
}

/// Cuts `text` by a scanner that returns the length of the word at its start.
fn each<'a>(text: &'a str, scan: impl Fn(&str) -> usize, word: &mut impl FnMut(&'a str)) {
    let mut rest = text;
    while !rest.is_empty() {
        let (head, tail) = rest.split_at(scan(rest));
        word(head);
        rest = tail;
    }
}

/// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
fn gpt2(text: &str) -> usize {
    for suffix in ["'s", "'t", "'re", "'ve", "'m", "'ll", "'d"] {
        if text.starts_with(suffix) {
            return suffix.len();
        }
    }
    let space = usize::from(text.starts_with(' '));
    let body = &text[space..];
    let len = match body.chars().next() {
        Some(c) if is_letter(c) => run(body, is_letter),
        Some(c) if is_number(c) => run(body, is_number),
        Some(c) if !c.is_whitespace() => run(body, is_other),
        _ => return spaces(text),
    };
    space + len
}

/// `(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,n}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+`
fn llama3(text: &str, digits: usize) -> usize {
    let mut chars = text.chars();
    let first = chars.next().expect("callers stop at the end of the text");
    let second = chars.next();
    if first == '\'' {
        // Case folding makes U+017F (long s) an s.
        let two: [Option<char>; 2] = [second, chars.next()].map(|c| c.map(|c| c.to_ascii_lowercase()));
        match two {
            [Some('s' | 't' | 'm' | 'd' | 'ſ'), _] => return 1 + second.map_or(0, char::len_utf8),
            [Some('r' | 'v'), Some('e')] | [Some('l'), Some('l')] => return 3,
            _ => {}
        }
    }
    let width = first.len_utf8();
    if is_letter(first) {
        return run(text, is_letter);
    }
    if is_number(first) {
        return run_up_to(text, digits, is_number);
    }
    if !is_newline(first) && second.is_some_and(is_letter) {
        return width + run(&text[width..], is_letter);
    }
    let space = usize::from(first == ' ');
    let marks = run(&text[space..], is_other);
    if marks > 0 {
        let end = space + marks;
        return end + run(&text[end..], is_newline);
    }
    lines_or_spaces(text)
}

/// One segment through
/// ``[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+``.
/// What it does not match (digits, control characters) stays together between matches.
fn deepseek_segment<'a>(segment: &'a str, word: &mut impl FnMut(&'a str)) {
    let (mut rest, mut gap) = (segment, 0);
    while let Some(c) = rest[gap..].chars().next() {
        let len = deepseek(&rest[gap..]);
        if len == 0 {
            gap += c.len_utf8();
            continue;
        }
        let (unmatched, tail) = rest.split_at(gap);
        let (matched, tail) = tail.split_at(len);
        if gap > 0 {
            word(unmatched);
        }
        word(matched);
        (rest, gap) = (tail, 0);
    }
    if gap > 0 {
        word(rest);
    }
}

/// Length of the match at the start of `text`, or 0.
fn deepseek(text: &str) -> usize {
    let mut chars = text.chars();
    let first = chars.next().expect("callers stop at the end of the text");
    let second = chars.next();
    let width = first.len_utf8();
    if first.is_ascii_punctuation() && second.is_some_and(|c| c.is_ascii_alphabetic()) {
        return width + run(&text[width..], |c| c.is_ascii_alphabetic());
    }
    if is_letter_or_mark(first) {
        return run(text, is_letter_or_mark);
    }
    if !is_newline(first) && !is_punct_or_symbol(first) && second.is_some_and(is_letter_or_mark) {
        return width + run(&text[width..], is_letter_or_mark);
    }
    let space = usize::from(first == ' ');
    let marks = run(&text[space..], is_punct_or_symbol);
    if marks > 0 {
        let end = space + marks;
        return end + run(&text[end..], is_newline);
    }
    if first.is_whitespace() { lines_or_spaces(text) } else { 0 }
}

/// `\s*[\r\n]+|\s+(?!\S)|\s+` at white space.
fn lines_or_spaces(text: &str) -> usize {
    let blank = &text[..run(text, char::is_whitespace)];
    match blank.rfind(is_newline) {
        Some(at) => at + 1,
        None => spaces(text),
    }
}

/// `\s+(?!\S)|\s+` at white space: the run, less its last character where a word follows.
fn spaces(text: &str) -> usize {
    let len = run(text, char::is_whitespace);
    let last = text[..len].chars().next_back().map_or(0, char::len_utf8);
    if len == text.len() || len == last { len } else { len - last }
}

/// Bytes of the longest start of `text` that lies in `class`.
fn run(text: &str, class: impl Fn(char) -> bool) -> usize {
    text.find(|c| !class(c)).unwrap_or(text.len())
}

fn run_up_to(text: &str, most: usize, class: impl Fn(char) -> bool) -> usize {
    text.chars().take(most).take_while(|&c| class(c)).map(char::len_utf8).sum()
}

/// `\p{L}`
fn is_letter(c: char) -> bool {
    if c.is_ascii() {
        return c.is_ascii_alphabetic();
    }
    use G::{LowercaseLetter, ModifierLetter, OtherLetter, TitlecaseLetter, UppercaseLetter};
    matches!(
        get_general_category(c),
        UppercaseLetter | LowercaseLetter | TitlecaseLetter | ModifierLetter | OtherLetter
    )
}

/// `[\p{L}\p{M}]`
fn is_letter_or_mark(c: char) -> bool {
    is_letter(c)
        || (!c.is_ascii() && matches!(get_general_category(c), G::NonspacingMark | G::SpacingMark | G::EnclosingMark))
}

/// `\p{N}`
fn is_number(c: char) -> bool {
    if c.is_ascii() {
        return c.is_ascii_digit();
    }
    matches!(get_general_category(c), G::DecimalNumber | G::LetterNumber | G::OtherNumber)
}

/// `[\p{P}\p{S}]`
fn is_punct_or_symbol(c: char) -> bool {
    if c.is_ascii() {
        return c.is_ascii_punctuation();
    }
    use G::{
        ClosePunctuation, ConnectorPunctuation, CurrencySymbol, DashPunctuation, FinalPunctuation, InitialPunctuation,
        MathSymbol, ModifierSymbol, OpenPunctuation, OtherPunctuation, OtherSymbol,
    };
    matches!(
        get_general_category(c),
        ClosePunctuation
            | ConnectorPunctuation
            | CurrencySymbol
            | DashPunctuation
            | FinalPunctuation
            | InitialPunctuation
            | MathSymbol
            | ModifierSymbol
            | OpenPunctuation
            | OtherPunctuation
            | OtherSymbol
    )
}

/// `[^\s\p{L}\p{N}]`
fn is_other(c: char) -> bool {
    !c.is_whitespace() && !is_letter(c) && !is_number(c)
}

/// `[\r\n]`
fn is_newline(c: char) -> bool {
    matches!(c, '\r' | '\n')
}

/// `[一-龥぀-ゟ゠-ヿ]`
fn is_han_or_kana(c: char) -> bool {
    matches!(c, '\u{4E00}'..='\u{9FA5}' | '\u{3040}'..='\u{30FF}')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(splitter: Splitter, text: &str) -> Vec<&str> {
        let mut words = Vec::new();
        splitter.split(text, |w| words.push(w));
        assert_eq!(words.concat(), text);
        assert!(words.iter().all(|w| !w.is_empty()));
        words
    }

    #[test]
    fn splits_as_the_expressions_say() {
        let cases: [(Splitter, &str, &[&str]); 12] = [
            (Splitter::SmolLm, "it's 42  cats", &["it", "'s", " ", "4", "2", " ", " cats"]),
            (Splitter::SmolLm, "a  7", &["a", "  ", "7"]),
            (Splitter::SmolLm, "x\n\n y  ", &["x", "\n\n", " y", "  "]),
            (Splitter::LlamaBpe, "IT'S 12345.6", &["IT", "'S", " ", "123", "45", ".", "6"]),
            (Splitter::LlamaBpe, "a \r\n\n  b", &["a", " \r\n\n", " ", " b"]),
            (Splitter::LlamaBpe, "f(x)!\n\ny", &["f", "(x", ")!\n\n", "y"]),
            (Splitter::LlamaBpe, "'ſo", &["'ſ", "o"]),
            (Splitter::Qwen2, "12 \tz", &["1", "2", " ", "\tz"]),
            (Splitter::JoyAiLlm, "a1234b", &["a", "123", "4", "b"]),
            (Splitter::JoyAiLlm, "見る漢字x .foo", &["見る漢字", "x", " .", "foo"]),
            (Splitter::JoyAiLlm, "\u{1}\u{2}!\u{3}a", &["\u{1}\u{2}", "!", "\u{3}a"]),
            (Splitter::JoyAiLlm, "e\u{301}x!\r\n \n z", &["e\u{301}x", "!\r\n", " \n", " z"]),
        ];
        for (splitter, text, expected) in cases {
            assert_eq!(words(splitter, text), expected, "{splitter:?} {text:?}");
        }
    }

    #[test]
    fn cost_is_linear_in_hostile_text() {
        for unit in [" ", "\n", " \n", "a", "'", "1", "\u{1}", "!", "あ", "\u{301}", " \u{1}", "a\u{1}"] {
            let text = unit.repeat(1_000_000 / unit.len());
            for splitter in [Splitter::SmolLm, Splitter::LlamaBpe, Splitter::Qwen2, Splitter::JoyAiLlm] {
                words(splitter, &text);
            }
        }
    }
}

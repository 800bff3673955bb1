//! Streams equal their one-shot results, however they are cut.

use std::sync::Arc;

use arc::text::{Control, Detokenizer, Special, StopMatcher, Tokenizer, TokenizerSpec};

use crate::golden::{GEMMA3, SMOLLM2, from_gguf, from_json};

/// A 64-bit linear congruential generator.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 33) % n as u64) as usize
    }
}

/// A vocabulary of the 256 bytes in order, a few words and one control token.
fn bytes_tokenizer(add_space_prefix: bool) -> Arc<Tokenizer> {
    let mut tokens: Vec<_> = (0..256).map(|byte| format!("<0x{byte:02X}>").into()).collect();
    tokens.extend(["▁".into(), "é".into(), "▁😀".into(), "</s>".into()]);
    let mut types = vec![6; 256];
    types.extend([1, 1, 1, 3]);
    let spec = TokenizerSpec {
        model: "llama".into(),
        scores: Some(vec![0.0; tokens.len()]),
        token_types: Some(types),
        eos: Some(259),
        add_space_prefix,
        tokens,
        ..Default::default()
    };
    Arc::new(Tokenizer::from_spec(spec).expect("sound"))
}

/// Bytes that are often almost UTF-8.
fn nearly_utf8(random: &mut Random) -> Vec<u8> {
    let parts: [&[u8]; 14] = [
        b"a",
        "é".as_bytes(),
        "漢".as_bytes(),
        "😀".as_bytes(),
        b"\xF0\x9F",
        b"\x80",
        b"\xC3",
        b"\xE6\xBC",
        b"\xF4\x90\x80\x80",
        b"\xED\xA0\x80",
        b"\xC0\x80",
        b"\xFF",
        b"\xE0\x80",
        "\u{FFFD}".as_bytes(),
    ];
    (0..random.below(12)).flat_map(|_| parts[random.below(parts.len())]).copied().collect()
}

#[test]
fn detokenizer_equals_lossy_decoding_and_holds_three_bytes() {
    let tokenizer = bytes_tokenizer(false);
    let mut random = Random(3);
    let mut replaced = 0;
    for _ in 0..20_000 {
        let bytes = nearly_utf8(&mut random);
        let want = String::from_utf8_lossy(&bytes);
        let (mut decoder, mut out) = (Detokenizer::new(tokenizer.clone(), Control::Skip), String::new());
        for (at, &byte) in bytes.iter().enumerate() {
            decoder.push(u32::from(byte), &mut out);
            // All but an unfinished character has come out: what follows cannot change it.
            let so_far = &bytes[..=at];
            let held = (0..=3).find(|&held| {
                let (done, rest) = so_far.split_at(so_far.len().saturating_sub(held));
                *out == String::from_utf8_lossy(done)
                    && (rest.is_empty() || std::str::from_utf8(rest).is_err_and(|e| e.error_len().is_none()))
            });
            assert!(held.is_some(), "{so_far:x?} gave {out:?}");
        }
        decoder.finish(&mut out);
        assert_eq!(out, want, "{bytes:x?}");
        replaced += usize::from(out.contains('\u{FFFD}'));
    }
    assert!(replaced > 5_000, "only {replaced} texts were damaged");
}

#[test]
fn detokenizer_never_stalls_and_stays_linear() {
    let tokenizer = bytes_tokenizer(false);
    let (mut decoder, mut out) = (Detokenizer::new(tokenizer, Control::Skip), String::new());
    for n in 1..=300_000 {
        decoder.push(0x80, &mut out);
        assert_eq!(out.len(), 3 * n);
    }
}

#[test]
fn control_tokens_and_first_spaces_are_handled() {
    let decode = |decoder: &mut Detokenizer, ids: &[u32]| {
        let mut out = String::new();
        ids.iter().for_each(|&id| decoder.push(id, &mut out));
        decoder.finish(&mut out);
        out
    };
    let (plain, prefixed) = (bytes_tokenizer(false), bytes_tokenizer(true));
    let ids = [259, 258, 256, 257, 0xC3, 259, 0xA9, 9999];
    assert_eq!(decode(&mut Detokenizer::new(plain.clone(), Control::Skip), &ids), " 😀 éé");
    assert_eq!(decode(&mut Detokenizer::new(plain, Control::Show), &ids), "</s> 😀 é\u{FFFD}</s>\u{FFFD}");
    assert_eq!(decode(&mut Detokenizer::new(prefixed.clone(), Control::Skip), &ids), "😀 éé");
    assert_eq!(decode(&mut Detokenizer::continuing(prefixed.clone(), Control::Skip), &ids), " 😀 éé");
    assert_eq!(prefixed.encode("😀", Special::Text), [258], "the prefix is part of the first token");
    assert_eq!(decode(&mut Detokenizer::new(prefixed, Control::Skip), &[0xC3]), "\u{FFFD}");
}

#[test]
fn every_model_stops_at_the_end_of_its_turn() {
    assert_eq!(from_gguf(GEMMA3).stop_ids(), [1, 106]);
    assert_eq!(from_json("gemma3").stop_ids(), [1, 106]);
    assert_eq!(from_json("llama3").stop_ids(), [128_001, 128_009]);
    assert_eq!(from_json("qwen3").stop_ids(), [151_643, 151_645]);
    assert_eq!(from_json("deepseek-v4").stop_ids(), [1, 128_805]);
}

#[test]
fn stops_of_smollm2() {
    let tokenizer = from_gguf(SMOLLM2);
    assert_eq!(tokenizer.stop_ids(), [0, 2]);
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.add_bos()), (Some(1), Some(2), false));
    assert_eq!(
        (tokenizer.id_of("<|im_start|>"), tokenizer.id_of(" the"), tokenizer.id_of("no such token")),
        (Some(1), Some(260), None)
    );
    assert!(tokenizer.is_special(2) && !tokenizer.is_special(260) && !tokenizer.is_special(u32::MAX));
    assert_eq!(tokenizer.token_bytes(260), b" the");
    assert_eq!(tokenizer.token_bytes(u32::MAX), b"");
    // Bytes that this vocabulary lacks are left out, as by its reference.
    assert_eq!(tokenizer.encode("!\u{4}!", Special::Text), tokenizer.encode("!!", Special::Text));
    assert_eq!(tokenizer.encode_prompt("a"), tokenizer.encode("a", Special::Text));
}

/// The definition: the first byte at which any stop string ends; of those, the longest.
fn stop_naive(text: &str, stops: &[&str]) -> (String, Option<usize>) {
    for end in 1..=text.len() {
        let ends = stops.iter().enumerate().filter(|(_, stop)| text.as_bytes()[..end].ends_with(stop.as_bytes()));
        if let Some((at, stop)) = ends.max_by_key(|(at, stop)| (stop.len(), usize::MAX - at)) {
            return (text[..end - stop.len()].to_owned(), Some(at));
        }
    }
    (text.to_owned(), None)
}

#[test]
fn stop_strings_are_found_in_every_split() {
    let stops: [&[&str]; 8] = [
        &["ab"],
        &["aab", "ab"],
        &["aaaa"],
        &["é漢", "漢"],
        &["b\n", "abab", "a😀"],
        &["abc", "bcd", "c"],
        &[],
        &["</s>", "\n\n"],
    ];
    let pieces = ["a", "b", "aa", "ab", "c", "d", "\n", "é", "漢", "😀", "<", "/s", ">"];
    let mut random = Random(5);
    let (mut found, mut splits) = (0, 0);
    for case in 0..6_000 {
        let stops = stops[case % stops.len()];
        let text: String = (0..random.below(9)).map(|_| pieces[random.below(pieces.len())]).collect();
        let want = stop_naive(&text, stops);
        found += usize::from(want.1.is_some());
        let borders: Vec<usize> = (1..text.len()).filter(|&at| text.is_char_boundary(at)).collect();
        // Every set of cuts of a short text, some of a longer one.
        for cuts in 0..1u32 << borders.len().min(5) {
            let (mut matcher, mut out, mut from, mut stopped) = (StopMatcher::new(stops), String::new(), 0, false);
            for (bit, &at) in borders.iter().enumerate() {
                if cuts >> (bit % 5) & 1 == 1 {
                    stopped |= matcher.push(&text[from..at], &mut out);
                    from = at;
                    assert!(want.0.starts_with(&out), "{text:?} {stops:?}: {out:?} came out");
                    // Held back is only what could still grow into a stop string.
                    let held = text[..at].strip_prefix(out.as_str()).filter(|_| !stopped);
                    assert!(
                        held.is_none_or(|held| held.is_empty() || stops.iter().any(|stop| stop.starts_with(held))),
                        "{text:?} {stops:?} {held:?}"
                    );
                }
            }
            stopped |= matcher.push(&text[from..], &mut out);
            matcher.finish(&mut out);
            assert_eq!((out, matcher.matched()), want, "{text:?} {stops:?} {cuts:b}");
            assert_eq!(stopped, want.1.is_some());
            splits += 1;
        }
    }
    assert!(found > 800 && splits > 40_000, "{found} found in {splits} splits");
}

#[test]
fn stop_strings_have_limits_and_stay_linear() {
    assert!(StopMatcher::check(&[""]).is_err_and(|e| e.contains("0 bytes")));
    assert!(StopMatcher::check(&["x".repeat(257)]).is_err_and(|e| e.contains("257 bytes")));
    assert!(StopMatcher::check(&["x"; 17]).is_err_and(|e| e.contains("17 stop strings")));
    let stops: Vec<String> = (0..16).map(|n| "a".repeat(240 + n) + "b").collect();
    assert_eq!(StopMatcher::check(&stops), Ok(()));
    let (mut matcher, mut out) = (StopMatcher::new(&stops), String::new());
    for _ in 0..500_000 {
        assert!(!matcher.push("a", &mut out));
    }
    assert_eq!(out.len(), 500_000 - 255, "what could still be a stop string is held");
    assert!(matcher.push("b and more", &mut out));
    assert_eq!((out.len(), matcher.matched()), (500_000 - 255, Some(15)));
    matcher.finish(&mut out);
    assert_eq!(out.len(), 500_000 - 255);
}

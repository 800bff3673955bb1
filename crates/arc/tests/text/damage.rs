//! Damaged templates, tokenizers and answers end in an error or a result, never a panic. The same inputs as the fuzz
//! targets `template`, `tokenizer_json` and `v4_answer`, from a few thousand seeded mutations.

use arc::text::testing::{exercise_answer, exercise_template, exercise_tokenizer_json};

use crate::golden::golden_json;
use crate::stream::Random;

/// A small tokenizer.json of each algorithm.
const TOKENIZERS: [&str; 2] = [
    include_str!("../../../../fuzz/seeds/tokenizer_json/bytes.json"),
    include_str!("../../../../fuzz/seeds/tokenizer_json/characters.json"),
];

/// Answers with calls, with reasoning and with what looks like a call, each behind two bytes of format.
const ANSWERS: [&str; 3] = [
    include_str!("../../../../fuzz/seeds/v4_answer/calls"),
    include_str!("../../../../fuzz/seeds/v4_answer/thinking"),
    include_str!("../../../../fuzz/seeds/v4_answer/text"),
];

/// `text` with up to four pieces taken out, doubled, moved or replaced.
fn damage(text: &str, random: &mut Random) -> String {
    const PIECES: [&str; 24] = [
        "{{",
        "}}",
        "{%",
        "%}",
        "{#",
        "-",
        "[",
        "]",
        "(",
        ")",
        "'",
        "\"",
        "|",
        ".",
        "+",
        "*",
        "~",
        "0",
        "999999999",
        "null",
        ":",
        ",",
        "\u{0}",
        "é",
    ];
    let mut text = text.to_owned();
    for _ in 0..1 + random.below(4) {
        let mut border = || text.floor_char_boundary(random.below(text.len() + 1));
        let (a, b) = (border(), border());
        let (start, end) = (a.min(b), text.floor_char_boundary(a.max(b).min(a.min(b) + 40)));
        let piece = text[start..end].to_owned();
        match random.below(4) {
            0 => text.replace_range(start..end, ""),
            1 => text.insert_str(start, &piece),
            2 => text.insert_str(start, PIECES[random.below(PIECES.len())]),
            _ => {
                text.replace_range(start..end, "");
                let at = text.floor_char_boundary(random.below(text.len() + 1));
                text.insert_str(at, &piece);
            }
        }
    }
    text
}

#[test]
fn damaged_templates() {
    let golden = golden_json("chat");
    let cases = golden["cases"].as_array().expect("cases");
    let mut sources: Vec<&str> = cases.iter().filter_map(|case| case["source"].as_str()).collect();
    sources.dedup();
    let mut random = Random(11);
    let (mut rendered, mut refused) = (0, 0);
    for round in 0..6_000 {
        let source = damage(sources[round % sources.len()], &mut random);
        if exercise_template(source.as_bytes()) { rendered += 1 } else { refused += 1 }
    }
    assert!(rendered > 300 && refused > 300, "{rendered} rendered, {refused} refused");
}

#[test]
fn damaged_tokenizers() {
    let mut random = Random(12);
    let (mut built, mut refused) = (0, 0);
    for tokenizer in TOKENIZERS {
        assert!(exercise_tokenizer_json(tokenizer.as_bytes()), "{tokenizer}");
        for _ in 0..10_000 {
            let damaged = damage(tokenizer, &mut random);
            if exercise_tokenizer_json(damaged.as_bytes()) { built += 1 } else { refused += 1 }
        }
    }
    assert!(built > 300 && refused > 300, "{built} built, {refused} refused");
}

#[test]
fn damaged_answers() {
    assert!(exercise_answer(ANSWERS[0].as_bytes()), "the whole one is calling");
    let mut random = Random(13);
    let (mut calling, mut other) = (0, 0);
    for round in 0..20_000 {
        let damaged = damage(ANSWERS[round % ANSWERS.len()], &mut random);
        if exercise_answer(damaged.as_bytes()) { calling += 1 } else { other += 1 }
    }
    assert!(calling > 300 && other > 300, "{calling} calling, {other} not");
}

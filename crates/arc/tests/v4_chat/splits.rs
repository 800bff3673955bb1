//! Streams add up to the whole answer, however they are cut.

use std::sync::Arc;

use arc::text::{
    Control, Detokenizer, Special, Tokenizer, TokenizerSpec,
    deepseek_v4::{AnswerEvent, AnswerFormat, AnswerParser, ParsedAnswer, Thinking},
};

use crate::{
    Random, cases,
    parse::{BLOCK, CHAT, THINKING, hard, tags},
    tokenizer,
};

/// The answer from pieces, and its events with neighbours joined.
fn stream<'a>(format: AnswerFormat, pieces: impl IntoIterator<Item = &'a str>) -> (ParsedAnswer, Vec<AnswerEvent>) {
    let (mut parser, mut answer, mut joined) = (AnswerParser::new(format), ParsedAnswer::default(), Vec::new());
    let mut take = |events: Vec<AnswerEvent>| {
        for event in events {
            answer.add(event.clone());
            join(&mut joined, event);
        }
    };
    for piece in pieces {
        let mut events = Vec::new();
        parser.push(piece, &mut events);
        take(events);
    }
    let mut events = Vec::new();
    parser.finish(&mut events);
    take(events);
    (answer, joined)
}

fn join(events: &mut Vec<AnswerEvent>, event: AnswerEvent) {
    match (events.last_mut(), &event) {
        (Some(AnswerEvent::Reasoning(a)), AnswerEvent::Reasoning(b))
        | (Some(AnswerEvent::Content(a)), AnswerEvent::Content(b)) => a.push_str(b),
        (
            Some(AnswerEvent::ToolCallArguments { index: i, delta: a }),
            AnswerEvent::ToolCallArguments { index: j, delta: b },
        ) if i == j => a.push_str(b),
        _ => events.push(event),
    }
}

/// Events come in an order that clients can follow.
fn check_order(events: &[AnswerEvent], text: &str) {
    let (mut begun, mut ended) = (0, 0);
    for event in events {
        match event {
            AnswerEvent::Reasoning(_) => assert_eq!(begun, 0, "{text:?}"),
            AnswerEvent::Content(_) => assert_eq!(begun, ended, "{text:?}"),
            AnswerEvent::ToolCallStart { index, .. } => {
                assert_eq!((*index, begun), (ended, ended), "{text:?}");
                begun += 1;
            }
            AnswerEvent::ToolCallArguments { index, .. } => assert_eq!((*index, begun), (ended, ended + 1), "{text:?}"),
            AnswerEvent::ToolCallEnd { index, .. } => {
                assert_eq!((*index, begun), (ended, ended + 1), "{text:?}");
                ended += 1;
            }
        }
    }
    assert_eq!(begun, ended, "{text:?}");
}

/// Pieces that the detokenizer gives for tokens.
fn pieces(tokenizer: &Arc<Tokenizer>, ids: &[u32]) -> Vec<String> {
    let mut detokenizer = Detokenizer::continuing(tokenizer.clone(), Control::Show);
    let mut piece = |id: u32| {
        let mut out = String::new();
        detokenizer.push(id, &mut out);
        out
    };
    ids.iter().map(|&id| piece(id)).collect()
}

/// A vocabulary of the 256 bytes in order.
fn bytes() -> Arc<Tokenizer> {
    let spec = TokenizerSpec {
        model: "llama".into(),
        scores: Some(vec![0.0; 256]),
        token_types: Some(vec![6; 256]),
        tokens: (0..256).map(|byte| format!("<0x{byte:02X}>").into()).collect(),
        ..Default::default()
    };
    Arc::new(Tokenizer::from_spec(spec).expect("sound"))
}

fn answers() -> Vec<(AnswerFormat, String)> {
    let mut answers: Vec<_> = hard().into_iter().map(|(format, text, _)| (format, text)).collect();
    for case in cases().parse {
        let thinking = if case.thinking_mode == "thinking" { Thinking::On } else { Thinking::Off };
        answers.push((AnswerFormat { thinking, tools: true }, case.completion));
    }
    answers
}

#[test]
fn every_cut_gives_the_same_answer() {
    let (tokenizer, bytes) = (tokenizer(), bytes());
    let mut n = 0;
    for (format, text) in answers() {
        let whole = stream(format, [&*text]);
        check_order(&whole.1, &text);
        let borders: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
        for (i, &at) in borders.iter().enumerate() {
            assert_eq!(stream(format, [&text[..at], &text[at..]]), whole, "{text:?} at {at}");
            for &then in borders[i..].iter().step_by(7) {
                assert_eq!(
                    stream(format, [&text[..at], &text[at..then], &text[then..]]),
                    whole,
                    "{text:?} {at} {then}"
                );
                n += 1;
            }
        }
        for size in 1..9 {
            let chars: Vec<char> = text.chars().collect();
            let cut: Vec<String> = chars.chunks(size).map(|c| c.iter().collect()).collect();
            assert_eq!(stream(format, cut.iter().map(String::as_str)), whole, "{text:?} by {size} characters");
            let cut: Vec<u32> = text.bytes().map(u32::from).collect();
            let cut: Vec<String> = pieces(&bytes, &cut).chunks(size).map(|p| p.concat()).collect();
            assert_eq!(stream(format, cut.iter().map(String::as_str)), whole, "{text:?} by {size} bytes");
            for special in [Special::Parse, Special::Text] {
                let cut = pieces(&tokenizer, &tokenizer.encode(&text, special));
                assert_eq!(cut.concat(), text);
                let cut: Vec<String> = cut.chunks(size).map(|p| p.concat()).collect();
                assert_eq!(stream(format, cut.iter().map(String::as_str)), whole, "{text:?} by {size} tokens");
                n += 1;
            }
            n += 2;
        }
    }
    assert!(n > 10_000, "{n}");
}

/// An answer as a model would write it, with a few parts changed, lost, doubled or out of place, and words that occur
/// once each.
fn soup(random: &mut Random) -> (String, usize) {
    let noise = [
        "</think>",
        "<think>",
        "\n",
        "\n\n",
        " ",
        "<",
        "</",
        "<｜",
        "<D ",
        "</D ",
        "\"",
        ">",
        "\">",
        "é",
        "😀",
        "{",
        "1",
        "<D tool_calls>",
        "\n\n<D tool_calls>\n",
        "</D tool_calls>",
        "<D invoke name=\"f\">",
        "<D invoke name=\"",
        "</D invoke>",
        "</D invoke>\n",
        "<D parameter name=\"k\" string=\"true\">",
        "<D parameter name=\"k\" string=\"false\">",
        "<D parameter name=\"",
        "\" string=\"true\">",
        "</D parameter>",
        "</D parameter>\n",
        "<｜end▁of▁sentence｜>",
        "<｜end▁of",
        BLOCK,
        "",
        "",
    ];
    let mut parts = vec!["@", "</think>", "@"];
    for _ in 0..random.below(3) {
        parts.push("\n\n<D tool_calls>\n");
        for _ in 0..=random.below(2) {
            parts.extend(["<D invoke name=\"", "@", "\">\n"]);
            for _ in 0..random.below(3) {
                parts.extend(["<D parameter name=\"", "@", "\" string=\""]);
                parts.extend(random.pick::<[&str; 3]>(&[
                    &["true\">", "@", "<"],
                    &["false\">", "1", ""],
                    &["false\">", "@", ""],
                ]));
                parts.push("</D parameter>\n");
            }
            parts.push("</D invoke>\n");
        }
        parts.extend(["</D tool_calls>", "@"]);
    }
    for _ in 0..random.below(4) {
        let at = random.below(parts.len());
        match random.below(3) {
            0 => parts[at] = random.pick(&noise),
            1 => parts.insert(at, random.pick(&noise)),
            _ => parts.insert(at, "@"),
        }
    }
    let (mut text, mut words) = (String::new(), 0);
    for part in parts {
        match part {
            "@" => {
                text.push_str(&format!("w{words}v"));
                words += 1;
            }
            other => text.push_str(other),
        }
    }
    (tags(&text), words)
}

fn cut(random: &mut Random, text: &str) -> Vec<String> {
    let (mut pieces, most) = (vec![String::new()], 1 + random.below(12));
    for c in text.chars() {
        if random.below(most) == 0 {
            pieces.push(String::new());
        }
        pieces.last_mut().expect("one at least").push(c);
    }
    pieces
}

/// Words that the answer lacks or has more than once.
fn lost(answer: &ParsedAnswer, words: usize) -> Option<String> {
    let mut all = format!("{}\0{}\0", answer.reasoning, answer.content);
    for call in &answer.calls {
        all.push_str(&format!("{}\0{}\0", call.name, call.arguments));
    }
    (0..words).map(|word| format!("w{word}v")).find(|word| all.matches(word.as_str()).count() != 1)
}

#[test]
fn random_answers_survive_random_cuts() {
    let (mut random, mut calls, mut incomplete, mut reasoned) = (Random(3), 0, 0, 0);
    for round in 0..40_000 {
        let (mut text, words) = soup(&mut random);
        let format = [CHAT, THINKING, AnswerFormat { tools: false, ..CHAT }][random.below(3)];
        let whole = stream(format, [&*text]);
        check_order(&whole.1, &text);
        let pieces = cut(&mut random, &text);
        assert_eq!(stream(format, pieces.iter().map(String::as_str)), whole, "round {round}: {text:?}");
        calls += whole.0.calls.len();
        incomplete += whole.0.calls.iter().filter(|call| !call.complete).count();
        reasoned += usize::from(!whole.0.reasoning.is_empty());
        for call in whole.0.calls.iter().filter(|call| call.complete) {
            serde_json::from_str::<serde_json::Map<_, _>>(&call.arguments).expect("a complete call has JSON arguments");
        }
        // Only a tag that the end cuts off leaves no trace, so here none is.
        text.push_str(&"x".repeat(600));
        let answer = AnswerParser::parse(format, &text);
        assert_eq!(lost(&answer, words), None, "round {round}: {text:?}\n{answer:?}");
    }
    assert!(calls > 20_000 && incomplete > 2_000 && reasoned > 10_000, "{calls} {incomplete} {reasoned}");
}

/// The properties above fail for parsers that are wrong in the ways that parsers are.
#[test]
fn wrong_parsers_are_noticed() {
    // Forgets between pieces, as one that matches tags inside pieces does.
    let forgets = |format: AnswerFormat, pieces: &[String]| {
        let mut answer = ParsedAnswer::default();
        let mut format = format;
        for piece in pieces {
            let part = AnswerParser::parse(format, piece);
            if piece.contains("</think>") {
                format.thinking = Thinking::Off;
            }
            answer.reasoning += &part.reasoning;
            answer.content += &part.content;
            answer.calls.extend(part.calls);
        }
        answer
    };
    // Gives up on whatever follows a block.
    let stops = |format: AnswerFormat, text: &str| {
        let end = tags("</D tool_calls>");
        let text = text.find(&end).map_or(text, |at| &text[..at + end.len()]);
        AnswerParser::parse(format, text)
    };
    let (mut random, mut noticed) = (Random(5), [0, 0]);
    for _ in 0..2_000 {
        let (mut text, words) = soup(&mut random);
        let pieces = cut(&mut random, &text);
        noticed[0] += usize::from(forgets(THINKING, &pieces) != AnswerParser::parse(THINKING, &text));
        text.push_str(&"x".repeat(600));
        noticed[1] += usize::from(lost(&stops(CHAT, &text), words).is_some());
    }
    assert!(noticed.iter().all(|&n| n > 100), "{noticed:?}");
}

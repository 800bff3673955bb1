//! Whole answers to reasoning, content and calls.

use arc::text::deepseek_v4::{AnswerFormat, AnswerParser, Call, ParsedAnswer, Thinking};
use serde_json::json;

use crate::cases;

pub const CHAT: AnswerFormat = AnswerFormat { thinking: Thinking::Off, tools: true };
pub const THINKING: AnswerFormat = AnswerFormat { thinking: Thinking::On, tools: true };

fn parsed(reasoning: &str, content: &str, calls: &[(&str, &str, bool)]) -> ParsedAnswer {
    let call = |&(name, arguments, complete): &(&str, &str, bool)| Call {
        name: name.into(),
        arguments: arguments.into(),
        complete,
    };
    ParsedAnswer { reasoning: reasoning.into(), content: content.into(), calls: calls.iter().map(call).collect() }
}

#[test]
fn answers_are_those_of_the_release() {
    let mut n = 0;
    for case in cases().parse {
        let thinking = serde_json::from_value(json!(case.thinking_mode)).expect("a mode");
        let answer = AnswerParser::parse(AnswerFormat { thinking, tools: true }, &case.completion);
        let calls: Vec<_> = answer
            .calls
            .iter()
            .map(|c| json!({"type": "function", "function": {"name": c.name, "arguments": c.arguments}}))
            .collect();
        assert!(answer.calls.iter().all(|call| call.complete));
        let (content, reasoning) = (answer.content, answer.reasoning);
        let answer =
            json!({"role": "assistant", "content": content, "reasoning_content": reasoning, "tool_calls": calls});
        assert_eq!(answer, case.parsed, "{}", case.name);
        n += 1;
    }
    assert_eq!(n, 4);
}

/// `D` stands for the token of tags.
pub fn tags(text: &str) -> String {
    text.replace("<D ", "<｜DSML｜").replace("</D ", "</｜DSML｜")
}

pub const BLOCK: &str = "\n\n<D tool_calls>\n<D invoke name=\"f\">\n<D parameter name=\"s\" string=\"true\">abc</D parameter>\n</D invoke>\n</D tool_calls>";

/// What the release's program refuses, or other parsers lose: answer, format and what is made of it.
pub fn hard() -> Vec<(AnswerFormat, String, ParsedAnswer)> {
    let f = ("f", r#"{"s": "abc"}"#, true);
    let head = "\n\n<D tool_calls>\n<D invoke name=\"f\">\n";
    let text = "<D parameter name=\"s\" string=\"true\">";
    let value = "<D parameter name=\"s\" string=\"false\">";
    let tail = "\n</D invoke>\n</D tool_calls>";
    let end = "</D parameter>";
    let long = "n".repeat(600);
    let cases: Vec<(AnswerFormat, String, ParsedAnswer)> = vec![
        (CHAT, "".into(), parsed("", "", &[])),
        (THINKING, "no end".into(), parsed("no end", "", &[])),
        (THINKING, "a<think>b</think>c</think>d".into(), parsed("a<think>b", "c</think>d", &[])),
        (THINKING, format!("a{BLOCK}</think>b"), parsed(&tags(&format!("a{BLOCK}")), "b", &[])),
        (THINKING, "a</thin</think>b".into(), parsed("a</thin", "b", &[])),
        (THINKING, "a</thin".into(), parsed("a</thin", "", &[])),
        (THINKING, format!("</think>{BLOCK}"), parsed("", "", &[f])),
        (
            CHAT,
            "The marker <｜DSML｜ is special. More text.".into(),
            parsed("", "The marker <｜DSML｜ is special. More text.", &[]),
        ),
        (
            CHAT,
            "The tag <D tool_calls> is special.".into(),
            parsed("", &tags("The tag <D tool_calls> is special."), &[]),
        ),
        (CHAT, "\n\n<D tool_calls>\n\n".into(), parsed("", &tags("\n\n<D tool_calls>\n\n"), &[])),
        (
            CHAT,
            "a\n\n<D tool_calls>\n</D tool_calls>b".into(),
            parsed("", &tags("a\n\n<D tool_calls>\n</D tool_calls>b"), &[]),
        ),
        (CHAT, format!("<D tool_calls>{BLOCK}"), parsed("", &tags("<D tool_calls>"), &[f])),
        (CHAT, format!("Hi{BLOCK}\nafter"), parsed("", "Hi\nafter", &[f])),
        (CHAT, format!("Hi{BLOCK}{BLOCK} x"), parsed("", "Hi x", &[f, f])),
        (CHAT, format!("\n{BLOCK}"), parsed("", "\n", &[f])),
        (CHAT, BLOCK[1..].into(), parsed("", "\n", &[f])),
        (CHAT, BLOCK[2..].into(), parsed("", "", &[f])),
        (CHAT, BLOCK.replace(">\n<", "><"), parsed("", "", &[f])),
        (CHAT, BLOCK.replace(">\n<", "> \t\r\n<"), parsed("", "", &[f])),
        (
            CHAT,
            format!("{head}{text}a \"q\" \\ \n😀</D x>{text}<D invoke name=\"g\">{end}{tail}"),
            parsed(
                "",
                "",
                &[(
                    "f",
                    &format!(
                        "{{\"s\": {}}}",
                        json!(tags(&format!("a \"q\" \\ \n😀</D x>{text}<D invoke name=\"g\">")))
                    ),
                    true,
                )],
            ),
        ),
        (CHAT, format!("{head}{text}{end}{tail}"), parsed("", "", &[("f", r#"{"s": ""}"#, true)])),
        // What says that it is JSON and is not becomes a string.
        (CHAT, format!("{head}{value}yes \"1\"{end}{tail}"), parsed("", "", &[("f", r#"{"s": "yes \"1\""}"#, true)])),
        (CHAT, format!("{head}{value}{end}{tail}"), parsed("", "", &[("f", r#"{"s": ""}"#, true)])),
        (CHAT, format!("{head}{value}NaN{end}{tail}"), parsed("", "", &[("f", r#"{"s": "NaN"}"#, true)])),
        (
            CHAT,
            format!("{head}{value}12345678901234567890123{end}{tail}"),
            parsed("", "", &[("f", r#"{"s": 12345678901234567890123}"#, true)]),
        ),
        // Cut off.
        (CHAT, format!("{head}{text}abc"), parsed("", "", &[("f", r#"{"s": "abc"#, false)])),
        (CHAT, format!("{head}{text}abc</D para"), parsed("", "", &[("f", &tags(r#"{"s": "abc</D para"#), false)])),
        (CHAT, format!("{head}{text}abc{end}"), parsed("", "", &[("f", r#"{"s": "abc""#, false)])),
        (CHAT, format!("{head}{value}[1, 2"), parsed("", "", &[("f", r#"{"s": [1, 2"#, false)])),
        (CHAT, format!("{head}<D parameter name=\"s"), parsed("", "", &[("f", "", false)])),
        (CHAT, head.into(), parsed("", "", &[("f", "", false)])),
        (CHAT, BLOCK.strip_suffix("calls>").expect("its end").into(), parsed("", "", &[f])),
        (
            CHAT,
            "\n\n<D tool_calls>\n<D invoke name=\"f".into(),
            parsed("", &tags("\n\n<D tool_calls>\n<D invoke name=\"f"), &[]),
        ),
        // What does not follow the format.
        (
            CHAT,
            format!("{head}{{\"a\": 1}}{tail}"),
            parsed("", &tags(&format!("\n{{\"a\": 1}}{tail}")), &[("f", "", false)]),
        ),
        (CHAT, format!("{head}{text}abc{end} x{BLOCK}"), parsed("", " x", &[("f", r#"{"s": "abc""#, false), f])),
        (
            CHAT,
            format!("{head}<D parameter name=\"s\" string=\"maybe\">1"),
            parsed("", &tags("\n<D parameter name=\"s\" string=\"maybe\">1"), &[("f", "", false)]),
        ),
        // A parameter that does not say what it is shows it.
        (
            CHAT,
            format!("{head}<D parameter name=\"s\">[1]{end}{tail}"),
            parsed("", "", &[("f", r#"{"s": [1]}"#, true)]),
        ),
        (CHAT, format!("{head}<D parameter name=\"s\">abc{end}{tail}"), parsed("", "", &[f])),
        (
            CHAT,
            format!("{head}<D parameter name=\"{long}\" string=\"true\">1"),
            parsed("", &tags(&format!("\n<D parameter name=\"{long}\" string=\"true\">1")), &[("f", "", false)]),
        ),
        (CHAT, BLOCK.replace("</D tool_calls>", "</tool_calls>"), parsed("", "\n</tool_calls>", &[f])),
        (CHAT, BLOCK.replace("\"f\"", "\"no such tool\""), parsed("", "", &[("no such tool", f.1, true)])),
        (
            CHAT,
            format!("{head}{text}1{end}{text}2{end}{tail}"),
            parsed("", "", &[("f", r#"{"s": "1", "s": "2"}"#, true)]),
        ),
        // The end of the answer, which is no text, and where it is.
        (CHAT, "a<｜end▁of▁sentence｜>".into(), parsed("", "a", &[])),
        (CHAT, "a<｜end▁of▁sentence｜>b".into(), parsed("", "a<｜end▁of▁sentence｜>b", &[])),
        (CHAT, "a<｜end▁of▁sentence｜><｜end▁of▁sentence｜>".into(), parsed("", "a<｜end▁of▁sentence｜>", &[])),
        (CHAT, "a<｜end▁of▁sent".into(), parsed("", "a<｜end▁of▁sent", &[])),
        (CHAT, "a<<｜end▁of▁sentence｜>".into(), parsed("", "a<", &[])),
        (THINKING, "a<｜end▁of▁sentence｜>".into(), parsed("a", "", &[])),
        (CHAT, format!("{head}{text}abc<｜end▁of▁sentence｜>"), parsed("", "", &[("f", r#"{"s": "abc"#, false)])),
        // Without tools, tags are what somebody asked for.
        (AnswerFormat { tools: false, ..CHAT }, format!("a{BLOCK}\n"), parsed("", &tags(&format!("a{BLOCK}\n")), &[])),
        (
            AnswerFormat { tools: false, ..THINKING },
            format!("r</think>a{BLOCK}"),
            parsed("r", &tags(&format!("a{BLOCK}")), &[]),
        ),
    ];
    cases.into_iter().map(|(format, text, answer)| (format, tags(&text), answer)).collect()
}

#[test]
fn hard_answers_lose_nothing() {
    for (format, text, expected) in hard() {
        assert_eq!(AnswerParser::parse(format, &text), expected, "{text:?}");
    }
}

#[test]
fn only_complete_calls_are_calls() {
    let answer = |text: &str| AnswerParser::parse(CHAT, &tags(text));
    assert!(answer(BLOCK).is_calling());
    assert!(!answer("a").is_calling());
    assert!(!answer(&format!("{BLOCK}\n\n<D tool_calls><D invoke name=\"g\">")).is_calling());
}

/// Texts of about `n` bytes that ask a parser for a second look, over and over.
fn costly(n: usize) -> Vec<String> {
    let head = "\n\n<D tool_calls>\n<D invoke name=\"f\">\n<D parameter name=\"s\" string=\"true\">";
    let json = head.replace("true", "false");
    let fill = |head: &str, part: &str| tags(&format!("{head}{}", part.repeat(n / part.len())));
    vec![
        fill(head, "abc\"d"),
        fill(head, "</D parameter"),
        fill(head, "</D parameter>"),
        fill(&json, "[1, "),
        fill(&json, "</D para"),
        fill("", "word "),
        fill("", "\n"),
        fill("", "<"),
        fill("", "\n\n<"),
        fill("", "<D tool_calls>"),
        fill("", "\n\n<D tool_calls>\n\n"),
        fill("", "<D tool_calls><D invoke name=\""),
        fill("", "<D tool_calls><D invoke name=\"f\">x"),
        fill("", "<D tool_calls><D invoke name=\"f\"><D parameter name=\""),
        fill("<D tool_calls>", "\n"),
        fill("<D tool_calls><D invoke name=\"f\">", "\n"),
        fill("<D tool_calls><D invoke name=\"f\"><D parameter name=\"", "\" string=\"x"),
        fill("<D tool_calls><D invoke name=\"f\"><D parameter name=\"", ">"),
        fill("<D tool_calls>", "<D invoke name=\"f\"></D invoke>"),
        fill("", "<｜end▁of▁sentence｜>"),
        fill("", "<｜end▁of▁sentence"),
        fill("", BLOCK),
    ]
}

/// Bytes that are looked at, in one piece or one character at a time.
fn bytes_read(format: AnswerFormat, text: &str, whole: bool) -> u64 {
    let (mut parser, mut events, mut answer) = (AnswerParser::new(format), Vec::new(), ParsedAnswer::default());
    let mut buffer = [0; 4];
    if whole {
        parser.push(text, &mut events);
    } else {
        text.chars().for_each(|c| parser.push(c.encode_utf8(&mut buffer), &mut events));
    }
    parser.finish(&mut events);
    events.into_iter().for_each(|event| answer.add(event));
    assert!(!answer.content.is_empty() || !answer.reasoning.is_empty() || !answer.calls.is_empty());
    parser.bytes_read()
}

/// Twice the text, twice the bytes that are looked at; what is quadratic would need four times as many.
#[test]
fn what_is_looked_at_is_in_proportion_to_length() {
    let (n, mut most, mut compared) = (1 << 15, 0.0_f64, 0);
    for (text, twice) in costly(n).iter().zip(&costly(2 * n)) {
        let shown: String = text.chars().skip(20).take(60).collect();
        for format in [CHAT, THINKING] {
            for whole in [true, false] {
                let (bytes, more) = (bytes_read(format, text, whole), bytes_read(format, twice, whole));
                assert!(bytes as f64 >= 0.99 * text.len() as f64, "{shown:?}: {bytes} of {}", text.len());
                assert!(more as f64 <= 2.1 * bytes as f64, "{shown:?}: {bytes}, then {more}");
                most = most.max(bytes as f64 / text.len() as f64);
                compared += 1;
            }
        }
    }
    eprintln!("{most:.1} looks at a byte");
    // What begins like a name is held for 512 bytes, in which eleven more blocks may open; every character of it is compared
    // with two tags.
    assert!(most < 600.0, "{most} looks at a byte");
    assert_eq!(compared, 22 * 4);
}

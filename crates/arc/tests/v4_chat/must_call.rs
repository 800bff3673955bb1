//! Answers that have to be calls: what the grammar takes and refuses, and what is drawn under it.

use arc::{
    structured::{Grammar, Grammars},
    text::{
        Special, Tokenizer,
        deepseek_v4::{AnswerFormat, AnswerParser, DSML, MustCall, Thinking},
    },
};
use arc_engine::grammar::TokenMask;
use serde_json::{Value, json};

use crate::{Random, tokenizer};

const VOCAB: u32 = 129_280;

fn tool(name: &str, parameters: Value) -> MustCall {
    let Value::Object(parameters) = parameters else { panic!("an object") };
    MustCall { name: name.to_owned(), parameters }
}

fn weather() -> MustCall {
    tool(
        "weather",
        json!({
            "type": "object",
            "properties": {
                "note": {"type": "string"},
                "city": {"$ref": "#/$defs/city"},
                "days": {"type": "integer", "minimum": 1, "maximum": 14},
                "of": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/city"}, "maxItems": 2}, {"enum": ["all", null]}]},
            },
            "required": ["note", "days"],
            "$defs": {"city": {"enum": ["Graz", "Łódź"]}},
        }),
    )
}

fn grammar(grammars: &Grammars, tools: &[MustCall], several: bool) -> Grammar {
    grammars.calls(tools, several, VOCAB).unwrap_or_else(|e| panic!("{e}"))
}

fn may(mask: &mut dyn TokenMask, bits: &mut [u32], id: u32) -> bool {
    mask.mask(bits).expect("the grammar goes on");
    bits[id as usize / 32] >> (id % 32) & 1 == 1
}

/// Whether a text is an answer, token by token, whole.
fn takes(tokenizer: &Tokenizer, grammar: &Grammar, text: &str) -> bool {
    let (mut mask, mut bits) = (grammar.mask(None), vec![0; VOCAB.div_ceil(32) as usize]);
    let ids = tokenizer.encode(text, Special::Parse);
    let taken = ids.iter().all(|&id| may(&mut *mask, &mut bits, id) && mask.accept(id).is_ok());
    taken && may(&mut *mask, &mut bits, tokenizer.stop_ids()[0])
}

fn parameter(name: &str, is_text: bool, value: &str) -> String {
    format!("<{DSML}parameter name=\"{name}\" string=\"{is_text}\">{value}</{DSML}parameter>\n")
}

fn call(name: &str, parameters: &[(&str, bool, &str)]) -> String {
    let parameters: String = parameters.iter().map(|(name, is_text, value)| parameter(name, *is_text, value)).collect();
    let parameters = if parameters.is_empty() { "\n".to_owned() } else { parameters };
    format!("<{DSML}invoke name=\"{name}\">\n{parameters}</{DSML}invoke>\n")
}

fn block(calls: &[String]) -> String {
    format!("\n\n<{DSML}tool_calls>\n{}</{DSML}tool_calls>", calls.concat())
}

#[test]
fn calls_of_the_format_are_taken_and_others_are_not() {
    let tokenizer = tokenizer();
    let grammars = Grammars::new(tokenizer.clone());
    let tools = [weather(), tool("now", json!({}))];
    let (several, one) = (grammar(&grammars, &tools, true), grammar(&grammars, &tools, false));
    let (note, days) =
        (("note", true, "a </div>\n</ <b>\"x\" <｜DSML｜invoke> </｜DSML｜invoke>"), ("days", false, "3"));
    let good = [
        vec![call("weather", &[note, days])],
        vec![call("weather", &[("note", true, ""), ("city", true, "Łódź"), days, ("of", false, "[\"Graz\"]")])],
        vec![call("weather", &[note, days, ("of", true, "all")])],
        vec![call("weather", &[note, days, ("of", false, "null")])],
        vec![call("now", &[])],
        vec![call("now", &[]), call("weather", &[note, days]), call("now", &[])],
    ];
    for calls in &good {
        let text = block(calls);
        assert!(takes(&tokenizer, &several, &text), "{text}");
        assert_eq!(takes(&tokenizer, &one, &text), calls.len() == 1, "{text}");
    }
    let bad = [
        block(&[]),
        block(&[call("weather", &[note])]),
        block(&[call("weather", &[days, note])]),
        block(&[call("weather", &[note, ("days", false, "15")])]),
        block(&[call("weather", &[note, ("days", true, "3")])]),
        block(&[call("weather", &[note, ("city", true, "Gra"), days])]),
        block(&[call("weather", &[note, days, ("of", true, "some")])]),
        block(&[call("weather", &[note, days, ("more", true, "x")])]),
        block(&[call("forecast", &[])]),
        block(&[call("now", &[days])]),
        format!("Well.{}", block(&[call("now", &[])])),
        format!("{} And", block(&[call("now", &[])])),
        "Sunny.".to_owned(),
        String::new(),
    ];
    for text in &bad {
        assert!(!takes(&tokenizer, &several, text), "{text}");
    }
}

/// Draws without a model; now and then it begins to close a parameter.
fn draw(tokenizer: &Tokenizer, grammar: &Grammar, rng: &mut Random) -> String {
    let (mut mask, mut bits, mut bytes) = (grammar.mask(None), vec![0; VOCAB.div_ceil(32) as usize], Vec::new());
    let close = tokenizer.encode(&format!("</{DSML}parameter>"), Special::Parse);
    let mut closing = [].iter();
    for _ in 0..2_000 {
        mask.mask(&mut bits).expect("the grammar goes on");
        let allowed: Vec<u32> = (0..VOCAB).filter(|id| bits[*id as usize / 32] >> (id % 32) & 1 == 1).collect();
        if closing.len() == 0 && rng.below(4) == 0 {
            closing = close.iter();
        }
        let id = match closing.next().filter(|id| allowed.contains(id)) {
            Some(id) => *id,
            None => {
                closing = [].iter();
                allowed[rng.below(allowed.len())]
            }
        };
        mask.accept(id).expect("it was allowed");
        if tokenizer.stop_ids().contains(&id) {
            return String::from_utf8(bytes).expect("whole characters");
        }
        bytes.extend_from_slice(tokenizer.token_bytes(id));
    }
    panic!("no end: {:?}", String::from_utf8_lossy(&bytes));
}

#[test]
fn whatever_is_drawn_is_calls_with_arguments_of_the_schema() {
    let tokenizer = tokenizer();
    let grammars = Grammars::new(tokenizer.clone());
    let grammar =
        grammar(&grammars, &[weather(), tool("now", json!({"properties": {"utc": {"type": "boolean"}}}))], true);
    let format = AnswerFormat { thinking: Thinking::Off, tools: true };
    let (mut seen, mut rng) = ([0; 4], Random(7));
    for _ in 0..40 {
        let text = draw(&tokenizer, &grammar, &mut rng);
        let answer = AnswerParser::parse(format, &text);
        assert!(answer.content.is_empty() && !answer.calls.is_empty(), "{text}: {answer:?}");
        for call in &answer.calls {
            let arguments: Value = serde_json::from_str(&call.arguments).unwrap_or_else(|e| panic!("{text}: {e}"));
            if call.name == "now" {
                assert!(arguments["utc"].is_null() || arguments["utc"].is_boolean(), "{text}");
                seen[0] += 1;
                continue;
            }
            assert_eq!(call.name, "weather", "{text}");
            assert!(
                arguments["note"].is_string() && (1..=14).contains(&arguments["days"].as_u64().unwrap_or(0)),
                "{text}"
            );
            let city = |value: &Value| ["Graz", "Łódź"].contains(&value.as_str().unwrap_or("-"));
            assert!(arguments.get("city").is_none_or(city), "{text}");
            assert!(arguments.get("of").is_none_or(|of| match of {
                Value::Array(some) => some.len() <= 2 && some.iter().all(city),
                other => *other == json!("all") || other.is_null(),
            }));
            for (i, name) in ["note", "city", "of"].iter().enumerate() {
                seen[1 + i] += usize::from(arguments.get(name).is_some());
            }
        }
    }
    assert!(seen.iter().all(|&n| n > 3), "all ways are taken: {seen:?}");
}

#[test]
fn hostile_tools_are_refused_or_bounded() {
    let grammars = Grammars::new(tokenizer());
    let turns = json!({"properties": {"x": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}});
    let fans: Value = (0..40)
        .map(|i| json!({"anyOf": vec![json!({"$ref": format!("#/$defs/d{}", i + 1)}); 40]}))
        .enumerate()
        .map(|(i, schema)| (format!("d{i}"), schema))
        .collect::<serde_json::Map<_, _>>()
        .into();
    let many: Value =
        (0..3_000).map(|i| (format!("p{i}"), json!({"$ref": "#/$defs/all"}))).collect::<serde_json::Map<_, _>>().into();
    let words: Vec<String> = (0..2_000).map(|i| format!("word {i}")).collect();
    let tools = [
        turns,
        json!({"properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": fans}),
        json!({"properties": &many, "$defs": {"all": {"enum": words}}}),
        json!({"properties": {"x": {"anyOf": vec![json!({"$ref": "#/$defs/all"}); 2_000]}},
            "$defs": {"all": {"enum": vec![""; 10_000]}}}),
        json!({"properties": many, "required": vec!["x"; 100_000]}),
        json!({"properties": {"x": {"type": "integer", "multipleOf": 99_999_989}}}),
        json!({"properties": {"x": {"type": "array", "items": {"pattern": "a?b?".repeat(200)}}}}),
        json!({"properties": {"x": {"type": "object", "$ref": "http://example.com/schema"}}}),
    ];
    for parameters in tools {
        let began = std::time::Instant::now();
        let refused = grammars.calls(&[tool("f", parameters.clone())], true, VOCAB).err().map(|e| e.to_string());
        let refused =
            refused.unwrap_or_else(|| panic!("{}", parameters.to_string().chars().take(200).collect::<String>()));
        assert!(refused.len() < 400, "{refused}");
        assert!(began.elapsed().as_secs() < 60, "bounded");
    }
    assert!(grammars.calls(&[weather()], true, VOCAB).is_ok(), "the next is as good as ever");
}

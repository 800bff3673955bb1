//! Answers with calls: what the grammar takes and refuses, and what is drawn under it.

use arc::{
    structured::{Grammar, Grammars},
    text::{
        Special, Tokenizer,
        deepseek_v4::{AnswerFormat, AnswerParser, Arguments, Calls, DSML, Thinking, Tool},
    },
};
use arc_engine::grammar::TokenMask;
use serde_json::{Value, json};

use crate::{Random, tokenizer};

const VOCAB: u32 = 129_280;

fn tool(name: &str, parameters: Value) -> Tool {
    let Value::Object(parameters) = parameters else { panic!("an object") };
    Tool { name: name.to_owned(), parameters, arguments: Arguments::Typed }
}

fn strict(name: &str, parameters: Value) -> Tool {
    Tool { arguments: Arguments::Strict, ..tool(name, parameters) }
}

fn weather() -> Tool {
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

fn has_to(tools: &[Tool], several: bool) -> Calls {
    Calls { tools: tools.to_vec(), has_to: true, several }
}

fn may_call(tools: &[Tool], several: bool) -> Calls {
    Calls { tools: tools.to_vec(), has_to: false, several }
}

fn grammar(grammars: &Grammars, calls: &Calls) -> Grammar {
    grammars.calls(calls, VOCAB).unwrap_or_else(|e| panic!("{e}"))
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
    let (several, one) = (grammar(&grammars, &has_to(&tools, true)), grammar(&grammars, &has_to(&tools, false)));
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

/// Draws without a model; now and then it begins to close a parameter, to open a block, or to end.
fn draw(tokenizer: &Tokenizer, grammar: &Grammar, rng: &mut Random) -> String {
    let (mut mask, mut bits, mut bytes) = (grammar.mask(None), vec![0; VOCAB.div_ceil(32) as usize], Vec::new());
    let mut pieces =
        ["</｜DSML｜parameter>", "\n\n<｜DSML｜tool_calls>"].map(|tag| tokenizer.encode(tag, Special::Parse)).to_vec();
    pieces.push(vec![tokenizer.stop_ids()[0]]);
    let mut piece = [].iter();
    for _ in 0..2_000 {
        mask.mask(&mut bits).expect("the grammar goes on");
        let allowed: Vec<u32> = (0..VOCAB).filter(|id| bits[*id as usize / 32] >> (id % 32) & 1 == 1).collect();
        if piece.len() == 0 && rng.below(4) == 0 {
            piece = pieces[rng.below(pieces.len())].iter();
        }
        let id = match piece.next().filter(|id| allowed.contains(id)) {
            Some(id) => *id,
            None => {
                piece = [].iter();
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
    let now = tool("now", json!({"properties": {"utc": {"type": "boolean"}}}));
    let grammar = grammar(&grammars, &has_to(&[weather(), now], true));
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
        let refused =
            grammars.calls(&has_to(&[tool("f", parameters.clone())], true), VOCAB).err().map(|e| e.to_string());
        let refused =
            refused.unwrap_or_else(|| panic!("{}", parameters.to_string().chars().take(200).collect::<String>()));
        assert!(refused.len() < 400, "{refused}");
        assert!(began.elapsed().as_secs() < 60, "bounded");
    }
    assert!(grammars.calls(&has_to(&[weather()], true), VOCAB).is_ok(), "the next is as good as ever");
}

#[test]
fn text_is_an_answer_and_a_block_ends_it() {
    let tokenizer = tokenizer();
    let grammars = Grammars::new(tokenizer.clone());
    let any = Tool { arguments: Arguments::Any, ..weather() };
    let tools = [any, strict("now", json!({"properties": {"utc": {"type": "boolean"}}}))];
    let (several, one) = (grammar(&grammars, &may_call(&tools, true)), grammar(&grammars, &may_call(&tools, false)));
    let (now, free) =
        (call("now", &[("utc", false, "true")]), call("weather", &[("x", true, "<y>"), ("z", false, "[")]));
    let texts =
        ["", "Well.", "a\n\n<", "1 < 2 <｜DSML｜invoke name=\"now\">", "</｜DSML｜tool_calls> <｜DSML｜tool_calls"];
    for text in texts {
        let single = [now.clone(), free.clone(), call("now", &[]), call("weather", &[])];
        for call in single {
            let text = format!("{text}{}", block(&[call]));
            assert!(takes(&tokenizer, &several, &text) && takes(&tokenizer, &one, &text), "{text}");
        }
        assert!(takes(&tokenizer, &several, text) && takes(&tokenizer, &one, text), "{text}");
        let two = format!("{text}{}", block(&[free.clone(), now.clone()]));
        assert!(takes(&tokenizer, &several, &two) && !takes(&tokenizer, &one, &two), "{two}");
    }
    let bad = [
        block(std::slice::from_ref(&now)).repeat(2),
        format!("{} And", block(&[now])),
        block(&[call("now", &[("utc", true, "true")])]),
        block(&[call("now", &[("x", true, "")])]),
        block(&[call("forecast", &[])]),
        block(&[call("weather", &[("a\"b", true, "x")])]),
        block(&[]),
        "Well.\n\n<｜DSML｜tool_calls> are what I like".to_owned(),
        format!("x <{DSML}tool_calls>{}", block(&[free])),
    ];
    for text in &bad {
        assert!(!takes(&tokenizer, &several, text) && !takes(&tokenizer, &one, text), "{text}");
    }
}

#[test]
fn strict_arguments_follow_all_of_the_schema() {
    let tokenizer = tokenizer();
    let grammars = Grammars::new(tokenizer.clone());
    let date = json!({"type": "string", "pattern": "^[0-9]{4}$"});
    /// Values of a parameter, as text or as JSON.
    type Values = &'static [(bool, &'static str)];
    // A schema, what follows it and what does not.
    let cases: [(Value, Values, Values); 10] = [
        (date.clone(), &[(false, "\"2025\"")], &[(true, "2025"), (true, "x"), (false, "\"x\""), (false, "2025")]),
        (json!({"type": "string", "maxLength": 2}), &[(false, "\"ab\"")], &[(false, "\"abc\""), (true, "abc")]),
        (json!({"type": "string", "description": "d"}), &[(true, "any")], &[(false, "\"any\"")]),
        (json!({"enum": ["a", "b"], "type": "string"}), &[(true, "b")], &[(true, "c"), (false, "\"a\"")]),
        (json!({"enum": ["a", 1], "type": "integer"}), &[(false, "1")], &[(true, "a"), (false, "\"a\"")]),
        (json!({"anyOf": [date, {"type": "null"}]}), &[(false, "null"), (false, "\"2025\"")], &[(true, "2025")]),
        (
            json!({"anyOf": [{"type": "string"}, {"type": "null"}], "maxLength": 1}),
            &[(false, "\"a\"")],
            &[(true, "ab")],
        ),
        (json!({"$ref": "#/$defs/date", "maxLength": 4}), &[(false, "\"2025\"")], &[(true, "2025")]),
        (json!({"$ref": "#/$defs/date"}), &[(false, "\"2025\"")], &[(true, "2025")]),
        (
            json!({"$ref": "#/$defs/date", "$defs": {"date": {}}}),
            &[(false, "\"2025\"")],
            &[(true, "2025"), (false, "1")],
        ),
    ];
    for (schema, good, bad) in cases {
        let parameters = json!({"type": "object", "properties": {"x": &schema}, "required": ["x"],
            "additionalProperties": false, "$defs": {"date": {"type": "string", "pattern": "^[0-9]{4}$"}}});
        let grammar = grammar(&grammars, &may_call(&[strict("f", parameters)], true));
        for (values, follow) in [(good, true), (bad, false)] {
            for &(is_text, value) in values {
                let text = block(&[call("f", &[("x", is_text, value)])]);
                assert_eq!(takes(&tokenizer, &grammar, &text), follow, "{schema}: {text}");
            }
        }
    }
}

#[test]
fn what_strict_cannot_keep_is_refused_by_name() {
    let grammars = Grammars::new(tokenizer());
    let x = json!({"x": {"type": "string"}});
    let cases = [
        (json!({"properties": &x, "anyOf": [{"required": ["x"]}]}), "anyOf"),
        (json!({"properties": &x, "minProperties": 1}), "minProperties"),
        (json!({"$ref": "#/$defs/a", "$defs": {"a": {}}}), "$ref"),
        (json!({"type": "array"}), "type"),
        (json!({"properties": &x, "required": ["x", "y"]}), "\"y\""),
        (json!({"required": ["y"]}), "\"y\""),
        (json!({"properties": {"x": {"type": "object", "properties": {"more": {"$ref": "#"}}}}}), "\"#\""),
        (json!({"properties": {"x": {"not": {"type": "string"}}}}), "not"),
        (json!({"properties": {"x": {"type": "string", "format": "none"}}}), "format"),
    ];
    for (parameters, says) in cases {
        let error = grammars.calls(&may_call(&[strict("f", parameters.clone())], true), VOCAB);
        let error = error.err().unwrap_or_else(|| panic!("{parameters}")).to_string();
        assert!(error.contains(says), "{parameters}: {error}");
        let any = Tool { arguments: Arguments::Any, ..tool("f", parameters) };
        assert!(grammars.calls(&may_call(&[any], true), VOCAB).is_ok(), "it is nobody's affair");
    }
}

#[test]
fn what_the_format_cannot_write_is_refused() {
    let grammars = Grammars::new(tokenizer());
    let closing = format!("</{DSML}parameter>");
    let tools = [
        tool("a\">b", json!({})),
        tool(&"n".repeat(600), json!({})),
        tool("f", json!({"properties": {"x\">": {}}})),
        tool("f", json!({"properties": {"x": {"enum": ["a", closing]}}})),
    ];
    for tool in tools {
        let error = grammars.calls(&has_to(std::slice::from_ref(&tool), true), VOCAB).err().map(|e| e.to_string());
        assert!(error.is_some_and(|e| e.contains("cannot be written") && e.len() < 400), "{tool:?}");
    }
}

/// However an answer that may call is drawn, its calls follow what was asked.
#[test]
fn whatever_is_drawn_has_calls_as_they_were_asked_for() {
    let tokenizer = tokenizer();
    let grammars = Grammars::new(tokenizer.clone());
    let date = json!({"properties": {"date": {"type": "string", "pattern": "^[0-9]{2}$"}}, "required": ["date"]});
    let tools = [Tool { arguments: Arguments::Any, ..weather() }, strict("on", date)];
    let format = AnswerFormat { thinking: Thinking::Off, tools: true };
    let (mut rng, mut seen) = (Random(11), [0; 3]);
    for several in [true, false] {
        let grammar = grammar(&grammars, &may_call(&tools, several));
        for _ in 0..20 {
            let text = draw(&tokenizer, &grammar, &mut rng);
            let answer = AnswerParser::parse(format, &text);
            assert!(several || answer.calls.len() <= 1, "{text}");
            assert!(answer.calls.iter().all(|call| call.complete), "{text}: {answer:?}");
            seen[0] += usize::from(answer.calls.is_empty());
            for call in &answer.calls {
                let arguments: Value = serde_json::from_str(&call.arguments).unwrap_or_else(|e| panic!("{text}: {e}"));
                let is_date = |date: &str| date.len() == 2 && date.bytes().all(|b| b.is_ascii_digit());
                assert!(call.name == "weather" || arguments["date"].as_str().is_some_and(is_date), "{text}");
                seen[1 + usize::from(call.name == "on")] += 1;
            }
        }
    }
    assert!(seen.iter().all(|&n| n > 3), "all ways are taken: {seen:?}");
}

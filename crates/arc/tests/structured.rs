//! Grammars of schemas over the real tokenizer: whatever is drawn under their masks is JSON of the schema, and hostile schemas are
//! refused or bounded.
#![forbid(unsafe_code)]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use arc::open::Described;
use arc::serve::testing::{Exercised, exercise_form};
use arc::structured::{Grammars, MAX_SCHEMA_BYTES, MAX_SCHEMA_BYTES_IN_USE, SchemaError};
use arc::text::Tokenizer;
use arc_engine::grammar::TokenMask;
use common::{SMOLLM2, model};
use serde_json::{Value, json};

/// Logits of a model that has some more than its tokenizer has tokens.
const VOCAB: u32 = 49_152 + 70;

fn tokenizer() -> Arc<Tokenizer> {
    Arc::new(Described::read(&model(SMOLLM2)).and_then(|d| d.tokenizer()).expect("the model is good"))
}

/// Tokens that may come next, by a mask that was full of others.
fn allowed(mask: &mut dyn TokenMask) -> Vec<u32> {
    let mut bits = vec![0x5555_5555; VOCAB.div_ceil(32) as usize];
    mask.mask(&mut bits).expect("the grammar goes on");
    (0..VOCAB).filter(|id| bits[*id as usize / 32] >> (id % 32) & 1 == 1).collect()
}

/// Draws without a model until an end is drawn.
fn draw(tokenizer: &Tokenizer, mask: &mut dyn TokenMask, seed: u64) -> String {
    let (mut state, mut bytes) = (seed, Vec::new());
    for _ in 0..2_000 {
        let ids = allowed(mask);
        assert!(!ids.is_empty(), "nothing may come behind {:?}", String::from_utf8_lossy(&bytes));
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let id = ids[(state >> 33) as usize % ids.len()];
        mask.accept(id).expect("it was allowed");
        if tokenizer.stop_ids().contains(&id) {
            let ends = allowed(mask);
            assert!(ends.iter().all(|id| tokenizer.stop_ids().contains(id)), "{ends:?} behind the end");
            return String::from_utf8(bytes).expect("whole characters");
        }
        assert!(!tokenizer.is_special(id), "a control token inside");
        bytes.extend_from_slice(tokenizer.token_bytes(id));
    }
    panic!("no end: {:?}", String::from_utf8_lossy(&bytes));
}

#[test]
fn whatever_is_drawn_is_json_of_the_schema() {
    let tokenizer = tokenizer();
    let grammars = Grammars::new(tokenizer.clone());
    let schema = json!({
        "type": "object",
        "properties": {
            "zone": {"enum": ["north", "süd", 3, null]},
            "at": {"type": "array", "items": {"type": "number", "minimum": -1, "maximum": 1}, "minItems": 1, "maxItems": 2},
            "note": {"type": "string", "maxLength": 8},
            "more": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/pair"}]}
        },
        "required": ["zone", "at", "more"],
        "additionalProperties": false,
        "$defs": {"pair": {"type": "object", "properties": {"x": {"type": "integer", "maximum": 99, "minimum": 0}},
                           "required": ["x"], "additionalProperties": false}}
    });
    let grammar = grammars.json(&schema.to_string(), VOCAB).expect("a good schema");
    let (mut notes, mut pairs) = (0, 0);
    for seed in 0..60 {
        let text = draw(&tokenizer, &mut *grammar.mask(None), seed);
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{text}: {e}"));
        let object = value.as_object().expect("an object");
        assert!([json!("north"), json!("süd"), json!(3), json!(null)].contains(&object["zone"]), "{text}");
        let at = object["at"].as_array().expect("an array");
        assert!((1..=2).contains(&at.len()) && at.iter().all(|x| x.as_f64().is_some_and(|x| x.abs() <= 1.0)), "{text}");
        notes += usize::from(object.get("note").is_some_and(|n| n.as_str().is_some_and(|n| n.chars().count() <= 8)));
        pairs += usize::from(object["more"]["x"].as_u64().is_some_and(|x| x < 100));
        assert!(object["more"].is_boolean() || object["more"]["x"].is_u64(), "{text}");
        assert!(object.keys().all(|key| ["zone", "at", "note", "more"].contains(&key.as_str())), "{text}");
    }
    assert!(notes > 5 && pairs > 5, "both ways are taken: {notes}, {pairs}");
}

#[test]
fn reasoning_comes_first_and_is_free() {
    let tokenizer = tokenizer();
    let grammars = Grammars::new(tokenizer.clone());
    let grammar = grammars.json(r#"{"const": 7}"#, VOCAB).expect("a good schema");
    let end = tokenizer.encode("#", arc::text::Special::Text)[0];
    let mut mask = grammar.mask(Some(end));
    for id in [5, 900, 40_000] {
        let free = allowed(&mut *mask);
        assert_eq!(free.len(), VOCAB as usize - tokenizer.stop_ids().len(), "anything but the end");
        assert!(!free.contains(&tokenizer.stop_ids()[0]));
        mask.accept(id).expect("anything goes");
    }
    mask.accept(end).expect("its end");
    assert_eq!(draw(&tokenizer, &mut *mask, 1).trim(), "7");
    assert_eq!(draw(&tokenizer, &mut *grammar.mask(None), 2).trim(), "7", "each sequence has its own");
}

#[test]
fn hostile_schemas_are_refused_or_bounded() {
    let grammars = Grammars::new(tokenizer());
    let panics = json!({"allOf": (0..11).map(|i| json!({"anyOf": [
        {"type": "object", "properties": {format!("a{i}"): {"type": "string"}}, "required": [format!("a{i}")]},
        {"type": "object", "properties": {format!("b{i}"): {"type": "string"}}, "required": [format!("b{i}")]},
    ]})).collect::<Vec<_>>()});
    match grammars.json(&panics.to_string(), VOCAB) {
        Ok(_) => {}
        Err(error) => assert!(error.to_string().len() < 400 && !error.to_string().contains(".rs"), "{error}"),
    }
    let multiple = |of: Value| json!({"type": "integer", "multipleOf": of}).to_string();
    let refused: [(String, &str); 13] = [
        (multiple(json!(99_999_989)), "multipleOf 99999989"),
        (multiple(json!(0.123_456_789)), "multipleOf"),
        (json!({"allOf": [{"multipleOf": 9973}, {"type": "integer", "multipleOf": 9967}]}).to_string(), "multipleOf"),
        (json!({"pattern": "a?b?".repeat(200)}).to_string(), "800 bytes"),
        ("{".into(), "EOF"),
        ("[]".into(), "object"),
        ("false".into(), "object"),
        (json!({"type": "objekt"}).to_string(), "objekt"),
        (json!({"$ref": "#"}).to_string(), "nothing satisfies"),
        (json!({"$ref": "http://127.0.0.1:1/schema"}).to_string(), "not present"),
        (json!({"type": "string", "pattern": "(?=a)b"}).to_string(), "look"),
        (json!({"allOf": [{"type": "string"}, {"type": "integer"}]}).to_string(), "incompatible"),
        (format!("{}1{}", r#"{"items":"#.repeat(200), "}".repeat(200)), "recursion limit"),
    ];
    for (schema, says) in refused {
        let error = grammars.json(&schema, VOCAB).expect_err(&schema);
        assert!(matches!(error, SchemaError::Refused(_)) && error.to_string().contains(says), "{schema}: {error}");
    }
    let large = json!({"const": "x".repeat(MAX_SCHEMA_BYTES)}).to_string();
    assert!(matches!(grammars.json(&large, VOCAB), Err(SchemaError::TooLarge { .. })));

    let chain = |n: usize| {
        let link =
            |i: usize| (format!("d{i}"), json!({"type": "array", "items": {"$ref": format!("#/$defs/d{}", i + 1)}}));
        let links: serde_json::Map<String, Value> = (0..n).map(link).chain([(format!("d{n}"), json!({}))]).collect();
        json!({"$ref": "#/$defs/d0", "$defs": links}).to_string()
    };
    let objects: Vec<Value> = (0..1_500).map(|i| json!({"properties": {format!("k{i}"): {}}})).collect();
    let properties: serde_json::Map<String, Value> = (0..3_500).map(|i| (format!("p{i}"), json!({}))).collect();
    for schema in [
        chain(2_000),
        json!({"anyOf": objects}).to_string(),
        json!({"properties": properties}).to_string(),
        json!({"type": "string", "pattern": "((a{0,1000}){0,1000}){0,1000}"}).to_string(),
        json!({"type": "string", "pattern": "^(|.*)$", "maxLength": 1_000_000_000}).to_string(),
        json!({"enum": (0..4_000).map(|i| format!("{i:020}")).collect::<Vec<_>>()}).to_string(),
    ] {
        assert!(schema.len() <= MAX_SCHEMA_BYTES);
        let began = Instant::now();
        // Taken or refused: no process dies, and it comes back.
        let _ = grammars.json(&schema, VOCAB);
        assert!(began.elapsed() < Duration::from_secs(20), "{}...", &schema[..60]);
    }
    // One that is late on a busy machine ends.
    let began = Instant::now();
    while matches!(grammars.json("{}", VOCAB), Err(SchemaError::Busy)) {
        assert!(began.elapsed() < Duration::from_secs(60), "compilers that do not end");
        std::thread::sleep(Duration::from_millis(50));
    }
    for schema in [
        multiple(json!(0.01)),
        multiple(json!(250)),
        multiple(json!(1e9)),
        json!({"oneOf": [{"const": 1}, {"const": 2}]}).to_string(),
    ] {
        assert!(grammars.json(&schema, VOCAB).is_ok(), "{schema}");
    }
    assert!(grammars.json("{}", VOCAB).is_ok(), "the next is as good as ever");
}

/// A 64-bit linear congruential generator.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}

/// `text` with up to three pieces replaced, taken out, doubled or cut off.
fn damage(text: &str, random: &mut Random) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    for _ in 0..1 + random.below(3) {
        let (at, from) = (random.below(bytes.len()), random.below(bytes.len()));
        match random.below(4) {
            0 => bytes[at] = b"{}[]\",:019\\$#.+*eE-ntf"[random.below(22)],
            1 if bytes.len() > 1 => drop(bytes.remove(at)),
            // A piece of it once more, which makes large numbers, long patterns and keys that come twice.
            2 => {
                let piece = bytes[from..(from + 1 + random.below(12)).min(bytes.len())].to_vec();
                bytes.splice(at..at, piece);
            }
            _ => bytes.truncate(at.max(1)),
        }
    }
    bytes
}

/// A value and all values in it.
fn parts(value: &Value) -> Vec<Value> {
    let inner: Vec<&Value> = match value {
        Value::Array(values) => values.iter().collect(),
        Value::Object(fields) => fields.values().collect(),
        _ => Vec::new(),
    };
    [value.clone()].into_iter().chain(inner.into_iter().flat_map(parts)).collect()
}

/// Puts `part` in the place of the value of this number.
fn graft(value: &mut Value, number: &mut usize, part: &Value) {
    *number = number.wrapping_sub(1);
    match value {
        _ if *number == 0 => *value = part.clone(),
        Value::Array(values) => values.iter_mut().for_each(|value| graft(value, number, part)),
        Value::Object(fields) => fields.values_mut().for_each(|value| graft(value, number, part)),
        _ => {}
    }
}

#[test]
fn damaged_schemas_are_refused_or_compile() {
    let grammars = Grammars::new(tokenizer());
    let good = [
        r##"{"type":"object","properties":{"a":{"type":"string","minLength":2,"pattern":"^[a-z]+(x|y)$"},"b":{"$ref":"#/$defs/c"}},
            "required":["a"],"$defs":{"c":{"type":"array","items":{"multipleOf":5,"type":"integer"},"maxItems":4}}}"##,
        r#"{"anyOf":[{"enum":["x",1,null]},{"type":"number","minimum":-1.5,"exclusiveMaximum":3e2},{"allOf":[{"type":"boolean"}]}]}"#,
        r#"{"oneOf":[{"const":{"k":[1,2]}},{"type":"string","format":"date-time"}],"title":"t","description":"d"}"#,
    ];
    let mut random = Random(7);
    let (mut compiled, mut refused) = (0, 0);
    for _ in 0..600 {
        let bytes = damage(good[random.below(good.len())], &mut random);
        let text = String::from_utf8_lossy(&bytes);
        match grammars.json(&text, VOCAB) {
            Ok(_) => compiled += 1,
            Err(SchemaError::Refused(why)) => {
                assert!(!why.is_empty() && why.len() < 2_000 && !why.contains("panic"), "{text}: {why}");
                refused += 1;
            }
            Err(other) => panic!("{text}: {other}"),
        }
    }
    assert!(compiled > 50 && refused > 200, "{compiled} compiled, {refused} were refused");
}

/// The same inputs as the fuzz target `request_form`, from seeded mutations.
#[test]
fn damaged_requests_are_refused_or_answered() {
    let seeds = [
        include_str!("../../../fuzz/seeds/request_form/auto.json"),
        include_str!("../../../fuzz/seeds/request_form/named.json"),
        include_str!("../../../fuzz/seeds/request_form/object.json"),
        include_str!("../../../fuzz/seeds/request_form/required.json"),
        include_str!("../../../fuzz/seeds/request_form/schema.json"),
    ];
    for seed in seeds {
        assert!(matches!(exercise_form(seed.as_bytes()), Exercised::Begun | Exercised::Whole), "{seed}");
    }
    let seeds_json = seeds.map(|seed| serde_json::from_str::<Value>(seed).expect("JSON"));
    let parts: Vec<Value> = seeds_json.iter().flat_map(parts).collect();
    let (mut random, mut seen) = (Random(8), [0; 4]);
    for round in 0..3_000 {
        let seed = round % seeds.len();
        let mut grafted = seeds_json[seed].clone();
        for _ in 0..1 + random.below(3) {
            // Schemas, most of the time: elsewhere little else is taken.
            let places = ["/tools/0/function/parameters", "/response_format/json_schema/schema"];
            let place = places.into_iter().find(|at| random.below(8) > 0 && grafted.pointer(at).is_some());
            let place = grafted.pointer_mut(place.unwrap_or_default()).expect("it is there");
            let at = random.below(self::parts(place).len());
            graft(place, &mut (at + 1), &parts[random.below(parts.len())]);
        }
        for bytes in [damage(seeds[seed], &mut random), grafted.to_string().into_bytes()] {
            seen[exercise_form(&bytes) as usize] += 1;
        }
    }
    let [refused, _, begun, whole] = seen;
    assert!(refused > 300 && begun > 50 && whole > 200, "{refused} refused, {begun} begun, {whole} whole");
}

#[test]
fn schemas_in_use_are_bounded_together() {
    let grammars = Grammars::new(tokenizer());
    let schema = json!({"const": "x".repeat(100_000)}).to_string();
    let most = MAX_SCHEMA_BYTES_IN_USE / schema.len();
    let mut masks = Vec::new();
    for _ in 0..most {
        masks.push(grammars.json(&schema, VOCAB).expect("there is room").mask(None));
    }
    assert!(matches!(grammars.json(&schema, VOCAB), Err(SchemaError::Busy)));
    assert!(grammars.json("{}", VOCAB).is_ok(), "a small one has room");
    masks.pop();
    assert!(grammars.json(&schema, VOCAB).is_ok(), "what has ended makes room");
}

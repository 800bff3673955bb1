//! The grammar of an answer that has to call tools, in the Lark of `llguidance`.
//!
//! A call has the parameters that its tool's `properties` name, in their order: those of `required`, and any of the others. A value
//! that is text is any text up to the first tag that closes it, or what `enum` and `const` allow; patterns and lengths are not looked
//! at. Every other value is JSON of its schema; of a string in it that holds the closing tag, the format knows no way to write it.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::words::{
    CLOSE_CALLS, CLOSE_INVOKE, CLOSE_PARAMETER, IS_JSON, IS_STRING, OPEN_CALLS_WITH_GAP, OPEN_INVOKE, OPEN_PARAMETER,
};

/// Work to find out which values are text, in bytes of what is looked at: schemas can refer to one another without end.
const MAX_LOOKED_AT: usize = 1 << 20;

/// Schemas inside of another, and references, that are followed one behind the other.
const MAX_DEPTH: usize = 32;

/// What a schema costs, and each of its values beside its text.
const LOOK: usize = 64;

/// A tool that has to be called.
#[derive(Debug, Clone, PartialEq)]
pub struct MustCall {
    /// Its name.
    pub name: String,
    /// The schema of its arguments; without one it has none.
    pub parameters: Map<String, Value>,
}

/// The grammar of an answer that is one call of one of `tools`, or `several`. `format`: what a schema has to say of how its JSON is
/// written, if anything; `most`: bytes of the grammar. `None`: it would have more.
pub fn must_call(tools: &[MustCall], several: bool, format: &Value, most: usize) -> Option<String> {
    let names: Vec<String> = (0..tools.len()).map(|t| format!("call_{t}")).collect();
    let mut lark = Lark { text: String::new(), left: MAX_LOOKED_AT };
    let (open, close) = (quoted(OPEN_CALLS_WITH_GAP), quoted(CLOSE_CALLS));
    lark.rule("start", &format!("{open} \"\\n\" {} {close}", if several { "(call \"\\n\")+" } else { "call \"\\n\"" }));
    lark.rule("call", &names.join(" | "));
    lark.rule(&format!("text[suffix={}]", quoted(CLOSE_PARAMETER)), "/(?s:.*)/");
    for (t, tool) in tools.iter().enumerate() {
        let empty = Map::new();
        let properties = tool.parameters.get("properties").and_then(Value::as_object).unwrap_or(&empty);
        let required: HashSet<&str> =
            tool.parameters.get("required").and_then(Value::as_array).map_or(HashSet::new(), |names| {
                names.iter().filter_map(Value::as_str).filter(|name| properties.contains_key(*name)).collect()
            });
        let mut parameters = String::new();
        for (p, (name, schema)) in properties.iter().enumerate() {
            let optional = if required.contains(name.as_str()) { "" } else { "?" };
            parameters += &format!(" p_{t}_{p}{optional}");
            lark.parameter(&format!("{t}_{p}"), name, schema, &tool.parameters, format)?;
            if lark.text.len() > most {
                return None;
            }
        }
        // Without parameters there is an empty line.
        let parameters = if required.is_empty() { format!("(\"\\n\" |{parameters})") } else { parameters };
        let parameters = if properties.is_empty() { "\"\\n\"" } else { &parameters };
        let head = quoted(&format!("{OPEN_INVOKE}{}\">\n", tool.name));
        lark.rule(&names[t], &format!("{head} {parameters} {}", quoted(CLOSE_INVOKE)));
    }
    Some(lark.text).filter(|text| text.len() <= most)
}

struct Lark {
    text: String,
    /// Of [`MAX_LOOKED_AT`].
    left: usize,
}

impl Lark {
    fn rule(&mut self, name: &str, means: &str) {
        self.text += &format!("{name}: {means}\n");
    }

    /// `None`: it takes too long to find out what it may be.
    fn parameter(
        &mut self,
        id: &str,
        name: &str,
        schema: &Value,
        root: &Map<String, Value>,
        format: &Value,
    ) -> Option<()> {
        let Forms { text, json } = self.forms(schema, root, MAX_DEPTH)?;
        let (close, mut values) = (quoted(CLOSE_PARAMETER), Vec::new());
        if let Some(text) = text {
            let value = match text {
                Text::Any => "text".to_owned(),
                Text::OneOf(texts) => {
                    let texts: Vec<String> = texts.iter().map(|text| quoted(text)).collect();
                    format!("({}) {close}", texts.join(" | "))
                }
            };
            values.push(format!("{} {value}", quoted(IS_STRING)));
        }
        if json {
            values.push(format!("{} json_{id} {close}", quoted(IS_JSON)));
            self.rule(&format!("json_{id}"), &format!("%json {}", alone(schema, root, format)));
        }
        let head = quoted(&format!("{OPEN_PARAMETER}{name}"));
        self.rule(&format!("p_{id}"), &format!("{head} ({}) \"\\n\"", values.join(" | ")));
        Some(())
    }

    /// What a schema allows; in doubt, everything: what is JSON has its schema.
    fn forms(&mut self, schema: &Value, root: &Map<String, Value>, depth: usize) -> Option<Forms> {
        self.left = self.left.checked_sub(LOOK).filter(|_| depth > 0)?;
        let Value::Object(fields) = schema else { return Some(Forms::ANY) };
        if let Some(reference) = fields.get("$ref").and_then(Value::as_str) {
            let mut names = reference.split('/');
            return match (names.next(), names.next(), names.next(), names.next()) {
                (Some("#"), Some(definitions), Some(name), None) => {
                    match root.get(definitions).and_then(|all| all.get(name)) {
                        Some(schema) => self.forms(schema, root, depth - 1),
                        None => Some(Forms::ANY),
                    }
                }
                _ => Some(Forms::ANY),
            };
        }
        let values = fields.get("const").map(std::slice::from_ref);
        let values = values.or_else(|| fields.get("enum").and_then(Value::as_array).map(Vec::as_slice));
        if let Some(values) = values {
            let bytes: usize = values.iter().map(|value| LOOK + value.as_str().map_or(0, str::len)).sum();
            self.left = self.left.checked_sub(bytes)?;
            return Some(Forms::of(values));
        }
        match fields.get("type") {
            Some(Value::String(one)) => {
                return Some(Forms { text: (one == "string").then_some(Text::Any), json: one != "string" });
            }
            Some(Value::Array(some)) => {
                let text = some.iter().any(|one| one == "string").then_some(Text::Any);
                return Some(Forms { json: some.len() > usize::from(text.is_some()), text });
            }
            _ => {}
        }
        let choices = ["anyOf", "oneOf"].iter().find_map(|of| fields.get(*of)).and_then(Value::as_array);
        let all = fields.get("allOf").and_then(Value::as_array).filter(|all| all.len() == 1);
        let mut union = None;
        for choice in choices.or(all).into_iter().flatten() {
            let forms = self.forms(choice, root, depth - 1)?;
            union = Some(match union {
                Some(union) => forms.or(union),
                None => forms,
            });
        }
        Some(union.unwrap_or(Forms::ANY))
    }
}

/// A string of Lark.
fn quoted(text: &str) -> String {
    Value::from(text).to_string().replace('\x7f', "\\u007f")
}

/// A part of a schema by itself: with the definitions that it may refer to.
fn alone(schema: &Value, root: &Map<String, Value>, format: &Value) -> Value {
    let Value::Object(fields) = schema else { return schema.clone() };
    let mut fields = fields.clone();
    for definitions in ["$defs", "definitions"] {
        if let Some(all) = root.get(definitions) {
            fields.entry(definitions).or_insert_with(|| all.clone());
        }
    }
    if !format.is_null() {
        fields.insert("x-guidance".to_owned(), format.clone());
    }
    Value::Object(fields)
}

/// How a value may be written.
struct Forms {
    text: Option<Text>,
    json: bool,
}

enum Text {
    Any,
    OneOf(Vec<String>),
}

impl Forms {
    const ANY: Forms = Forms { text: Some(Text::Any), json: true };

    /// Of one of these values.
    fn of(values: &[Value]) -> Forms {
        let texts: Vec<String> = values.iter().filter_map(Value::as_str).map(str::to_owned).collect();
        let json = texts.len() < values.len() || values.is_empty();
        Forms { text: Some(texts).filter(|texts| !texts.is_empty()).map(Text::OneOf), json }
    }

    fn or(self, other: Forms) -> Forms {
        let text = match (self.text, other.text) {
            (Some(Text::OneOf(mut a)), Some(Text::OneOf(b))) => {
                a.extend(b);
                Some(Text::OneOf(a))
            }
            (None, one) | (one, None) => one,
            _ => Some(Text::Any),
        };
        Forms { text, json: self.json || other.json }
    }
}

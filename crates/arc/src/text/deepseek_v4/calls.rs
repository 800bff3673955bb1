//! The grammar of an answer that calls tools, in the Lark of `llguidance`.
//!
//! A call has the parameters that its tool's `properties` name, in their order: those of `required`, and any of the others. A value
//! that is text is any text up to the first tag that closes it, or what `enum` and `const` allow. Every other value is JSON of its
//! schema; of a string in it that holds the closing tag, the format knows no way to write it. Patterns and lengths of text are looked
//! at where a tool is strict: such text is written as JSON, too. Where text is an answer as well, a block of calls ends it.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::{
    parse::MAX_NAME,
    words::{
        CLOSE_CALLS, CLOSE_INVOKE, CLOSE_PARAMETER, IS_JSON, IS_STRING, OPEN_CALLS, OPEN_CALLS_WITH_GAP, OPEN_INVOKE,
        OPEN_PARAMETER,
    },
};

/// Work to find out which values are text, in bytes of what is looked at: schemas can refer to one another without end.
const MAX_LOOKED_AT: usize = 1 << 20;

/// Schemas inside of another, and references, that are followed one behind the other.
const MAX_DEPTH: usize = 32;

/// What a schema costs, and each of its values beside its text.
const LOOK: usize = 64;

/// What says of arguments as a whole more than their properties say.
#[rustfmt::skip]
const NOT_OF_PROPERTIES: [&str; 18] = [
    "$ref", "$dynamicRef", "allOf", "anyOf", "const", "dependencies", "dependentRequired", "dependentSchemas", "else",
    "enum", "if", "maxProperties", "minProperties", "not", "oneOf", "patternProperties", "propertyNames", "then",
];

/// What says which texts a value may be, beside its type.
#[rustfmt::skip]
const OF_TEXT: [&str; 13] = [
    "$ref", "$dynamicRef", "allOf", "anyOf", "const", "enum", "format", "if", "maxLength", "minLength", "not", "oneOf",
    "pattern",
];

/// How an answer calls tools.
#[derive(Debug, Clone, PartialEq)]
pub struct Calls {
    /// What may be called.
    pub tools: Vec<Tool>,
    /// There is a call, and nothing else. If not, text is an answer too, with calls behind it or without.
    pub has_to: bool,
    /// There may be several calls.
    pub several: bool,
}

/// A tool that may be called.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// The schema of its arguments; without one it has none.
    pub parameters: Map<String, Value>,
    /// How closely arguments follow it.
    pub arguments: Arguments,
}

/// How closely the arguments of a call follow the schema.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arguments {
    /// They are written as the format wants it.
    Any,
    /// They follow it, but for patterns, formats and lengths of text and what concerns several of them.
    Typed,
    /// They follow it.
    Strict,
}

/// Why there is no grammar of calls.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallsError {
    /// The grammar would have more bytes, or it takes too long to find out what values are.
    #[error("schemas of tools, with the definitions that they refer to, have {most} bytes at most")]
    TooLarge {
        /// What was allowed.
        most: usize,
    },
    /// A name or a value that the format has no way to write.
    #[error("{text:?} cannot be written in a call: a name has no \"> and is short, a value has no {CLOSE_PARAMETER}")]
    Unwritable {
        /// Its beginning.
        text: String,
    },
    /// Something of a strict tool that the grammar does not know.
    #[error(
        "arguments of {tool:?} cannot be kept to {what}; describe them by properties and required, or leave strict out"
    )]
    Strict {
        /// The tool.
        tool: String,
        /// What its schema says.
        what: String,
    },
}

/// The grammar of answers with calls. `format`: what a schema has to say of how its JSON is written, if anything; `most`: bytes of
/// the grammar.
pub fn calls_grammar(calls: &Calls, format: &Value, most: usize) -> Result<String, CallsError> {
    let names: Vec<String> = (0..calls.tools.len()).map(|t| format!("call_{t}")).collect();
    let mut lark = Lark { text: String::new(), left: MAX_LOOKED_AT, most };
    let called = if calls.several { "(call \"\\n\")+" } else { "call \"\\n\"" };
    let called = format!("\"\\n\" {called} {}", quoted(CLOSE_CALLS));
    if calls.has_to {
        lark.rule("start", &format!("{} {called}", quoted(OPEN_CALLS_WITH_GAP)));
    } else {
        let open = quoted(OPEN_CALLS);
        lark.rule("start", &format!("TEXT | before {called}"));
        lark.rule("TEXT", &format!("/(?s:.*)/ & ~(/(?s:.*)/ {open} /(?s:.*)/)"));
        lark.rule(&format!("before[suffix={open}]"), "/(?s:.*)/");
    }
    lark.rule("call", &names.join(" | "));
    lark.rule(&format!("value[suffix={}]", quoted(CLOSE_PARAMETER)), "/(?s:.*)/");
    if calls.tools.iter().any(|tool| tool.arguments == Arguments::Any) {
        let (text, json) = (quoted(IS_STRING), quoted(IS_JSON));
        lark.rule("any", &format!("{} /[^\"<>\\n]{{1,100}}/ ({text} | {json}) value \"\\n\"", quoted(OPEN_PARAMETER)));
    }
    for (t, tool) in calls.tools.iter().enumerate() {
        let parameters = match tool.arguments {
            Arguments::Any => "(\"\\n\" | any+)".to_owned(),
            Arguments::Typed => lark.parameters(t, tool, format)?,
            Arguments::Strict => {
                strictly(tool)?;
                lark.parameters(t, tool, format)?
            }
        };
        let head = quoted(&format!("{OPEN_INVOKE}{}\">\n", writable(&tool.name)?));
        lark.rule(&names[t], &format!("{head} {parameters} {}", quoted(CLOSE_INVOKE)));
    }
    Some(lark.text).filter(|text| text.len() <= most).ok_or(CallsError::TooLarge { most })
}

/// A name, if an answer with it is read as it was meant.
fn writable(name: &str) -> Result<&str, CallsError> {
    if name.len() + IS_JSON.len() > MAX_NAME || name.contains("\">") { Err(unwritable(name)) } else { Ok(name) }
}

fn unwritable(text: &str) -> CallsError {
    CallsError::Unwritable { text: text.chars().take(50).collect() }
}

/// Whether a grammar of parameters is all that a tool's schema says.
fn strictly(tool: &Tool) -> Result<(), CallsError> {
    /// A reference to what no schema of a parameter has with it.
    fn lost(value: &Value) -> Option<&str> {
        match value {
            Value::Array(values) => values.iter().find_map(lost),
            Value::Object(fields) => fields.iter().find_map(|(name, value)| match value {
                Value::String(to) if name == "$ref" => {
                    Some(to.as_str()).filter(|to| !["#/$defs/", "#/definitions/"].iter().any(|at| to.starts_with(at)))
                }
                _ => lost(value),
            }),
            _ => None,
        }
    }
    let all = &tool.parameters;
    let refuse = |what: String| {
        let short = |text: &str| text.chars().take(100).collect();
        Err(CallsError::Strict { tool: short(&tool.name), what: short(&what) })
    };
    if let Some(name) = NOT_OF_PROPERTIES.into_iter().find(|name| all.contains_key(*name)) {
        return refuse(name.to_owned());
    }
    if all.get("type").is_some_and(|of| of != "object") {
        return refuse(format!("type {}", all["type"]));
    }
    if all.get("properties").is_some_and(|all| !all.is_object()) {
        return refuse("properties that are no object".to_owned());
    }
    if all.get("required").is_some_and(|names| !names.is_array()) {
        return refuse("required that is no list".to_owned());
    }
    let stranger = all.get("required").and_then(Value::as_array).and_then(|names| {
        let properties = all.get("properties").unwrap_or(&Value::Null);
        names.iter().find(|name| name.as_str().is_none_or(|name| properties.get(name).is_none()))
    });
    match (stranger, all.values().find_map(lost)) {
        (Some(name), _) => refuse(format!("required {name}, which is not among properties")),
        (_, Some(to)) => refuse(format!("$ref {to:?}, which is not of its own $defs")),
        _ => Ok(()),
    }
}

struct Lark {
    text: String,
    /// Of [`MAX_LOOKED_AT`].
    left: usize,
    /// Bytes of the grammar.
    most: usize,
}

impl Lark {
    fn rule(&mut self, name: &str, means: &str) {
        self.text += &format!("{name}: {means}\n");
    }

    /// The parameters of the tool of this number.
    fn parameters(&mut self, t: usize, tool: &Tool, format: &Value) -> Result<String, CallsError> {
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
            let forms = self.forms(schema, tool, MAX_DEPTH).ok_or(CallsError::TooLarge { most: self.most })?;
            self.parameter(&format!("{t}_{p}"), writable(name)?, forms, || alone(schema, &tool.parameters, format))?;
            if self.text.len() > self.most {
                return Err(CallsError::TooLarge { most: self.most });
            }
        }
        // Without parameters there is an empty line.
        Ok(match (properties.is_empty(), required.is_empty()) {
            (true, _) => "\"\\n\"".to_owned(),
            (_, true) => format!("(\"\\n\" |{parameters})"),
            _ => parameters,
        })
    }

    /// `schema`: of its JSON.
    fn parameter(
        &mut self,
        id: &str,
        name: &str,
        forms: Forms,
        schema: impl FnOnce() -> Value,
    ) -> Result<(), CallsError> {
        let (close, mut values) = (quoted(CLOSE_PARAMETER), Vec::new());
        if let Some(text) = forms.text {
            let value = match text {
                Text::Any => "value".to_owned(),
                Text::OneOf(texts) => {
                    if let Some(text) = texts.iter().find(|text| text.contains(CLOSE_PARAMETER)) {
                        return Err(unwritable(text));
                    }
                    let texts: Vec<String> = texts.iter().map(|text| quoted(text)).collect();
                    format!("({}) {close}", texts.join(" | "))
                }
            };
            values.push(format!("{} {value}", quoted(IS_STRING)));
        }
        if forms.json {
            values.push(format!("{} json_{id} {close}", quoted(IS_JSON)));
            self.rule(&format!("json_{id}"), &format!("%json {}", schema()));
        }
        let head = quoted(&format!("{OPEN_PARAMETER}{name}"));
        self.rule(&format!("p_{id}"), &format!("{head} ({}) \"\\n\"", values.join(" | ")));
        Ok(())
    }

    /// How a value may be written; in doubt, in every way, or as JSON where a tool is strict. `None`: it takes too long to find out.
    fn forms(&mut self, schema: &Value, tool: &Tool, depth: usize) -> Option<Forms> {
        self.left = self.left.checked_sub(LOOK).filter(|_| depth > 0)?;
        let doubt = if tool.arguments == Arguments::Strict { Forms::JSON } else { Forms::ANY };
        let Value::Object(fields) = schema else { return Some(doubt) };
        if tool.arguments == Arguments::Strict && !says_one_thing(fields) {
            return Some(doubt);
        }
        if let Some(reference) = fields.get("$ref").and_then(Value::as_str) {
            let mut names = reference.split('/');
            return match (names.next(), names.next(), names.next(), names.next()) {
                (Some("#"), Some(definitions), Some(name), None) => {
                    match tool.parameters.get(definitions).and_then(|all| all.get(name)) {
                        Some(schema) => self.forms(schema, tool, depth - 1),
                        None => Some(doubt),
                    }
                }
                _ => Some(doubt),
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
            let forms = self.forms(choice, tool, depth - 1)?;
            union = Some(match union {
                Some(union) => forms.or(union),
                None => forms,
            });
        }
        let says_nothing = OF_TEXT.iter().all(|name| !fields.contains_key(*name));
        Some(union.unwrap_or(if says_nothing { Forms::ANY } else { doubt }))
    }
}

/// Whether a schema says one thing of texts, that [`Lark::forms`] knows: what they are beside that is for JSON to see to.
fn says_one_thing(fields: &Map<String, Value>) -> bool {
    let of_type = |of: &Value| of == "string" || of.as_array().is_some_and(|some| some.iter().any(|of| of == "string"));
    let mut said = OF_TEXT.into_iter().filter(|name| fields.contains_key(*name));
    match (said.next(), said.next()) {
        (None, _) => true,
        (Some("const" | "enum"), None) => fields.get("type").is_none_or(of_type),
        (Some("$ref" | "allOf" | "anyOf" | "oneOf"), None) => !fields.contains_key("type"),
        _ => false,
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
        // Those of the whole are meant, whatever a part has of the same name.
        if let Some(all) = root.get(definitions) {
            fields.insert(definitions.to_owned(), all.clone());
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
    const JSON: Forms = Forms { text: None, json: true };

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

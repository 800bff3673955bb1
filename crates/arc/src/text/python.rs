//! What chat templates expect of Jinja because they were written against Python's.

use std::fmt::Write as _;

use jiff::ZonedDateTime;
use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State};
use unicode_general_category::{GeneralCategory, get_general_category};

use super::template::{MARK_KEY, Raised};

/// Deepest value that is printed or turned into JSON.
const MAX_DEPTH: usize = 128;

/// Adds the functions of `apply_chat_template`, Python's methods and Python's spelling of values to `environment`.
pub(super) fn install(environment: &mut Environment<'_>) {
    environment.set_unknown_method_callback(|state, value, method, args| {
        if method == "format" {
            value.as_str().map_or(Ok(()), bounded_fields)?;
        }
        minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
    });
    environment.add_filter("tojson", tojson);
    environment.add_filter("string", |state: &State<'_, '_>, value: &Value| {
        let mut out = String::new();
        Printer { state, out: &mut out, mark: mark(state) }.str(value)?;
        Ok::<_, Error>(out)
    });
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Raised(message)))
    });
    environment.add_function("strftime_now", |format: String| -> Result<String, Error> {
        jiff::fmt::strtime::format(&format, &ZonedDateTime::now())
            .map_err(|error| Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {error}")))
    });
    environment.set_formatter(|out, state, value| {
        let mut text = String::new();
        Printer { state, out: &mut text, mark: mark(state) }.str(value)?;
        out.write_str(&text).map_err(|_| Error::from(ErrorKind::WriteFailure))
    });
}

/// Refuses what `str.format` would make of a width or a precision of more than three digits, for which no fuel is taken, and of
/// fields inside fields, which could be such a one.
fn bounded_fields(format: &str) -> Result<(), Error> {
    let digits = format.as_bytes().windows(4).any(|four| four.iter().all(u8::is_ascii_digit));
    let (mut inside, mut nested) = (false, false);
    let mut bytes = format.bytes().peekable();
    while let Some(byte) = bytes.next() {
        match byte {
            // Two are one that is no field.
            b'{' if !inside => inside = bytes.next_if_eq(&b'{').is_none(),
            b'{' => nested = true,
            b'}' => inside = false,
            _ => {}
        }
    }
    if digits || nested {
        let problem = "format: a width or precision has at most three digits, and no field is inside another";
        return Err(Error::new(ErrorKind::InvalidOperation, problem));
    }
    Ok(())
}

/// The character that must pass unchanged: see [`super::ChatTemplate::encode`].
fn mark(state: &State<'_, '_>) -> Option<char> {
    state.lookup(MARK_KEY)?.as_str()?.chars().next()
}

/// `json.dumps` with the defaults that `apply_chat_template` gives it: no ASCII escapes, key order kept.
fn tojson(
    state: &State<'_, '_>,
    value: &Value,
    ensure_ascii: Option<bool>,
    indent: Option<Value>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let ensure_ascii = ensure_ascii.map_or_else(|| kwargs.get::<Option<bool>>("ensure_ascii"), |b| Ok(Some(b)))?;
    let indent = indent.map_or_else(|| kwargs.get::<Option<Value>>("indent"), |i| Ok(Some(i)))?;
    let separators = kwargs.get::<Option<Vec<String>>>("separators")?;
    let sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    kwargs.assert_all_used()?;
    let indent = match indent.filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) => match (indent.as_usize(), indent.as_str()) {
            (Some(width @ 0..=32), _) => Some(" ".repeat(width)),
            (_, Some(text)) => Some(text.to_owned()),
            _ => return Err(Error::new(ErrorKind::InvalidOperation, "tojson: indent must be 0 to 32 or a string")),
        },
    };
    let separators = match separators.as_deref() {
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "tojson: separators must be a pair")),
    };
    let mut out = String::new();
    let style = Json { indent, separators, sort_keys, ensure_ascii: ensure_ascii.unwrap_or(false) };
    Printer { state, out: &mut out, mark: mark(state) }.json(value, &style, 0)?;
    Ok(Value::from_safe_string(out))
}

struct Json {
    indent: Option<String>,
    separators: (String, String),
    sort_keys: bool,
    ensure_ascii: bool,
}

/// Writes values as Python would, paying fuel for every one, since a value can hold the same part many times.
struct Printer<'a, 'state, 'env> {
    state: &'a State<'state, 'env>,
    out: &'a mut String,
    mark: Option<char>,
}

impl Printer<'_, '_, '_> {
    fn pay(&self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(Error::new(ErrorKind::InvalidOperation, "a value is nested too deeply to print"));
        }
        self.state.consume_fuel(1 + value.as_str().map_or(0, str::len) as u64 / 64)
    }

    /// `json.dumps(value)`
    fn json(&mut self, value: &Value, style: &Json, depth: usize) -> Result<(), Error> {
        self.pay(value, depth)?;
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value),
            ValueKind::String => self.json_string(value.as_str().unwrap_or_default(), style),
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if style.sort_keys {
                    keys.sort();
                }
                self.out.push('{');
                for (at, key) in keys.iter().enumerate() {
                    self.separate(at, style, depth + 1);
                    match key.as_str() {
                        Some(text) => self.json_string(text, style),
                        None => {
                            self.out.push('"');
                            self.json(key, style, depth + 1)?;
                            self.out.push('"');
                        }
                    }
                    self.out.push_str(&style.separators.1);
                    self.json(&value.get_item(key)?, style, depth + 1)?;
                }
                self.close('}', keys.is_empty(), style, depth);
            }
            ValueKind::Seq | ValueKind::Iterable => {
                self.out.push('[');
                let mut is_empty = true;
                for (at, item) in value.try_iter()?.enumerate() {
                    is_empty = false;
                    self.separate(at, style, depth + 1);
                    self.json(&item, style, depth + 1)?;
                }
                self.close(']', is_empty, style, depth);
            }
            kind => {
                return Err(Error::new(
                    ErrorKind::BadSerialization,
                    format!("tojson: a value of type {kind} has no JSON"),
                ));
            }
        }
        Ok(())
    }

    fn separate(&mut self, at: usize, style: &Json, depth: usize) {
        if at > 0 {
            self.out.push_str(&style.separators.0);
        }
        self.new_line(style, depth);
    }

    fn close(&mut self, bracket: char, is_empty: bool, style: &Json, depth: usize) {
        if !is_empty {
            self.new_line(style, depth);
        }
        self.out.push(bracket);
    }

    fn new_line(&mut self, style: &Json, depth: usize) {
        if let Some(indent) = &style.indent {
            self.out.push('\n');
            (0..depth).for_each(|_| self.out.push_str(indent));
        }
    }

    fn json_string(&mut self, text: &str, style: &Json) {
        self.out.push('"');
        for c in text.chars() {
            if style.ensure_ascii && !c.is_ascii() && Some(c) != self.mark {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    write!(self.out, "\\u{unit:04x}").expect("writing to a string");
                }
            } else {
                push_json_char(c, self.out);
            }
        }
        self.out.push('"');
    }

    /// `str(value)`
    fn str(&mut self, value: &Value) -> Result<(), Error> {
        match value.as_str() {
            Some(text) => {
                self.out.push_str(text);
                Ok(())
            }
            None => self.repr(value, 0),
        }
    }

    /// `repr(value)`, which is also `str(value)` of everything but a string.
    fn repr(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.pay(value, depth)?;
        match value.kind() {
            ValueKind::None => self.out.push_str("None"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "True" } else { "False" }),
            ValueKind::Number => self.number(value),
            ValueKind::String => self.repr_string(value.as_str().unwrap_or_default()),
            ValueKind::Seq => {
                let (open, close) = match (value.is_tuple(), value.len()) {
                    (false, _) => ("[", "]"),
                    (true, Some(1)) => ("(", ",)"),
                    (true, _) => ("(", ")"),
                };
                self.out.push_str(open);
                for (at, item) in value.try_iter()?.enumerate() {
                    self.out.push_str(if at > 0 { ", " } else { "" });
                    self.repr(&item, depth + 1)?;
                }
                self.out.push_str(close);
            }
            ValueKind::Map => {
                self.out.push('{');
                for (at, key) in value.try_iter()?.enumerate() {
                    self.out.push_str(if at > 0 { ", " } else { "" });
                    self.repr(&key, depth + 1)?;
                    self.out.push_str(": ");
                    self.repr(&value.get_item(&key)?, depth + 1)?;
                }
                self.out.push('}');
            }
            _ => self.out.push_str(&value.to_string()),
        }
        Ok(())
    }

    fn repr_string(&mut self, text: &str) {
        let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
        self.out.push(quote);
        for c in text.chars() {
            match c {
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                _ if c == quote => {
                    self.out.push('\\');
                    self.out.push(c);
                }
                _ if Some(c) == self.mark || is_printable(c) => self.out.push(c),
                _ => {
                    let code = u32::from(c);
                    match code {
                        0..=0xFF => write!(self.out, "\\x{code:02x}"),
                        0x100..=0xFFFF => write!(self.out, "\\u{code:04x}"),
                        _ => write!(self.out, "\\U{code:08x}"),
                    }
                    .expect("writing to a string");
                }
            }
        }
        self.out.push(quote);
    }

    fn number(&mut self, value: &Value) {
        match f64::try_from(value.clone()) {
            Ok(float) if !value.is_integer() => self.out.push_str(&repr_float(float)),
            _ => self.out.push_str(&value.to_string()),
        }
    }
}

/// Python's `str.isprintable` for one character.
fn is_printable(c: char) -> bool {
    use GeneralCategory::{
        Control, Format, LineSeparator, ParagraphSeparator, PrivateUse, SpaceSeparator, Surrogate, Unassigned,
    };
    c == ' '
        || !matches!(
            get_general_category(c),
            Control
                | Format
                | LineSeparator
                | ParagraphSeparator
                | PrivateUse
                | SpaceSeparator
                | Surrogate
                | Unassigned
        )
}

/// Appends a character of a JSON string as `json.dumps` writes it with `ensure_ascii=False`.
pub(super) fn push_json_char(c: char, out: &mut String) {
    match c {
        '"' => out.push_str("\\\""),
        '\\' => out.push_str("\\\\"),
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        '\u{8}' => out.push_str("\\b"),
        '\u{c}' => out.push_str("\\f"),
        _ if c < ' ' => write!(out, "\\u{:04x}", u32::from(c)).expect("writing to a string"),
        _ => out.push(c),
    }
}

/// Python's `repr` of a float, also its JSON: the shortest digits, an exponent from 1e16 and below 1e-4.
pub(super) fn repr_float(float: f64) -> String {
    if float.is_nan() {
        return "NaN".into();
    }
    if float.is_infinite() {
        return if float > 0.0 { "Infinity" } else { "-Infinity" }.into();
    }
    let magnitude = float.abs();
    if magnitude == 0.0 || (1e-4..1e16).contains(&magnitude) {
        return format!("{float:?}");
    }
    let text = format!("{float:e}");
    let (digits, exponent) = text.split_once('e').expect("an exponent was asked for");
    match exponent.strip_prefix('-') {
        Some(exponent) => format!("{digits}e-{exponent:0>2}"),
        None => format!("{digits}e+{exponent:0>2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_spelt_as_in_python() {
        let cases = [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e-7, "1e-07"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (-2.5e-10, "-2.5e-10"),
            (123456789.125, "123456789.125"),
        ];
        for (float, text) in cases {
            assert_eq!(repr_float(float), text);
        }
    }
}

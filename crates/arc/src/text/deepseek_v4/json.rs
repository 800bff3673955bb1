//! JSON text to JSON text as Python writes it: `json.dumps(json.loads(text), ensure_ascii=False)`.
//!
//! The models have seen no other spelling. Works on text, since a number that has passed through `f64` is not always the
//! number that was sent: integers of any length stay as they are, floats become Python's shortest.

use std::char::decode_utf16;

use hashbrown::HashMap;

use crate::text::python::{push_json_char, repr_float};

/// Deepest nesting. Python gives up at about a thousand levels, which nobody sends in earnest.
const MAX_DEPTH: usize = 128;

/// Most digits of an integer that Python 3.11 and later read.
const MAX_DIGITS: usize = 4300;

/// A value of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Member {
    /// A string, unescaped.
    Text(String),
    /// Any other value, as Python writes it.
    Json(String),
}

/// `text` as Python would write it back, or nothing where Python would not read it.
pub(super) fn rewrite(text: &str) -> Option<String> {
    let mut reader = Reader { text, at: 0 };
    let mut out = String::with_capacity(text.len() + text.len() / 4);
    reader.space();
    reader.value(&mut out, 0)?;
    reader.end()?;
    Some(out)
}

/// The members of the object `text`, in order; nothing where it is not an object. A later member of an equal name
/// replaces the value of the first.
pub(super) fn members(text: &str) -> Option<Vec<(String, Member)>> {
    let mut reader = Reader { text, at: 0 };
    reader.space();
    let members = reader.object(0)?;
    reader.end()?;
    Some(members)
}

/// Appends `text` as a JSON string.
pub(super) fn push_string(text: &str, out: &mut String) {
    out.push('"');
    text.chars().for_each(|c| push_json_char(c, out));
    out.push('"');
}

struct Reader<'a> {
    text: &'a str,
    at: usize,
}

impl Reader<'_> {
    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    fn take(&mut self, byte: u8) -> Option<()> {
        (self.peek()? == byte).then(|| self.at += 1)
    }

    fn space(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    fn end(&mut self) -> Option<()> {
        self.space();
        self.peek().is_none().then_some(())
    }

    fn value(&mut self, out: &mut String, depth: usize) -> Option<()> {
        match self.peek()? {
            b'"' => push_string(&self.string()?, out),
            b'{' => {
                out.push('{');
                for (at, (name, member)) in self.object(depth)?.iter().enumerate() {
                    out.push_str(if at > 0 { ", " } else { "" });
                    push_string(name, out);
                    out.push_str(": ");
                    match member {
                        Member::Text(text) => push_string(text, out),
                        Member::Json(json) => out.push_str(json),
                    }
                }
                out.push('}');
            }
            b'[' => self.array(out, depth)?,
            _ => self.scalar(out)?,
        }
        Some(())
    }

    fn object(&mut self, depth: usize) -> Option<Vec<(String, Member)>> {
        if depth >= MAX_DEPTH {
            return None;
        }
        self.take(b'{')?;
        self.space();
        let mut members: Vec<(String, Member)> = Vec::new();
        let mut places: HashMap<String, usize> = HashMap::new();
        if self.take(b'}').is_some() {
            return Some(members);
        }
        loop {
            let name = self.string()?;
            self.space();
            self.take(b':')?;
            self.space();
            let member = if self.peek()? == b'"' {
                Member::Text(self.string()?)
            } else {
                let mut json = String::new();
                self.value(&mut json, depth + 1)?;
                Member::Json(json)
            };
            match places.get(&name) {
                Some(&place) => members[place].1 = member,
                None => {
                    places.insert(name.clone(), members.len());
                    members.push((name, member));
                }
            }
            self.space();
            if self.take(b'}').is_some() {
                return Some(members);
            }
            self.take(b',')?;
            self.space();
        }
    }

    fn array(&mut self, out: &mut String, depth: usize) -> Option<()> {
        if depth >= MAX_DEPTH {
            return None;
        }
        self.take(b'[')?;
        out.push('[');
        self.space();
        if self.take(b']').is_none() {
            loop {
                self.value(out, depth + 1)?;
                self.space();
                if self.take(b']').is_some() {
                    break;
                }
                self.take(b',')?;
                out.push_str(", ");
                self.space();
            }
        }
        out.push(']');
        Some(())
    }

    /// A number or a word.
    fn scalar(&mut self, out: &mut String) -> Option<()> {
        let rest = &self.text[self.at..];
        // The last three are Python's own.
        for word in ["null", "true", "false", "NaN", "Infinity", "-Infinity"] {
            if rest.starts_with(word) {
                self.at += word.len();
                out.push_str(word);
                return Some(());
            }
        }
        let start = self.at;
        let _ = self.take(b'-');
        let digits = self.digits();
        let first = self.text.as_bytes().get(self.at - digits);
        if digits == 0 || digits > 1 && first == Some(&b'0') {
            return None;
        }
        let mut is_float = false;
        if self.take(b'.').is_some() {
            is_float = true;
            (self.digits() > 0).then_some(())?;
        }
        if matches!(self.peek(), Some(b'e' | b'E')) {
            is_float = true;
            self.at += 1;
            if matches!(self.peek(), Some(b'+' | b'-')) {
                self.at += 1;
            }
            (self.digits() > 0).then_some(())?;
        }
        match &self.text[start..self.at] {
            number if is_float => out.push_str(&repr_float(number.parse().ok()?)),
            "-0" => out.push('0'),
            number => out.push_str((digits <= MAX_DIGITS).then_some(number)?),
        }
        Some(())
    }

    fn digits(&mut self) -> usize {
        let start = self.at;
        while matches!(self.peek(), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        self.at - start
    }

    fn string(&mut self) -> Option<String> {
        self.take(b'"')?;
        let mut out = String::new();
        loop {
            let rest = &self.text[self.at..];
            let plain = rest.bytes().position(|byte| byte < b' ' || byte == b'"' || byte == b'\\')?;
            out.push_str(&rest[..plain]);
            self.at += plain + 1;
            match rest.as_bytes()[plain] {
                b'"' => return Some(out),
                b'\\' => self.escape(&mut out)?,
                _ => return None,
            }
        }
    }

    fn escape(&mut self, out: &mut String) -> Option<()> {
        let byte = self.peek()?;
        self.at += 1;
        out.push(match byte {
            b'"' | b'\\' | b'/' => char::from(byte),
            b'b' => '\u{8}',
            b'f' => '\u{c}',
            b'n' => '\n',
            b'r' => '\r',
            b't' => '\t',
            b'u' => {
                let unit = self.unit()?;
                let (before, mut units) = (self.at, vec![unit]);
                if (0xD800..0xDC00).contains(&unit) && self.text[self.at..].starts_with("\\u") {
                    self.at += 2;
                    match self.unit()? {
                        second @ 0xDC00..0xE000 => units.push(second),
                        _ => self.at = before,
                    }
                }
                // Half a pair, which Python keeps, is no text.
                decode_utf16(units).next()?.unwrap_or(char::REPLACEMENT_CHARACTER)
            }
            _ => return None,
        });
        Some(())
    }

    fn unit(&mut self) -> Option<u16> {
        let digits = self.text.get(self.at..self.at + 4)?;
        self.at += 4;
        digits.bytes().all(|byte| byte.is_ascii_hexdigit()).then(|| u16::from_str_radix(digits, 16).ok())?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_spelt_as_in_python() {
        let cases = [
            ("1e-7", "1e-07"),
            ("12345678901234567890123", "12345678901234567890123"),
            ("-0", "0"),
            ("-0.0", "-0.0"),
            ("1.50", "1.5"),
            ("1e400", "Infinity"),
            ("1E2", "100.0"),
            ("123456789012345678.0", "1.2345678901234568e+17"),
            (" [1,2 , {\"a\":null,\"b\":[ ],\"c\":{ }}] ", r#"[1, 2, {"a": null, "b": [], "c": {}}]"#),
            (r#""\u00e9\/\u4f60\ud83d\ude00\u007f""#, "\"é/你😀\u{7f}\""),
            (r#""\u0000\u001f\b\f\n\r\t\"\\""#, r#""\u0000\u001f\b\f\n\r\t\"\\""#),
            (r#"{"a":1,"b":2,"a":3}"#, r#"{"a": 3, "b": 2}"#),
            (r#""\ud83d""#, "\"\u{FFFD}\""),
            (r#""\ud83dx\udE00""#, "\"\u{FFFD}x\u{FFFD}\""),
            (r#""\ud83d\ud83d\ude00""#, "\"\u{FFFD}😀\""),
            ("NaN", "NaN"),
            ("-Infinity", "-Infinity"),
        ];
        for (text, expected) in cases {
            assert_eq!(rewrite(text).as_deref(), Some(expected), "{text}");
        }
    }

    #[test]
    fn what_python_refuses_is_refused() {
        let long = "9".repeat(4301);
        let deep = "[".repeat(100_000);
        let cases = [
            "",
            " ",
            "01",
            "1.",
            ".5",
            "+1",
            "-",
            "1e",
            "tru",
            "nul",
            "'a'",
            "\"a",
            "\"\u{1}\"",
            "\"\\x\"",
            "\"\\u12\"",
            "\"\\u+123\"",
            "\"\\ué00\"",
            "[1,]",
            "[",
            "[1",
            "{\"a\"}",
            "{\"a\":}",
            "{\"a\":1,}",
            "{1:2}",
            "{",
            "1 2",
            "[] x",
            "\u{FEFF}1",
            "\"\\",
            "\"\\ud83d\\u",
            &long,
            &deep,
        ];
        for text in cases {
            assert_eq!(rewrite(text), None, "{}", &text[..text.len().min(20)]);
        }
        assert!(rewrite(&format!("{}{}", "[".repeat(128), "]".repeat(128))).is_some());
        assert_eq!(members("[]"), None);
        assert_eq!(members("\"a\""), None);
    }

    #[test]
    fn members_tell_text_from_json() {
        let text = |text: &str| Member::Text(text.into());
        let json = |text: &str| Member::Json(text.into());
        let expected = vec![("a".into(), text("x\n")), ("b".into(), json("[1, \"y\"]")), ("c".into(), json("true"))];
        assert_eq!(members(r#"{"a":"x\n","b":[1,"y"],"c":true}"#), Some(expected));
        assert_eq!(members(r#"{"a":1,"b":2,"a":"z"}"#), Some(vec![("a".into(), text("z")), ("b".into(), json("2"))]));
    }
}

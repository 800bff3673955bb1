//! Marks that keep control token look-alikes apart from control tokens through a template.
//!
//! Text must go through the template as it is, since templates trim, split, compare and quote it. So nothing is wrapped:
//! only inside a look-alike, after its first character, stands one private character, which no filter minds.

use std::collections::HashSet;
use std::ops::Range;

use serde_json::{Map, Value};

use super::tokenizer::Tokenizer;

/// Puts a mark into every control token look-alike.
pub(super) struct Marker<'a> {
    tokenizer: &'a Tokenizer,
    mark: char,
    used: bool,
}

impl<'a> Marker<'a> {
    /// A marker whose mark occurs in none of the texts of a template and its variables: a noncharacter, which Unicode reserves for such uses, or a
    /// private character of plane 15. None if all of them occur.
    pub(super) fn new(tokenizer: &'a Tokenizer, context: &Map<String, Value>, source: &str) -> Option<Self> {
        let mut taken: HashSet<char> = source.chars().collect();
        context.values().for_each(|value| collect(value, &mut taken));
        let mut candidates = ('\u{FDD0}'..='\u{FDEF}').chain('\u{F0000}'..='\u{FFFFD}');
        let mark = candidates.find(|c| !taken.contains(c))?;
        Some(Self { tokenizer, mark, used: false })
    }

    /// The mark, if any text had a look-alike.
    pub(super) fn used(&self) -> Option<char> {
        self.used.then_some(self.mark)
    }

    /// `value` with marks in all its strings. `visible`: see [`Tokenizer::look_alikes`].
    pub(super) fn mark(&mut self, value: &Value, visible: bool) -> Value {
        match value {
            Value::String(text) => self.mark_text(text, visible).into(),
            Value::Array(items) => items.iter().map(|item| self.mark(item, visible)).collect(),
            Value::Object(entries) => {
                let marked = entries.iter().map(|(k, v)| (self.mark_text(k, visible), self.mark(v, visible)));
                Value::Object(marked.collect())
            }
            other => other.clone(),
        }
    }

    fn mark_text(&mut self, text: &str, visible: bool) -> String {
        let places = self.tokenizer.look_alikes(text, visible);
        self.used |= !places.is_empty();
        let mut marked = String::with_capacity(text.len() + 4 * places.len());
        let mut from = 0;
        for place in places {
            marked.push_str(&text[from..place]);
            marked.push(self.mark);
            from = place;
        }
        marked.push_str(&text[from..]);
        marked
    }
}

/// Characters of `value` that could be marks.
fn collect(value: &Value, taken: &mut HashSet<char>) {
    match value {
        Value::String(text) => taken.extend(text.chars().filter(|&c| c >= '\u{FDD0}')),
        Value::Array(items) => items.iter().for_each(|item| collect(item, taken)),
        Value::Object(entries) => {
            for (key, value) in entries {
                taken.extend(key.chars().filter(|&c| c >= '\u{FDD0}'));
                collect(value, taken);
            }
        }
        _ => {}
    }
}

/// Takes the marks out of `text` and says where they were.
pub(super) fn unmark(text: &str, mark: char) -> (String, Vec<Range<usize>>) {
    let (mut plain, mut places) = (String::with_capacity(text.len()), Vec::new());
    for (at, part) in text.split(mark).enumerate() {
        if at > 0 {
            places.push(plain.len()..plain.len());
        }
        plain.push_str(part);
    }
    (plain, places)
}

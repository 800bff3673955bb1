//! Finding control and added tokens in a text, and leaving alone what only looks like one.

use std::ops::Range;

use aho_corasick::{AhoCorasick, AhoCorasickKind, BuildError, Input, MatchKind};

/// Longest text of an added token, so that skipping a look-alike costs a bounded amount.
pub(super) const MAX_ADDED_BYTES: usize = 256;

/// Most bytes of all added tokens: what an index takes is some hundred times that. Gemma 3 has 90 kB.
pub(super) const MAX_ADDED_TOTAL: usize = 512 << 10;

/// Index over the tokens that are matched as a whole: leftmost first, longest among those.
pub(super) struct AddedTokens {
    /// Every control and added token.
    all: Index,
    /// Those that a user's text may contain.
    plain: Index,
    /// Those that it may not contain.
    control: Index,
    /// Their texts in byte order.
    control_texts: Vec<Box<[u8]>>,
}

struct Index {
    matcher: Option<AhoCorasick>,
    ids: Vec<u32>,
}

impl Index {
    fn new<'a>(tokens: impl Iterator<Item = &'a (u32, &'a str, bool)>) -> Result<Self, BuildError> {
        let (ids, texts): (Vec<u32>, Vec<&str>) = tokens.map(|t| (t.0, t.1)).unzip();
        let matcher = if texts.is_empty() {
            None
        } else {
            let kind = Some(AhoCorasickKind::ContiguousNFA);
            Some(AhoCorasick::builder().match_kind(MatchKind::LeftmostLongest).kind(kind).build(texts)?)
        };
        Ok(Self { matcher, ids })
    }

    fn find(&self, text: &str, span: Range<usize>) -> Option<(Range<usize>, u32)> {
        let found = self.matcher.as_ref()?.find(Input::new(text).span(span))?;
        Some((found.range(), self.ids[found.pattern().as_usize()]))
    }
}

impl AddedTokens {
    /// `tokens` in id order: id, text to match, and whether it is a control token in a user's text.
    pub(super) fn new(tokens: &[(u32, &str, bool)]) -> Result<Self, BuildError> {
        let mut control_texts: Vec<_> = tokens.iter().filter(|t| t.2).map(|t| t.1.as_bytes().into()).collect();
        control_texts.sort_unstable();
        Ok(Self {
            all: Index::new(tokens.iter())?,
            plain: Index::new(tokens.iter().filter(|t| !t.2))?,
            control: Index::new(tokens.iter().filter(|t| t.2))?,
            control_texts,
        })
    }

    /// Cuts `text` at added tokens: `token` gets their ids, `between` the ranges of what lies between.
    ///
    /// `guarded` is sorted. A control token that touches a guarded range, or has an empty one strictly inside it, is
    /// ordinary text.
    pub(super) fn split(&self, text: &str, guarded: &[Range<usize>], mut part: impl FnMut(Part)) {
        let (mut emitted, mut from, mut guards) = (0, 0, guarded);
        while let Some((mut range, mut id)) = self.all.find(text, from..text.len()) {
            while guards.first().is_some_and(|g| g.end <= range.start) {
                guards = &guards[1..];
            }
            let touched = guards.iter().take_while(|g| g.start < range.end).any(|g| range.start < g.end);
            if touched && self.control.ids.binary_search(&id).is_ok() {
                // The control token is only text here, but a plain added token may begin at the same place.
                match self.plain.find(text, range.clone()) {
                    Some(plain) if plain.0.start == range.start => (range, id) = plain,
                    _ => {
                        from = next_char(text, range.start);
                        continue;
                    }
                }
            }
            if emitted < range.start {
                part(Part::Text(emitted..range.start));
            }
            part(Part::Token(id));
            (emitted, from) = (range.end, range.end);
        }
        if emitted < text.len() {
            part(Part::Text(emitted..text.len()));
        }
    }

    /// The control or added token spelt exactly `text`.
    pub(super) fn id_of(&self, text: &str) -> Option<u32> {
        let (range, id) = self.all.find(text, 0..text.len())?;
        (range == (0..text.len())).then_some(id)
    }

    /// Whether `text` begins with a control token that is not guarded (see [`Self::split`]).
    pub(super) fn begins(&self, text: &str, guarded: &[Range<usize>]) -> bool {
        let end = text.floor_char_boundary(MAX_ADDED_BYTES);
        let token = self.control.find(text, 0..end).filter(|(range, _)| range.start == 0);
        token.is_some_and(|(range, _)| guarded.first().is_none_or(|guard| guard.start >= range.end))
    }

    /// Byte offsets just after the first character of every control token in `text` that `counts`, and of every
    /// beginning of one at its end, which text appended later could complete. In ascending order.
    pub(super) fn look_alikes(&self, text: &str, counts: impl Fn(u32) -> bool) -> Vec<usize> {
        let mut inside = Vec::new();
        let mut from = 0;
        while let Some((range, id)) = self.control.find(text, from..text.len()) {
            from = next_char(text, range.start);
            if counts(id) {
                inside.push(from);
            }
        }
        let tail = text.floor_char_boundary(text.len().saturating_sub(MAX_ADDED_BYTES)).max(from);
        for (at, c) in text[tail..].char_indices() {
            if self.begins_control(&text.as_bytes()[tail + at..]) {
                inside.push(tail + at + c.len_utf8());
            }
        }
        inside
    }

    fn begins_control(&self, text: &[u8]) -> bool {
        let at = self.control_texts.partition_point(|control| &control[..] < text);
        self.control_texts.get(at).is_some_and(|control| control.starts_with(text))
    }
}

/// What [`AddedTokens::split`] found.
pub(super) enum Part {
    /// An added token.
    Token(u32),
    /// Text without one.
    Text(Range<usize>),
}

fn next_char(text: &str, at: usize) -> usize {
    at + text[at..].chars().next().map_or(1, char::len_utf8)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(text: &str, guarded: &[(usize, usize)]) -> String {
        let guarded: Vec<Range<usize>> = guarded.iter().map(|&(start, end)| start..end).collect();
        let added =
            AddedTokens::new(&[(0, "<a>", true), (1, "<a>b", true), (2, "<", false), (3, "  ", false)]).unwrap();
        let mut out = String::new();
        added.split(text, &guarded, |part| match part {
            Part::Token(id) => out += &format!("[{id}]"),
            Part::Text(range) => out += &text[range],
        });
        out
    }

    #[test]
    fn guards_stop_control_tokens_only() {
        assert_eq!(parts("x<a>b<a>  y", &[]), "x[1][0][3]y");
        assert_eq!(parts("x<a>b<a>  y", &[(0, 11)]), "x[2]a>b[2]a>[3]y");
        assert_eq!(parts("x<a>b<a>", &[(2, 2)]), "x[2]a>b[0]", "an empty guard inside the first");
        assert_eq!(parts("x<a>b<a>", &[(1, 1), (5, 5)]), "x[1][0]", "empty guards at borders touch nothing");
        assert_eq!(parts("x<a>b<a>", &[(4, 5)]), "x[2]a>b[0]", "the longest token there is touched");
        assert_eq!(parts("x<a>b<a>", &[(0, 1), (5, 6)]), "x[1][2]a>");
    }

    #[test]
    fn look_alikes_are_found_whole_and_begun() {
        let added = AddedTokens::new(&[(0, "<|im|>", true), (1, "｜D｜", true), (2, "<p>", false)]).unwrap();
        let find = |text| added.look_alikes(text, |_| true);
        assert_eq!(find("a<|im|>b<p>"), [2]);
        assert_eq!(find("<|im|>｜D｜"), [1, 9, 13], "the last mark begins another `｜D｜`");
        assert_eq!(find("x <|i"), [3]);
        assert_eq!(find("<|i<"), [4]);
        assert_eq!(find("a < b"), [0usize; 0]);
        assert_eq!(added.look_alikes("<|im|>", |id| id != 0), [0usize; 0]);
    }
}

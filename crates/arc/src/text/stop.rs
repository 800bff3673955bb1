//! Stop strings, found across token borders.

/// Streams text through until one of a few stop strings appears.
///
/// Text that could still become part of a stop string is held back; all else passes at once. Of stop strings that end
/// at the same byte the longest counts. One comparison per byte and stop string (Knuth, Morris and Pratt 1977).
#[derive(Debug, Clone, Default)]
pub struct StopMatcher {
    patterns: Vec<Pattern>,
    held: String,
    matched: Option<usize>,
}

#[derive(Debug, Clone)]
struct Pattern {
    text: Box<[u8]>,
    /// `border[n]`: length of the longest proper beginning of `text[..n]` that is also its end; index 0 is unused.
    border: Box<[u16]>,
    /// How much of `text` the stream ends in.
    len: usize,
    /// Its place in the list given.
    index: usize,
}

impl Pattern {
    fn new(index: usize, text: &str) -> Self {
        let text: Box<[u8]> = text.as_bytes().into();
        let mut border = vec![0u16; text.len() + 1].into_boxed_slice();
        let mut len = 0;
        for at in 1..text.len() {
            while len > 0 && text[at] != text[len] {
                len = usize::from(border[len]);
            }
            len += usize::from(text[at] == text[len]);
            border[at + 1] = len as u16;
        }
        Self { text, border, len: 0, index }
    }

    /// Takes one byte; true when the stream now ends in the whole of `text`.
    fn step(&mut self, byte: u8) -> bool {
        while self.len > 0 && (self.len == self.text.len() || self.text[self.len] != byte) {
            self.len = usize::from(self.border[self.len]);
        }
        self.len += usize::from(self.text[self.len] == byte);
        self.len == self.text.len()
    }
}

impl StopMatcher {
    /// Most stop strings.
    pub const MAX_STRINGS: usize = 16;
    /// Most bytes of one.
    pub const MAX_BYTES: usize = 256;

    /// Whether `stops` can be matched: at most [`Self::MAX_STRINGS`], each of 1 to [`Self::MAX_BYTES`] bytes. The error
    /// is a sentence for the client.
    pub fn check<S: AsRef<str>>(stops: &[S]) -> Result<(), String> {
        if stops.len() > Self::MAX_STRINGS {
            return Err(format!("{} stop strings given, at most {} are supported", stops.len(), Self::MAX_STRINGS));
        }
        match stops.iter().map(|s| s.as_ref().len()).find(|len| !(1..=Self::MAX_BYTES).contains(len)) {
            Some(len) => Err(format!("a stop string has {len} bytes, 1 to {} are supported", Self::MAX_BYTES)),
            None => Ok(()),
        }
    }

    /// A matcher for `stops`, which have passed [`Self::check`]; an empty list lets everything through.
    ///
    /// # Panics
    /// When they have not.
    pub fn new<S: AsRef<str>>(stops: &[S]) -> Self {
        if let Err(error) = Self::check(stops) {
            panic!("stop strings must be checked first: {error}");
        }
        let patterns = stops.iter().enumerate().map(|(index, text)| Pattern::new(index, text.as_ref())).collect();
        Self { patterns, ..Self::default() }
    }

    /// Passes `text` on to `out` as far as it can be; true once a stop string has appeared, which is not passed on, nor
    /// is anything after it.
    pub fn push(&mut self, text: &str, out: &mut String) -> bool {
        if self.matched.is_some() {
            return true;
        }
        let before = self.held.len();
        self.held.push_str(text);
        for at in before..self.held.len() {
            let byte = self.held.as_bytes()[at];
            let mut cut = None;
            for pattern in &mut self.patterns {
                if pattern.step(byte) && cut.is_none_or(|(len, _)| len < pattern.text.len()) {
                    cut = Some((pattern.text.len(), pattern.index));
                }
            }
            if let Some((len, index)) = cut {
                out.push_str(&self.held[..at + 1 - len]);
                self.held.clear();
                self.matched = Some(index);
                return true;
            }
        }
        let keep = self.patterns.iter().map(|pattern| pattern.len).max().unwrap_or(0);
        let free = self.held.len() - keep;
        out.push_str(&self.held[..free]);
        self.held.drain(..free);
        false
    }

    /// Ends the text: passes on what was held.
    pub fn finish(&mut self, out: &mut String) {
        out.push_str(&self.held);
        self.held.clear();
    }

    /// Which stop string has appeared, by its place in the list given.
    pub fn matched(&self) -> Option<usize> {
        self.matched
    }
}

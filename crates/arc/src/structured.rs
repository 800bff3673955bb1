//! Structured outputs: answers that are JSON of a schema, or calls of tools whose arguments are, by masks of the tokens that may come
//! next.
//!
//! The grammar is `llguidance`'s. Schemas are a stranger's: they are compiled on a deep stack of their own within a deadline (chains
//! of `$ref` nest as deep as they are long), under the library's limits on work and size and [`check`]'s on what these do not see, and
//! the first mask is made before a request is taken. Nothing is fetched. Keys come in the order of `properties`; `oneOf` is taken as
//! `anyOf`; in strings a printable character is itself and no `\u` escape; between tokens of JSON stand at most 40 blanks, so that an
//! answer cannot be white space for ever.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use arc_engine::grammar::{MaskError, TokenMask};
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

use crate::text::deepseek_v4::{Arguments, Calls, calls_grammar};
use crate::text::{DeepStackError, DeepStacks, Tokenizer};

/// Largest schema, in bytes of its JSON.
pub const MAX_SCHEMA_BYTES: usize = 128 << 10;

/// Bytes of schemas that are in use at once. One of 37 kB can make a grammar of 17 MB.
pub const MAX_SCHEMA_BYTES_IN_USE: usize = 1 << 20;

/// Longest regular expression, in bytes: the work for a mask grows with it, and everybody waits for a mask.
const MAX_PATTERN_BYTES: usize = 512;

/// Largest common multiple of all `multipleOf`, without powers of ten. A grammar has a state for each remainder.
const MAX_MULTIPLE: u64 = 10_000;

/// Time to compile a schema, for which its request holds one of the turns of `serve::body`. One that takes longer has a thread that
/// cannot be stopped.
const DEADLINE: Duration = Duration::from_secs(2);

/// Time to index a vocabulary, with the first schema: 1.5 s where nothing else runs.
const INDEX_DEADLINE: Duration = Duration::from_secs(60);

/// Compilers that may be late before no more schemas are taken.
const MAX_LATE: usize = 2;

/// Longest message about a schema, in characters.
const MAX_WORDS: usize = 300;

/// First byte of the texts of control tokens, which no grammar reaches.
const CONTROL: u8 = TokTrie::SPECIAL_TOKEN_MARKER;

/// Why there is no grammar of a schema.
#[derive(Debug, thiserror::Error)]
pub enum SchemaError {
    /// It is larger than [`MAX_SCHEMA_BYTES`].
    #[error("the schema has {bytes} bytes, at most {MAX_SCHEMA_BYTES} are supported")]
    TooLarge {
        /// Its size.
        bytes: usize,
    },
    /// It is no schema, one that nothing satisfies, or has what is not supported.
    #[error("{0}")]
    Refused(String),
    /// Too many others are in use.
    #[error("too much is asked for in schemas at once; try again later")]
    Busy,
    /// It takes too long to compile.
    #[error("the schema takes too long to compile; make it simpler")]
    TooSlow,
    /// The compiler failed by a defect of its own, or has no thread.
    #[error("the schema cannot be compiled: {0}")]
    Failed(String),
}

/// Makes grammars over the tokens of one model. Its vocabulary is indexed with the first.
#[derive(Clone)]
pub struct Grammars {
    tokenizer: Arc<Tokenizer>,
    factory: Arc<OnceLock<Result<ParserFactory, String>>>,
    threads: DeepStacks,
    in_use: Arc<AtomicUsize>,
}

/// Bytes of a schema that is in use, until it is dropped.
struct InUse {
    bytes: usize,
    of: Arc<AtomicUsize>,
}

impl InUse {
    fn new(bytes: usize, of: &Arc<AtomicUsize>) -> Result<InUse, SchemaError> {
        let room = |used: usize| Some(used + bytes).filter(|&used| used <= MAX_SCHEMA_BYTES_IN_USE);
        of.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room).map_err(|_| SchemaError::Busy)?;
        Ok(InUse { bytes, of: of.clone() })
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.of.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Grammars")
    }
}

impl Grammars {
    /// Of the model with this tokenizer.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Grammars {
        let threads = DeepStacks::new("json-schema", MAX_LATE);
        Grammars { tokenizer, factory: Arc::default(), threads, in_use: Arc::default() }
    }

    /// The grammar of the JSON that a schema describes. `vocab`: logits of the model, at least the tokenizer's tokens.
    pub fn json(&self, schema: &str, vocab: u32) -> Result<Grammar, SchemaError> {
        if schema.len() > MAX_SCHEMA_BYTES {
            return Err(SchemaError::TooLarge { bytes: schema.len() });
        }
        let in_use = InUse::new(schema.len(), &self.in_use)?;
        let mut schema: Value = serde_json::from_str(schema).map_err(|e| SchemaError::Refused(e.to_string()))?;
        check(&schema)?;
        if schema == Value::Bool(true) {
            schema = json!({});
        }
        let fields = schema.as_object_mut().ok_or_else(|| SchemaError::Refused("a schema is an object".to_owned()))?;
        fields.insert("x-guidance".into(), self::format());
        self.compile(in_use, vocab, move || TopLevelGrammar::from_json_schema(schema))
    }

    /// The grammar of an answer with calls, in the format of DeepSeek-V4.
    pub fn calls(&self, calls: &Calls, vocab: u32) -> Result<Grammar, SchemaError> {
        let mut told = calls.tools.iter().filter(|tool| tool.arguments != Arguments::Any);
        told.try_for_each(|tool| check(&Value::Object(tool.parameters.clone())))?;
        let lark = calls_grammar(calls, &self::format(), MAX_SCHEMA_BYTES);
        let lark = lark.map_err(|e| SchemaError::Refused(e.to_string()))?;
        let in_use = InUse::new(lark.len(), &self.in_use)?;
        self.compile(in_use, vocab, move || TopLevelGrammar::from_lark(lark))
    }

    /// Makes a grammar, and looks whether anything satisfies it.
    fn compile(
        &self,
        in_use: InUse,
        vocab: u32,
        grammar: impl FnOnce() -> TopLevelGrammar + Send + 'static,
    ) -> Result<Grammar, SchemaError> {
        if self.factory.get().is_none() {
            let (tokenizer, factory) = (self.tokenizer.clone(), self.factory.clone());
            let index = move || {
                factory.get_or_init(|| self::factory(&tokenizer, vocab));
            };
            self.threads.run(INDEX_DEADLINE, index)?;
        }
        let factory = self.factory.clone();
        self.threads.run(DEADLINE, move || {
            let factory = factory.get().expect("made before").as_ref().map_err(|e| SchemaError::Failed(e.clone()))?;
            let parser = factory.create_parser(grammar());
            let matcher = Matcher::new(parser.map_err(|e| e.to_string()).map_err(anyhow::Error::msg));
            if let Some(error) = matcher.get_error() {
                return Err(refusal(&error));
            }
            // That nothing satisfies a schema may show with the first mask only.
            match matcher.deep_clone().compute_mask() {
                Ok(first) if !first.is_zero() => {
                    let stops = self::stops(factory);
                    Ok(Grammar {
                        compiled: Arc::new(Compiled { matcher: Mutex::new(matcher), stops, _in_use: in_use }),
                    })
                }
                _ => {
                    let why = "nothing satisfies the schema, or it takes too much work to find what does";
                    Err(SchemaError::Refused(why.to_owned()))
                }
            }
        })?
    }
}

impl From<DeepStackError> for SchemaError {
    fn from(error: DeepStackError) -> SchemaError {
        match error {
            DeepStackError::Late => SchemaError::TooSlow,
            DeepStackError::Full => SchemaError::Busy,
            DeepStackError::Panicked | DeepStackError::Thread(_) => SchemaError::Failed(error.to_string()),
        }
    }
}

/// How JSON is written, as the library is told in a schema.
fn format() -> Value {
    json!({"whitespace_pattern": "[ \\t\\n]{0,40}", "coerce_one_of": true})
}

/// What the library's limits on work do not see.
fn check(schema: &Value) -> Result<(), SchemaError> {
    fn walk(value: &Value, multiple: &mut u64) -> Result<(), String> {
        match value {
            Value::Array(items) => items.iter().try_for_each(|item| walk(item, multiple)),
            Value::Object(fields) => fields.iter().try_for_each(|(name, value)| {
                let patterns = match (name.as_str(), value) {
                    ("pattern", Value::String(pattern)) => pattern.len(),
                    ("patternProperties", Value::Object(of)) => of.keys().map(String::len).max().unwrap_or(0),
                    _ => 0,
                };
                if patterns > MAX_PATTERN_BYTES {
                    return Err(format!("a pattern has {patterns} bytes, at most {MAX_PATTERN_BYTES} are supported"));
                }
                if let ("multipleOf", Value::Number(of)) = (name.as_str(), value) {
                    let digits = coefficient(&of.to_string()).filter(|&digits| digits > 0);
                    let common = digits.and_then(|digits| (*multiple / gcd(*multiple, digits)).checked_mul(digits));
                    *multiple = common.filter(|&common| common <= MAX_MULTIPLE).ok_or_else(|| {
                        format!(
                            "multipleOf {of} has too many multiples: at most {MAX_MULTIPLE} in common are supported"
                        )
                    })?;
                }
                walk(value, multiple)
            }),
            _ => Ok(()),
        }
    }
    walk(schema, &mut 1).map_err(SchemaError::Refused)
}

/// The digits of a number without its point and its power of ten; `None` if they are too many.
fn coefficient(number: &str) -> Option<u64> {
    let mantissa = number.split(['e', 'E']).next().unwrap_or(number);
    let digits: String = mantissa.chars().filter(char::is_ascii_digit).collect();
    digits.trim_end_matches('0').trim_start_matches('0').parse().ok()
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// What the library says of a schema, in words for who wrote it. Its own failures are nobody's to read but ours.
fn refusal(error: &str) -> SchemaError {
    if error.starts_with("panic") || error.contains("<backtrace>") {
        tracing::warn!(error, "a schema made the compiler panic");
        return SchemaError::Failed("it panicked".to_owned());
    }
    SchemaError::Refused(words(error))
}

/// The first of its words, without marks that only its authors can read.
fn words(error: &str) -> String {
    let error = error.split("<backtrace>").next().unwrap_or(error).replace("<non-verbose/>", "");
    let error = error.trim();
    let short: String = error.chars().take(MAX_WORDS).collect();
    if short.len() < error.len() { format!("{short}...") } else { short }
}

/// Tokens that end an answer.
fn stops(factory: &ParserFactory) -> Vec<u32> {
    factory.tok_env().tok_trie().eos_tokens().to_vec()
}

/// An index of the vocabulary, and the limits of a grammar.
fn factory(tokenizer: &Tokenizer, vocab: u32) -> Result<ParserFactory, String> {
    let stops = tokenizer.stop_ids();
    let eos = *stops.first().ok_or("the model has no token that ends an answer")?;
    let words: Vec<Vec<u8>> = (0..vocab)
        .map(|id| {
            let bytes = tokenizer.token_bytes(id);
            let control = (tokenizer.is_special(id) || stops.contains(&id)).then_some(CONTROL);
            control.into_iter().chain(bytes.iter().copied()).collect()
        })
        .collect();
    let trie = TokTrie::from(&TokRxInfo::new(vocab, eos), &words).with_eos_tokens(stops);
    let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
    let mut factory = ParserFactory::new_simple(&env).map_err(|e| e.to_string())?;
    factory.quiet();
    // Errors are a client's to read, and hold nothing of the parser.
    factory.limits_mut().verbose_errors = false;
    Ok(factory)
}

/// A compiled schema, or tools. Each sequence has a mask of its own, which is made when it is first asked: those that wait take no memory.
pub struct Grammar {
    compiled: Arc<Compiled>,
}

struct Compiled {
    matcher: Mutex<Matcher>,
    stops: Vec<u32>,
    _in_use: InUse,
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Grammar")
    }
}

impl Grammar {
    /// A mask for one sequence. `behind`: the token that ends its reasoning, before which it may say anything but its end.
    pub fn mask(&self, behind: Option<u32>) -> Box<dyn TokenMask> {
        Box::new(Mask { compiled: self.compiled.clone(), own: None, behind })
    }
}

struct Mask {
    compiled: Arc<Compiled>,
    own: Option<Matcher>,
    behind: Option<u32>,
}

impl Mask {
    fn matcher(&mut self) -> &mut Matcher {
        self.own
            .get_or_insert_with(|| self.compiled.matcher.lock().unwrap_or_else(PoisonError::into_inner).deep_clone())
    }
}

fn mask_error(error: anyhow::Error) -> MaskError {
    MaskError(words(&error.to_string()))
}

impl TokenMask for Mask {
    fn accept(&mut self, token: u32) -> Result<(), MaskError> {
        if let Some(end) = self.behind {
            self.behind = Some(end).filter(|&end| end != token);
            return Ok(());
        }
        let matcher = self.matcher();
        // What ends the answer comes behind the end of the grammar.
        if matcher.is_stopped() { Ok(()) } else { matcher.consume_token(token).map_err(mask_error) }
    }

    fn mask(&mut self, out: &mut [u32]) -> Result<(), MaskError> {
        if self.behind.is_some() {
            out.fill(u32::MAX);
            // An answer comes behind the reasoning.
            for &stop in &self.compiled.stops {
                out[stop as usize / 32] &= !(1 << (stop % 32));
            }
            return Ok(());
        }
        let mask = self.matcher().compute_mask_or_eos().map_err(mask_error)?;
        let bits = mask.as_slice();
        out.fill(0);
        let n = out.len().min(bits.len());
        out[..n].copy_from_slice(&bits[..n]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;
    use std::time::Instant;

    use super::*;
    use crate::serve::body::PREPARING;
    use crate::serve::testing::{VOCAB, tokenizer};

    /// Schemas that do not compile in time hold as many turns as there are, and then none, though their compilers go on.
    #[test]
    fn slow_schemas_are_given_up_and_others_told_to_come_back() {
        let grammars = Grammars::new(tokenizer());
        assert!(grammars.json("{}", VOCAB).is_ok(), "the vocabulary is indexed");
        // Every compiler waits until its sender is gone.
        let (mut held, mut turns) = (Vec::new(), Vec::new());
        for _ in 0..PREPARING {
            let (sender, receiver) = mpsc::channel::<()>();
            held.push(sender);
            let grammars = grammars.clone();
            turns.push(thread::spawn(move || {
                let in_use = InUse::new(1, &grammars.in_use)?;
                grammars.compile(in_use, VOCAB, move || {
                    receiver.recv().expect_err("nothing is sent");
                    TopLevelGrammar::from_json_schema(json!({}))
                })
            }));
        }
        let ends: Vec<SchemaError> =
            turns.into_iter().map(|turn| turn.join().expect("no panic").expect_err("its compiler is held")).collect();
        let late = ends.iter().filter(|end| matches!(end, SchemaError::TooSlow)).count();
        assert!(late >= MAX_LATE, "{ends:?}");
        assert!(ends.iter().all(|end| matches!(end, SchemaError::TooSlow | SchemaError::Busy)), "{ends:?}");
        assert!(matches!(grammars.json("{}", VOCAB), Err(SchemaError::Busy)), "while they go on");
        // With fewer of them than may be late, others compile.
        held.truncate(MAX_LATE - 1);
        let began = Instant::now();
        while let Err(error) = grammars.json("{}", VOCAB) {
            assert!(matches!(error, SchemaError::Busy) && began.elapsed() < Duration::from_secs(60), "{error}");
            thread::yield_now();
        }
        assert_eq!(held.len(), MAX_LATE - 1);
    }
}

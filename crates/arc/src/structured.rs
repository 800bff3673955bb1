//! Structured outputs: answers that are JSON of a schema, by masks of the tokens that may come next.
//!
//! The grammar is `llguidance`'s. Schemas are a stranger's: they are compiled on a deep stack of their own within a deadline (chains
//! of `$ref` nest as deep as they are long), under the library's limits on work and size, and the first mask is made before a
//! request is taken. Nothing is fetched. Keys come in the order of `properties`; in strings a printable character is itself and no
//! `\u` escape; between tokens of JSON stand at most 40 blanks, so that an answer cannot be white space for ever.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use arc_engine::grammar::{MaskError, TokenMask};
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

use crate::text::{DeepStackError, DeepStacks, Tokenizer};

/// Largest schema, in bytes of its JSON.
pub const MAX_SCHEMA_BYTES: usize = 128 << 10;

/// Bytes of schemas that are in use at once. One of 37 kB can make a grammar of 17 MB.
pub const MAX_SCHEMA_BYTES_IN_USE: usize = 1 << 20;

/// Time to compile one: a schema of the largest size takes a second, and the first of a server indexes the vocabulary too, which
/// takes two.
const DEADLINE: Duration = Duration::from_secs(10);

/// Compilers that may be late before no more schemas are taken.
const MAX_LATE: usize = 4;

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
    fn new(bytes: usize, of: &Arc<AtomicUsize>) -> Result<Arc<InUse>, SchemaError> {
        let room = |used: usize| Some(used + bytes).filter(|&used| used <= MAX_SCHEMA_BYTES_IN_USE);
        of.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room).map_err(|_| SchemaError::Busy)?;
        Ok(Arc::new(InUse { bytes, of: of.clone() }))
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
    pub fn compile(&self, schema: &str, vocab: u32) -> Result<Grammar, SchemaError> {
        if schema.len() > MAX_SCHEMA_BYTES {
            return Err(SchemaError::TooLarge { bytes: schema.len() });
        }
        let in_use = InUse::new(schema.len(), &self.in_use)?;
        let mut schema: Value = serde_json::from_str(schema).map_err(|e| SchemaError::Refused(e.to_string()))?;
        match &mut schema {
            Value::Object(fields) => {
                fields.insert("x-guidance".into(), json!({"whitespace_pattern": "[ \\t\\n]{0,40}"}));
            }
            Value::Bool(true) => schema = json!({"x-guidance": {"whitespace_pattern": "[ \\t\\n]{0,40}"}}),
            _ => return Err(SchemaError::Refused("a schema is an object".to_owned())),
        }
        let (tokenizer, factory) = (self.tokenizer.clone(), self.factory.clone());
        let compiled = self.threads.run(DEADLINE, move || {
            let factory = factory.get_or_init(|| self::factory(&tokenizer, vocab)).as_ref().map_err(Clone::clone)?;
            let parser = factory.create_parser(TopLevelGrammar::from_json_schema(schema));
            let matcher = Matcher::new(parser.map_err(|e| e.to_string()).map_err(anyhow::Error::msg));
            if let Some(error) = matcher.get_error() {
                // Without what only its authors can read.
                return Err(error.replace("<non-verbose/>", "").trim().to_owned());
            }
            // That nothing satisfies a schema may show with the first mask only.
            match matcher.deep_clone().compute_mask() {
                Ok(first) if !first.is_zero() => Ok(Grammar { matcher, in_use }),
                _ => Err("nothing satisfies the schema, or it takes too much work to find what does".to_owned()),
            }
        });
        match compiled {
            Ok(compiled) => compiled.map_err(SchemaError::Refused),
            Err(DeepStackError::Late) => Err(SchemaError::TooSlow),
            Err(error) => Err(SchemaError::Failed(error.to_string())),
        }
    }
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

/// A compiled schema. Each sequence has a mask of its own.
pub struct Grammar {
    matcher: Matcher,
    in_use: Arc<InUse>,
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Grammar")
    }
}

impl Grammar {
    /// A mask for one sequence. `behind`: the token that ends its reasoning, before which it may say anything.
    pub fn mask(&self, behind: Option<u32>) -> Box<dyn TokenMask> {
        Box::new(Mask { matcher: self.matcher.deep_clone(), behind, _in_use: self.in_use.clone() })
    }
}

struct Mask {
    matcher: Matcher,
    behind: Option<u32>,
    _in_use: Arc<InUse>,
}

impl TokenMask for Mask {
    fn accept(&mut self, token: u32) -> Result<(), MaskError> {
        match self.behind {
            Some(end) => {
                self.behind = Some(end).filter(|&end| end != token);
                Ok(())
            }
            // What ends the answer comes behind the end of the grammar.
            None if self.matcher.is_stopped() => Ok(()),
            None => self.matcher.consume_token(token).map_err(|e| MaskError(e.to_string())),
        }
    }

    fn mask(&mut self, out: &mut [u32]) -> Result<(), MaskError> {
        if self.behind.is_some() {
            out.fill(u32::MAX);
            return Ok(());
        }
        let mask = self.matcher.compute_mask_or_eos().map_err(|e| MaskError(e.to_string()))?;
        let bits = mask.as_slice();
        out.fill(0);
        let n = out.len().min(bits.len());
        out[..n].copy_from_slice(&bits[..n]);
        Ok(())
    }
}

//! What a model file says about its tokenizer, before any of it is believed.

use std::borrow::Cow;

/// `tokenizer.ggml.model` values that [`super::Tokenizer::from_spec`] accepts, and one of our own:
/// `bpe-byte-fallback` is merge ranks over characters with U+2581 for a space, as in Gemma's `tokenizer.json`.
pub const KNOWN_MODELS: [&str; 3] = ["gpt2", "llama", "bpe-byte-fallback"];

/// `tokenizer.ggml.pre` values accepted with the model `gpt2`. Each is compared with its reference tokenizer in tests.
pub const KNOWN_PRE: [&str; 4] = ["smollm", "llama-bpe", "qwen2", "joyai-llm"];

/// GGUF token types (`tokenizer.ggml.token_type`). Source: the GGUF specification.
pub mod token_type {
    /// Ordinary piece, found by merging.
    pub const NORMAL: i32 = 1;
    /// Stands for characters that no piece covers.
    pub const UNKNOWN: i32 = 2;
    /// Control token: never printed, never read from a user's text.
    pub const CONTROL: i32 = 3;
    /// Added token: matched as a whole before anything else.
    pub const USER_DEFINED: i32 = 4;
    /// Piece that the model was not trained with.
    pub const UNUSED: i32 = 5;
    /// One raw byte, spelt `<0xHH>`.
    pub const BYTE: i32 = 6;
}

/// A tokenizer as a model file describes it. Borrows from the file where it can.
#[derive(Debug, Clone, Default)]
pub struct TokenizerSpec<'a> {
    /// Algorithm: one of [`KNOWN_MODELS`].
    pub model: String,
    /// Pre-tokenizer: one of [`KNOWN_PRE`] for `gpt2`; not read for the others.
    pub pre: String,
    /// Token texts in id order. Byte-level models spell bytes as GPT-2 does; others spell a space as U+2581.
    pub tokens: Vec<Cow<'a, str>>,
    /// One score per token; required by `llama`: of two possible merges the one with the higher score goes first.
    pub scores: Option<Vec<f32>>,
    /// One of [`token_type`] per token; all normal when absent.
    pub token_types: Option<Vec<i32>>,
    /// Merges in rank order, each `left right` with one space between; required by the BPE models.
    pub merges: Option<Vec<Cow<'a, str>>>,
    /// Id of the token that begins a text.
    pub bos: Option<u32>,
    /// Id of the token that ends a text.
    pub eos: Option<u32>,
    /// Id of the token that ends a turn, where it is not `eos`.
    pub eot: Option<u32>,
    /// Id of the token for text that nothing covers.
    pub unk: Option<u32>,
    /// Id of the padding token.
    pub pad: Option<u32>,
    /// Whether a raw prompt begins with `bos`.
    pub add_bos: bool,
    /// Whether a raw prompt ends with `eos`.
    pub add_eos: bool,
    /// Whether a text begins as if a space stood before it (SentencePiece's dummy prefix).
    pub add_space_prefix: bool,
    /// Jinja source of the chat template. Bracketed tokens that it writes (`<think>`, `</tool_call>`) count as control
    /// tokens in a user's text.
    pub chat_template: Option<String>,
}

/// Why a tokenizer cannot be built. Every variant is the model file's fault.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The algorithm is not one of [`KNOWN_MODELS`].
    #[error("unknown tokenizer model `{model}`; known: {}", KNOWN_MODELS.join(", "))]
    UnknownModel {
        /// What the file names.
        model: String,
    },
    /// The pre-tokenizer is not one of [`KNOWN_PRE`].
    #[error("unknown pre-tokenizer `{pre}`; known: {}", KNOWN_PRE.join(", "))]
    UnknownPre {
        /// What the file names.
        pre: String,
    },
    /// There are no tokens, or more than ids or offsets can address.
    #[error(
        "a vocabulary of {n_tokens} tokens with {bytes} bytes of text is outside the limits (1 to {max_tokens} tokens, {max_bytes} bytes)"
    )]
    VocabSize {
        /// Tokens in the file.
        n_tokens: usize,
        /// Bytes of all token texts.
        bytes: usize,
        /// Most tokens accepted.
        max_tokens: usize,
        /// Most bytes accepted.
        max_bytes: usize,
    },
    /// A parallel array has another length than the token list.
    #[error("`{array}` has {len} entries for {n_tokens} tokens")]
    ArrayLength {
        /// Name of the array.
        array: &'static str,
        /// Its length.
        len: usize,
        /// Tokens in the file.
        n_tokens: usize,
    },
    /// An array that the algorithm needs is absent.
    #[error("tokenizer model `{model}` needs `{array}`, which the file does not have")]
    MissingArray {
        /// The algorithm.
        model: String,
        /// Name of the array.
        array: &'static str,
    },
    /// A score is not a number.
    #[error("score of token {id} is not a number")]
    Score {
        /// Token id.
        id: usize,
    },
    /// A token type is outside the GGUF list.
    #[error("token {id} has unknown type {value} (1 to 6 are defined)")]
    TokenType {
        /// Token id.
        id: usize,
        /// What the file says.
        value: i32,
    },
    /// A byte token is not spelt `<0xHH>`.
    #[error("byte token {id} is spelt {text:?} instead of <0xHH>")]
    ByteToken {
        /// Token id.
        id: usize,
        /// Its text.
        text: String,
    },
    /// A merge is not two texts with a space between, or names a text that is not a token.
    #[error("merge {rank} ({merge:?}) {problem}")]
    Merge {
        /// Position in the list.
        rank: usize,
        /// Its text, shortened.
        merge: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A special id is outside the vocabulary.
    #[error("{name} token id {id} is outside the vocabulary of {n_tokens} tokens")]
    SpecialId {
        /// Which special token.
        name: &'static str,
        /// Its id.
        id: u32,
        /// Tokens in the file.
        n_tokens: usize,
    },
    /// A control or added token is empty or too long to be matched cheaply.
    #[error("added token {id} has {len} bytes; 1 to {max} are supported")]
    AddedLength {
        /// Token id.
        id: usize,
        /// Bytes of its text.
        len: usize,
        /// Longest accepted.
        max: usize,
    },
    /// All control and added tokens together are too long.
    #[error("control and added tokens have more than {max} bytes in total")]
    AddedTotal {
        /// Most bytes accepted.
        max: usize,
    },
    /// Added tokens could not be indexed.
    #[error("added tokens cannot be indexed: {0}")]
    Index(#[from] aho_corasick::BuildError),
    /// Neither 256 byte tokens nor an unknown token: some text could not be encoded at all.
    #[error("the vocabulary has neither all 256 byte tokens nor an unknown token")]
    NoFallback,
    /// A JSON file is malformed or lacks a part.
    #[error("not a usable tokenizer.json or tokenizer_config.json: {0}")]
    Json(#[from] serde_json::Error),
    /// A `tokenizer.json` asks for something that no model we run does.
    #[error("tokenizer.json: unsupported {part} {found}")]
    Unsupported {
        /// Which part of the file.
        part: &'static str,
        /// What it says, shortened.
        found: String,
    },
}

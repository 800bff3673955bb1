//! The text layer against reference tokenizers, and against itself in every split.
//!
//! Models and reference tokenizers are found in the folder `ARC_TEST_MODELS`, else in `~/.cache/arc/models`;
//! `tests/reference/fetch_tokenizers.sh` puts the tokenizers there. Goldens: see `tests/reference/tokenizer_goldens.py`.
#![forbid(unsafe_code)]

#[path = "text/bad_input.rs"]
mod bad_input;
#[path = "text/chat.rs"]
mod chat;
#[path = "text/damage.rs"]
mod damage;
#[path = "text/golden.rs"]
mod golden;
#[path = "text/stream.rs"]
mod stream;

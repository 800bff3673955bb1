//! The tokenizer in the metadata of a GGUF file, to a [`TokenizerSpec`]. Nothing is copied but scores and types.

use std::borrow::Cow;

use arc_engine::load::LoadError;
use arc_engine::load::gguf::{Metadata, Optional};

use super::spec::TokenizerSpec;

impl<'a> TokenizerSpec<'a> {
    /// Reads `tokenizer.ggml.*` and `tokenizer.chat_template`. Keys, defaults and meaning: the GGUF specification.
    ///
    /// # Errors
    /// [`LoadError::MissingMetadata`] without a model or tokens, [`LoadError::WrongType`] for a value of another type.
    pub fn from_gguf(metadata: Metadata<'a>) -> Result<Self, LoadError> {
        let key = |name: &str| format!("tokenizer.ggml.{name}");
        let id = |name: &str| metadata.get_u32(&key(name)).optional();
        let flag =
            |name: &str, default| Ok::<_, LoadError>(metadata.get_bool(&key(name)).optional()?.unwrap_or(default));
        let texts = |name: &str| {
            metadata.get_str_array(&key(name)).map(|array| array.iter().map(Cow::Borrowed).collect::<Vec<_>>())
        };
        let model = metadata.get_str(&key("model"))?.to_owned();
        let is_sentencepiece = model == "llama";
        Ok(Self {
            pre: metadata.get_str(&key("pre")).optional()?.unwrap_or_default().to_owned(),
            tokens: texts("tokens")?,
            scores: metadata.get_f32_array(&key("scores")).optional()?,
            token_types: metadata.get_i32_array(&key("token_type")).optional()?,
            merges: texts("merges").optional()?,
            bos: id("bos_token_id")?,
            eos: id("eos_token_id")?,
            eot: id("eot_token_id")?,
            unk: id("unknown_token_id")?,
            pad: id("padding_token_id")?,
            add_bos: flag("add_bos_token", is_sentencepiece)?,
            add_eos: flag("add_eos_token", false)?,
            add_space_prefix: flag("add_space_prefix", is_sentencepiece)?,
            chat_template: metadata.get_str("tokenizer.chat_template").optional()?.map(str::to_owned),
            model,
        })
    }
}

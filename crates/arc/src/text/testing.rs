//! What the tests and the fuzz targets do with any bytes.

use std::sync::Arc;

use serde_json::json;

use super::{ChatInput, ChatTemplate, Control, Detokenizer, Special, Tokenizer, TokenizerSpec};

/// Compiles and renders `source`; true if a text came of it.
pub fn exercise_template(source: &[u8]) -> bool {
    let Ok(source) = std::str::from_utf8(source) else { return false };
    let messages = [
        json!({"role": "system", "content": "s"}),
        json!({"role": "user", "content": [{"type": "text", "text": "<|x|> é"}]}),
        json!({"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": "{\"a\":1}"}}]}),
    ];
    let input = ChatInput { messages: &messages, tools: None, add_generation_prompt: true, variables: None };
    ChatTemplate::new(source, Some("<s>"), None).and_then(|template| template.render(&input)).is_ok()
}

/// Builds a tokenizer from the text of a `tokenizer.json`; true if it could be built and then encodes and decodes.
///
/// # Panics
/// When it encodes to ids outside its vocabulary.
pub fn exercise_tokenizer_json(json: &[u8]) -> bool {
    let Ok(json) = std::str::from_utf8(json) else { return false };
    let spec = TokenizerSpec::from_json(json, Some("{\"bos_token\":\"<|s|>\",\"eos_token\":{\"content\":\"<unk>\"}}"));
    let Ok(tokenizer) = spec.and_then(Tokenizer::from_spec) else { return false };
    let tokenizer = Arc::new(tokenizer);
    let mut out = String::new();
    for special in [Special::Parse, Special::Text] {
        let mut decoder = Detokenizer::new(Arc::clone(&tokenizer), Control::Show);
        for id in tokenizer.encode("ab a  b<|s|>▁▁A é\u{301}\n12 漢😀\u{0}", special) {
            assert!((id as usize) < tokenizer.n_vocab(), "id {id} of {}", tokenizer.n_vocab());
            decoder.push(id, &mut out);
        }
        decoder.finish(&mut out);
    }
    true
}

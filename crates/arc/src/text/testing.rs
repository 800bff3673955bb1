//! What the tests and the fuzz targets do with any bytes.

use std::sync::Arc;

use serde_json::json;

use super::{
    ChatInput, ChatTemplate, Control, Detokenizer, Special, Tokenizer, TokenizerSpec,
    deepseek_v4::{AnswerFormat, AnswerParser, ParsedAnswer, Thinking},
};

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

/// Reads an answer of DeepSeek-V4, whole and in pieces; true if somebody could act on its calls. The first byte says what
/// kind of answer it is, the second how long pieces are.
///
/// # Panics
/// When pieces add up to another answer, a call that is complete has arguments that are no JSON object, there is more text
/// than came in, or bytes are looked at too often.
pub fn exercise_answer(bytes: &[u8]) -> bool {
    let [kind, step, text @ ..] = bytes else { return false };
    let text = String::from_utf8_lossy(text);
    let thinking = if kind & 1 == 0 { Thinking::Off } else { Thinking::On };
    let format = AnswerFormat { thinking, tools: kind & 2 == 0 };
    let whole = AnswerParser::parse(format, &text);
    let (mut parser, mut events, mut pieces) = (AnswerParser::new(format), Vec::new(), ParsedAnswer::default());
    let mut rest = &*text;
    while !rest.is_empty() {
        let mut at = usize::from(*step).clamp(1, rest.len());
        while !rest.is_char_boundary(at) {
            at += 1;
        }
        let (piece, after) = rest.split_at(at);
        parser.push(piece, &mut events);
        events.drain(..).for_each(|event| pieces.add(event));
        rest = after;
    }
    parser.finish(&mut events);
    events.into_iter().for_each(|event| pieces.add(event));
    assert_eq!(pieces, whole, "in pieces of {step}");
    for call in whole.calls.iter().filter(|call| call.complete) {
        assert!(call.arguments.starts_with('{'), "{call:?}");
        serde_json::from_str::<serde::de::IgnoredAny>(&call.arguments).expect("complete arguments are JSON");
    }
    assert!(whole.reasoning.len() + whole.content.len() <= text.len(), "{whole:?}");
    assert!(parser.bytes_read() <= LOOKS * (text.len() as u64 + 1), "{} looks", parser.bytes_read());
    whole.is_calling()
}

/// The most looks at a byte. What begins like a name is held for 512 bytes, in which ten more blocks may open and every
/// second byte may look like its end.
const LOOKS: u64 = 4096;

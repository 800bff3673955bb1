//! What the tests and the fuzz targets do with the body of a chat request.

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    sync::{Arc, OnceLock},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Map, Value};

use super::{
    api::{self, ChatRequest},
    job::{Form, ToolChoice, tool_choice},
};
use crate::{
    structured::{Grammar, Grammars, SchemaError},
    text::{
        Tokenizer, TokenizerSpec,
        deepseek_v4::{AnswerFormat, AnswerParser, Calls, DSML, Thinking},
        token_type,
    },
};

/// A token for each byte, one for the word that tags have, and one that ends an answer.
pub(crate) const VOCAB: u32 = 258;

/// Tokens that are drawn of an answer at most.
const MAX_DRAWN: usize = 400;

/// Until a compiler that is late ends.
const ENDS: Duration = Duration::from_secs(60);

/// What came of a body.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exercised {
    /// It is refused.
    Refused,
    /// Its answer is what the model likes.
    Free,
    /// Its answer has a grammar, of which something was drawn.
    Begun,
    /// The same, up to the end.
    Whole,
}

/// Reads what a chat request says of its answer (`tools`, `tool_choice`, `parallel_tool_calls`, `response_format`), and draws an answer
/// that follows it.
///
/// # Panics
/// When an answer leads to nothing, or is not what was asked for, or a compiler does not end.
pub fn exercise_form(body: &[u8]) -> Exercised {
    let Ok(request) = api::parse::<ChatRequest>(body) else { return Exercised::Refused };
    let Ok(choice) = tool_choice(request.tool_choice) else { return Exercised::Refused };
    let mut tools = request.tools.unwrap_or_default();
    if choice == ToolChoice::None {
        tools.clear();
    }
    let form = match Form::new(&choice, &tools, request.parallel_tool_calls.unwrap_or(true), request.response_format) {
        Ok(Some(form)) => form,
        Ok(None) => return Exercised::Free,
        Err(_) => return Exercised::Refused,
    };
    let Some(grammar) = compile(&form) else { return Exercised::Refused };
    let mut hasher = DefaultHasher::new();
    body.hash(&mut hasher);
    match (draw(&grammar, hasher.finish()), form) {
        (None, _) => return Exercised::Begun,
        (Some(text), Form::Calls(calls)) => check_calls(&calls, &text),
        (Some(text), Form::Object) => {
            serde_json::from_str::<Map<String, Value>>(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
        }
        // A number may be larger than those of serde_json.
        (Some(text), Form::Json(_)) => {
            serde_json::from_str::<serde::de::IgnoredAny>(&text).unwrap_or_else(|e| panic!("{e}: {text}"));
        }
    }
    Exercised::Whole
}

/// A tokenizer of [`VOCAB`].
pub(crate) fn tokenizer() -> Arc<Tokenizer> {
    let tokens = (0..=255).map(|byte| format!("<0x{byte:02X}>").into()).chain([DSML.into(), "</s>".into()]).collect();
    let types = [[token_type::BYTE; 256].as_slice(), &[token_type::USER_DEFINED, token_type::CONTROL]].concat();
    let spec = TokenizerSpec {
        model: "llama".to_owned(),
        tokens,
        scores: Some(vec![0.0; VOCAB as usize]),
        token_types: Some(types),
        eos: Some(VOCAB - 1),
        ..TokenizerSpec::default()
    };
    Arc::new(Tokenizer::from_spec(spec).expect("a sound tokenizer"))
}

fn compile(form: &Form) -> Option<Grammar> {
    static GRAMMARS: OnceLock<Grammars> = OnceLock::new();
    let grammars = GRAMMARS.get_or_init(|| Grammars::new(tokenizer()));
    match form.grammar(grammars, VOCAB) {
        Ok(grammar) => Some(grammar),
        Err(SchemaError::TooSlow) => {
            // Once more, so that one that never ends shows.
            let _ = form.grammar(grammars, VOCAB);
            let began = Instant::now();
            while matches!(grammars.json("{}", VOCAB), Err(SchemaError::Busy)) {
                assert!(began.elapsed() < ENDS, "compilers that do not end");
                thread::sleep(Duration::from_millis(50));
            }
            None
        }
        Err(SchemaError::Busy) => panic!("nobody else uses any"),
        Err(error) => {
            let error = error.to_string();
            assert!(!error.is_empty() && error.len() < 2_000, "{error}");
            None
        }
    }
}

/// Draws without a model; now and then it begins to close a text, to open a block, or to end. `None`: no end has come.
fn draw(grammar: &Grammar, seed: u64) -> Option<String> {
    let mut state = seed;
    let mut below = |n: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n
    };
    let end = [VOCAB as usize - 1];
    let close: Vec<usize> = format!("</{DSML}parameter>").bytes().map(usize::from).collect();
    let open: Vec<usize> = format!("\n\n<{DSML}tool_calls>").bytes().map(usize::from).collect();
    let (mut mask, mut bits, mut bytes) = (grammar.mask(None), [0; VOCAB.div_ceil(32) as usize], Vec::new());
    let mut piece = [].iter();
    for _ in 0..MAX_DRAWN {
        mask.mask(&mut bits).unwrap_or_else(|e| panic!("{e} behind {:?}", String::from_utf8_lossy(&bytes)));
        let allowed: Vec<usize> = (0..VOCAB as usize).filter(|id| bits[id / 32] >> (id % 32) & 1 == 1).collect();
        assert!(!allowed.is_empty(), "nothing may come behind {:?}", String::from_utf8_lossy(&bytes));
        if piece.len() == 0 && below(8) == 0 {
            // In JSON, the tag that closes a parameter is one for the reader, too: see `deepseek_v4::calls`.
            let text = String::from_utf8_lossy(&bytes);
            let in_json = text.rfind("string=\"false\">") > text.rfind("string=\"true\">");
            piece = [&open[..], &end, if in_json { &[] } else { &close }][below(3)].iter();
        }
        let id = match piece.next().filter(|id| allowed.contains(id)) {
            Some(id) => *id,
            None => {
                piece = [].iter();
                allowed[below(allowed.len())]
            }
        };
        mask.accept(id as u32).expect("it was allowed");
        match u8::try_from(id) {
            Ok(byte) => bytes.push(byte),
            Err(_) if id == end[0] => return Some(String::from_utf8(bytes).expect("whole characters")),
            Err(_) => bytes.extend_from_slice(DSML.as_bytes()),
        }
    }
    None
}

fn check_calls(calls: &Calls, text: &str) {
    let answer = AnswerParser::parse(AnswerFormat { thinking: Thinking::Off, tools: true }, text);
    assert!(calls.several || answer.calls.len() <= 1, "{text}");
    assert!(!calls.has_to || !answer.calls.is_empty() && answer.content.is_empty(), "{text}");
    for call in answer.calls {
        assert!(call.complete && calls.tools.iter().any(|tool| tool.name == call.name), "{call:?} of {text}");
        assert!(call.arguments.starts_with('{'), "{call:?}");
        serde_json::from_str::<serde::de::IgnoredAny>(&call.arguments).expect("complete arguments are JSON");
    }
}

//! Any text as a `tokenizer.json`: refused, or a tokenizer that encodes to ids of its own and back.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = arc::text::testing::exercise_tokenizer_json(bytes);
});

//! Any text as an answer of DeepSeek-V4: the same in pieces as whole, and complete calls can be acted on.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let _ = arc::text::testing::exercise_answer(bytes);
});

//! Every field that can be wrong, and the sentence that it is refused with.

use super::*;

fn limits() -> RequestLimits {
    RequestLimits { vocab: 100, context: 64, kv_tokens: 48, default_max_tokens: 20 }
}

fn refused(change: impl FnOnce(&mut Request)) -> String {
    let mut request = Request { max_tokens: Some(4), ..Request::new(vec![1, 2, 3], SamplerConfig::default()) };
    change(&mut request);
    match ValidRequest::new(request, &limits()) {
        Ok(valid) => format!("accepted with {} tokens", valid.max_out()),
        Err(error) => error.to_string(),
    }
}

#[test]
fn every_parameter_out_of_range_is_refused_by_name() {
    type Field = fn(&mut SamplerConfig) -> &mut f32;
    let floats: [(&str, Field, &[f32]); 6] = [
        ("temperature", |s| &mut s.temperature, &[-0.1, 100.5]),
        ("top_p", |s| &mut s.top_p, &[0.0, -1.0, 1.1]),
        ("min_p", |s| &mut s.min_p, &[-0.1, 1.1]),
        ("presence_penalty", |s| &mut s.presence, &[-2.1, 2.1]),
        ("frequency_penalty", |s| &mut s.frequency, &[-2.1, 2.1]),
        ("repetition_penalty", |s| &mut s.repetition, &[0.0, -1.0, 10.5]),
    ];
    let mut refusals = 0;
    for (name, field, wrong) in floats {
        for &value in wrong.iter().chain(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]) {
            let message = refused(|r| *field(&mut r.sampling) = value);
            assert!(message.starts_with(&format!("{name} is {value}, must be a number ")), "{message}");
            refusals += 1;
        }
        assert_eq!(refused(|r| *field(&mut r.sampling) = 1.0), "accepted with 4 tokens");
    }
    assert_eq!(refusals, 32);

    let dry = |change: fn(&mut DryConfig)| {
        let mut dry = DryConfig { multiplier: 0.8, base: 1.75, allowed_length: 2, window: u32::MAX, breakers: vec![5] };
        change(&mut dry);
        refused(|r| r.sampling.dry = Some(dry))
    };
    assert_eq!(dry(|_| ()), "accepted with 4 tokens");
    assert_eq!(dry(|d| d.multiplier = f32::NAN), "dry_multiplier is NaN, must be a number from 0 to 100");
    assert_eq!(dry(|d| d.base = 0.5), "dry_base is 0.5, must be a number from 1 to 100");
    assert_eq!(dry(|d| d.base = f32::INFINITY), "dry_base is inf, must be a number from 1 to 100");
    assert_eq!(dry(|d| d.allowed_length = 0), "dry_allowed_length is 0, must be at least 1");
    assert_eq!(
        dry(|d| d.breakers.push(100)),
        "dry_sequence_breakers names token 100, but the vocabulary has 100 tokens"
    );

    assert_eq!(refused(|r| r.sampling.min_tokens = 5), "min_tokens is 5, must be at most max_tokens");
    assert_eq!(refused(|r| r.sampling.min_tokens = 4), "accepted with 4 tokens");
    let depth = "must be less than the prompt's tokens, and 0 where those are scored";
    assert_eq!(refused(|r| r.depth = 2), "accepted with 4 tokens");
    assert_eq!(refused(|r| r.depth = 3), format!("depth is 3, {depth}"));
    assert_eq!(refused(|r| (r.depth, r.prompt_logprobs) = (1, Some(0))), format!("depth is 1, {depth}"));
    let bias = |bias: Vec<(u32, f32)>| refused(|r| r.sampling.bias = bias);
    assert_eq!(bias(vec![(99, 100.0), (0, -100.0)]), "accepted with 4 tokens");
    assert_eq!(bias(vec![(100, 1.0)]), "logit_bias names token 100, but the vocabulary has 100 tokens");
    assert_eq!(bias(vec![(1, 101.0)]), "logit_bias is 101, must be a number from -100 to 100");
    assert_eq!(bias(vec![(1, f32::NAN)]), "logit_bias is NaN, must be a number from -100 to 100");
    assert_eq!(bias(vec![(1, 1.0), (2, 1.0), (1, 2.0)]), "logit_bias is given twice for token 1, must be given once");
}

#[test]
fn tokens_and_lists_are_held_to_the_vocabulary_and_their_limits() {
    assert_eq!(refused(|r| r.prompt.clear()), "prompt is empty; send at least one token");
    assert_eq!(refused(|r| r.prompt.push(100)), "prompt names token 100, but the vocabulary has 100 tokens");
    assert_eq!(refused(|r| r.stop_ids = vec![7; 16]), "accepted with 4 tokens");
    assert_eq!(refused(|r| r.stop_ids = vec![7; 17]), "stop_ids has 17 entries; at most 16 are allowed");
    assert_eq!(
        refused(|r| r.stop_ids = vec![u32::MAX]),
        "stop_ids names token 4294967295, but the vocabulary has 100 tokens"
    );
    assert_eq!(refused(|r| r.logprobs = Some(20)), "accepted with 4 tokens");
    assert_eq!(refused(|r| r.logprobs = Some(21)), "logprobs is 21, must be from 0 to 20");
    assert_eq!(refused(|r| r.prompt_logprobs = Some(21)), "prompt_logprobs is 21, must be from 0 to 20");
}

#[test]
fn lengths_are_settled_or_refused_with_the_arithmetic() {
    let of =
        |prompt: usize, max_tokens: Option<u32>| refused(|r| (r.prompt, r.max_tokens) = (vec![1; prompt], max_tokens));
    assert_eq!(of(3, None), "accepted with 20 tokens");
    assert_eq!(of(40, None), "accepted with 8 tokens");
    assert_eq!(of(28, Some(20)), "accepted with 20 tokens");
    assert_eq!(of(48, Some(0)), "accepted with 0 tokens");
    assert_eq!(
        of(30, Some(19)),
        "prompt has 30 tokens and max_tokens is 19: 49 together, but the KV cache holds 48; \
         shorten the prompt or lower max_tokens"
    );
    assert_eq!(
        of(60, Some(5)),
        "prompt has 60 tokens and max_tokens is 5: 65 together, but the context is 64; \
         shorten the prompt or lower max_tokens"
    );
    assert!(of(64, None).starts_with("prompt has 64 tokens and max_tokens is 1: 65 together"));
    assert!(of(1, Some(u32::MAX)).contains("4294967296 together"));
}

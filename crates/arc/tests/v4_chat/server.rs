//! The server's answers for a model of this format, on the real tokenizer and a scripted engine.

use std::sync::{Arc, Mutex};

use arc::{
    model_text::{ChatMessage, Conversation, ModelText, Role},
    serve::{
        App, HttpLimits, backend::Backend, body::Turns, ending::Ending, metrics::Metrics, models::ServedModel, router,
    },
    text::{Control, Detokenizer, Special, deepseek_v4::Profile},
};
use arc_engine::{
    engine::{RequestId, SubmitError},
    request::{Event, EventSink, FinishReason, Finished, Request, RequestLimits, TokenEvent},
    stats::EngineStats,
};
use axum::{
    body::{Body, to_bytes},
    http::Request as HttpRequest,
};
use serde_json::{Value, json};
use tower::ServiceExt;

use crate::{
    cases,
    parse::{BLOCK, tags},
    tokenizer,
};

struct Script {
    events: Vec<Event>,
    prompts: Mutex<Vec<Vec<u32>>>,
    /// Whether the grammar of each, if it has one, takes the answer.
    taken: Mutex<Vec<Option<bool>>>,
}

impl Backend for Script {
    fn submit(&self, request: Request, mut sink: Box<dyn EventSink>) -> Result<RequestId, SubmitError> {
        let taken = request.grammar.map(|mut grammar| {
            let mut bits = vec![0; 129_280_usize.div_ceil(32)];
            self.events.iter().all(|event| match event {
                Event::Token(TokenEvent { id, .. }) => {
                    grammar.mask(&mut bits).expect("the grammar goes on");
                    bits[*id as usize / 32] >> (id % 32) & 1 == 1 && grammar.accept(*id).is_ok()
                }
                _ => true,
            })
        });
        self.taken.lock().expect("no test panics here").push(taken);
        let mut prompts = self.prompts.lock().expect("no test panics here");
        prompts.push(request.prompt);
        for event in &self.events {
            sink.send(event.clone());
        }
        Ok(RequestId(prompts.len() as u64))
    }

    fn end(&self, _: RequestId, _: FinishReason) {}

    fn stats(&self) -> EngineStats {
        EngineStats::default()
    }

    fn limits(&self) -> RequestLimits {
        RequestLimits { vocab: 129_280, context: 4096, kv_tokens: 8192, default_max_tokens: 64 }
    }

    fn fault(&self) -> Option<String> {
        None
    }
}

/// Answers to requests with `answer`, ended for `reason`: their status and bodies, and the prompts that they made.
async fn ask(answer: &str, reason: FinishReason, bodies: &[Value]) -> (Vec<(u16, String)>, Vec<Vec<u32>>) {
    let (answers, script) = scripted(answer, reason, bodies).await;
    let prompts = script.prompts.lock().expect("no panic").clone();
    (answers, prompts)
}

/// The same, and all that the engine was asked.
async fn scripted(answer: &str, reason: FinishReason, bodies: &[Value]) -> (Vec<(u16, String)>, Arc<Script>) {
    let tokenizer = tokenizer();
    let ids = tokenizer.encode(answer, Special::Parse);
    let token = |&id: &u32| Event::Token(TokenEvent { id, logprob: None, top: Vec::new() });
    let mut events: Vec<Event> = ids.iter().map(token).collect();
    events.push(Event::Finished(Finished {
        reason,
        error: None,
        prompt_tokens: 3,
        cached_tokens: 0,
        output_tokens: ids.len() as u32,
        queue_us: 1,
        prefill_us: 1,
        decode_us: 1,
    }));
    let script = Arc::new(Script { events, prompts: Mutex::default(), taken: Mutex::default() });
    let text = ModelText::new(Arc::into_inner(tokenizer).expect("its only owner"), 4096);
    assert!(text.has_template() && text.takes_tools());
    let app = Arc::new(App {
        backend: script.clone(),
        text: Arc::new(text),
        model: ServedModel {
            name: "v4".to_owned(),
            title: "V4".to_owned(),
            created: 1,
            format: "fp8".to_owned(),
            hugging_face_id: None,
            prices: ["0".to_owned(), "0".to_owned()],
            parameters: 1,
        },
        http: HttpLimits {
            body_bytes: 256 * 1024,
            connections: 4,
            read_timeout_s: 5,
            request_timeout_s: 5,
            max_choices: 4,
            drain_s: 1,
        },
        metrics: Metrics::default(),
        ending: Ending::default(),
        turns: Turns::new(256 * 1024),
    });
    let router = router(app);
    let mut answers = Vec::new();
    for body in bodies {
        let request =
            HttpRequest::builder().method("POST").uri("/v1/chat/completions").body(Body::from(body.to_string()));
        let response = router.clone().oneshot(request.expect("well formed")).await.expect("the router is infallible");
        let status = response.status().as_u16();
        let body = to_bytes(response.into_body(), 1 << 24).await.expect("the body ends");
        answers.push((status, String::from_utf8(body.to_vec()).expect("UTF-8")));
    }
    (answers, script)
}

/// What each effort puts in front of a prompt, in the words of each release.
#[test]
fn effort_is_asked_for_in_the_words_of_the_release() {
    let words = &cases().protocol_strings["reasoning_effort"];
    let message = [ChatMessage::new(Role::User, "hello")];
    let text = ModelText::new(Arc::into_inner(tokenizer()).expect("its only owner"), 4096);
    let mut compared = 0;
    for (profile, name) in [(Profile::Preview, "preview"), (Profile::July, "0731")] {
        let text = text.clone().with_profile(profile);
        for (asked, key) in [
            (None, ""),
            (Some("none"), ""),
            (Some("minimal"), ""),
            (Some("low"), ""),
            (Some("medium"), ""),
            (Some("high"), if profile == Profile::July { "high" } else { "" }),
            (Some("xhigh"), "max"),
            (Some("max"), "max"),
        ] {
            let conversation = Conversation { messages: &message, effort: asked, ..Conversation::default() };
            let ids = text.encode_conversation(&conversation).expect("a prompt").ids;
            let mut detokenizer = Detokenizer::new(text.tokenizer().clone(), Control::Show);
            let mut prompt = String::new();
            ids.iter().for_each(|&id| detokenizer.push(id, &mut prompt));
            detokenizer.finish(&mut prompt);
            let effort = if key.is_empty() { "" } else { words[name][key].as_str().expect("a text") };
            let think = if matches!(asked, None | Some("none")) { "</think>" } else { "<think>" };
            let bos = "<｜begin▁of▁sentence｜>";
            assert_eq!(prompt, format!("{bos}{effort}<｜User｜>hello<｜Assistant｜>{think}"), "{name} {asked:?}");
            compared += 1;
        }
    }
    assert_eq!(compared, 16);
}

/// One message from the deltas of a stream, as clients add them up, and the finish reason.
fn add_up(stream: &str) -> (Value, Value) {
    let (mut content, mut reasoning, mut calls, mut reason) = (String::new(), String::new(), Vec::new(), Value::Null);
    for line in stream.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|line| *line != "[DONE]") {
        let chunk: Value = serde_json::from_str(line).expect("JSON");
        let choice = &chunk["choices"][0];
        let delta = &choice["delta"];
        content.push_str(delta["content"].as_str().unwrap_or_default());
        reasoning.push_str(delta["reasoning_content"].as_str().unwrap_or_default());
        for part in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = part["index"].as_u64().expect("an index") as usize;
            if index == calls.len() {
                assert!(part["id"].is_string() && part["type"] == "function" && part["function"]["name"].is_string());
                calls.push(part.clone());
                calls[index].as_object_mut().expect("an object").remove("index");
            } else {
                let so_far = calls[index]["function"]["arguments"].as_str().expect("text").to_owned();
                assert!(part.get("id").is_none() && part["function"].get("name").is_none());
                let more = part["function"]["arguments"].as_str().expect("text");
                calls[index]["function"]["arguments"] = json!(so_far + more);
            }
        }
        if !choice["finish_reason"].is_null() {
            reason = choice["finish_reason"].clone();
        }
        let says_nothing = delta.as_object().is_some_and(|delta| delta.is_empty());
        assert!(!says_nothing || !choice["finish_reason"].is_null(), "an empty chunk: {line}");
    }
    let mut message = json!({"role": "assistant", "content": content, "refusal": null});
    if !reasoning.is_empty() {
        message["reasoning_content"] = json!(reasoning);
    }
    if !calls.is_empty() {
        message["tool_calls"] = json!(calls);
        if content.is_empty() {
            message["content"] = Value::Null;
        }
    }
    (message, reason)
}

fn without_ids(message: &Value) -> Value {
    let mut message = message.clone();
    for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
        let id = call.as_object_mut().expect("an object").remove("id").expect("an id");
        assert!(id.as_str().is_some_and(|id| id.starts_with("call_")));
    }
    message
}

fn request(more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "Show a.txt"}]});
    body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    body
}

fn tool() -> Value {
    json!([{"type": "function", "function": {"name": "read_file", "parameters": {"type": "object"}}}])
}

#[tokio::test]
async fn answers_are_told_apart_whole_and_streamed() {
    let call =
        |name: &str, arguments: &str| json!({"type": "function", "function": {"name": name, "arguments": arguments}});
    let expected = [
        ("plain", json!({"content": "Two."}), "stop"),
        ("thinking", json!({"content": "Two.", "reasoning_content": "I add."}), "stop"),
        (
            "tool",
            json!({
                "content": "Reading.", "reasoning_content": "Look it up.",
                "tool_calls": [call("read_file", r#"{"path": "a \"b\".txt", "max_lines": 5}"#), call("noargs", "{}")],
            }),
            "tool_calls",
        ),
        ("tool_one", json!({"content": "Ok.", "tool_calls": [call("f", r#"{"o": {"k": [1, true]}}"#)]}), "tool_calls"),
    ];
    for (name, message, reason) in expected {
        let case = cases().parse.into_iter().find(|case| case.name == name).expect("in the fixture");
        let effort = if case.thinking_mode == "thinking" { "high" } else { "none" };
        let body = request(json!({"tools": tool(), "reasoning_effort": effort}));
        let bodies = [body.clone(), request(json!({"tools": tool(), "reasoning_effort": effort, "stream": true}))];
        let (answers, _) = ask(&case.completion, FinishReason::Stop, &bodies).await;
        assert_eq!((answers[0].0, answers[1].0), (200, 200), "{answers:?}");
        let whole: Value = serde_json::from_str(&answers[0].1).expect("JSON");
        let choice = &whole["choices"][0];
        let mut message = message;
        (message["role"], message["refusal"]) = (json!("assistant"), Value::Null);
        assert_eq!(without_ids(&choice["message"]), message, "{name}");
        assert_eq!(choice["finish_reason"], reason, "{name}");
        let (streamed, streamed_reason) = add_up(&answers[1].1);
        assert_eq!(without_ids(&streamed), message, "{name}");
        assert_eq!(streamed_reason, reason, "{name}");
    }
}

#[tokio::test]
async fn only_whole_calls_are_a_reason_to_call() {
    let block = tags(BLOCK);
    let cut = block.split("</｜DSML｜invoke>").next().expect("a part");
    let ask = async |text: &str, reason, body: Value| {
        let (answers, _) = ask(text, reason, &[body]).await;
        let body: Value = serde_json::from_str(&answers[0].1).expect("JSON");
        body["choices"][0].clone()
    };
    let with_tools = request(json!({"tools": tool()}));
    let choice = ask(cut, FinishReason::Length, with_tools.clone()).await;
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(choice["message"]["tool_calls"][0]["function"]["arguments"], r#"{"s": "abc""#);
    assert_eq!(ask(cut, FinishReason::Stop, with_tools.clone()).await["finish_reason"], "stop");
    let choice = ask(&block, FinishReason::Length, with_tools).await;
    assert_eq!((&choice["finish_reason"], &choice["message"]["content"]), (&json!("length"), &Value::Null));
    // Who offers no tools, or wants none, gets text.
    let call = json!({"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let called = json!([{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "x"}]);
    for body in [
        request(json!({})),
        request(json!({"tools": tool(), "tool_choice": "none"})),
        request(json!({"messages": called, "tools": tool(), "tool_choice": "none", "parallel_tool_calls": false})),
    ] {
        let choice = ask(&block, FinishReason::Stop, body).await;
        assert_eq!(choice["message"], json!({"role": "assistant", "content": block, "refusal": null}));
        assert_eq!(choice["finish_reason"], "stop");
    }
}

/// What a grammar of calls takes for each way to ask for them; without one the model does as it likes.
#[tokio::test]
async fn calls_are_held_to_what_was_asked() {
    let call = |x: &str| {
        format!(
            "<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"x\" string=\"false\">{x}</｜DSML｜parameter>\n</｜DSML｜invoke>\n"
        )
    };
    let block = |calls: &str| format!("Well.\n\n<｜DSML｜tool_calls>\n{calls}</｜DSML｜tool_calls>");
    let (one, two, wrong) = (block(&call("1")), block(&(call("1") + &call("2"))), block(&call("true")));
    let tools = |strict: Value| {
        let parameters = json!({"properties": {"x": {"type": "integer"}}, "required": ["x"]});
        json!([{"type": "function", "function": {"name": "f", "parameters": parameters, "strict": strict}}])
    };
    let (loose, strict) = (tools(Value::Null), tools(json!(true)));
    let once = json!(false);
    // Tools, parallel_tool_calls, and whether each answer is taken.
    let cases = [
        (&loose, Value::Null, None, None, None),
        (&loose, json!(true), None, None, None),
        (&tools(json!(false)), Value::Null, None, None, None),
        (&loose, once.clone(), Some(true), Some(false), Some(true)),
        (&strict, Value::Null, Some(true), Some(true), Some(false)),
        (&strict, once, Some(true), Some(false), Some(false)),
    ];
    for thought in ["", "I call.</think>"] {
        let effort = if thought.is_empty() { "none" } else { "high" };
        let body = |tools: &Value, parallel: &Value| {
            request(json!({"tools": tools, "parallel_tool_calls": parallel, "reasoning_effort": effort}))
        };
        let bodies: Vec<Value> = cases.iter().map(|(tools, parallel, ..)| body(tools, parallel)).collect();
        let mut taken = Vec::new();
        for text in [&one, &two, &wrong] {
            let (answers, script) = scripted(&format!("{thought}{text}"), FinishReason::Stop, &bodies).await;
            assert!(answers.iter().all(|(status, _)| *status == 200), "{answers:?}");
            taken.push(script.taken.lock().expect("no panic").clone());
        }
        for (i, (tools, parallel, one, two, wrong)) in cases.iter().enumerate() {
            assert_eq!([taken[0][i], taken[1][i], taken[2][i]], [*one, *two, *wrong], "{tools} {parallel} {thought}");
        }
    }
}

#[tokio::test]
async fn requests_become_the_prompts_of_the_release() {
    let case = |name: &str| cases().encode.into_iter().find(|case| case.name == name).expect("in the fixture");
    let (mut bodies, mut expected) = (Vec::new(), Vec::new());
    for (name, more) in [
        ("chat_single", json!({})),
        ("thinking_single", json!({"reasoning_effort": "low"})),
        ("thinking_high", json!({"chat_template_kwargs": {"thinking": true}})),
        ("thinking_max_system", json!({"reasoning_effort": "max"})),
        ("chat_multi_turn", json!({"reasoning_effort": "none"})),
        ("thinking_multi_turn_drops", json!({"chat_template_kwargs": {"enable_thinking": true}})),
        (
            "thinking_multi_turn_keeps",
            json!({"reasoning_effort": "high", "chat_template_kwargs": {"drop_thinking": false}}),
        ),
        ("tools_first_turn", json!({"reasoning_effort": "medium"})),
        ("tools_results_reordered", json!({"reasoning_effort": "high"})),
        ("tools_results_chat_mode", json!({})),
        ("tools_then_user", json!({"chat_template_kwargs": {"reasoning_effort": "high"}})),
        ("user_after_tool_result", json!({"reasoning_effort": "high", "tool_choice": "auto"})),
        ("response_format", json!({})),
    ] {
        let case = case(name);
        let mut messages: Value = serde_json::from_str(case.messages.get()).expect("JSON");
        // In the API the tools and the schema of the answer stand beside the messages.
        let tools = messages[0].as_object_mut().expect("an object").remove("tools");
        let schema = messages[0].as_object_mut().expect("an object").remove("response_format");
        let mut body = request(more);
        body["messages"] = messages;
        if let Some(tools) = tools {
            body["tools"] = tools;
        }
        if let Some(schema) = schema {
            body["response_format"] = json!({"type": "json_schema", "json_schema": {"schema": schema}});
        }
        bodies.push(body);
        expected.push(case.ids);
    }
    let (answers, prompts) = ask("x", FinishReason::Stop, &bodies).await;
    assert!(answers.iter().all(|(status, _)| *status == 200), "{answers:?}");
    assert_eq!(prompts, expected);
}

#[tokio::test]
async fn numbers_in_tools_reach_the_prompt_as_they_were_sent() {
    // By hand, since a JSON library would round the integer.
    let tool = r#"{"type": "function", "function": {"name": "f", "max": 12345678901234567890123, "step": 1e-7}}"#;
    let body = format!(r#"{{"messages": [{{"role": "user", "content": "x"}}], "tools": [{tool}]}}"#);
    let body: Box<serde_json::value::RawValue> = serde_json::value::RawValue::from_string(body).expect("JSON");
    let tokenizer = tokenizer();
    let text = ModelText::new(Arc::into_inner(tokenizer).expect("its only owner"), 4096);
    let request: arc::serve::api::ChatRequest = arc::serve::api::parse(body.get().as_bytes()).expect("sound");
    let conversation = arc::model_text::Conversation {
        messages: &[arc::model_text::ChatMessage::new(arc::model_text::Role::User, "x")],
        tools: &request.tools.expect("tools"),
        ..Default::default()
    };
    let prompt = text.encode_conversation(&conversation).expect("a prompt");
    let bytes: Vec<u8> = prompt.ids.iter().flat_map(|&id| text.tokenizer().token_bytes(id)).copied().collect();
    let prompt = String::from_utf8(bytes).expect("UTF-8");
    assert!(prompt.starts_with("<｜begin▁of▁sentence｜>\n\n## Tools"), "{prompt}");
    assert!(prompt.contains(r#"{"name": "f", "max": 12345678901234567890123, "step": 1e-07}"#), "{prompt}");
}

#[tokio::test]
async fn what_the_format_does_not_know_is_refused_by_name() {
    let call = json!({"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}});
    let messages = |message: Value| json!({"messages": [message]});
    let cases = [
        (json!({"reasoning_effort": "lots"}), "reasoning_effort"),
        (json!({"reasoning_effort": 3}), "reasoning_effort"),
        (json!({"chat_template_kwargs": {"thinking": "yes"}}), "chat_template_kwargs.thinking"),
        (json!({"chat_template_kwargs": {"thinkin": true}}), "chat_template_kwargs.thinkin"),
        (json!({"chat_template_kwargs": {"thinking": false}, "reasoning_effort": "high"}), "reasoning_effort"),
        (
            json!({"chat_template_kwargs": {"reasoning_effort": "max"}, "reasoning_effort": "high"}),
            "chat_template_kwargs.reasoning_effort",
        ),
        (json!({"tools": [{"type": "function"}]}), "tools[0]"),
        (json!({"tools": [tool()[0], 1]}), "tools[1]"),
        (json!({"tools": {"a": 1}}), "tools"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"tools": tool(), "tool_choice": "sometimes"}), "tool_choice"),
        (json!({"tools": tool(), "tool_choice": {"type": "function", "function": {"name": "write"}}}), "tool_choice"),
        (json!({"tools": tool(), "tool_choice": {"type": "function"}}), "tool_choice"),
        (json!({"tools": tool(), "tool_choice": "required", "min_tokens": 2}), "min_tokens"),
        (json!({"tools": [{"function": {"name": "f", "parameters": 1}}], "tool_choice": "required"}), "tools[0]"),
        (
            json!({"tools": [{"function": {"name": "f", "parameters": {"properties": {"x": {"multipleOf": 99_999_989}}}}}],
                "tool_choice": "required"}),
            "tools",
        ),
        (json!({"tools": tool(), "parallel_tool_calls": false, "min_tokens": 2}), "min_tokens"),
        (json!({"tools": [{"function": {"name": "f", "strict": "yes"}}]}), "tools[0]"),
        (json!({"tools": [{"function": {"name": "f", "strict": true, "parameters": []}}]}), "tools[0]"),
        (json!({"tools": [{"function": {"name": "f", "strict": true, "parameters": {"anyOf": []}}}]}), "tools"),
        (
            json!({"messages": [{"role": "assistant", "tool_calls": [call]}], "parallel_tool_calls": false}),
            "parallel_tool_calls",
        ),
        (json!({"tools": tool(), "response_format": {"type": "json_object"}}), "response_format"),
        (messages(json!({"role": "user", "content": "x", "tool_calls": [call]})), "messages[0].tool_calls"),
        (messages(json!({"role": "user", "content": "x", "tool_call_id": "a"})), "messages[0].tool_call_id"),
        (messages(json!({"role": "user", "content": "x", "reasoning_content": "a"})), "messages[0].reasoning_content"),
        (messages(json!({"role": "tool", "tool_call_id": "a"})), "messages[0].content"),
        (messages(json!({"role": "assistant", "tool_calls": 1})), "messages[0].tool_calls"),
        (
            messages(json!({"role": "assistant", "tool_calls": [{"type": "x", "function": call["function"]}]})),
            "messages[0].tool_calls[0]",
        ),
        (
            messages(json!({"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]})),
            "messages[0].tool_calls[0]",
        ),
        (
            messages(json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]})),
            "messages[0].tool_calls[0]",
        ),
    ];
    let bodies: Vec<Value> = cases.iter().map(|(more, _)| request(more.clone())).collect();
    let (answers, prompts) = ask("x", FinishReason::Stop, &bodies).await;
    for ((status, answer), (body, param)) in answers.iter().zip(&cases) {
        let answer: Value = serde_json::from_str(answer).expect("JSON");
        assert_eq!((*status, answer["error"]["param"].as_str()), (400, Some(*param)), "{body}: {answer}");
    }
    assert!(prompts.is_empty());
}

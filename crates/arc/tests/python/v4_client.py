"""Drives a server of a tiny DeepSeek-V4 with random weights. Usage: v4_client.py http://HOST:PORT TOKENIZER.JSON

Every check counts; the last line says how many there were.
"""

import concurrent.futures
import json
import sys

import openai
from checks import check, done, refused
from openai import OpenAI

def main(base, tokenizer):
    client = OpenAI(base_url=base + "/v1", api_key="none", max_retries=0, timeout=120)
    with open(tokenizer) as file:
        added = {t["content"]: t["id"] for t in json.load(file)["added_tokens"]}
    end_think, end = added["</think>"], added["<｜end▁of▁sentence｜>"]
    model = client.models.list().data[0]
    check(model.id == "v4-tiny", f"named by its folder: {model.id}")
    check({"tools", "reasoning", "structured_outputs"} <= set(model.model_extra["supported_features"]), "features")
    check(model.model_extra["quantization"] == "bf16", "most of it are the tables of the vocabulary")
    question = [{"role": "user", "content": "What is the weather in Graz?"}]

    def ask(**more):
        return client.chat.completions.create(**{"model": model.id, "messages": question, "max_tokens": 12, "seed": 1, **more})

    # Without reasoning, and with it, whole and streamed.
    plain = ask()
    check(plain.choices[0].message.content and plain.usage.completion_tokens <= 12, "content")
    check(ask().choices[0].message.content == plain.choices[0].message.content, "a seed repeats")
    thinking = ask(reasoning_effort="high").choices[0].message
    reasoned = thinking.model_extra.get("reasoning_content")
    check(reasoned and not thinking.content, "all of it is reasoning")
    chunks = list(ask(reasoning_effort="high", stream=True, stream_options={"include_usage": True}))
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    check("".join(d.model_extra.get("reasoning_content") or "" for d in deltas) == reasoned, "reasoning streamed")
    check(chunks[-1].usage.completion_tokens == 12, "usage in the last chunk")
    # Reasoning that ends at once.
    both = ask(reasoning_effort="high", logit_bias={str(end_think): 100}, max_tokens=1)
    check(both.choices[0].finish_reason == "length", "cut behind the end of its reasoning")

    # JSON of a schema, with and without reasoning before it.
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 10}, "warm": {"type": "boolean"}},
        "required": ["city", "warm"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": schema}}
    for effort in [{}, {"reasoning_effort": "low", "logit_bias": {str(end_think): 100}}]:
        for seed in range(2):
            answer = ask(response_format=form, max_tokens=300, seed=seed, **effort).choices[0]
            weather = json.loads(answer.message.content)
            check(list(weather) == ["city", "warm"] and isinstance(weather["warm"], bool), answer.message.content)
            check(answer.finish_reason == "stop" and len(weather["city"]) <= 10, "the end of the schema is the end")

    # Tools are told, and a conversation with calls is one.
    tool = {"type": "function", "function": {"name": "weather", "parameters": schema}}
    told = ask(tools=[tool])
    check(told.usage.prompt_tokens > plain.usage.prompt_tokens + 50, "tools are in the prompt")
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Graz"}'}}
    history = [*question, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1", "content": "12 C"}]
    check(ask(messages=history, tools=[tool]).usage.completion_tokens > 0, "a result is answered")

    # A call that has to be, with and without reasoning before it, whole and streamed.
    place = {"city": {"enum": ["Graz", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": place, "required": list(place)}}}
        for name in ["weather", "news"]
    ]
    ends = {"reasoning_effort": "low", "logit_bias": {str(end_think): 100}}
    named = {"type": "function", "function": {"name": "news"}}
    for more, choice in [({}, "required"), (ends, "required"), ({}, named), (ends, named)]:
        asked = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 200, **more}
        answer = ask(**asked).choices[0]
        [call] = answer.message.tool_calls
        check(answer.finish_reason == "tool_calls" and not answer.message.content, answer)
        check(call.function.name in (["news"] if choice == named else ["weather", "news"]), call.function.name)
        arguments = json.loads(call.function.arguments)
        check(arguments["city"] in place["city"]["enum"] and 1 <= arguments["days"] <= 9, arguments)
        pieces = [c.choices[0].delta.tool_calls for c in ask(stream=True, **asked) if c.choices]
        streamed = "".join(p.function.arguments or "" for piece in pieces for p in piece or [])
        check(json.loads(streamed) == arguments, "the same call streamed")
    # One that may be, once and with arguments of the schema, is held to it with text before it.
    tools[0]["function"]["strict"] = True
    answer = ask(tools=tools, parallel_tool_calls=False, logit_bias={str(added["｜DSML｜"]): 30}, max_tokens=60).choices[0]
    check(answer.message.content and len(answer.message.tool_calls or []) <= 1, answer)
    refused(lambda: ask(tools=tools, tool_choice={"type": "function", "function": {"name": "x"}}), openai.BadRequestError,
            "a tool that is not there", "tool_choice")
    refused(lambda: ask(tools=[tool], response_format=form), openai.BadRequestError, "tools and a schema", "response_format")

    # Strangers of all lengths, side by side: each has the answer that it has alone.
    def one(i):
        messages = [{"role": "user", "content": "word " * (1 + 7 * i)}]
        more = {"temperature": 0} if i % 3 == 0 else {"temperature": 1.2, "extra_body": {"top_k": 50}}
        more |= {"reasoning_effort": "low"} if i % 4 == 1 else {}
        message = ask(messages=messages, max_tokens=5 + 3 * i, seed=i, **more).choices[0].message
        return message.content, message.model_extra.get("reasoning_content")

    alone = [one(i) for i in range(12)]
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        together = list(pool.map(one, range(12)))
    for i, (a, b) in enumerate(zip(alone, together)):
        check(a == b, f"request {i}: {a!r} alone, {b!r} among strangers")
    ended = ask(logit_bias={str(end): 100})
    check(ended.choices[0].finish_reason == "stop" and ended.usage.completion_tokens == 1, "its own end")
    done()


main(*sys.argv[1:])

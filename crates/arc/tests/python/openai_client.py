"""Drives a running server with the openai package, as its users do. Usage: openai_client.py http://HOST:PORT

Every check counts; the last line says how many there were, so that a script that stops early is seen.
"""

import json
import math
import sys
import threading
from typing import Literal

import openai
import pydantic
from checks import check, done, refused
from openai import OpenAI


def known(answer):
    """Tokens of the prompt that did not run again."""
    return answer.usage.prompt_tokens_details.cached_tokens


def main(base):
    client = OpenAI(base_url=base + "/v1", api_key="none", max_retries=0, timeout=120)
    model = "smollm2"
    question = [{"role": "user", "content": "Why is the sky blue?"}]

    # Models.
    listed = client.models.list().data
    check([m.id for m in listed] == [model], "one model is listed")
    one = client.models.retrieve(model)
    extra = one.model_extra
    check(extra["context_length"] >= 2048, "context_length")
    for field in ["quantization", "pricing", "max_output_length", "input_modalities", "supported_sampling_parameters"]:
        check(field in extra, field)
    check((extra["quantization"], extra["format"]) == ("int4", "q4_1"), "quantization is a marketplace's word")
    check("structured_outputs" in extra["supported_features"], "features")
    refused(lambda: client.models.retrieve("gpt-4"), openai.NotFoundError, "another model")

    # Chat, whole.
    chat = client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=12)
    text = chat.choices[0].message.content
    words = text.split()
    check(len(words) > 5, f"greedy answer: {text!r}")
    check(chat.choices[0].finish_reason in ("stop", "length"), "finish reason")
    check(chat.usage.prompt_tokens > 5 and chat.usage.completion_tokens > 0, "usage")
    check(chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens, "usage adds up")
    parts = [{"role": "user", "content": [{"type": "text", "text": "Why is the"}, {"type": "text", "text": " sky blue?"}]}]
    again = client.chat.completions.create(model=model, messages=parts, temperature=0, max_completion_tokens=12)
    check(again.choices[0].message.content == text, "content in parts is the same text")
    check(known(chat) == 0 and known(again) == chat.usage.prompt_tokens - 1, "all of a prompt is known but what draws")

    # Chat, streamed: the same text, and usage in the last chunk.
    stream = client.chat.completions.create(
        model=model, messages=question, temperature=0, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    check(chunks[0].choices[0].delta.role == "assistant", "the role comes first")
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    check(streamed == text, f"streamed {streamed!r} is {text!r}")
    check(chunks[-1].choices == [] and chunks[-1].usage == again.usage, "usage in the last chunk")
    check(chunks[-2].choices[0].finish_reason == chat.choices[0].finish_reason, "finish reason in the chunk before")
    check(len({c.id for c in chunks}) == 1, "one id")
    plain = list(client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=3, stream=True))
    check(all(c.usage is None for c in plain), "no usage where nobody asked")

    # n choices and seeds.
    def draw(seed, n):
        answer = client.chat.completions.create(
            model=model, messages=question, temperature=1.5, max_tokens=10, n=n, seed=seed
        )
        check([c.index for c in answer.choices] == list(range(n)), "choices come in order")
        return [c.message.content for c in answer.choices], answer

    three, _ = draw(7, 3)
    check(len(set(three)) > 1, f"choices differ: {three}")
    check(draw(7, 3)[0] == three, "a seed repeats all choices")
    check(draw(7, 1)[0] == three[:1], "the first choice does not depend on n")
    check(draw(8, 3)[0] != three, "another seed differs")
    unseeded = client.chat.completions.create(model=model, messages=question, temperature=1.5, max_tokens=10)
    seed = unseeded.model_extra["seed"]
    check(draw(seed, 1)[0] == [unseeded.choices[0].message.content], "the seed that was returned draws the answer again")
    stream = client.chat.completions.create(model=model, messages=question, temperature=1.5, max_tokens=10, n=3, seed=7, stream=True)
    texts = ["", "", ""]
    for c in stream:
        for choice in c.choices:
            texts[choice.index] += choice.delta.content or ""
    check(texts == three, "streamed choices are the same")

    # Stop strings.
    word = words[4]
    for stop in [word, ["xyzzy", word]]:
        stopped = client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=32, stop=stop)
        check(stopped.choices[0].message.content == text.split(word)[0], "text before the stop string")
        check(stopped.choices[0].finish_reason == "stop", "finish reason of a stop string")
        check(stopped.usage.completion_tokens < 32, "nothing after the stop string is counted")
        check(known(stopped) == known(again), "what was known of a prompt is told whatever ends an answer")

    # Logprobs.
    scored = client.chat.completions.create(
        model=model, messages=question, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    content = scored.choices[0].logprobs.content
    check("".join(t.token for t in content) == scored.choices[0].message.content, "tokens spell the text")
    for t in content:
        check(len(t.top_logprobs) == 3, "three alternatives")
        check(t.top_logprobs[0].token == t.token and t.top_logprobs[0].logprob == t.logprob, "greedy takes the first")
        check(t.logprob <= 0 and bytes(t.bytes).decode() == t.token, "logprob and bytes")

    # Completions: four shapes of prompt, echo, scores of the prompt.
    def complete(**more):
        return client.completions.create(**{"model": model, "temperature": 0, "max_tokens": 6, **more})

    prompt = "The capital of France is"
    base_text = complete(prompt=prompt).choices[0].text
    two = complete(prompt=[prompt, "1 2 3 4"])
    check([c.index for c in two.choices] == [0, 1], "two prompts, two choices")
    check(two.choices[0].text == base_text, "neighbours change nothing")
    echoed = complete(prompt=prompt, echo=True)
    check(echoed.choices[0].text == prompt + base_text, "echo")
    scores = complete(prompt=prompt, echo=True, logprobs=2, max_tokens=0)
    lp = scores.choices[0].logprobs
    check(scores.choices[0].text == prompt and "".join(lp.tokens) == prompt, "max_tokens 0 scores the prompt")
    check(lp.token_logprobs[0] is None and all(x <= 0 for x in lp.token_logprobs[1:]), "the first token has no score")
    check(lp.top_logprobs[0] is None and all(len(t) == 2 for t in lp.top_logprobs[1:]), "two alternatives")
    check([prompt[o:].startswith(t) for o, t in zip(lp.text_offset, lp.tokens)] == [True] * len(lp.tokens), "offsets")
    check(scores.usage.completion_tokens == 0, "nothing was generated")
    both = complete(prompt=prompt, echo=True, logprobs=0).choices[0].logprobs
    check("".join(both.tokens) == prompt + base_text, "echo with an answer")
    check(both.token_logprobs[: len(lp.tokens)] == lp.token_logprobs, "prompt scores do not depend on what follows")
    ids = [504, 3575, 282, 4649, 314]
    by_ids = complete(prompt=ids, echo=True)
    check(by_ids.choices[0].text.startswith(complete(prompt=[ids], echo=True, max_tokens=1).choices[0].text), "token ids")
    check(by_ids.usage.prompt_tokens == len(ids), "token ids are taken as they are")
    streamed = "".join(c.choices[0].text for c in complete(prompt=prompt, stream=True, echo=True) if c.choices)
    check(streamed == prompt + base_text, "a completion streamed with echo")

    # logit_bias.
    first = client.completions.create(model=model, prompt=prompt, temperature=0, max_tokens=1, logprobs=2).choices[0]
    forced = complete(prompt=prompt, max_tokens=3, logit_bias={"28": 100}).choices[0].text
    check(forced == forced[:1] * 3 and forced != first.text, f"a bias of 100 decides: {forced!r}")
    penal = complete(prompt="a a a a a a a a", max_tokens=8, frequency_penalty=2.0, presence_penalty=1.0)
    check(penal.choices[0].text != complete(prompt="a a a a a a a a", max_tokens=8).choices[0].text, "penalties act")
    more = {"top_k": 1, "min_p": 0.1, "repetition_penalty": 1.0, "min_tokens": 2, "ignore_eos": True}
    check(complete(prompt=prompt, temperature=1, extra_body=more).choices[0].text == base_text, "top_k 1 is greedy")

    # Structured outputs.
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    ask_json = {"model": model, "messages": question, "response_format": form, "max_tokens": 200, "temperature": 1.5}

    def is_person(text):
        person = json.loads(text)
        good = list(person) == ["name", "age", "tags"] and len(person["name"]) <= 12
        return good and 0 <= person["age"] <= 150 and len(person["tags"]) <= 3 and set(person["tags"]) <= {"a", "b"}

    people = client.chat.completions.create(**ask_json, n=3, seed=5).choices
    check(all(is_person(c.message.content) and c.finish_reason == "stop" for c in people), f"JSON of the schema: {people}")
    check(len({c.message.content for c in people}) > 1, "choices differ")
    streamed = client.chat.completions.create(**ask_json, seed=5, stream=True)
    streamed = "".join(c.choices[0].delta.content or "" for c in streamed if c.choices)
    check(streamed == people[0].message.content, "a schema streamed")
    free = {**ask_json, "response_format": {"type": "json_object"}, "max_tokens": 30}
    check(client.chat.completions.create(**free).choices[0].message.content.lstrip().startswith("{"), "any object")

    class Answer(pydantic.BaseModel):
        word: Literal["yes", "no"]
        sure: bool

    parsed = client.chat.completions.parse(model=model, messages=question, response_format=Answer, max_tokens=100)
    check(parsed.choices[0].message.parsed.word in ("yes", "no"), "the client reads its own class")
    bad_schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}
    refused(lambda: client.chat.completions.create(**{**ask_json, "response_format": bad_schema}), openai.BadRequestError, "schema", "response_format")

    # Refusals.
    chat = client.chat.completions.create
    bad = openai.BadRequestError
    e = refused(lambda: chat(model=model, messages=question, extra_body={"temprature": 1}), bad, "unknown field", "temprature")
    check("temperature" in e.body["message"], "the nearest field is named")
    refused(lambda: chat(model=model, messages=question, temperature=-1), bad, "temperature", "temperature")
    refused(lambda: chat(model=model, messages=question, top_p=0), bad, "top_p", "top_p")
    refused(lambda: chat(model=model, messages=[]), bad, "no messages", "messages")
    refused(lambda: chat(model=model, messages=[{"role": "robot", "content": "x"}]), bad, "role", "messages[0].role")
    refused(lambda: chat(model=model, messages=question, n=0), bad, "n", "n")
    refused(lambda: chat(model=model, messages=question, tools=[{"type": "function", "function": {"name": "f"}}]), bad, "tools", "tools")
    e = refused(lambda: chat(model=model, messages=question, max_tokens=1 << 20), bad, "too long", "max_tokens")
    check(e.body["code"] == "context_length_exceeded", "the code of a context that is exceeded")
    refused(lambda: complete(prompt=[10**9]), bad, "token id", "prompt")
    refused(lambda: chat(model="gpt-4", messages=question), openai.NotFoundError, "another model", "model")

    # Side by side: the same answers as alone.
    results = [None] * 8

    def ask(i):
        results[i] = client.chat.completions.create(model=model, messages=question, temperature=0, max_tokens=12)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    check(all(r and r.choices[0].message.content == text for r in results), "eight at once answer as one does")
    check(math.isfinite(first.logprobs.token_logprobs[0]), "logprobs are finite")
    done()


main(sys.argv[1])

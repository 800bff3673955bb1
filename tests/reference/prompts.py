"""The prompts of the greedy goldens: prose, code, lists, scripts, numbers, chat, one token, a long one."""

from pathlib import Path

PLAIN = {
    "prose": "The old lighthouse keeper climbed the stairs one last time, and",
    "facts": "The capital of France is Paris. The capital of Italy is Rome. The capital of Spain is",
    "science": "Water boils at a lower temperature on a mountain because",
    "definition": "Photosynthesis is the process by which",
    "story": "Once upon a time, in a village at the edge of a great forest, there lived a girl named Mira who",
    "dialogue": "\"Where were you last night?\" asked the inspector.\n\"At home,\" said the gardener, \"",
    "letter": "Dear Professor Lindqvist,\n\nThank you for your letter of 3 March. I am writing to",
    "python": "def fibonacci(n):\n    \"\"\"Return the n-th Fibonacci number.\"\"\"\n",
    "rust": "fn main() {\n    let numbers = vec![3, 1, 4, 1, 5, 9];\n    let total: i32 = numbers",
    "html": "<ul>\n  <li>Apples</li>\n  <li>Pears</li>\n",
    "json": "{\"name\": \"Ada\", \"born\": 1815, \"fields\": [\"mathematics\", ",
    "sql": "SELECT name, COUNT(*) FROM orders WHERE",
    "list": "Seven things to pack for a winter hike:\n1. Warm gloves\n2. A thermos of tea\n3.",
    "numbers": "2, 4, 8, 16, 32, 64, 128,",
    "sum": "17 + 25 = 42\n38 + 14 = 52\n61 + 19 =",
    "table": "| month | days |\n|---|---|\n| January | 31 |\n| February | 28 |\n| March |",
    "french": "Il était une fois une petite fille qui habitait",
    "german": "Die Donau ist ein Fluss, der",
    "russian": "Москва является столицей",
    "chinese": "人工智能是",
    "emoji": "Weather report \U0001F324\uFE0F: Monday \u2600\uFE0F, Tuesday \U0001F327\uFE0F, Wednesday",
    "spaces": "a\n\n\n    b\t\tc   d\r\n\r\n        e",
}
QUESTIONS = {
    "chat-sky": "Why is the sky blue?",
    "chat-haiku": "Write a haiku about the sea.",
    "chat-code": "How do I reverse a string in Python?",
    "chat-list": "Name three rivers in Africa and the countries they flow through.",
}


def smollm2_chat(question: str) -> str:
    """What SmolLM2's own template renders for one user message."""
    return ("<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")


def gemma_chat(question: str) -> str:
    """One user turn as Gemma's instruction models see it (BOS is added as an id)."""
    return f"<start_of_turn>user\n{question}<end_of_turn>\n<start_of_turn>model\n"


def long_text() -> str:
    """The beginning of ppl.txt, about 600 tokens: longer than Gemma's window of 512."""
    return (Path(__file__).parent.parent / "fixtures" / "ppl.txt").read_text()[:2750]


def prompts(name: str) -> list[tuple[str, str, bool]]:
    """(label, text, whether special tokens in the text are control tokens) for `smollm2` or `gemma3`."""
    chat = {"smollm2": smollm2_chat, "gemma3": gemma_chat}[name]
    # One token in all: for Gemma that is BOS alone.
    one = {"smollm2": "The", "gemma3": ""}[name]
    return ([(k, v, False) for k, v in PLAIN.items()] + [("one-token", one, False), ("long", long_text(), False)]
            + [(k, chat(v), True) for k, v in QUESTIONS.items()])

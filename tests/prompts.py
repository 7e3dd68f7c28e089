"""Fifty and more prompts: English, emoji, Chinese, code, white space, nothing."""

ENGLISH = """Once upon a time|The king had three daughters|In the middle of the forest stood a house|'Who are
you?' asked the wolf|There was once a poor miller|She|And then|One day the youngest brother|The princess wept,
for|He took the golden key and|Far, far away, beyond the sea,|'I am hungry,' said the fox|When the sun rose|It was
a dark and stormy night|A|THE END|Long ago|The witch laughed|Nobody knew|If I were you|1, 2, 3, 4,|Chapter
1|Dear|to be or not to be|Alan Turing theorized that computers would one day become|The quick brown fox jumps over
the lazy dog|What is your name|Yes|no|I've never seen such a thing, he'd say|wolf wolf wolf
wolf|<|endoftext|>x|zzzzzzzz"""
OTHERS = [
    "",
    " ",
    "\n",
    "\n\n",
    "   \t  ",
    "\t",
    "🙂",
    "🙂🙃 👩‍👩‍👧",
    "日本語のテキスト",
    "从前有一个国王",
    "Привет, мир",
    "naïve café",
]
CODE = [
    "def f(x):\n    return x + 1\n",
    "for (int i = 0; i < n; i++) {",
    "<html><body>",
    '{"a": [1, 2, 3]}',
    "SELECT * FROM t;",
]
LONG = ["There was once a poor miller. " * 40, "a" * 700, "the wolf and the seven little kids " * 3]
PROMPTS = [*ENGLISH.replace("\n", " ").split("|"), *OTHERS, *CODE, *LONG]

"""Compile times, table sizes and step times of grammars, beside llguidance where it is installed.

    python tests/structured/bench_grammars.py TOKENIZER_JSON [--step] [--rows 32 128]

TOKENIZER_JSON: the real vocabulary, 129,280 logits wide. Step times are of compiled functions that
run one after another without waiting, divided by their number. Measured by hand, not in CI.
"""

import argparse
import json
import time

import jax
import jax.numpy as jnp
import numpy as np

from deepinfer_jax import structured

WIDTH = 129_280
STRING = r'"([^"\\\x00-\x1f]|\\(["\\/bfnrt]|u[0-9a-fA-F]{4}))*"'
NUMBER = r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?"
TAGS = {"type": "array", "items": {"type": "string"}, "maxItems": 10}
TREE = {
    "$defs": {
        "n": {
            "type": "object",
            "properties": {
                "v": {"type": "integer"},
                "c": {"type": "array", "items": {"$ref": "#/$defs/n"}},
            },
            "required": ["v", "c"],
        }
    },
    "$ref": "#/$defs/n",
}


def closed(properties: dict) -> dict:
    return {"type": "object", "properties": properties, "required": list(properties)}


CASES = {
    "date": {"regex": r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"},
    "email": {"regex": r"[\w.+-]+@[\w-]+\.[a-z]{2,}"},
    "<= 50 words": {"regex": "([A-Za-z]+ ){0,49}[A-Za-z]+"},
    "JSON string": {"regex": STRING},
    "JSON 3 fields": {"regex": rf'\{{"name": {STRING}, "age": {NUMBER}, "ok": (true|false)\}}'},
    ".{1,200}": {"regex": ".{1,200}"},
    "JSON string <= 200": {"json_schema": {"type": "string", "maxLength": 200}},
    "JSON string <= 2000": {"json_schema": {"type": "string", "maxLength": 2000}},
    "nested, 10 tags": {
        "json_schema": closed(
            {"user": closed({"id": {"type": "integer"}, "tags": TAGS}), "ok": {"type": "boolean"}}
        )
    },
    "bounded strings": {
        "json_schema": closed(
            {
                "name": {"type": "string", "maxLength": 60},
                "bio": {"type": "string", "maxLength": 200},
            }
        )
    },
    "enum of 50": {"choice": [f"option {i} of {i * i}" for i in range(50)]},
    "any JSON object": {"json": True},
    "recursive tree": {"json_schema": TREE},
    "arithmetic": {
        "ebnf": 'root ::= expr ("=" expr)*\nexpr ::= term ([-+*/] term)*\n'
        'term ::= num | "(" expr ")"\nnum ::= [0-9]+\n'
    },
    "s-expressions": {
        "ebnf": 'root ::= sexp\nsexp ::= atom | "(" sexp (" " sexp)* ")"\natom ::= [a-z]+'
    },
}


def compile_table(vocabulary: structured.Vocabulary) -> None:
    """Processor seconds are the best of two compilations; bytes are tables and token classes."""
    print("| grammar | tier | states | token classes | patterns | edges | MB | seconds |")
    print("| --- | --: | --: | --: | --: | --: | --: | --: |")
    for name, spec in CASES.items():
        seconds = np.inf
        for _ in range(2):
            begin = time.thread_time()
            r = structured.compile(spec, vocabulary).report
            seconds = min(seconds, time.thread_time() - begin)
        print(
            f"| {name} | {r.tier} | {r.states} | {r.classes} | {r.patterns} | {r.edges} "
            f"| {r.bytes / 1e6:.2f} | {seconds:.3f} |"
        )


def timed(function, *arguments, repeat: int = 50) -> float:
    """Milliseconds of one call, of ``repeat`` calls in flight."""
    jax.block_until_ready(function(*arguments))
    best = np.inf
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(repeat):
            out = function(*arguments)
        jax.block_until_ready(out)
        best = min(best, (time.perf_counter() - begin) / repeat)
    return best * 1e3


def step_table(vocabulary: structured.Vocabulary, rows: list[int], repeat: int) -> None:
    """What a decode step pays: greedy choice alone, with mask and advance, and a block of six."""
    manager = structured.PoolManager(vocabulary.width)
    pool = manager.empty()
    indices = []
    for name in ("date", "bounded strings", "any JSON object", "recursive tree"):
        pool, index = manager.acquire(pool, structured.compile(CASES[name], vocabulary))
        indices.append(index)

    def choose(logits):
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def constrained(pool, state, logits, remaining):
        allowed = structured.mask(pool, state, remaining)
        token = choose(jnp.where(allowed, logits, -jnp.inf))
        return token, structured.advance(pool, state, token)

    def block(pool, state, drafts, logits, remaining):
        states = structured.walk(pool, state, drafts)
        left = remaining[:, None] - jnp.arange(drafts.shape[1] + 1, dtype=jnp.int32)[None, :]
        allowed = structured.mask(pool, states, left)
        return choose(jnp.where(allowed, logits, -jnp.inf)), states

    print(f"device: {jax.devices()[0].device_kind}; milliseconds")
    print("| rows | choose | choose + mask + advance | mask | advance | 6 x choose | 6 x all |")
    print("| --: | --: | --: | --: | --: | --: | --: |")
    for count in rows:
        states = [structured.start(indices[i % 4], levels=32) for i in range(count)]
        state = jax.tree.map(lambda *x: jnp.stack(x), *states)
        logits = jax.random.normal(jax.random.key(0), (count, vocabulary.width))
        six = jnp.broadcast_to(logits[:, None], (count, 6, vocabulary.width)) + 0
        remaining = jnp.full((count,), 1000, jnp.int32)
        token, _ = jax.jit(constrained)(pool, state, logits, remaining)
        drafts = jnp.broadcast_to(token[:, None], (count, 5)) + 0
        figures = [
            timed(jax.jit(choose), logits, repeat=repeat),
            timed(jax.jit(constrained), pool, state, logits, remaining, repeat=repeat),
            timed(jax.jit(structured.mask), pool, state, remaining, repeat=repeat),
            timed(jax.jit(structured.advance), pool, state, token, repeat=repeat),
            timed(jax.jit(choose), six, repeat=repeat),
            timed(jax.jit(block), pool, state, drafts, six, remaining, repeat=repeat),
        ]
        print(
            f"| {count} | " + " | ".join(f"{figure:.3f}" for figure in figures) + " |", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tokenizer", help="tokenizer.json of the real vocabulary")
    parser.add_argument("--step", action="store_true", help="step times instead of compile times")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--repeat", type=int, default=20, help="calls in flight")
    arguments = parser.parse_args()
    vocabulary = structured.Vocabulary.load(arguments.tokenizer, width=WIDTH, eos=[1])
    print(
        json.dumps(
            {
                "tokens": sum(map(bool, vocabulary.texts)),
                "nodes": sum(len(level.bytes) for level in vocabulary.levels),
            }
        )
    )
    if arguments.step:
        step_table(vocabulary, arguments.rows, arguments.repeat)
    else:
        compile_table(vocabulary)


if __name__ == "__main__":
    main()

"""CPU time of Hugging Face's tokenizers per token of random text, which load generators send, and of plain English.

    python -m venv VENV && VENV/bin/pip install transformers tiktoken && pip download litellm==1.74.0 --no-deps
    unzip -j litellm-*.whl 'litellm/litellm_core_utils/tokenizers/fb37*' -d .
    VENV/bin/python benchmarks/tokenizing.py fb374d419588a4632f3f557e76b4b70aebbca790

The file is o200k_base, the vocabulary of gpt-oss, as tiktoken has it; litellm's wheel brings it along. Random text is what
inference-perf makes: ids drawn evenly from the vocabulary, decoded.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from statistics import median

from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter

UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERN = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""How o200k splits text before it merges bytes, as tiktoken has it."""
LENGTHS = (5_000, 50_000)


def main() -> None:
    """Print microseconds of CPU per token."""
    converted = TikTokenConverter(vocab_file=sys.argv[1], pattern=PATTERN, extra_special_tokens=[]).converted()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=converted)
    draw = random.Random(0)
    texts = {
        f"random, {length:,} tokens": tokenizer.decode([draw.randrange(tokenizer.vocab_size) for _ in range(length)])
        for length in LENGTHS
    }
    pages = Path(__file__).parents[1].glob("docs/**/*.md")
    texts["English"] = "\n".join(page.read_text() for page in pages)
    for name, text in texts.items():
        times = []
        for _ in range(5):
            began = time.process_time()
            count = len(tokenizer.encode(text))
            times.append((time.process_time() - began) / count)
        print(f"{name}: {1e6 * median(times):.2f} us a token, {count:,} tokens")


if __name__ == "__main__":
    main()

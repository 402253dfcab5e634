"""Writes a file of training prompts from what is on any machine with this project's environment: no download.

    python perf/drafter/make_prompts.py --output prompts.jsonl

Code stubs and passages of prose come from the sources and documentation of the installed Python packages; word
problems and instructions are made from templates. Nothing here is a benchmark's prompt. The same environment gives the
same file; another Python version gives other stubs, which does no harm.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import json
import pydoc_data.topics
import random
import sys
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
from perf.drafter import prompt_templates as templates

_PACKAGES = ("numpy", "scipy", "networkx", "sympy", "torch", "transformers", "matplotlib", "pydantic", "hypothesis")


def code_stubs() -> Iterator[str]:
    """Heads and docstrings of functions in the standard library and the installed packages."""
    roots = [Path(sysconfig.get_path("stdlib"))]
    roots += [Path(sysconfig.get_path("purelib")) / name for name in _PACKAGES]
    for root in roots:
        for file in sorted(root.rglob("*.py")):
            if "test" in str(file.relative_to(root)) or (
                root.name.startswith("python") and "site-packages" in str(file)
            ):
                continue
            try:
                tree = ast.parse(file.read_text())
            except (SyntaxError, UnicodeDecodeError, ValueError):
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                    docstring = ast.get_docstring(node) or ""
                    if 40 <= len(docstring) <= 500 and docstring.isascii():
                        body = textwrap.indent(f'"""{docstring}\n"""', "    ")
                        yield f"def {node.name}({ast.unparse(node.args)}):\n{body}\n"


def passages() -> Iterator[str]:
    """Paragraphs of prose from Python's own manual and the packages' descriptions."""
    texts: list[str] = [str(text) for text in pydoc_data.topics.topics.values()]
    for distribution in importlib.metadata.distributions():
        metadata: Any = distribution.metadata
        texts.append(str(metadata.get_payload() or metadata.get("Description") or ""))
    seen = set()
    for text in texts:
        for paragraph in text.split("\n\n"):
            joined = " ".join(paragraph.split())
            prose = joined.isascii() and sum(c.isalpha() or c == " " for c in joined) > 0.88 * len(joined)
            if prose and 200 <= len(joined) <= 900 and joined.endswith(".") and joined not in seen:
                seen.add(joined)
                yield joined


def word_problems(random_numbers: random.Random) -> Iterator[str]:
    """Endless."""
    while True:
        a, b = random_numbers.sample(templates.NAMES, 2)
        i, j, k = random_numbers.randint(20, 400), random_numbers.randint(5, 60), random_numbers.randint(2, 12)
        x = random_numbers.choice(templates.THINGS)
        yield random_numbers.choice(templates.PROBLEMS).format(a=a, b=b, i=i, j=j, k=k, x=x)


def instructions() -> Iterator[str]:
    """Every instruction about every topic."""
    for place, topic in enumerate(templates.TOPICS):
        for number, instruction in enumerate(templates.INSTRUCTIONS):
            other = templates.TOPICS[(place + number + 1) % len(templates.TOPICS)]
            yield instruction.format(t=topic, u=other)


def make_prompts(count: int, seed: int) -> list[dict[str, Any]]:
    """About `count` prompts: three tenths code, two tenths each of problems and passages, the rest instructions."""
    numbers = random.Random(seed)

    def some(texts: Iterator[str], share: float) -> list[str]:
        found = list(texts)
        return numbers.sample(found, min(len(found), int(count * share)))

    entries: list[dict[str, Any]] = []
    for stub in some(code_stubs(), 0.3):
        if numbers.random() < 0.5:
            entries.append({"prompt": f"Complete this Python function.\n\n{stub}"})
        else:
            entries.append({"prompt": stub, "raw": True})
    for passage in some(passages(), 0.2):
        if numbers.random() < 0.2:
            entries.append({"prompt": passage, "raw": True})
        else:
            longest = max(passage.strip(".").split(), key=len)
            entries.append({"prompt": numbers.choice(templates.PASSAGE_TASKS).format(p=passage, w=longest)})
    problems = word_problems(numbers)
    entries += [{"prompt": next(problems), "raw": numbers.random() < 0.4} for _ in range(int(count * 0.2))]
    entries += [{"prompt": text, "raw": numbers.random() < 0.3} for text in some(instructions(), 0.3)]
    numbers.shuffle(entries)
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    entries = make_prompts(arguments.count, arguments.seed)
    arguments.output.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    print(f"{len(entries)} prompts in {arguments.output}")


if __name__ == "__main__":
    main()

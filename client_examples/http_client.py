"""Text in, text out over HTTP, with nothing but the standard library.

python client_examples/http_client.py "The capital of France is"
python client_examples/http_client.py --stream --chat "Tell me a story." --temperature 0.7
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any


def generate(url: str, request: dict[str, Any]) -> dict[str, Any]:
    """One answer for the whole text."""
    with _post(f"{url}/v2/models/generate/generate", request) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def generate_stream(url: str, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """An answer for each piece of text as it is decoded (server-sent events)."""
    with _post(f"{url}/v2/models/generate/generate_stream", {**request, "stream": True}) as response:
        for line in response:
            if line.startswith(b"data: "):
                yield json.loads(line.removeprefix(b"data: "))


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        return urllib.request.urlopen(request)
    except urllib.error.HTTPError as error:
        sys.exit(f"{error.code}: {json.load(error)['error']}")
    except urllib.error.URLError as error:
        sys.exit(f"{url} does not answer: {error.reason}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--chat", action="store_true", help="send the prompt as a chat message")
    parser.add_argument("--stream", action="store_true", help="print the text as it comes")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()

    request: dict[str, Any] = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    if arguments.chat:
        # `messages` is a JSON string: Triton's generate endpoint has no nested objects
        request["messages"] = json.dumps([{"role": "user", "content": arguments.prompt}])
    else:
        request["text_input"] = arguments.prompt

    if arguments.stream:
        for piece in generate_stream(arguments.url, request):
            print(piece["text_output"], end="", flush=True)
        answer = piece
        print()
    else:
        answer = generate(arguments.url, request)
        print(answer["text_output"])
    print(
        f"[{answer['finish_reason']}; of {answer['total_draft_tokens']} drafts "
        f"{answer['total_accepted_draft_tokens']} were accepted]",
        file=sys.stderr,
    )


if __name__ == "__main__":
    main()

"""Several prompts at once over one gRPC stream; each piece of text is printed as it comes.

python client_examples/grpc_stream_client.py "The capital of France is" "The largest planet is"
"""

from __future__ import annotations

import argparse
import queue
from typing import Any

import numpy as np
import tritonclient.grpc as triton


def request_inputs(prompt: str, max_tokens: int, temperature: float) -> list[Any]:
    """The inputs of one request to `generate`: every tensor is `[1, 1]`."""

    def tensor(name: str, value: Any, triton_type: str, dtype: Any) -> Any:
        array = np.array([[value]], dtype=dtype)
        inputs = triton.InferInput(name, list(array.shape), triton_type)
        inputs.set_data_from_numpy(array)
        return inputs

    return [
        tensor("text_input", prompt.encode(), "BYTES", np.object_),
        tensor("stream", True, "BOOL", np.bool_),
        tensor("max_tokens", max_tokens, "INT32", np.int32),
        tensor("temperature", temperature, "FP32", np.float32),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    arguments = parser.parse_args()

    answers: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()
    texts = dict.fromkeys(map(str, range(len(arguments.prompts))), "")
    client = triton.InferenceServerClient(arguments.url)
    client.start_stream(callback=lambda result, error: answers.put((result, error)))
    for request_id, prompt in enumerate(arguments.prompts):
        client.async_stream_infer(
            "generate",
            request_inputs(prompt, arguments.max_tokens, arguments.temperature),
            request_id=str(request_id),
            enable_empty_final_response=True,
        )
    unfinished = len(arguments.prompts)
    while unfinished:
        result, error = answers.get()
        if error is not None:
            raise SystemExit(f"the server says: {error}")
        response = result.get_response()
        if response.outputs:
            piece = result.as_numpy("text_output").reshape(-1)[0].decode()
            texts[response.id] += piece
            print(f"[{response.id}] {piece!r}", flush=True)
        unfinished -= response.parameters["triton_final_response"].bool_param
    client.stop_stream()
    for request_id, prompt in enumerate(arguments.prompts):
        print(f"\n[{request_id}] {prompt}{texts[str(request_id)]}")


if __name__ == "__main__":
    main()

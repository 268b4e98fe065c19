"""A gRPC client in Python: streams the answer to a chat message.

Start a cluster with `cargo run --release --bin conductor -- --workers 2`, then run:

    pip install grpcio grpcio-tools
    mkdir -p target/stubs
    python -m grpc_tools.protoc -I proto/protos --python_out=target/stubs --grpc_python_out=target/stubs \
        tutti/v1/inference.proto
    PYTHONPATH=target/stubs python examples/generate.py "What is Tutti?"
"""

import argparse
import sys

import grpc
from tutti.v1 import inference_pb2 as tutti
from tutti.v1 import inference_pb2_grpc


def main():
    parser = argparse.ArgumentParser(description="Streams the answer to a chat message over gRPC.")
    parser.add_argument("message", nargs="?", default="What is Tutti?", help="the user's message")
    parser.add_argument("--address", default="127.0.0.1:50051", help="gRPC API (default: %(default)s)")
    arguments = parser.parse_args()

    request = tutti.GenerateRequest(
        chat=tutti.Chat(messages=[tutti.ChatMessage(role="user", content=arguments.message)]),
        sampling=tutti.Sampling(temperature=0),
        stopping=tutti.Stopping(max_tokens=200),
    )
    with grpc.insecure_channel(arguments.address) as channel:
        # Each response has the text generated since the previous response. The last response has the token counts.
        for response in inference_pb2_grpc.InferenceStub(channel).Generate(request):
            print(response.text, end="", flush=True)
            if response.HasField("usage"):
                print()
                usage = response.usage
                print(f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} output tokens", file=sys.stderr)


if __name__ == "__main__":
    main()

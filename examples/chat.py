"""An OpenAI client in Python: streams the answer to a chat message.

Start a cluster with `cargo run --release --bin conductor -- --workers 2`, then run:

    pip install openai
    python examples/chat.py "What is Tutti?"
"""

import argparse

import openai


def main():
    parser = argparse.ArgumentParser(description="Streams the answer to a chat message over the OpenAI API.")
    parser.add_argument("message", nargs="?", default="What is Tutti?", help="the user's message")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="OpenAI API (default: %(default)s)")
    arguments = parser.parse_args()

    # The cluster checks no API key, but the client library requires one.
    client = openai.OpenAI(base_url=arguments.url, api_key="unused")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": arguments.message}],
        temperature=0,
        max_completion_tokens=200,
        stream=True,
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()

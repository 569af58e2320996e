"""Reads the event stream of a completion from standard input and prints its text as it arrives.

    curl -sN http://127.0.0.1:8080/v1/completions -H 'Content-Type: application/json' \
        -d '{"prompt": "rose: a shrub of", "stream": true}' | python3 stream_text.py
"""

import json
import sys


def main():
    for line in sys.stdin:
        line = line.strip()
        if not line or line.startswith(":"):  # an empty line ends an event; ":" begins a comment
            continue
        # If the server rejects the request, its response is plain JSON instead of a stream.
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            print()
            return 0
        event = json.loads(data)
        if "choices" not in event:
            print(event.get("error", event), file=sys.stderr)
            return 1
        for choice in event["choices"]:
            print(choice["text"], end="", flush=True)
    print("the stream ended early", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

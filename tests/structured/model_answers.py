"""Generates completions constrained by random JSON schemas and validates them with the package
jsonschema.

Each schema is sent to one of the models in turn, at temperature 1. Every completion that ends with
finish reason "stop" must be valid, and at least 95 % of the completions must end this way within
--limit tokens.

    python tests/structured/model_answers.py build/release/moeserve \
        $(python3 tests/support/bundled_models.py)
"""

import argparse
import collections
import concurrent.futures
import json
import pathlib
import subprocess
import sys
import urllib.request

import jsonschema

from schema_parity import schema_of, unique


class Server:
    def __init__(self, program, model):
        self.process = subprocess.Popen(
            [program, "serve", "--model", model, "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0",
             "--log-level", "error"], stdout=subprocess.PIPE, text=True)
        line = self.process.stdout.readline()
        self.url = "http://" + line.strip().removeprefix("http listening on ")

    def complete(self, **body):
        request = urllib.request.Request(self.url + "/v1/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        return json.load(urllib.request.urlopen(request))["choices"][0]

    def stop(self):
        self.process.terminate()
        return self.process.wait()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("models", nargs="+")
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--limit", type=int, default=512)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    models = [pathlib.Path(model) for model in args.models]
    servers = [Server(args.program, model) for model in models]
    outcomes = collections.Counter()
    failures = []

    def answer(number):
        schema, _, _ = schema_of(args.seed, number)
        choice = servers[number % len(servers)].complete(
            prompt="Here is the record as JSON:\n", max_tokens=args.limit, temperature=1,
            seed=number,
            response_format={"type": "json_schema",
                             "json_schema": {"name": "generated", "schema": schema,
                                             "strict": True}})
        return number, schema, choice

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for number, schema, choice in pool.map(answer, range(args.schemas)):
            outcomes[choice["finish_reason"]] += 1
            if choice["finish_reason"] != "stop":
                print(f"schema {number}: cut off: {choice['text'][-200:]!r}")
                continue
            try:
                value = json.loads(choice["text"], object_pairs_hook=unique)
                jsonschema.Draft202012Validator(
                    schema, format_checker=jsonschema.FormatChecker()).validate(value)
            except Exception as error:
                failures.append((number, choice["text"], str(error)[:200]))
    statuses = [server.stop() for server in servers]
    print(f"{args.schemas} schemas, {len(models)} models: {dict(outcomes)}, "
          f"{len(failures)} invalid answers")
    for number, text, error in failures[:10]:
        print(f"schema {number}: {error}\n  {text}")
    good = not failures and outcomes["stop"] >= 0.95 * args.schemas and not any(statuses)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

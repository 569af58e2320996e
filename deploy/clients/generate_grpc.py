"""Streams a completion over gRPC and prints its text as it arrives.

    protoc -I proto --python_out=build/clients --grpc_out=build/clients \
        --plugin=protoc-gen-grpc=/usr/bin/grpc_python_plugin proto/moeserve/v1/moeserve.proto
    PYTHONPATH=build/clients python3 deploy/clients/generate_grpc.py "rose: a shrub of"

Needs the Python packages grpcio and protobuf.
"""

import argparse
import sys

import grpc

from moeserve.v1 import moeserve_pb2, moeserve_pb2_grpc


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("prompt")
    parser.add_argument("--address", default="127.0.0.1:8081")
    parser.add_argument("--max-tokens", type=int, default=48)
    # Without these, the defaults of the model hold.
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", default=[])
    options = parser.parse_args()

    request = moeserve_pb2.GenerateRequest(
        text=options.prompt,
        sampling=moeserve_pb2.SamplingParams(
            max_tokens=options.max_tokens, temperature=options.temperature, top_p=options.top_p,
            seed=options.seed, stop=options.stop))
    with grpc.insecure_channel(options.address) as channel:
        try:
            for message in moeserve_pb2_grpc.InferenceStub(channel).Generate(request, timeout=120):
                print(message.text, end="", flush=True)
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
            return 1
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())

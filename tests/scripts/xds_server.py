"""A server of the delta discovery service, made of other people's parts: grpcio, and classes that protoc made.

Usage: xds_server.py CLASSES HOST:PORT. Reads commands from stdin and prints what happens, a JSON object a line each:
  {"send": {"type": KIND, "nonce": N, "resources": [RESOURCE..], "removed": [NAME..]}}
                        sends a DeltaDiscoveryResponse on the newest stream. A RESOURCE has a name and a version, and either
                        `body`, a message of its kind in JSON form, or `hex`, bytes; `name_bytes` makes a name of that length
  {"end": true}         ends the newest stream, after what was sent before
"""
import concurrent.futures
import itertools
import json
import queue
import sys
import threading

sys.path.insert(0, sys.argv[1])

import grpc  # noqa: E402
from envoy.service.discovery.v3 import discovery_pb2  # noqa: E402
from google.protobuf import json_format  # noqa: E402
from vipgate.policy.v1 import policy_pb2  # noqa: E402

URL = "type.googleapis.com/vipgate.policy.v1."
lock = threading.Lock()
numbers = itertools.count(1)
newest = None


def tell(**event):
    with lock:
        print(json.dumps(event), flush=True)


def hear(stream, requests):
    try:
        for request in requests:
            text = json_format.MessageToDict(request, preserving_proto_field_name=True)
            tell(request=text, stream=stream, type=request.type_url.rsplit(".", 1)[-1])
    except grpc.RpcError:
        pass
    tell(closed=stream)


def serve(requests, context):
    global newest
    mine = newest = queue.Queue()
    stream = next(numbers)
    tell(opened=stream)
    threading.Thread(target=hear, args=(stream, requests), daemon=True).start()
    context.add_callback(lambda: mine.put(None))
    yield from iter(mine.get, None)


def response(command):
    url = URL + command["type"]
    made = discovery_pb2.DeltaDiscoveryResponse(type_url=url, nonce=command["nonce"])
    made.removed_resources.extend(command.get("removed", []))
    for entry in command.get("resources", []):
        resource = made.resources.add(version=entry.get("version", "1"))
        resource.name = "x" * entry["name_bytes"] if "name_bytes" in entry else entry["name"]
        resource.resource.type_url = url
        if "hex" in entry:
            resource.resource.value = bytes.fromhex(entry["hex"])
        else:
            message = getattr(policy_pb2, command["type"])()
            resource.resource.value = json_format.ParseDict(entry["body"], message).SerializeToString()
    return made


handler = grpc.stream_stream_rpc_method_handler(
    serve,
    request_deserializer=discovery_pb2.DeltaDiscoveryRequest.FromString,
    response_serializer=discovery_pb2.DeltaDiscoveryResponse.SerializeToString,
)
server = grpc.server(concurrent.futures.ThreadPoolExecutor(max_workers=8))
service = "envoy.service.discovery.v3.AggregatedDiscoveryService"
server.add_generic_rpc_handlers(
    (grpc.method_handlers_generic_handler(service, {"DeltaAggregatedResources": handler}),)
)
if server.add_insecure_port(sys.argv[2]) == 0:
    sys.exit("the port is taken")
server.start()
tell(listening=True)
for line in sys.stdin:
    command = json.loads(line)
    if "send" in command:
        newest.put(response(command["send"]))
    if "end" in command:
        newest.put(None)
server.stop(0)

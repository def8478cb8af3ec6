"""A client of the delta discovery service, made of other people's parts: grpcio, and classes that protoc made.

Usage: xds_client.py CLASSES HOST:PORT. Reads commands from stdin and prints what happens, a JSON object a line each:
  {"open": true}        begins a stream; there is one at a time
  {"send": REQUEST}     sends a DeltaDiscoveryRequest, in its JSON form
  {"close": true}       ends the stream from this side
  {"brief": true}       from now on, of responses only names, versions and sizes are told
"""
import json
import queue
import sys
import threading

sys.path.insert(0, sys.argv[1])

import grpc  # noqa: E402
from envoy.service.discovery.v3 import discovery_pb2  # noqa: E402
from google.protobuf import json_format  # noqa: E402
from vipgate.policy.v1 import policy_pb2  # noqa: E402, F401 (registers its messages)

METHOD = "/envoy.service.discovery.v3.AggregatedDiscoveryService/DeltaAggregatedResources"
lock = threading.Lock()
brief = False


def tell(**event):
    with lock:
        print(json.dumps(event), flush=True)


def shown(response):
    resources = []
    for resource in response.resources:
        entry = {"name": resource.name, "version": resource.version}
        if not brief:
            body = json_format.MessageToDict(resource.resource, preserving_proto_field_name=True)
            entry["body"] = body
        resources.append(entry)
    return {
        "version": response.system_version_info,
        "type": response.type_url.rsplit(".", 1)[-1],
        "type_url": response.type_url,
        "nonce": response.nonce,
        "resources": resources,
        "removed": sorted(response.removed_resources),
        "bytes": response.ByteSize(),
    }


def hear(responses):
    try:
        for response in responses:
            tell(response=shown(response))
        tell(ended="OK", details="")
    except grpc.RpcError as error:
        tell(ended=error.code().name, details=error.details())


channel = grpc.insecure_channel(sys.argv[2])
call = channel.stream_stream(
    METHOD,
    request_serializer=discovery_pb2.DeltaDiscoveryRequest.SerializeToString,
    response_deserializer=discovery_pb2.DeltaDiscoveryResponse.FromString,
)
requests = None
tell(listening=True)
for line in sys.stdin:
    command = json.loads(line)
    if "open" in command:
        requests = queue.Queue()
        responses = call(iter(requests.get, None))
        threading.Thread(target=hear, args=(responses,), daemon=True).start()
    if "send" in command:
        requests.put(json_format.ParseDict(command["send"], discovery_pb2.DeltaDiscoveryRequest()))
    if "close" in command:
        requests.put(None)
    if "brief" in command:
        brief = True

"""Runs the flow of the contract test with Google's own client, against the server that is given.

Usage: gcp.py URL PARAMETERS (JSON: see `run` for its fields). Prints JSON: package and revision of the client, the schemas that
it ships as JSON Schema, and each response with the name of its schema.
"""

import json
import sys
from importlib.metadata import version

import google_auth_httplib2
import httplib2
from google.oauth2.credentials import Credentials
from googleapiclient.discovery import build_from_document
from googleapiclient.discovery_cache import get_static_doc
from googleapiclient.errors import HttpError

PACKAGE = "google-api-python-client"


def to_json_schema(node):
    """JSON Schema of a discovery schema: references are definitions, and no other field is allowed."""
    if isinstance(node, list):
        return [to_json_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    schema = {}
    for key, value in node.items():
        if key == "$ref":
            schema["$ref"] = f"#/$defs/{value}"
        elif key in ("properties", "patternProperties"):
            schema[key] = {name: to_json_schema(field) for name, field in value.items()}
        elif (key, value) == ("type", "any"):
            continue
        elif key in ("type", "items", "additionalProperties", "enum", "pattern"):
            schema[key] = to_json_schema(value)
    if schema.get("type") == "object" and "additionalProperties" not in schema:
        schema["additionalProperties"] = False
    return schema


def reachable(schemas, names):
    """The schemas of these names and those that they refer to."""
    found, open_names = {}, list(names)
    while open_names:
        name = open_names.pop()
        if name in found:
            continue
        found[name] = to_json_schema(schemas[name])
        text = json.dumps(found[name])
        open_names += [part.split('"')[0] for part in text.split('"#/$defs/')[1:]]
    return found


class Flow:
    def __init__(self, url, parameters):
        self.document = json.loads(get_static_doc("compute", "v1"))
        root = dict(self.document, rootUrl=f"{url}/", baseUrl=f"{url}/compute/v1/")
        http = google_auth_httplib2.AuthorizedHttp(Credentials(token="vendor"), http=httplib2.Http())
        self.api = build_from_document(root, http=http)
        self.given = parameters
        self.project, self.region = parameters["project"], parameters["region"]
        self.responses = []

    def seen(self, schema, response):
        self.responses.append({"schema": schema, "body": response})
        return response

    def address(self, name):
        request = self.api.addresses().get(project=self.project, region=self.region, address=name)
        return self.seen("Address", request.execute())

    def instance(self, gateway):
        request = self.api.instances().get(project=self.project, zone=gateway["zone"], instance=gateway["name"])
        return self.seen("Instance", request.execute())

    def finish(self, request, zone=None):
        """Sends a change and waits until it is done."""
        operation = self.seen("Operation", request.execute())
        while operation["status"] != "DONE":
            if zone:
                wait = self.api.zoneOperations().wait(project=self.project, zone=zone, operation=operation["name"])
            else:
                wait = self.api.regionOperations().wait(
                    project=self.project, region=self.region, operation=operation["name"]
                )
            operation = self.seen("Operation", wait.execute())
        assert "error" not in operation, operation
        return operation

    def set_labels(self, name, labels):
        body = {"labels": labels, "labelFingerprint": self.address(name)["labelFingerprint"]}
        self.finish(
            self.api.addresses().setLabels(
                project=self.project, region=self.region, resource=name, body=body, requestId=self.given["requestIds"].pop()
            )
        )

    def attach(self, gateway, address):
        body = {
            "type": "ONE_TO_ONE_NAT",
            "name": self.given["accessConfig"],
            "natIP": address["address"],
            "networkTier": address["networkTier"],
        }
        self.finish(
            self.api.instances().addAccessConfig(
                project=self.project,
                zone=gateway["zone"],
                instance=gateway["name"],
                networkInterface="nic0",
                body=body,
                requestId=self.given["requestIds"].pop(),
            ),
            gateway["zone"],
        )

    def detach(self, gateway, address):
        for interface in self.instance(gateway)["networkInterfaces"]:
            for config in interface.get("accessConfigs", []):
                if config["natIP"] == address["address"]:
                    self.finish(
                        self.api.instances().deleteAccessConfig(
                            project=self.project,
                            zone=gateway["zone"],
                            instance=gateway["name"],
                            networkInterface=interface["name"],
                            accessConfig=config["name"],
                            requestId=self.given["requestIds"].pop(),
                        ),
                        gateway["zone"],
                    )

    def list(self):
        names = []
        addresses = self.api.addresses()
        request = addresses.list(project=self.project, region=self.region, filter=self.given["filter"], maxResults=500)
        while request is not None:
            page = self.seen("AddressList", request.execute())
            names += [item["name"] for item in page.get("items", [])]
            request = addresses.list_next(request, page)
        return names

    def allocate(self, name, description, labels):
        body = {"name": name, "description": description, "addressType": "EXTERNAL"}
        self.finish(
            self.api.addresses().insert(
                project=self.project, region=self.region, body=body, requestId=self.given["requestIds"].pop()
            )
        )
        self.set_labels(name, labels)

    def release(self, name):
        self.address(name)
        self.finish(
            self.api.addresses().delete(
                project=self.project, region=self.region, address=name, requestId=self.given["requestIds"].pop()
            )
        )

    def run(self):
        given = self.given
        name, (first, second) = given["address"], given["gateways"]
        assert self.list() == given["names"], "the filter"
        assert all(self.instance(gateway)["canIpForward"] for gateway in (first, second))
        self.set_labels(name, given["claimed"])
        address = self.address(name)
        assert address["status"] == "RESERVED" and "users" not in address, address
        self.attach(first, address)
        taken = self.address(name)
        assert taken["status"] == "IN_USE" and taken["users"][0].endswith(f"/instances/{first['name']}"), taken
        try:
            self.attach(second, address)
            raise AssertionError("an address that is in use was attached")
        except HttpError as error:
            assert error.status_code == 400 and error.error_details[0]["reason"] == "invalid", error
        self.detach(first, address)
        self.attach(second, address)
        self.detach(second, address)
        assert "accessConfigs" not in self.instance(second)["networkInterfaces"][0]
        self.set_labels(name, given["unclaimed"])
        self.allocate(given["allocated"], given["description"], given["allocatedLabels"])
        self.release(given["allocated"])


def main():
    flow = Flow(sys.argv[1], json.loads(sys.argv[2]))
    flow.run()
    bodies = ["Address", "AccessConfig", "RegionSetLabelsRequest"]
    names = {response["schema"] for response in flow.responses}.union(bodies)
    result = {
        "package": f"{PACKAGE}=={version(PACKAGE)}",
        "revision": flow.document["revision"],
        "schemas": reachable(flow.document["schemas"], sorted(names)),
        "responses": flow.responses,
    }
    json.dump(result, sys.stdout)


main()
